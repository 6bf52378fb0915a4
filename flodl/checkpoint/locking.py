"""One writer at a time for a stem: a lock on the small file ``<stem>.fdl.lock``, which goes with its holder.

The system gives the lock up when the process ends, however that comes; a file without a lock is what a killed process
has left, and the next writer takes it over. A process that is forked from the holder, such as a loader's worker, gets
the descriptor, and would keep the lock for as long as it lives: it closes it at once, and holds nothing. On a disk that
knows no locks nobody is kept out.
"""

import errno
import fcntl
import os
import socket
import stat
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from flodl.checkpoint.bundle import Stem
from flodl.errors import CheckpointError

SUFFIX: Final = ".fdl.lock"
ATTEMPTS: Final = 10
"""Each fails only when another holder removed the file between two of our steps."""
MAX_HOLDER_BYTES: Final = 300

_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_held: "weakref.WeakSet[StemLock]" = weakref.WeakSet()


class StemLock:
    """The right to write at a stem, until ``release`` or the end of the process. Not for several threads at a time."""

    def __init__(self, stem: Stem) -> None:
        """Assigns only."""
        self._stem = stem
        self._path = stem.plain(SUFFIX)
        self._fd = -1

    def __enter__(self) -> "StemLock":
        """As ``acquire``."""
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As ``release``."""
        self.release()

    def acquire(self) -> None:
        """Take it, unless it is held already. The folder is there.

        Raises:
            CheckpointError: another one holds it, who is named; or the lock's file is no regular one.
            OSError: the file cannot be made.
        """
        if self._fd >= 0 and _is_at(self._path, self._fd):
            return
        self.release()
        for _ in range(ATTEMPTS):
            fd = self._open(os.O_RDONLY)  # one that is open for writing would keep the disk from being remounted
            try:
                if self._is_taken(fd):
                    self._fd, fd = fd, -1
                    _held.add(self)
                    return
            finally:
                if fd >= 0:
                    os.close(fd)
        raise CheckpointError(f"another run is saving to {self._stem}; take another save_path, or end that run")

    def release(self) -> None:
        """Give it up, if it is held."""
        if self._fd < 0:
            return
        with suppress(OSError):
            if _is_at(self._path, self._fd):
                os.unlink(self._path)
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # whoever was forked by C code has the descriptor too
        self.forsake()

    def forsake(self) -> None:
        """In a forked process: the lock, and its file, are the holder's alone."""
        _held.discard(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, access: int) -> int:
        try:
            return os.open(self._path, access | os.O_CREAT | _FLAGS, 0o666)
        except PermissionError:  # somebody else's file in a folder like /tmp, perhaps
            with suppress(FileNotFoundError):
                return os.open(self._path, access | _FLAGS)
            raise
        except IsADirectoryError:
            raise CheckpointError(f"{self._path} is a folder; move it, or take another save_path") from None

    def _is_taken(self, fd: int) -> bool:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{self._path} is no regular file; move it, or take another save_path")
        try:
            self._flock(fd)
        except BlockingIOError:
            if not _is_at(self._path, fd):
                return False
            holder = os.pread(fd, MAX_HOLDER_BYTES, 0).decode(errors="replace").strip()
            who = f" ({holder})" if holder and holder.isprintable() else ""
            raise CheckpointError(
                f"another run is saving to {self._stem}{who}; take another save_path, or end that run"
            ) from None
        except OSError:  # a disk without locks
            pass
        if not _is_at(self._path, fd):
            return False
        with suppress(OSError), open(self._path, "w") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        return True

    def _flock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            writable = self._open(os.O_RDWR)  # NFS wants that
            try:
                os.dup2(writable, fd, inheritable=False)
            finally:
                os.close(writable)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _forsake_all() -> None:
    for lock in list(_held):
        lock.forsake()


os.register_at_fork(after_in_child=_forsake_all)


def _is_at(path: Path, fd: int) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        there, ours = os.lstat(path), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
