"""Files and folders of this user alone. A file stands under its name once it is whole and on the disk, so that a full
disk, a crash or another process at the same moment leaves no half of one.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

IGNORE_NAME: Final = ".gitignore"
ALONE_S: Final = 10.0
LOCK_POLL_S: Final = 0.02

_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Make the file ``path``; nothing that is there is followed or replaced.

    Raises:
        FileExistsError: something is there.
        OSError: it cannot be made; nothing is left then.
    """
    temporary = _write_beside(path, data, mode)
    try:
        _give_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put the file in the place of whatever file is there, in one step.

    Raises:
        OSError: it cannot be made; what was there is there still.
    """
    temporary = _write_beside(path, data, mode)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_folders(folder: Path) -> None:
    """Make ``folder`` and those above it that are missing, each 0700 under any umask (``mkdir(parents=True)`` gives its
    mode to the last one only). What is there stays as it is.

    Raises:
        OSError: one cannot be made, or is no folder.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folders(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    else:
        folder.chmod(0o700)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Until the end of the block no other process is in such a block for ``folder``, which is there. On a disk that
    lets no folder be locked nobody is kept out.

    Raises:
        TimeoutError: another one is in it for ``ALONE_S`` and more.
    """
    descriptor, deadline_s = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + ALONE_S
    try:
        while not _is_locked(descriptor):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process changes it for {ALONE_S:g} s or more", str(folder)
                )
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def keep_at_home(folder: Path) -> None:
    """Have git and every sync pass ``folder`` by, also of a user for whom it is no state folder (any more)."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder / IGNORE_NAME):
            write_new(folder / IGNORE_NAME, b"*\n")


def is_open_to_others(folder: Path) -> bool:
    """Whether others may put files of theirs in the place of ours there; a folder that is not there lets nobody."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks
        return True
    return True


def _write_beside(path: Path, data: bytes, mode: int) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _give_name(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.replace(path)
