"""Process trees: spawn one, learn how it ended, end all of it and nothing else.

A process is known by pid *and* start time, never by name. A tree is its leader, the leader's session, everything that
descends from these, and orphans that carry the tree's mark in their environment (``FLODL_RUN_MARK``), so that loader
workers, shell-wrapped scripts and ``setsid`` children are found as well.

The leader is reaped last, when the whole tree is gone: as long as its pid is held, the session's number cannot be
given to anybody else. Orphans that land at a subreaper are reaped one by one by pid (``OrphanReaper``); nothing here
ever waits for "any child", which would steal asyncio's.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from flodl.errors import DeadlineExceeded

MARK_VARIABLE: Final = "FLODL_RUN_MARK"
"""Names the tree, ``<run>:<rank>``, in the environment of all its processes."""

KILL_DEADLINE_S: Final = 10.0
"""How long the processes of a tree may take to go after SIGKILL; only one stuck in the kernel takes longer."""

_SCAN_PAUSE_S: Final = 0.005
_QUIET_SCANS: Final = 2
"""Empty scans before a tree counts as gone: a fork during one scan may hide behind a smaller pid."""

_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: by ``code`` (0–255), or by ``signal`` (> 0, then ``code`` is 0)."""

    code: int
    signal: int


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for good: ``start_ticks`` is its start in clock ticks since boot."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has this number now; None when there is none."""
        entry = _read_entry(pid)
        return None if entry is None else entry.identity

    @property
    def is_alive(self) -> bool:
        """It still runs: neither gone nor a zombie."""
        entry = _read_entry(self.pid)
        return entry is not None and entry.start_ticks == self.start_ticks and not entry.is_zombie

    @property
    def is_frozen(self) -> bool:
        """A signal such as SIGSTOP has stopped it, until SIGCONT."""
        entry = _read_entry(self.pid)
        return entry is not None and entry.start_ticks == self.start_ticks and entry.is_frozen

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process; False when it is gone or not ours to signal."""
        with contextlib.suppress(OSError), _pidfd(self.pid) as fd:
            if not self.is_alive:
                return False
            if fd is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(fd, number)
            return True
        return False


class ProcessTree:
    """A spawned process and everything that comes of it. Made by ``spawn``; ``kill_tree`` ends and releases it."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        identity: ProcessId,
        mark: str,
        exited: "asyncio.Future[ExitStatus]",
        pipes: Sequence[int | None],
    ) -> None:
        """See ``spawn``."""
        self._process = process
        self._mark = mark
        self._exited = exited
        self._known: set[ProcessId] = {identity}
        self.identity = identity
        self.stdout_fd, self.stderr_fd = pipes

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        *,
        mark: str,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Iterable[int] = (),
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> Self:
        """Start ``argv`` in a session of its own; call it in the event loop that is to see it end.

        Args:
            argv: program and arguments.
            mark: names the tree, ``<run>:<rank>``; set as ``FLODL_RUN_MARK`` and unique to this tree.
            env: the whole environment but for the mark; None inherits ours.
            cwd: working directory; None inherits ours.
            pass_fds: descriptors to inherit under the same numbers; ours stay open.
            stdin: a descriptor or a constant of ``subprocess``.
            stdout: as ``stdin``; PIPE makes ``stdout_fd`` a non-blocking read end that belongs to the caller.
            stderr: as ``stdout``.

        Raises:
            OSError: the program or the directory is missing or may not be used.
        """
        loop = asyncio.get_running_loop()
        with _OutputPipes(stdout, stderr) as pipes:
            process = subprocess.Popen(
                argv,
                env={**(os.environ if env is None else env), MARK_VARIABLE: mark},
                cwd=cwd,
                pass_fds=tuple(pass_fds),
                stdin=stdin,
                stdout=pipes.for_child[0],
                stderr=pipes.for_child[1],
                start_new_session=True,
            )
            exited: asyncio.Future[ExitStatus] = loop.create_future()
            try:
                identity = ProcessId(process.pid, _start_ticks(process.pid))
                _watch_exit(loop, process.pid, exited)
            except BaseException:
                process.kill()
                process.wait()
                raise
        return cls(process, identity, mark, exited, pipes.ours)

    @property
    def pid(self) -> int:
        """The leader's pid."""
        return self.identity.pid

    @property
    def exit_status(self) -> ExitStatus | None:
        """How the leader ended; None while it runs."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> ExitStatus:
        """Wait for the leader to end; cancelling the wait changes nothing. The rest of the tree may live on."""
        return await asyncio.shield(self._exited)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the leader alone. Nothing happens when it has ended."""
        if not self._exited.done():
            self.identity.send_signal(number)

    def first_child(self) -> ProcessId | None:
        """The oldest living child of the leader: of a warden, what it guards. Reads all of /proc."""
        children = [entry for entry in _scan().values() if entry.parent == self.pid and not entry.is_zombie]
        return min(children, key=lambda entry: entry.start_ticks).identity if children else None

    def members(self) -> list[ProcessId]:
        """The tree's living processes, the leader included. Reads all of /proc.

        What it has seen once stays known as the tree's, even when it has shed session, parent and environment.
        """
        return self._living(_scan())

    async def kill_tree(self, deadline_s: float = KILL_DEADLINE_S) -> ExitStatus:
        """SIGKILL the whole tree, again and again until nothing of it is left; then reap the leader.

        Returns how the leader ended. A second call returns the same at once.

        Raises:
            DeadlineExceeded: something of it is still there after ``deadline_s`` seconds; calling again tries again.
        """
        if self._process.returncode is None:
            await asyncio.to_thread(self._kill_until_gone, time.monotonic() + deadline_s)
            await self.wait()
            self._process.wait()
        return self._exited.result()

    def close_pipes(self) -> None:
        """Close ``stdout_fd`` and ``stderr_fd`` where nobody has taken them over (set to None then)."""
        for fd in (self.stdout_fd, self.stderr_fd):
            if fd is not None:
                os.close(fd)
        self.stdout_fd = self.stderr_fd = None

    def _kill_until_gone(self, deadline_s: float) -> None:
        quiet_scans = 0
        while quiet_scans < _QUIET_SCANS:
            entries = _scan()
            living = self._living(entries)
            if living and time.monotonic() > deadline_s:
                pids = ", ".join(str(member.pid) for member in living)
                raise DeadlineExceeded(f"process tree {self._mark}: pids {pids} are still there after SIGKILL")
            for member in living:
                member.send_signal(signal.SIGKILL)
            self._reap_adopted(entries)
            quiet_scans = 0 if living else quiet_scans + 1
            time.sleep(_SCAN_PAUSE_S)

    def _living(self, entries: "dict[int, _Entry]") -> list[ProcessId]:
        """What of the tree lives, by session, descent and mark; never this process, its ancestors or init."""
        spared = _lineage(entries, os.getpid()) | {1}
        tree = {pid for pid, entry in entries.items() if entry.session == self.pid or entry.identity in self._known}
        mark = f"{MARK_VARIABLE}={self._mark}".encode()
        for pid, entry in entries.items():
            is_candidate = pid not in tree and pid not in spared and entry.start_ticks >= self.identity.start_ticks
            if is_candidate and not entry.is_zombie and mark in _environment(pid):
                tree.add(pid)
        tree -= spared
        while more := {pid for pid, entry in entries.items() if entry.parent in tree} - tree - spared:
            tree |= more
        self._known = {entries[pid].identity for pid in tree} | {self.identity}
        return [entries[pid].identity for pid in sorted(tree) if not entries[pid].is_zombie]

    def _reap_adopted(self, entries: "dict[int, _Entry]") -> None:
        for pid, entry in entries.items():
            is_ours = pid != self.pid and entry.parent == os.getpid() and entry.identity in self._known
            if is_ours and entry.is_zombie:
                _reap(pid)


