"""Servers as labs have them: other ports, jump hosts, noise, bare paths, slow and crowded logins, and ill ones.

What ``ssh HOST true`` accepts is accepted. Which key and which answer of a server leads to which words is in
tests/unit/launch/test_ssh_login.py.
"""

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import JOB, Fdl
from tests.system.lab import Host, Lab, is_listening
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

SIZE, EPOCHS = 101, 2

NOISY_SHELL = """\
#!/bin/sh
printf 'Welcome to \\033[31mthe lab\\033[0m\\nFDL1 ready nobody\\n'
printf '\\377\\376 maintenance at noon' >&2
stty -echo 2>&1
head -c 1048576 /dev/zero | tr '\\0' x
sleep 2
export PATH=/bin
cd /
exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""


def trust(fdl: Fdl, line: str) -> None:
    with (fdl.home / ".ssh" / "known_hosts").open("a") as file:
        file.write(line)


def at_port(hosts: Lab, host: Host, port: int, **changes: object) -> dict[str, object]:
    """A worker with one rank behind another sshd of ``host``."""
    ssh = {"target": host.address, "port": port, "user": "root", "identity_file": str(hosts.key)}
    return hosts.worker(host, 1, ssh=ssh, **changes)


@pytest.mark.long
def test_noise_bare_path_and_a_slow_login_are_no_obstacle(fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(NOISY_SHELL)
    wrapper.chmod(0o755)
    (tmp_path / "banner").write_text("Authorised use only.\nFDL1 ready nobody\n")
    lines = (f"ForceCommand {wrapper}", f"Banner {tmp_path / 'banner'}")
    with hosts.one_more_sshd(hosts.hosts[0], lines) as (port, known):
        trust(fdl, known)
        cluster = hosts.cluster(tmp_path / "c.yml", [at_port(hosts, hosts.hosts[0], port)])
        run = fdl.job(options=("-c", cluster), size=SIZE, epochs=EPOCHS, log=log)
        assert run.wait() == 0, run.story()
        assert witness_run(run.folder, log, SIZE, EPOCHS).faults == []
        run.wait_until_clean()
    said = (run.folder / "logs" / f"daemon-{hosts.hosts[0].name}.log").read_bytes()
    assert b"Welcome to \033[31mthe lab" in said
    assert b"\377\376 maintenance at noon" in said


@pytest.mark.long
def test_jump_host_on_another_port_with_hashed_and_system_wide_known_hosts(
    fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path
) -> None:
    """Only the jump host reaches the target; its key stands hashed in the user's file, the target's in the system's."""
    jump, target = hosts.hosts
    with contextlib.ExitStack() as stack:
        jump_port, jump_known = stack.enter_context(hosts.one_more_sshd(jump))
        port, known = stack.enter_context(hosts.one_more_sshd(target))
        ssh, system = fdl.home / ".ssh", tmp_path / "etc-ssh"
        shutil.copytree("/etc/ssh", system)
        (ssh / "known_hosts").write_text(jump_known)
        (system / "ssh_known_hosts").write_text(known)
        for file in (ssh / "known_hosts", system / "ssh_known_hosts"):
            subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True)
            assert file.read_text().startswith("|1|")
        (ssh / "config").write_text(
            f"Host jump\n  HostName {jump.address}\n  Port {jump_port}\n"
            f"Host inner\n  HostName {target.address}\n  Port {port}\n  ProxyJump jump\n"
            f"Host *\n  User root\n  IdentityFile {hosts.key}\n"
        )
        stack.enter_context(hosts.hide(target, port))
        assert not is_listening(target.address, port)
        cluster = hosts.cluster(tmp_path / "c.yml", [hosts.worker(target, 1, ssh={"target": "inner"})])
        mounted = ("unshare", "-m", "sh", "-c", f'mount --bind {system} /etc/ssh && exec "$@"', "sh")
        run = fdl.job(options=("-c", cluster), size=SIZE, epochs=EPOCHS, log=log, under=mounted)
        assert run.wait() == 0, run.story()
        assert witness_run(run.folder, log, SIZE, EPOCHS).faults == []
        run.wait_until_clean()


@pytest.mark.long
def test_crowded_sshd_lets_everybody_in_in_the_end(fdl: Fdl, hosts: Lab, tmp_path: Path) -> None:
    """It takes one login at a time and drops the others; everybody gets as far as the interpreter."""
    host, names = hosts.hosts[0], ("a", "b", "c", "d", "e", "f", "g", "h")
    with hosts.one_more_sshd(host, ("MaxStartups 1:100:1",)) as (port, known):
        trust(fdl, known)
        (fdl.home / ".ssh" / "config").write_text(
            f"Host {' '.join(names)}\n  HostName {host.address}\n  Port {port}\n"
            f"  User root\n  IdentityFile {hosts.key}\n"
        )
        workers = [{"host": name, "local_devices": ["cpu"], "python": "/no/such/python"} for name in names]
        run = fdl.launch("-c", hosts.cluster(tmp_path / "c.yml", workers), JOB)
        assert run.wait() == 3, run.story()
    for name in names:
        assert f"host {name}: preflight: interpreter /no/such/python not found" in run.stderr
    run.wait_until_clean()


@pytest.mark.long
def test_changed_key_and_silent_server_are_named_each_with_its_stage(fdl: Fdl, hosts: Lab, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        port, known = stack.enter_context(hosts.one_more_sshd(hosts.hosts[0]))
        _, other = stack.enter_context(hosts.one_more_sshd(hosts.hosts[0]))
        trust(fdl, f"{known.split()[0]} {other.partition(' ')[2]}")
        silent = stack.enter_context(mute(hosts.address))
        workers = [
            at_port(hosts, hosts.hosts[0], port),
            {"host": "mute", "ssh": {"target": hosts.address, "port": silent}, "local_devices": ["cpu"]},
        ]
        run = fdl.launch("-c", hosts.cluster(tmp_path / "c.yml", workers), JOB)
        assert run.wait() == 4, run.story()
    assert f"host {hosts.hosts[0].name}: host key: " in run.stderr
    assert "is not the one in your known hosts" in run.stderr
    assert "host mute: connect: " in run.stderr
    assert "accepts connections but did not finish the ssh greeting" in run.stderr
    run.wait_until_clean()


@contextlib.contextmanager
def mute(address: str) -> Iterator[int]:
    """A server that accepts and never speaks; yields its port."""
    taken: list[socket.socket] = []
    with socket.create_server((address, 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    for sock in taken:
        sock.close()
