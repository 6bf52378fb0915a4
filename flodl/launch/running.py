"""A daemon that has been started, and the wait until it says that it has read its bootstrap.

Two ways lead here, a child process (``flodl.launch.local``) and ssh (``flodl.launch.ssh``); the controller holds both
as a ``RunningDaemon``. Whatever the daemon's streams carry besides the ready line is the host's log.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from flodl.errors import HostUnreachable
from flodl.launch.bootstrap import ReadyScanner
from flodl.launch.commands import FOLDER_MISSING, INTERPRETER_MISSING, install_command
from flodl.launch.plan import HostPlan

START_TIMEOUT_S: Final = 30.0
"""From the command's start to the ready line: Python and a few modules, perhaps from a slow network file system."""

MAX_LOG_BYTES: Final = 16 << 20
"""A daemon says little; what a noisy login adds must not fill the disk."""

TAIL_BYTES: Final = 4096
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
PIECE_BYTES: Final = 1 << 16

Read: TypeAlias = Callable[[int], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class DaemonEnded:
    """How a started daemon left: ``code`` (128 + N for signal N), or None when its connection was lost."""

    code: int | None
    reason: str


class RunningDaemon(Protocol):
    """A host's daemon that has read its bootstrap. Its control connection is its own affair."""

    host: str

    async def wait(self) -> DaemonEnded:
        """Wait until it has ended or its connection is lost; bounded by ssh keep-alives."""

    async def close(self) -> None:
        """Let go: ask a daemon that still runs to end, and free what this side holds, within a few seconds."""


class HostLog:
    """The host's log file, ``logs/daemon-HOST.log``: appended to, bounded, and remembered for error reports. Without a
    file our own stderr takes its place.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._left_bytes = MAX_LOG_BYTES
        self._tail = b""

    def write(self, data: bytes) -> None:
        """Append ``data``, even if it is empty: messages name the file. A disk that cannot take it stops no run."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        piece = data[: self._left_bytes]
        self._left_bytes -= len(piece)
        if data and not piece:
            return
        try:
            descriptor = os.dup(2) if self._path is None else os.open(self._path, _APPEND, 0o600)
        except OSError:
            self._left_bytes = 0
            return
        with open(descriptor, "ab") as file:
            file.write(piece)

    def last_lines(self, count: int = 5) -> str:
        """The last lines in printable form."""
        lines = self._tail.decode(errors="backslashreplace").splitlines()
        printable = ("".join(char if char.isprintable() else " " for char in line)[:300].strip() for line in lines)
        return "\n".join([line for line in printable if line][-count:])


async def pump(read: Read, log: HostLog, scanner: ReadyScanner | None, ready: asyncio.Event) -> None:
    """Read a stream to its end into ``log``; set ``ready`` when ``scanner`` finds the ready line, which is no log."""
    while data := await read(PIECE_BYTES):
        log.write(data if scanner is None else scanner.feed(data))
        if scanner is not None and scanner.is_found:
            ready.set()
    if scanner is not None:
        log.write(scanner.rest())


def start_failure(host: HostPlan, code: int | None, log: HostLog) -> HostUnreachable:
    """Why a daemon never got ready, from its exit code (None: still running) and what it printed."""
    python, said = host.python or "python3 (of the login shell's PATH)", log.last_lines()
    quoted = f"; it said:\n{said}" if said else ""
    if code == FOLDER_MISSING:
        return HostUnreachable(
            host.name, "start", f"folder {host.cwd} not found", f"create it there, or set `path` of worker {host.name}"
        )
    if code in (INTERPRETER_MISSING, 127):
        return HostUnreachable(
            host.name,
            "start",
            f"interpreter {python} not found",
            f"set `python` of worker {host.name} to an interpreter with flodl, by its absolute path",
        )
    if "No module named" in said and "flodl" in said:
        return HostUnreachable(
            host.name,
            "start",
            f"{python} has no flodl",
            f"install it there: {install_command(host.python or 'python3')}",
        )
    if "nknown option: -P" in said or "Unknown option" in said:
        return HostUnreachable(
            host.name, "start", f"{python} is older than Python 3.11", f"set `python` of worker {host.name}"
        )
    if code is None:
        return HostUnreachable(
            host.name,
            "start",
            f"the daemon was not ready within {START_TIMEOUT_S:g} s{quoted}",
            "see what its login shell and interpreter do: an rc file that waits, or a slow file system",
        )
    return HostUnreachable(host.name, "start", f"the daemon ended with code {code} before it was ready{quoted}")
