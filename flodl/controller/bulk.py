"""The controller's bulk connections: hosts' sums come up and the total goes down; the final state comes up.

Two threads per host over a blocking socket: bytes go straight into a sum's buffer, and a chunk is sent back as soon as
every host has delivered it. The loop's thread only opens and closes.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from flodl.averaging.reducer import BufferPool, HostSums
from flodl.errors import DeadlineExceeded, PeerLost, ProtocolError, RemoteProtocolError
from flodl.ids import HostName, RankId, RoundKey
from flodl.messages import FromDaemon, Layout
from flodl.runtime.blocking import BlockingFrames
from flodl.wire.chunks import CHUNK_BYTES, HEADER_BYTES, ChunkHeader, ChunkKind, pack_header, unpack_header

STALL_S: Final = 120.0
"""A host that moves no byte in the middle of a transfer for this long is dropped; its beats say whether it lives."""

IDLE_S: Final = 3600.0 * 24 * 365
QUEUED_CHUNKS: Final = 1 << 16
"""Chunks waiting to go down to one host: 64 GiB of model; a slower host delays only itself."""

SPARE_BUFFERS: Final = 16

_log = logging.getLogger(__name__)

_Piece = tuple[HostSums, int, int]


class StateFile:
    """The final state on its way to disk: written beside its place, then renamed. Used by one thread at a time."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Creates the temporary file.

        Raises:
            OSError: it cannot be created.
        """
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self._path = path
        self._temporary = path.with_name(f".{path.name}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._temporary, flags, 0o600)

    def write(self, header: ChunkHeader, data: memoryview) -> bool:
        """Write one chunk; True when it was the last and the file is in its place.

        Raises:
            OSError: the disk does not take it.
        """
        while data:
            data = data[os.pwrite(self._fd, data, header.offset_bytes + header.length_bytes - len(data)) :]
        self.received_bytes += header.length_bytes
        if self.received_bytes < self.size_bytes:
            return False
        os.fsync(self._fd)
        self.close()
        self._temporary.replace(self._path)
        return True

    def close(self) -> None:
        """Close the file; what is incomplete stays temporary."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BulkHub:
    """All bulk connections of a run. ``on_state(host, rank, path, error)`` is called from a thread."""

    def __init__(self, state_path: Path, on_state: Callable[[HostName, RankId, str, str], None]) -> None:
        self._state_path = state_path
        self._on_state = on_state
        self._pool = BufferPool(SPARE_BUFFERS)
        self._sums: dict[RoundKey, HostSums] = {}
        self._links: dict[HostName, _Link] = {}
        self._lock = threading.Lock()

    def attach(self, host: HostName, sock: socket.socket) -> None:
        """A host's bulk connection is open; an older one of the same host is closed."""
        link = _Link(self, host, sock)
        with self._lock:
            old = self._links.get(host)
            self._links[host] = link
        if old is not None:
            old.close()
        link.start()

    def drop(self, host: HostName) -> None:
        """Close the host's connection."""
        with self._lock:
            link = self._links.pop(host, None)
        if link is not None:
            link.close()

    def open_sum(self, key: RoundKey, hosts: Sequence[HostName], layout: Layout) -> None:
        """Sum the images of ``hosts`` for ``key``; any other sum is closed."""
        sums = HostSums(key, layout, hosts, self._pool)
        with self._lock:
            stale, self._sums = list(self._sums.values()), {key: sums}
        for old in stale:
            old.close()

    def close_sum(self, key: RoundKey) -> None:
        """Forget ``key``."""
        with self._lock:
            sums = self._sums.pop(key, None)
        if sums is not None:
            sums.close()

    def close(self) -> None:
        """Close everything."""
        with self._lock:
            links, sums = list(self._links.values()), list(self._sums.values())
            self._links, self._sums = {}, {}
        for link in links:
            link.close()
        for each in sums:
            each.close()

    def sums(self, key: RoundKey | int) -> HostSums | None:
        """The open sum for ``key``."""
        with self._lock:
            return self._sums.get(key) if isinstance(key, RoundKey) else None

    def send_down(self, sums: HostSums, hosts: Sequence[HostName], ranges: Sequence[tuple[int, int]]) -> None:
        """Queue finished ranges for every host of the sum."""
        with self._lock:
            links = [self._links[host] for host in hosts if host in self._links]
        for link in links:
            for offset, length in ranges:
                link.queue.put((sums, offset, length))

    def open_state(self, rank: RankId, size_bytes: int) -> StateFile:
        """A file for the final state from ``rank``."""
        return StateFile(self._state_path, size_bytes)

    def state_done(self, host: HostName, rank: RankId, error: str) -> None:
        """The state is in its place, or is not going to be."""
        self._on_state(host, rank, "" if error else str(self._state_path), error)


