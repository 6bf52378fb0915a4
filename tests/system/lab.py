"""Hosts on one machine: network namespaces on a bridge of their own, each with its own name and sshd. Needs root.

Names, interfaces and subnet come from this process's id and a count, so that two labs never meet. ``Lab`` is a context
manager; it takes everything down again, and ends whatever still runs on its hosts.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import yaml

START_S: Final = 10.0
POLL_S: Final = 0.02

_ANOTHER_PORT: Final = 2200
"""Of the first of ``one_more_sshd``; the others follow."""

_CONFIG = """\
HostKey {host_key}
AuthorizedKeysFile {authorized}
PidFile none
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 100
Subsystem sftp internal-sftp
"""


@dataclass
class Host:
    """One host: its name (of the namespace, too) and its address."""

    name: str
    address: str
    sshd: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def namespace(self) -> str:
        """As ``/proc/PID/ns/net`` of a process on this host shows it."""
        return f"net:[{os.stat(f'/run/netns/{self.name}').st_ino}]"


class Lab:
    """``with Lab(folder, 2) as lab``: two hosts and this machine, which is ``lab.address`` on their network."""

    def __init__(self, folder: Path, count: int, number: int = 0) -> None:
        """``number`` tells the labs of one process apart."""
        self._folder = folder
        me = os.getpid() % 0x100000
        self.bridge = f"flb{me:x}{number}"
        self._net = f"10.{96 + (me + number) % 96}.{me // 96 % 256}"
        self.address = f"{self._net}.1"
        self.pid_of_sshd: dict[int, int] = {}
        self._count = itertools.count()
        names = [f"flh{me:x}{number}{chr(97 + index)}" for index in range(count)]
        self.hosts = [Host(name, f"{self._net}.{11 + index}") for index, name in enumerate(names)]

    # ---------------------------------------------------------------------------------------------------- up and down
    @staticmethod
    def obstacle() -> str:
        """Why there can be no lab here; empty when there can."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        missing = [name for name in ("ip", "unshare", "ssh-keygen", "/usr/sbin/sshd") if shutil.which(name) is None]
        return f"not installed: {', '.join(missing)}" if missing else ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._down)
            self._up()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._down()

    def _up(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.address}/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        for host in self.hosts:
            self._attach(host)
            self._start_sshd(host)
        for host in self.hosts:
            _wait_for_port(host.address, 22)

    def _attach(self, host: Host) -> None:
        outer = f"v{host.name}"
        _run("ip", "netns", "add", host.name)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "e0", "netns", host.name)
        _run("ip", "link", "set", outer, "master", self.bridge, "up")
        _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "e0")
        for device in ("e0", "lo"):
            _run("ip", "-n", host.name, "link", "set", device, "up")

    def _start_sshd(self, host: Host) -> None:
        config = self._sshd_config(host.name, self.key.with_suffix(".pub"), ())
        serve = f"hostname {host.name}; exec /usr/sbin/sshd -D -f {config} -E {self._folder / host.name}.log"
        host.sshd = _start("ip", "netns", "exec", host.name, "unshare", "-u", "sh", "-c", serve)

    def _sshd_config(self, name: str, authorized: Path, lines: Sequence[str]) -> Path:
        """The configuration of an sshd called ``name``; ``lines`` win over the usual ones."""
        host_key, config = self._folder / f"{name}.hostkey", self._folder / f"{name}.conf"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key))
        usual = _CONFIG.format(host_key=host_key, authorized=authorized)
        config.write_text("".join(f"{line}\n" for line in lines) + usual)
        return config

    def _down(self) -> None:
        for host in self.hosts:
            pids = subprocess.run(
                ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False
            ).stdout
            for pid in map(int, pids.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if host.sshd is not None:
                host.sshd.kill()
                host.sshd.wait(START_S)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    # --------------------------------------------------------------------------------------------------------- using
    @property
    def key(self) -> Path:
        """The private key that every host lets in as root."""
        return self._folder / "key"

    @property
    def nobody(self) -> str:
        """An address of the network at which there is no host."""
        return f"{self._net}.99"

    @contextlib.contextmanager
    def one_more_sshd(
        self, host: Host | None, lines: Sequence[str] = (), authorized: Path | None = None
    ) -> Iterator[tuple[int, str]]:
        """Another sshd, on ``host`` or, for None, on this machine. ``lines`` are of its configuration and win over the
        usual ones; ``authorized`` takes the place of the lab's key.

        Yields its port and the line that makes it known; its pid is in ``pid_of_sshd`` by its port.
        """
        port = _ANOTHER_PORT + next(self._count)
        address, name = (self.address, "here") if host is None else (host.address, host.name)
        listens = (f"ListenAddress {address}:{port}",)
        config = self._sshd_config(f"{name}-{port}", authorized or self.key.with_suffix(".pub"), (*lines, *listens))
        there = [] if host is None else ["ip", "netns", "exec", name, "unshare", "-u"]
        process = _start(*there, "/usr/sbin/sshd", "-D", "-f", str(config), "-E", str(config.with_suffix(".log")))
        try:
            _wait_for_port(address, port)
            self.pid_of_sshd[port] = process.pid
            yield port, f"[{address}]:{port} {config.with_suffix('.hostkey.pub').read_text()}"
        finally:
            for session in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    session.kill()
            process.kill()
            process.wait(START_S)

    def known_hosts(self) -> str:
        """The lines that make all hosts known."""
        keys = ((host.address, self._folder / f"{host.name}.hostkey.pub") for host in self.hosts)
        return "".join(f"{address} {path.read_text()}" for address, path in keys)

    def worker(self, host: Host, ranks: int, **changes: object) -> dict[str, object]:
        """A worker of the cluster file with ``ranks`` CPU ranks on ``host``."""
        ssh = {"target": host.address, "user": "root", "identity_file": str(self.key)}
        values = {"host": host.name, "ssh": ssh, "local_devices": ["cpu"] * ranks, "python": sys.executable}
        return {**values, "env": {"OMP_NUM_THREADS": "1"}, **changes}

    def cluster(
        self,
        path: Path,
        workers: Sequence[Mapping[str, object]],
        port: int = 0,
        is_elastic: bool = False,
        controller: Mapping[str, object] | None = None,
        **changes: object,
    ) -> Path:
        """Write a cluster file; port 0 takes a free one; ``controller`` are more keys of the controller's, ``changes``
        keys beside controller and workers.

        Unless ``is_elastic`` a host that is lost stays away, and nobody joins.
        """
        where = {"host": self.address, "port": port or self.free_port(), "join": {"elastic": is_elastic}}
        own = {**where, **(controller or {})}
        path.write_text(yaml.safe_dump({"cluster": {"controller": own, "workers": [*workers], **changes}}))
        return path

    def free_port(self) -> int:
        """A port on which nobody listens at ``address``."""
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return int(probe.getsockname()[1])

    def fence(self, host: Host, port: int) -> contextlib.AbstractContextManager[None]:
        """As a firewall would: from ``host`` nothing gets to the controller's ``port``, and it is told so."""
        return _fenced(host.name, "to", f"{self.address}/32", "ipproto", "tcp", "dport", str(port))

    def reaches(self, host: Host, port: int) -> bool:
        """Whether packets from ``host`` get to the controller's ``port``, whether somebody listens there or not."""
        words = f"import socket; print(socket.socket().connect_ex(({self.address!r}, {port})))"
        return int(self.call(host, sys.executable, "-c", words)) in (0, errno.ECONNREFUSED)

    def hide(self, host: Host, port: int) -> contextlib.AbstractContextManager[None]:
        """This machine gets no answer from ``port`` of ``host``; others do."""
        return _fenced(host.name, "to", f"{self.address}/32", "ipproto", "tcp", "sport", str(port))

    @contextlib.contextmanager
    def running(self, host: Host, *command: object, ready: Callable[[], bool]) -> Iterator[None]:
        """A command on ``host`` as long as the block runs, which begins when ``ready`` says so."""
        process = _start("ip", "netns", "exec", host.name, *map(str, command))
        try:
            _wait_for(ready, " ".join(map(str, command)))
            yield
        finally:
            process.kill()
            process.wait(START_S)

    def call(self, host: Host, *command: object) -> str:
        """What a command on ``host`` prints."""
        there = ["ip", "netns", "exec", host.name, *map(str, command)]
        done = subprocess.run(there, capture_output=True, text=True, check=False, timeout=START_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def cut(self, host: Host) -> None:
        """Pull the host's cable: no FIN, no RST."""
        _run("ip", "-n", host.name, "link", "set", "e0", "down")

    def heal(self, host: Host) -> None:
        """Put the cable back."""
        _run("ip", "-n", host.name, "link", "set", "e0", "up")

    def run_on(self, host: Host, *command: str) -> None:
        """Run a command where the host's own mounts are."""
        assert host.sshd is not None
        _run("nsenter", "--mount", "--target", str(host.sshd.pid), *command)

    def isolate(self, *hosts: Host, is_isolated: bool = True) -> None:
        """Let these hosts reach this machine, and nobody of each other."""
        for host in hosts:
            _run(
                "ip", "link", "set", f"v{host.name}", "type", "bridge_slave", "isolated", "on" if is_isolated else "off"
            )

    def logins(self, host: Host) -> int:
        """How often somebody has logged in there."""
        return (self._folder / f"{host.name}.log").read_text().count("Accepted publickey")

    def hang_up(self, host: Host) -> None:
        """End the host's ssh sessions: where the other end closed them while the cable was out, it says so again only
        after about as long as that took.
        """
        assert host.sshd is not None
        hang_up(host.sshd.pid)


@contextlib.contextmanager
def _fenced(namespace: str, *traffic: str) -> Iterator[None]:
    _run("ip", "-n", namespace, "rule", "add", *traffic, "prohibit")
    try:
        yield
    finally:
        _run("ip", "-n", namespace, "rule", "del", *traffic, "prohibit")


def _start(*command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{json.dumps(command)} ended with {done.returncode}: {done.stderr.strip()}")


def hang_up(sshd: int) -> None:
    """End the sessions of the sshd with this pid."""
    for session in psutil.Process(sshd).children(recursive=True):
        if session.name() == "sshd":
            with contextlib.suppress(psutil.NoSuchProcess):
                session.kill()


def is_listening(address: str, port: int) -> bool:
    """Whether a connection there is taken."""
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True


def _wait_for_port(address: str, port: int) -> None:
    _wait_for(lambda: is_listening(address, port), f"a server at {address} port {port}")


def _wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline_s, tick = time.monotonic() + START_S, threading.Event()
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {START_S:g} s: {what}")
        tick.wait(POLL_S)
