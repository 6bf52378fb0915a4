"""The controller's bulk connections: hosts' sums come up and the total goes down; the final state comes up.

Two threads per host over a blocking socket: bytes go straight into a sum's buffer, and a chunk is sent back as soon as
every host has delivered it. The loop's thread only opens and closes. A state that has arrived whole lies in a file of
its own until the run takes it: of two ranks that sent one, the wrong one never stands in the place of the right one.
"""

import contextlib
import logging
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flodl.averaging.reducer import BufferPool, HostSums
from flodl.errors import DeadlineExceeded, PeerLost, ProtocolError, RemoteProtocolError
from flodl.ids import HostName, RankId, RoundKey
from flodl.messages import FromDaemon, HostHello, Layout
from flodl.runtime.blocking import BlockingFrames
from flodl.wire.chunks import CHUNK_BYTES, HEADER_BYTES, ChunkHeader, ChunkKind, pack_header, unpack_header

STALL_S: Final = 120.0
"""A host that moves no byte in the middle of a transfer for this long is dropped; its beats say whether it lives."""

IDLE_S: Final = 3600.0 * 24 * 365
QUEUED_CHUNKS: Final = 1 << 16
"""Chunks waiting to go down to one host: 64 GiB of model. A host that is further behind is dropped."""

SPARE_BUFFERS: Final = 16

_log = logging.getLogger(__name__)

_Piece = tuple[HostSums, int, int]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A state that came up, in a temporary file at ``path``; ``error`` says why it is not there."""

    host: HostName
    rank: RankId
    size_bytes: int
    path: Path | None
    error: str


class StateFile:
    """A state on its way to a temporary file. Used by one thread."""

    def __init__(self, folder: Path, rank: RankId, size_bytes: int) -> None:
        """Creates the file, mode 0600.

        Raises:
            OSError: it cannot be created.
        """
        self.rank = rank
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self._fd, name = tempfile.mkstemp(prefix=".state-", dir=folder)
        self.path = Path(name)

    def write(self, header: ChunkHeader, data: memoryview) -> bool:
        """Write one chunk; True when it was the last and all is on disk.

        Raises:
            RemoteProtocolError: it does not follow on the one before.
            OSError: the disk does not take it.
        """
        expected = (self.rank, self.size_bytes, self.received_bytes)
        if (header.key, header.total_bytes, header.offset_bytes) != expected:
            raise RemoteProtocolError(f"bulk: {header} does not follow on byte {self.received_bytes} of a state")
        while data:
            data = data[os.write(self._fd, data) :]
        self.received_bytes += header.length_bytes
        if self.received_bytes < self.size_bytes:
            return False
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        return True

    def discard(self) -> None:
        """Remove it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.path.unlink(missing_ok=True)


class BulkHub:
    """All bulk connections of a run. ``on_state`` is called from a thread and owns the file from then on."""

    def __init__(self, folder: Path, on_state: Callable[[Arrived], None]) -> None:
        """``folder``: where states are kept until the run takes one."""
        self.folder = folder
        self.on_state = on_state
        self._pool = BufferPool(SPARE_BUFFERS)
        self._sums: dict[RoundKey, HostSums] = {}
        self._links: dict[HostName, Link] = {}
        self._lock = threading.Lock()

    def link(self, host: HostName, sock: socket.socket) -> "Link":
        """A host's new connection; it takes no part before ``attach``. Close it if it never will."""
        return Link(self, host, sock)

    def attach(self, link: "Link") -> bool:
        """Let a connection take part; False when its host has one already."""
        with self._lock:
            if link.host in self._links:
                return False
            self._links[link.host] = link
        link.start()
        return True

    def drop(self, host: HostName) -> None:
        """Close the host's connection."""
        with self._lock:
            link = self._links.pop(host, None)
        if link is not None:
            link.close()

    def open_sum(self, key: RoundKey, hosts: Sequence[HostName], layout: Layout, bf16: bool = False) -> None:
        """Sum the images of ``hosts`` for ``key``; any other sum is closed. ``bf16``: see ``WireImage``."""
        sums = HostSums(key, layout, hosts, self._pool, bf16)
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

    def sums(self, header: ChunkHeader) -> HostSums | None:
        """The open sum that a chunk is meant for."""
        with self._lock:
            found = self._sums.get(header.key) if isinstance(header.key, RoundKey) else None
        return found if found is not None and found.total_bytes == header.total_bytes else None

    def send_down(self, sums: HostSums, ranges: Sequence[tuple[int, int]]) -> None:
        """Queue finished ranges for every host of the sum."""
        with self._lock:
            links = [self._links[host] for host in sums.hosts if host in self._links]
        for link in links:
            for offset, length in ranges:
                link.send(sums, offset, length)


