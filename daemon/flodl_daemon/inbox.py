"""The host's inbox: memory in which a state that comes down lies until the host's ranks have taken it.

A memfd that all ranks inherit. They share its file position as well, so they read at offsets (pread). It holds one
transfer at a time: a new one takes the place of the one before.
"""

import os
import threading

from flodl.core.events import StateLanded
from flodl.errors import RemoteProtocolError
from flodl.runtime.processes import create_memfd
from flodl.wire.chunks import ChunkHeader


class HostInbox:
    """Filled by one thread; ``empty`` may be called from any."""

    def __init__(self, limit_bytes: int) -> None:
        """``limit_bytes``: this machine's memory; no longer state is taken."""
        self.fd = -1
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._transfer = -1
        self._total_bytes = 0
        self._received_bytes = 0
        self._is_refused = False

    def open(self) -> None:
        """Make the memfd ``fd``, to be inherited by ranks."""
        self.fd = create_memfd("flodl-inbox")

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            os.close(self.fd)
            self.fd = -1

    def take(self, header: ChunkHeader, data: memoryview) -> StateLanded | None:
        """Put one chunk in its place; the landing behind the last one, or as soon as there is no place for it.

        Raises:
            RemoteProtocolError: it does not follow on the one before.
        """
        with self._lock:
            assert isinstance(header.key, int), "states have transfer numbers for keys"
            if header.offset_bytes == 0:
                self._transfer, self._total_bytes, self._received_bytes = header.key, header.total_bytes, 0
                self._is_refused = False
            follows = (self._transfer, self._total_bytes, self._received_bytes)
            if (header.key, header.total_bytes, header.offset_bytes) != follows:
                raise RemoteProtocolError(f"bulk: {header} does not follow on byte {self._received_bytes} of a state")
            self._received_bytes += header.length_bytes
            if self._is_refused:
                return None
            try:
                self._write(header, data)
            except OSError as error:
                self._is_refused = True
                os.ftruncate(self.fd, 0)
                reason = error.strerror or error
                return StateLanded(self._transfer, f"no memory for a state of {self._total_bytes} bytes: {reason}")
            return StateLanded(self._transfer) if self._received_bytes == self._total_bytes else None

    def empty(self, transfer: int) -> None:
        """Give its memory back, if it still holds ``transfer``."""
        with self._lock:
            if transfer == self._transfer:
                os.ftruncate(self.fd, 0)

    def _write(self, header: ChunkHeader, data: memoryview) -> None:
        offset = header.offset_bytes
        if offset == 0:
            os.ftruncate(self.fd, 0)  # what is left of the one before
            if self._total_bytes > self._limit_bytes:
                raise OSError(f"this machine has {self._limit_bytes} bytes")
            os.ftruncate(self.fd, self._total_bytes)
        while data:
            count = os.pwrite(self.fd, data, offset)
            data, offset = data[count:], offset + count
