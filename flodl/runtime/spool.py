"""Log spools: what a rank prints goes from its pipe to a file at once, byte for byte, and is shipped from there.

A slow or absent controller therefore never blocks a rank, and memory holds no more than one read. Offsets count from
the stream's first byte, so that repeats are recognised. What has been shipped is let go of.
When the disk takes nothing (full, quota, error), or the file is as large as it may be, the rank is not blocked either:
its bytes are dropped, and a line in the log says how many as soon as one is taken again.
"""

import asyncio
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

READ_BYTES: Final = 64 * 1024
"""Bytes taken from a pipe in one turn of the loop: all that a pipe holds."""

MAX_BYTES: Final = 1 << 30
"""A stream's file grows no larger, when the controller is slower than the rank, or away. What was shipped counts until
all has been: then the file starts again.
"""

KEPT_BYTES: Final = 1 << 20
"""A file as small as this is not emptied, though all of it has been shipped: that would cost a call for every line."""


class LogSpool:
    """One stream of one rank: its pipe, its file, and the wait for more of it."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """``path``: the file; made with mode 0600, emptied if it is there. Its folder exists."""
        self.path = path
        self._max_bytes = max_bytes
        self.lost_bytes = 0
        self._unmarked_bytes = 0
        self._loss_reason = ""
        self._pipe_fd: int | None = None
        self._file_fd: int | None = None
        self._size_bytes = 0
        self._first_offset = 0
        self._has_ended = False
        self._news = asyncio.Event()

    def start(self, pipe_fd: int) -> None:
        """Spool ``pipe_fd`` (a read end; it belongs to the spool from here) in the running loop until its end.

        Raises:
            OSError: the file cannot be made; the pipe is closed.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file_fd = os.open(self.path, flags, 0o600)
        except OSError:
            os.close(pipe_fd)
            raise
        os.set_blocking(pipe_fd, False)
        self._pipe_fd = pipe_fd
        asyncio.get_running_loop().add_reader(pipe_fd, self._spool_once)

    def __enter__(self) -> Self:
        """The spool itself; it is closed on leaving."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close it."""
        self.close()

    @property
    def size_bytes(self) -> int:
        """Bytes taken so far: the offset behind the last one."""
        return self._size_bytes

    @property
    def has_ended(self) -> bool:
        """Nothing will come any more."""
        return self._has_ended

    def read_from(self, offset: int, max_bytes: int) -> bytes:
        """Up to ``max_bytes`` bytes from ``offset`` on; empty when there are none. May be cut inside a character.

        Raises:
            OSError: the file cannot be read, or the bytes at ``offset`` are forgotten.
        """
        return b"" if self._file_fd is None else os.pread(self._file_fd, max_bytes, offset - self._first_offset)

    def forget(self, offset: int) -> None:
        """Nobody reads what is before ``offset`` any more: the disk may have its room back once that is all there is.

        Raises:
            OSError: the file cannot be emptied.
        """
        held_bytes = self._size_bytes - self._first_offset
        if self._file_fd is not None and offset == self._size_bytes and held_bytes > KEPT_BYTES:
            os.ftruncate(self._file_fd, 0)
            self._first_offset = offset

    async def wait_beyond(self, offset: int) -> bool:
        """Wait for bytes behind ``offset``; False when the stream has ended without."""
        while self._size_bytes <= offset and not self._has_ended:
            self._news.clear()
            await self._news.wait()
        return self._size_bytes > offset

    def finish(self) -> None:
        """Take what the pipe holds now and let go of it; for a rank that is gone while a stranger holds its pipe."""
        while self._pipe_fd is not None and self._spool_once():
            pass
        self._end()

    def close(self) -> None:
        """Let go of pipe and file. What the pipe still held is lost; see ``finish``."""
        self._end()
        if self._file_fd is not None:
            os.close(self._file_fd)
            self._file_fd = None

    def _spool_once(self) -> bool:
        """Move one read from the pipe to the file; False when there was nothing to read."""
        assert self._pipe_fd is not None, "called only while the pipe is open"
        try:
            data = os.read(self._pipe_fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            self._end()
            return False
        self._write(data)
        self._news.set()
        return True

    def _write(self, data: bytes) -> None:
        if self._unmarked_bytes:
            mark = f"\n[flodl: {self._unmarked_bytes} bytes of output lost: {self._loss_reason}]\n".encode()
            if self._append(mark) < len(mark):
                self._lose(len(data))
                return
            self._unmarked_bytes = 0
        self._lose(len(data) - self._append(data))

    def _append(self, data: bytes) -> int:
        """Write ``data`` to the file; return how much of it was taken."""
        assert self._file_fd is not None, "the file outlives the pipe"
        view = memoryview(data)
        if self._size_bytes - self._first_offset + len(data) > self._max_bytes:
            self._loss_reason = f"the spool is full, {self._max_bytes} bytes, and not all are sent"
            return 0
        try:
            while view:
                view = view[os.write(self._file_fd, view) :]
        except OSError as error:
            self._loss_reason = str(error.strerror)
        written = len(data) - len(view)
        self._size_bytes += written
        return written

    def _lose(self, count: int) -> None:
        self.lost_bytes += count
        self._unmarked_bytes += count

    def _end(self) -> None:
        if self._pipe_fd is not None:
            asyncio.get_running_loop().remove_reader(self._pipe_fd)
            os.close(self._pipe_fd)
            self._pipe_fd = None
        self._has_ended = True
        self._news.set()