class OrphanReaper:
    """Reaps the orphans that a subreaper adopts, without taking a status from asyncio or ``subprocess``.

    Those reap their own children as soon as the loop turns. What is still a zombie one sweep later, and is no tree's
    leader, is nobody's.
    """

    def __init__(self) -> None:
        self._seen: set[ProcessId] = set()

    def sweep(self, leaders: Iterable[int]) -> list[int]:
        """Reap adopted zombies that were there at the last sweep too; call it about once a second.

        ``leaders`` are the pids of all trees not yet killed. Returns the reaped pids.
        """
        kept, me = set(leaders), os.getpid()
        zombies = {
            entry.identity
            for entry in _scan().values()
            if entry.is_zombie and entry.parent == me and entry.pid not in kept
        }
        lost = sorted(process.pid for process in zombies & self._seen)
        self._seen = zombies - self._seen
        return [pid for pid in lost if _reap(pid)]


def become_subreaper() -> None:
    """Make this process the parent of all orphans among its descendants (Linux).

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"PR_SET_CHILD_SUBREAPER: {os.strerror(number)}")


def create_memfd(name: str) -> int:
    """A new anonymous file in memory; it goes with its last descriptor. ``name`` shows in /proc only."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a local stream: (ours, the child's). Pass the child's descriptor in ``pass_fds``, then close it."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


