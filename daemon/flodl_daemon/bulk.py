"""The daemon's bulk connection: the host's sum goes up, the total comes back, the final state goes up.

Blocking sockets in two threads: bytes go straight from and into shared memory, and never share a connection with
heartbeats.
"""

import logging
import mmap
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flodl.averaging.shared import SharedPlane
from flodl.core.events import ControllerDropped, HostEvent, SumReturned
from flodl.errors import DeadlineExceeded, PeerLost, ProtocolError, RemoteProtocolError
from flodl.ids import RankId, RoundKey
from flodl.messages import Layout, ToDaemon
from flodl.runtime.blocking import BlockingFrames
from flodl.wire.chunks import (
    CHUNK_BYTES,
    HEADER_BYTES,
    ChunkHeader,
    ChunkKind,
    chunk_ranges,
    pack_header,
    unpack_header,
)

STALL_S: Final = 120.0
"""A controller that takes no byte for this long is gone; its silence on the control connection says the same."""

IDLE_S: Final = 3600.0 * 24 * 365
"""Between rounds the connection is silent for as long as a window takes."""

QUEUED_STREAMS: Final = 64
"""Sums and states waiting to go up: one sum at a time, and one state per rank."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sum:
    key: RoundKey
    layout: Layout


@dataclass(frozen=True, slots=True)
class _State:
    rank: RankId
    size_bytes: int
    outbox_fd: int


class BulkLink:
    """Two daemon threads over one socket. ``post`` must be safe to call from them."""

    def __init__(self, sock: socket.socket, plane: SharedPlane, post: Callable[[HostEvent], None]) -> None:
        """Takes over ``sock``, connected and blocking."""
        self._frames = BlockingFrames(sock, "controller (bulk)", ToDaemon)
        self._plane = plane
        self._post = post
        self._queue: queue.Queue[_Sum | _State | None] = queue.Queue(QUEUED_STREAMS)
        self._current: _Sum | None = None
        self._received_bytes = 0

    def start(self) -> None:
        """Start the threads."""
        for name, work in (("bulk-send", self._send_all), ("bulk-receive", self._receive_all)):
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True).start()

    def stream_sum(self, key: RoundKey, layout: Layout) -> None:
        """Send the result area up and let the total replace it."""
        self._current, self._received_bytes = _Sum(key, layout), 0
        self._queue.put_nowait(self._current)

    def cancel(self, key: RoundKey) -> None:
        """Forget ``key``: what is not sent stays, what comes is thrown away."""
        if self._current is not None and self._current.key == key:
            self._current = None

    def stream_state(self, rank: RankId, size_bytes: int, outbox_fd: int) -> None:
        """Send a rank's outbox up."""
        self._queue.put_nowait(_State(rank, size_bytes, outbox_fd))

    def close(self) -> None:
        """End both threads."""
        self._queue.put_nowait(None)
        self._frames.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (PeerLost, ProtocolError, DeadlineExceeded) as error:
            self._post(ControllerDropped(f"bulk connection: {error}"))

    def _send_all(self) -> None:
        while (job := self._queue.get()) is not None:
            match job:
                case _Sum():
                    self._send_sum(job)
                case _State():
                    self._send_state(job)

    def _send_sum(self, job: _Sum) -> None:
        image = self._plane.result(job.layout)
        total = job.layout.total_bytes
        for offset, length in chunk_ranges(total, CHUNK_BYTES):
            if self._current is not job:
                return
            header = ChunkHeader(ChunkKind.SUM_UP, job.key, offset, length, total)
            self._frames.send_buffers(pack_header(header), image[offset : offset + length], timeout_s=STALL_S)

    def _send_state(self, job: _State) -> None:
        with mmap.mmap(job.outbox_fd, job.size_bytes, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as image:
            for offset, length in chunk_ranges(job.size_bytes, CHUNK_BYTES):
                header = ChunkHeader(ChunkKind.STATE_UP, job.rank, offset, length, job.size_bytes)
                with image[offset : offset + length] as piece:
                    self._frames.send_buffers(pack_header(header), piece, timeout_s=STALL_S)

    def _receive_all(self) -> None:
        raw = bytearray(HEADER_BYTES)
        scratch = bytearray(CHUNK_BYTES)
        while True:
            self._frames.receive_into(raw, IDLE_S)
            header = unpack_header(raw, max_chunk_bytes=CHUNK_BYTES)
            job = self._current
            if header.kind is not ChunkKind.SUM_DOWN:
                raise RemoteProtocolError(f"bulk: {header.kind.name} does not go to a daemon")
            if job is None or header.key != job.key or header.total_bytes != job.layout.total_bytes:
                self._frames.receive_into(memoryview(scratch)[: header.length_bytes], STALL_S)
                continue
            start, stop = header.offset_bytes, header.offset_bytes + header.length_bytes
            self._frames.receive_into(self._plane.result(job.layout)[start:stop], STALL_S)
            self._received_bytes += header.length_bytes
            if self._received_bytes == header.total_bytes:
                self._post(SumReturned(job.key))