class _Link:
    """One host's bulk connection and its two threads."""

    def __init__(self, hub: BulkHub, host: HostName, sock: socket.socket) -> None:
        self.host = host
        self.queue: queue.Queue[_Piece | None] = queue.Queue(QUEUED_CHUNKS)
        self._hub = hub
        self._frames = BlockingFrames(sock, f"host {host} (bulk)", FromDaemon)
        self._scratch = bytearray(CHUNK_BYTES)
        self._state: StateFile | None = None

    def start(self) -> None:
        for name, work in (("receive", self._receive_all), ("send", self._send_all)):
            thread = threading.Thread(target=self._guarded, args=(work,), name=f"bulk-{name}-{self.host}", daemon=True)
            thread.start()

    def close(self) -> None:
        self._frames.close()
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(None)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (PeerLost, ProtocolError, DeadlineExceeded) as error:
            _log.debug("bulk connection over: host=%s reason=%s", self.host, error)
            self.close()

    def _receive_all(self) -> None:
        raw = bytearray(HEADER_BYTES)
        while True:
            self._frames.receive_into(raw, IDLE_S)
            header = unpack_header(raw, max_chunk_bytes=CHUNK_BYTES)
            match header.kind:
                case ChunkKind.SUM_UP:
                    self._receive_sum(header)
                case ChunkKind.STATE_UP:
                    self._receive_state(header)
                case _:
                    raise RemoteProtocolError(f"bulk: {header.kind.name} does not come from a daemon")

    def _receive_sum(self, header: ChunkHeader) -> None:
        sums = self._hub.sums(header.key)
        offset, length = header.offset_bytes, header.length_bytes
        try:
            if sums is None:
                raise RemoteProtocolError("no such round")
            with sums.receiving(self.host, offset, length) as view:
                self._frames.receive_into(view, STALL_S)
        except RemoteProtocolError:  # closed, stale or out of place: read past it
            self._frames.receive_into(memoryview(self._scratch)[:length], STALL_S)
            return
        with contextlib.suppress(RemoteProtocolError):  # closed in the meantime
            self._hub.send_down(sums, sums.hosts, sums.landed(self.host, offset, length))

    def _receive_state(self, header: ChunkHeader) -> None:
        view = memoryview(self._scratch)[: header.length_bytes]
        self._frames.receive_into(view, STALL_S)
        assert isinstance(header.key, int)
        try:
            if header.offset_bytes == 0:
                self._state = self._hub.open_state(header.key, header.total_bytes)
            if self._state is not None and self._state.write(header, view):
                self._state = None
                self._hub.state_done(self.host, header.key, "")
        except OSError as error:
            self._state = None
            self._hub.state_done(self.host, header.key, f"{error.filename or ''}: {error.strerror}".lstrip(": "))

    def _send_all(self) -> None:
        while (piece := self.queue.get()) is not None:
            sums, offset, length = piece
            try:
                with sums.sending(offset, length) as view:
                    self._send_range(sums, offset, view)
            except RemoteProtocolError:  # closed in the meantime
                continue

    def _send_range(self, sums: HostSums, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            header = ChunkHeader(ChunkKind.SUM_DOWN, sums.key, offset + start, len(piece), sums.total_bytes)
            self._frames.send_buffers(pack_header(header), piece, timeout_s=STALL_S)
