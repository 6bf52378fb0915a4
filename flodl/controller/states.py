"""A state on its way to the controller's disk: who expects it, and the file into which it goes.

A state goes straight to where it belongs, chunk by chunk, and is hashed on the way: the disk holds it once, and nobody
reads it again. One that may not be lost goes on in an anonymous file in memory where the disk does not take it; others
can read that as long as we live.
"""

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flodl.errors import RemoteProtocolError
from flodl.ids import HostName
from flodl.runtime.processes import create_memfd
from flodl.wire.chunks import ChunkHeader


@dataclass(frozen=True, slots=True)
class Arrived:
    """The end of a transfer: all of it is in the file at ``path`` and synced, or ``error`` says why there is none.

    ``sha256`` is that of the ``size_bytes`` bytes, in hex. ``memory_fd`` is ≥ 0 where the file is in memory: ``path``
    then leads there through this process, and ``error`` says why it is not on disk.
    """

    transfer: int
    host: HostName
    size_bytes: int
    path: Path | None
    sha256: str
    error: OSError | None
    memory_fd: int = -1

    def discard(self) -> None:
        """Nobody wants it: remove it, as far as the disk lets us."""
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
        elif self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """A transfer that somebody waits for.

    Both functions are called from threads. ``place`` makes or names the empty file and may raise OSError; while it
    waits, no sum of the host comes through. ``on_arrived`` owns the file from then on. ``or_memory``: it goes on
    in memory where the disk does not take it.
    """

    transfer: int
    host: HostName
    place: Callable[[], Path]
    on_arrived: Callable[[Arrived], None]
    or_memory: bool = False


def private_file(folder: Path) -> Path:
    """A new empty file in ``folder``, mode 0600.

    Raises:
        OSError: it cannot be made.
    """
    fd, name = tempfile.mkstemp(prefix=".state-", dir=folder)
    os.close(fd)
    return Path(name)


class IncomingState:
    """One transfer on its way into its file. Used by one thread at a time."""

    def __init__(self, expected: Expected, size_bytes: int) -> None:
        """Opens the file.

        Raises:
            OSError: there is no place for it.
        """
        self.expected = expected
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self._digest = hashlib.sha256()
        self._fd = -1
        self._path: Path | None = None
        self._disk_error: OSError | None = None  # set once it goes to memory
        try:
            self._path = expected.place()
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            self._move_to_memory(error)

    def write(self, header: ChunkHeader, data: memoryview) -> bool:
        """Write one chunk; True when it was the last.

        Raises:
            RemoteProtocolError: it does not follow on the one before.
            OSError: the disk does not take it, nor memory where it might.
        """
        follows = (self.expected.transfer, self.size_bytes, self.received_bytes)
        if (header.key, header.total_bytes, header.offset_bytes) != follows:
            raise RemoteProtocolError(f"bulk: {header} does not follow on byte {self.received_bytes} of a state")
        try:
            _write_all(self._fd, data)
        except OSError as error:
            self._move_to_memory(error)
            _write_all(self._fd, data)
        self._digest.update(data)
        self.received_bytes += header.length_bytes
        return self.received_bytes == self.size_bytes

    def sync(self) -> Arrived:
        """See to it that all of it is on the disk; for a large state on a slow disk this takes long. It is the taker's
        from then on.

        Raises:
            OSError: it is not, nor in memory where it might be.
        """
        if self._disk_error is None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self._move_to_memory(error)
        path, memory_fd = self._path, -1
        if self._disk_error is None:
            self._close()
        else:
            memory_fd, self._fd = self._fd, -1
            path = Path(f"/proc/{os.getpid()}/fd/{memory_fd}")
        transfer, host, sha256 = self.expected.transfer, self.expected.host, self._digest.hexdigest()
        return Arrived(transfer, host, self.size_bytes, path, sha256, self._disk_error, memory_fd)

    def discard(self) -> None:
        """Remove it, as far as the disk lets us."""
        self._close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _move_to_memory(self, error: OSError) -> None:
        """The disk has failed with ``error``: go on in memory, or raise it."""
        if not self.expected.or_memory or self._disk_error is not None:
            raise error
        try:
            memory_fd = self._copy_to_memory()
        except OSError as cause:
            raise error from cause
        self.discard()
        self._fd, self._path, self._disk_error = memory_fd, None, error

    def _copy_to_memory(self) -> int:
        """What has been received; checked, for a disk that has failed may have lost what it had taken."""
        memory_fd, copied, count = create_memfd("state"), 0, 1
        try:
            while copied < self.received_bytes and count:
                count = os.sendfile(memory_fd, self._fd, copied, self.received_bytes - copied)
                copied += count
            with open(memory_fd, "rb", buffering=0, closefd=False) as file:
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").digest()  # and the next byte goes behind the last
            if digest != self._digest.digest():
                raise OSError(errno.EIO, "the disk has lost what it had taken")
        except OSError:
            os.close(memory_fd)
            raise
        return memory_fd

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