# --------------------------------------------------------------------------------------------------------- pipes
class _OutputPipes:
    """The pipes of a spawn: the write ends close on leaving, the read ends stay open unless it failed."""

    def __init__(self, *targets: int) -> None:
        self._targets = targets
        self._writers: list[int] = []
        self.for_child: list[int] = []
        self.ours: list[int | None] = []

    def __enter__(self) -> Self:
        try:
            for target in self._targets:
                self._add(target)
        except OSError:
            self._close(self.ours)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close(self.ours if kind else [])

    def _add(self, target: int) -> None:
        if target != subprocess.PIPE:
            self.ours.append(None)
            self.for_child.append(target)
            return
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self.ours.append(reader)
        self._writers.append(writer)
        self.for_child.append(writer)

    def _close(self, readers: list[int | None]) -> None:
        for fd in (*self._writers, *readers):
            if fd is not None:
                os.close(fd)


# ------------------------------------------------------------------------------------------------------- waiting
def _watch_exit(loop: asyncio.AbstractEventLoop, pid: int, exited: "asyncio.Future[ExitStatus]") -> None:
    """Resolve ``exited`` when ``pid`` ends, leaving it unreaped."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # Linux before 5.3, or a sandbox without it
        threading.Thread(target=_wait_in_thread, args=(loop, pid, exited), name=f"wait for {pid}", daemon=True).start()
        return

    def on_exit() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        if not exited.done():
            exited.set_result(_peek_status(pid))

    loop.add_reader(fd, on_exit)


def _wait_in_thread(loop: asyncio.AbstractEventLoop, pid: int, exited: "asyncio.Future[ExitStatus]") -> None:
    status = _peek_status(pid)
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(lambda: None if exited.done() else exited.set_result(status))


def _peek_status(pid: int) -> ExitStatus:
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert result is not None, "without WNOHANG waitid returns a result"
    if result.si_code == os.CLD_EXITED:
        return ExitStatus(result.si_status, 0)
    return ExitStatus(0, result.si_status)


def _reap(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return False


# ------------------------------------------------------------------------------------------------------- /proc
@dataclass(frozen=True, slots=True)
class _Entry:
    pid: int
    parent: int
    session: int
    start_ticks: int
    is_zombie: bool
    is_frozen: bool

    @property
    def identity(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)


def _scan() -> dict[int, _Entry]:
    found = (_read_entry(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {entry.pid: entry for entry in found if entry is not None}


def _read_entry(pid: int) -> _Entry | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return None
    state = fields[0]
    return _Entry(pid, int(fields[1]), int(fields[3]), int(fields[19]), state in (b"Z", b"X"), state in (b"T", b"t"))


def _start_ticks(pid: int) -> int:
    entry = _read_entry(pid)
    if entry is None:
        raise OSError(f"/proc/{pid}/stat cannot be read: flodl needs /proc")
    return entry.start_ticks


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _lineage(entries: Mapping[int, _Entry], pid: int) -> set[int]:
    lineage: set[int] = set()
    while pid in entries and pid not in lineage:
        lineage.add(pid)
        pid = entries[pid].parent
    return lineage


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    """A handle that stays with the process whoever gets its number; None where the kernel has none."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