class Link:
    """One host's bulk connection and its two threads; see ``BulkHub.link``."""

    def __init__(self, hub: BulkHub, host: HostName, sock: socket.socket) -> None:
        self.host = host
        self._queue: queue.Queue[_Piece | None] = queue.Queue(QUEUED_CHUNKS)
        self._hub = hub
        self._frames = BlockingFrames(sock, f"host {host} (bulk)", FromDaemon)
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        self._state: StateFile | None = None
        self._is_closed = False

    def greeting(self, timeout_s: float) -> HostHello:
        """The connection's first word; blocks, ``close`` ends it.

        Raises:
            RemoteProtocolError: it is another word.
            DeadlineExceeded: none came in time.
            PeerLost: the connection is over.
        """
        word = self._frames.receive(timeout_s)
        if not isinstance(word, HostHello):
            raise RemoteProtocolError(f"host {self.host} (bulk): expected its hello, got {type(word).__name__}")
        return word

    def start(self) -> None:
        """Start the threads."""
        for name, work in (("receive", self._receive_all), ("send", self._send_all)):
            thread = threading.Thread(target=self._guarded, args=(work,), name=f"bulk-{name}-{self.host}", daemon=True)
            thread.start()

    def send(self, sums: HostSums, offset: int, length: int) -> None:
        """Queue a range of the total; never waits."""
        try:
            self._queue.put_nowait((sums, offset, length))
        except queue.Full:
            _log.warning("bulk connection dropped: host=%s reason=%d chunks behind", self.host, QUEUED_CHUNKS)
            self.close()

    def close(self) -> None:
        """End both threads."""
        self._is_closed = True
        self._frames.close()
        with contextlib.suppress(queue.Full):  # then the sender has enough to wake up for
            self._queue.put_nowait(None)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (PeerLost, ProtocolError, DeadlineExceeded) as error:
            _log.log(logging.DEBUG if self._is_closed else logging.INFO, "bulk: host=%s reason=%s", self.host, error)
        except Exception:  # noqa: BLE001  # the host notices the end of its connection and leaves
            _log.exception("bulk: host=%s", self.host)
        finally:
            self.close()

    def _receive_all(self) -> None:
        raw = bytearray(HEADER_BYTES)
        try:
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
        finally:
            if self._state is not None:
                self._state.discard()

    def _receive_sum(self, header: ChunkHeader) -> None:
        sums, offset, length = self._hub.sums(header), header.offset_bytes, header.length_bytes
        with contextlib.ExitStack() as held:
            try:
                if sums is None:
                    raise RemoteProtocolError("no such round")
                view = held.enter_context(sums.receiving(self.host, offset, length))
            except RemoteProtocolError:  # closed, stale or out of place: read past it
                self._frames.receive_into(self._scratch[:length], STALL_S)
                return
            self._frames.receive_into(view, STALL_S)
        with contextlib.suppress(RemoteProtocolError):  # closed in the meantime
            self._hub.send_down(sums, sums.landed(self.host, offset, length))

    def _receive_state(self, header: ChunkHeader) -> None:
        data = self._scratch[: header.length_bytes]
        self._frames.receive_into(data, STALL_S)
        assert isinstance(header.key, int), "states have ranks for keys"
        if header.offset_bytes == 0 and self._state is not None:
            self._state.discard()
            self._state = None
        try:
            if header.offset_bytes == 0:
                self._state = StateFile(self._hub.folder, header.key, header.total_bytes)
            if self._state is not None and self._state.write(header, data):
                path, self._state = self._state.path, None
                self._hub.on_state(Arrived(self.host, header.key, header.total_bytes, path, ""))
        except OSError as error:  # the rest of it is read and thrown away
            if self._state is not None:
                self._state.discard()
                self._state = None
            reason = f"{self._hub.folder}: {error.strerror} ({header.total_bytes} bytes)"
            self._hub.on_state(Arrived(self.host, header.key, header.total_bytes, None, reason))

    def _send_all(self) -> None:
        while (piece := self._queue.get()) is not None and not self._is_closed:
            sums, offset, length = piece
            with contextlib.ExitStack() as held:
                try:
                    view = held.enter_context(sums.sending(offset, length))
                except RemoteProtocolError:  # closed in the meantime
                    continue
                self._send_range(sums, offset, view)

    def _send_range(self, sums: HostSums, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            header = ChunkHeader(ChunkKind.SUM_DOWN, sums.key, offset + start, len(piece), sums.total_bytes)
            self._frames.send_buffers(pack_header(header), piece, timeout_s=STALL_S)
