"""A state on its way to the controller's disk: who expects it, and the file into which it goes.

A state goes straight to where it belongs, chunk by chunk, and is hashed on the way: the disk holds it once, and nobody
reads it again.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flodl.errors import RemoteProtocolError
from flodl.ids import HostName
from flodl.wire.chunks import ChunkHeader


@dataclass(frozen=True, slots=True)
class Arrived:
    """The end of a transfer: all of it is in the file at ``path`` and synced, or ``error`` says why there is none.

    ``sha256`` is that of the ``size_bytes`` bytes, in hex.
    """

    transfer: int
    host: HostName
    size_bytes: int
    path: Path | None
    sha256: str
    error: OSError | None


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """A transfer that somebody waits for.

    Both functions are called from threads. ``place`` makes or names the empty file and may raise OSError; while it
    waits, no sum of the host comes through. ``on_arrived`` owns the file from then on.
    """

    transfer: int
    host: HostName
    place: Callable[[], Path]
    on_arrived: Callable[[Arrived], None]


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
        self._path = expected.place()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, header: ChunkHeader, data: memoryview) -> bool:
        """Write one chunk; True when it was the last.

        Raises:
            RemoteProtocolError: it does not follow on the one before.
            OSError: the disk does not take it.
        """
        follows = (self.expected.transfer, self.size_bytes, self.received_bytes)
        if (header.key, header.total_bytes, header.offset_bytes) != follows:
            raise RemoteProtocolError(f"bulk: {header} does not follow on byte {self.received_bytes} of a state")
        self._digest.update(data)
        while data:
            data = data[os.write(self._fd, data) :]
        self.received_bytes += header.length_bytes
        return self.received_bytes == self.size_bytes

    def sync(self) -> Arrived:
        """See to it that all of it is on the disk; for a large state on a slow disk this takes long.

        Raises:
            OSError: it is not.
        """
        os.fsync(self._fd)
        self._close()
        sha256 = self._digest.hexdigest()
        return Arrived(self.expected.transfer, self.expected.host, self.size_bytes, self._path, sha256, None)

    def discard(self) -> None:
        """Remove it, as far as the disk lets us."""
        self._close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
