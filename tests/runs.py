"""Whole runs in tests: start ``fdl``, look at a run while it lives, and prove that nothing of it is left.

Import the fixture ``fdl`` into a conftest to use it.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

WaitUntil = Callable[..., Any]

BIN: Final = Path(sys.executable).parent
ROOT: Final = Path(__file__).parents[1]
JOB: Final = ROOT / "tests" / "scripts" / "job.py"
DDP: Final = ROOT / "tests" / "scripts" / "ddp.py"
DIGITS: Final = ROOT / "examples" / "digits.py"
TRANSFORMER: Final = ROOT / "examples" / "transformer.py"

START_S: Final = 60.0
"""Until a run trains: interpreters and torch, several at once on two cores."""
END_S: Final = 90.0
CLEAN_S: Final = 5.0
"""What the promise allows: nothing is left this long after the stop grace."""

LAUNCH_MARK: Final = "FDL_TEST_LAUNCH"
"""In the environment of one launch and of everything on this machine that comes of it."""

_STARTED = re.compile(r"^fdl: run (\S+) \((.*)\) on (\S+):(\d+)$", re.MULTILINE)


@dataclass
class Fdl:
    """The command line, with a home and a state folder of its own."""

    folder: Path
    wait_until: WaitUntil
    deadline_factor: float
    env: dict[str, str]
    launched: list["Launched"] = field(default_factory=list)
    joined: list["Joined"] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """HOME of every command."""
        return self.folder / "home"

    def call(self, *arguments: str, timeout_s: float = 30.0) -> "subprocess.CompletedProcess[str]":
        """Run a command of ``fdl`` to its end."""
        return self._run(str(BIN / "fdl"), *arguments, timeout_s=timeout_s)

    def call_on(self, namespace: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """The same on a host of the lab."""
        return self._run("ip", "netns", "exec", namespace, str(BIN / "fdl"), *arguments, timeout_s=30.0)

    def python(self, *arguments: object, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """Run a script without ``fdl``, to its end."""
        return self._run(sys.executable, *map(str, arguments), timeout_s=timeout_s)

    def _run(self, *command: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s * self.deadline_factor,
            check=False,
        )

    def launch(
        self,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        under: tuple[str, ...] = (),
        folder: Path | None = None,
    ) -> "Launched":
        """Start ``fdl launch`` with these arguments, in the background, without a terminal.

        ``under``: a command that starts the one behind it, such as ``("setpriv", "--reuid", "65534")``. ``folder``:
        where; None means this object's.
        """
        stem = self.folder / f"launch-{len(self.launched)}"
        run = Launched(self, stem, [str(each) for each in arguments], under, folder or self.folder)
        run.start({**self.env, **(env or {})})
        self.launched.append(run)
        return run

    def join(self, run: "Launched", *arguments: object, under: tuple[str, ...] = ()) -> "Joined":
        """Start ``fdl join`` in the background, without a terminal. ``under`` as in ``launch``."""
        joined = Joined(self, run, [*under, str(BIN / "fdl"), "join", *map(str, arguments)], len(self.joined))
        self.joined.append(joined)
        return joined

    def job(
        self,
        *arguments: object,
        options: tuple[object, ...] = ("--local", 2),
        script: Path = JOB,
        env: Mapping[str, str] | None = None,
        under: tuple[str, ...] = (),
        **flags: object,
    ) -> "Launched":
        """Launch tests/scripts/job.py, or a ``script`` around it; ``flags`` are its own, ``step_ms=20`` for
        ``--step-ms 20``. ``env`` and ``under`` as in ``launch``.
        """
        given = [str(each) for each in arguments]
        for name, value in flags.items():
            given += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return self.launch("--stop-timeout", 5, *options, script, *given, env=env, under=under)


class Joined:
    """One ``fdl join`` and its host; ``run`` counts its processes among its own."""

    def __init__(self, fdl: Fdl, run: "Launched", command: list[str], number: int) -> None:
        stem = fdl.folder / f"join-{number}"
        self._fdl, self._run = fdl, run
        self._out_path, self._err_path = stem.with_suffix(".out"), stem.with_suffix(".err")
        with self._out_path.open("wb") as out, self._err_path.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                env={**fdl.env, LAUNCH_MARK: run.mark},
                cwd=fdl.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def stdout(self) -> str:
        return self._out_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err_path.read_text(errors="replace")

    def story(self) -> str:
        return f"$ fdl join\n{self.stdout}\n{self.stderr}\n{self._run.story()}"

    def wait(self, timeout_s: float = END_S) -> int:
        """The exit code, once the command has ended."""
        self._fdl.wait_until(lambda: self.process.poll() is not None, timeout_s, self.story)
        return int(self.process.returncode)

    def wait_for_text(self, text: str, timeout_s: float = START_S) -> None:
        """Return once the command has said ``text``."""

        def has_said() -> bool:
            if text not in self.stdout + self.stderr and self.process.poll() is not None:
                pytest.fail(f"it has ended without {text!r}\n{self.story()}")
            return text in self.stdout + self.stderr

        self._fdl.wait_until(has_said, timeout_s, lambda: f"{text!r}\n{self.story()}")

    def daemon_pid(self) -> int:
        """Of the daemon under its warden."""
        (warden,) = psutil.Process(self.process.pid).children()
        return int(warden.children()[0].pid)


class Launched:
    """One ``fdl launch`` and its run."""

    def __init__(self, fdl: Fdl, stem: Path, arguments: list[str], under: tuple[str, ...], folder: Path) -> None:
        self._fdl, self._arguments, self._under, self._folder = fdl, arguments, under, folder
        self.stdout_path, self.stderr_path = stem.with_suffix(".out"), stem.with_suffix(".err")
        self.process: subprocess.Popen[bytes] | None = None
        self._mark = f"{LAUNCH_MARK}={uuid.uuid4().hex}"

    def start(self, env: Mapping[str, str]) -> None:
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self.process = subprocess.Popen(
                [*self._under, str(BIN / "fdl"), "launch", *self._arguments],
                env={**env, LAUNCH_MARK: self._mark.partition("=")[2]},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def mark(self) -> str:
        """What this launch carries in its environment."""
        return self._mark.partition("=")[2]

    # -------------------------------------------------------------------------------------------------------- waiting
    def wait(self, timeout_s: float = START_S + END_S) -> int:
        """The exit code, once the launcher has ended."""
        assert self.process is not None
        process = self.process
        self._until(lambda: process.poll() is not None, timeout_s, "the end of the launcher")
        return process.returncode

    def wait_for_training(self, version: int = 1) -> None:
        """Return once the ranks have committed ``version``."""
        self._until(lambda: self._has_committed(version), START_S, f"version {version}")

    def wait_for_end(self, timeout_s: float = END_S) -> dict[str, Any]:
        """The outcome, once the controller has ended; for a run whose launcher is gone."""
        self._until(lambda: not self.is_live, timeout_s, "the end of the controller")
        outcome = self.read("outcome.json")
        assert outcome is not None, self.story()
        return outcome

    def wait_until_rankless(self, timeout_s: float) -> None:
        """No rank and nothing that a rank has started is left, within ``timeout_s``."""
        self._until(lambda: not self._of_ranks(), timeout_s, lambda: f"left: {self._of_ranks()}")

    def wait_until_clean(self, timeout_s: float = CLEAN_S) -> None:
        """Nothing of the run is left and its port can be bound, within ``timeout_s``."""
        self._until(lambda: not self.leftovers(), timeout_s, lambda: f"left: {self.leftovers()}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(self.address)

    def _has_committed(self, version: int) -> bool:
        assert self.process is not None
        if self.process.poll() is not None and not self.is_live:
            pytest.fail(f"the run has ended before version {version}\n{self.story()}")
        return self.has_started and any(fields["version"] >= version for fields in self.commits())

    def _until(self, predicate: Callable[[], Any], timeout_s: float, what: str | Callable[[], str]) -> None:
        self._fdl.wait_until(predicate, timeout_s, lambda: f"{what() if callable(what) else what}\n{self.story()}")

    def wait_for_text(self, text: str, timeout_s: float = START_S) -> None:
        """Return once the launcher has said ``text``."""
        self._until(lambda: text in self.stderr, timeout_s, repr(text))

    def wait_for_log(self, name: str, text: str, timeout_s: float = START_S) -> None:
        """Return once ``text`` stands in the run's log ``name``."""
        self._until(lambda: self.has_started and text in self.log(name), timeout_s, f"{text!r} in {name}")

    def wait_for_event(self, kind: str, timeout_s: float = START_S) -> None:
        """Return once an event of this kind stands in the run's log."""
        self._until(lambda: self.has_started and self.events(kind), timeout_s, kind)

    # ------------------------------------------------------------------------------------------------------- looking
    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    @property
    def has_started(self) -> bool:
        """Whether the launcher has named its run."""
        return _STARTED.search(self.stderr) is not None

    @property
    def run_id(self) -> str:
        return self._named()[1]

    @property
    def address(self) -> tuple[str, int]:
        """Where the controller listens."""
        return self._named()[3], int(self._named()[4])

    @property
    def folder(self) -> Path:
        """The run's directory."""
        return Path(self._fdl.env["FDL_STATE_HOME"]) / "runs" / self.run_id

    @property
    def is_live(self) -> bool:
        """Whether the run's controller runs."""
        return self.has_started and self.controller_pid is not None

    @property
    def controller_pid(self) -> int | None:
        return next((pid for pid, argv in self._processes() if "flodl.controller" in argv), None)

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run's directory, None when there is none."""
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["event"] == kind]

    def commits(self) -> list[dict[str, Any]]:
        """The round log so far."""
        return [{**record["fields"], "ts": record["ts"]} for record in self.events("commit")]

    def log(self, name: str) -> str:
        path = self.folder / "logs" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def story(self) -> str:
        """Everything that explains a failure."""
        parts = [f"$ fdl launch {' '.join(self._arguments)}", self.stdout[-3000:], self.stderr[-6000:]]
        if self.has_started and self.folder.exists():
            logs = sorted((self.folder / "logs").glob("*.log"))
            parts += [f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
        return "\n".join(parts)

    # ----------------------------------------------------------------------------------------------------- processes
    def pid_of(self, role: str, host: str = "") -> int:
        """The process of a role: ``controller``, ``daemon``, ``warden``, ``head``, or ``rank0``, ``rank1``, …"""
        found = [pid for pid, argv in self._processes() if _plays(pid, argv, role, self.run_id, host)]
        assert len(found) == 1, f"{role} of {self.run_id}: {found}\n{self.story()}"
        return found[0]

    def kill(self, role: str, host: str = "", number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process of a role; ``launcher`` is one, too."""
        assert self.process is not None
        os.kill(self.process.pid if role == "launcher" else self.pid_of(role, host), number)

    def leftovers(self) -> list[str]:
        """Every process of the run but its launcher, wherever it hides."""
        return [f"{pid} {' '.join(argv)[:160]}" for pid, argv in self._processes()]

    def leftovers_on(self, namespace: str) -> list[str]:
        """Those of ``leftovers`` that run on one of the lab's hosts."""
        found = [(pid, argv) for pid, argv in self._processes() if _namespace_of(pid) == namespace]
        return [f"{pid} {' '.join(argv)[:160]}" for pid, argv in found]

    def _of_ranks(self) -> list[str]:
        mark = f"FLODL_RUN_MARK={self.run_id}:"
        marks = {pid: _proc(pid, "environ").decode(errors="replace") for pid, _ in self._processes()}
        return [str(pid) for pid, text in marks.items() if mark in text and f"{mark}head" not in text]

    def clear(self) -> None:
        """End whatever is left, so that a failed test harms no other."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait(10)
        for pid, _ in self._processes() if self.has_started else []:
            _kill(pid)

    def _processes(self) -> list[tuple[int, list[str]]]:
        """Of this run: by its id or the launch's mark in argv or environment, or descended from such a one."""
        assert self.process is not None
        needle, mark = self.run_id.encode(), self._mark.encode()
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid(), self.process.pid}
        own = {pid for pid in pids if needle in _proc(pid, "cmdline")}
        own |= {pid for pid in pids - own if any(each in _proc(pid, "environ") for each in (mark, needle))}
        for pid in tuple(own):
            own |= _descendants(pid)
        named = [(pid, _proc(pid, "cmdline").decode(errors="replace").split("\0")[:-1]) for pid in sorted(own)]
        hosts = self._fdl.env.get("FDL_TEST_NAMESPACES", "")
        named += _in_namespaces(hosts.split(), own)
        return [(pid, argv) for pid, argv in named if argv]

    def _named(self) -> re.Match[str]:
        match = _STARTED.search(self.stderr)
        assert match is not None, f"the launcher has not started a run\n{self.story()}"
        return match


def _plays(pid: int, argv: list[str], role: str, run_id: str, host: str) -> bool:
    if host and _namespace_of(pid) != host:
        return False
    is_warden = "flodl_daemon.warden" in argv
    environ = _proc(pid, "environ").split(b"\0")
    match role:
        case "controller":
            return "flodl.controller" in argv
        case "warden":
            return is_warden and "flodl_daemon" in argv
        case "daemon":
            return not is_warden and "flodl_daemon" in argv
        case _:
            mark = f"FLODL_RUN_MARK={run_id}:{role.removeprefix('rank')}".encode()
            roles = (f"FLODL_ROLE={role.rstrip('0123456789')}:".encode(), b"FLODL_ROLE=plain")
            return not is_warden and mark in environ and any(each.startswith(roles) for each in environ)


def _proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # gone


def _namespace_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _in_namespaces(namespaces: list[str], known: set[int]) -> list[tuple[int, list[str]]]:
    """What runs on the lab's hosts, but for their ssh servers and sessions."""
    found = []
    for name in os.listdir("/proc") if namespaces else ():
        if not name.isdigit() or int(name) in known or _namespace_of(int(name)) not in namespaces:
            continue
        argv = _proc(int(name), "cmdline").decode(errors="replace").split("\0")[:-1]
        if argv and not argv[0].startswith(("sshd", "/usr/sbin/sshd")):
            found.append((int(name), argv))
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
def fdl(tmp_path: Path, wait_until: WaitUntil, deadline_factor: float) -> Iterator[Fdl]:
    """The command line in a folder of its own; whatever a failed test leaves running is ended."""
    (tmp_path / "home").mkdir()
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("FDL_", "FLODL_ROLE"))},
        "HOME": str(tmp_path / "home"),
        "FDL_STATE_HOME": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
    }
    command = Fdl(tmp_path, wait_until, deadline_factor, env)
    yield command
    for guest in command.joined:
        guest.process.kill()
        guest.process.wait(10)
    for run in command.launched:
        run.clear()
