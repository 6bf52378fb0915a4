"""The daemon's bulk connection: the host's sum goes up, the total comes back, states go up and come down.

Blocking sockets in two threads, so that bytes never share a connection, or the event loop, with heartbeats. What comes
down passes through a buffer of the thread's own: once ``cancel`` has returned, nothing of that round is written into
the ranks' shared memory any more. A sum waits for one chunk of a state at most: the ranks stand still for it, and train
on while a state is on its way.
"""

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from flodl.averaging.regions import Bytes
from flodl.averaging.shared import SharedPlane
from flodl.averaging.wire_image import WireImage
from flodl.core.events import ControllerDropped, HostEvent, SumReturned
from flodl.errors import RemoteProtocolError
from flodl.ids import RankId, RoundKey
from flodl.messages import HostHello, Layout, ToDaemon
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.tls import TlsLayer
from flodl.wire.chunks import (
    CHUNK_BYTES,
    HEADER_BYTES,
    ChunkHeader,
    ChunkKind,
    chunk_ranges,
    pack_header,
    unpack_header,
)
from flodl_daemon.inbox import HostInbox

STALL_S: Final = 120.0
"""A controller that takes no byte for this long is gone; its silence on the control connection says the same."""

IDLE_S: Final = 3600.0 * 24 * 365
"""Between rounds the connection is silent for as long as a window takes."""

MAX_STATES: Final = 64
"""States waiting to go up, one after the other. The controller asks one rank at a time."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Sum:
    key: RoundKey
    form: WireImage
    image: Bytes | None = None
    received_bytes: int = 0


@dataclass(slots=True, eq=False)
class _State:
    rank: RankId
    transfer: int
    size_bytes: int
    fd: int
    sent_bytes: int = 0


class BulkLink:
    """Two daemon threads over one socket. ``post`` must be safe to call from them."""

    def __init__(self, sock: socket.socket, post: Callable[[HostEvent], None], tls: TlsLayer | None = None) -> None:
        """Takes over ``sock``, connected and blocking; ``tls`` is open on it."""
        self._frames = BlockingFrames(sock, "controller (bulk)", ToDaemon, tls)
        self._post = post
        self._plane: SharedPlane | None = None
        self._inbox: HostInbox | None = None
        self._news = threading.Condition()
        self._current: _Sum | None = None
        self._unsent: _Sum | None = None
        self._states: deque[_State] = deque()
        self._is_closed = False

    def greet(self, hello: HostHello) -> None:
        """Say whose connection this is, as on the control connection.

        Raises:
            PeerLost: the controller is gone.
        """
        self._frames.send(hello)

    def start(self, plane: SharedPlane, inbox: HostInbox) -> None:
        """Start the threads."""
        self._plane, self._inbox = plane, inbox
        for name, work in (("bulk-send", self._send_until_closed), ("bulk-receive", self._receive_all)):
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True).start()

    def stream_sum(self, key: RoundKey, layout: Layout, bf16: bool = False) -> None:
        """Send the result area up and let the total replace it; takes the place of any other sum.

        ``bf16``: both cross the network in half the bytes, see ``WireImage``. A chunk is converted while the socket's
        buffer still drains the one before.
        """
        with self._news:
            self._current = self._unsent = _Sum(key, WireImage(layout, bf16))
            self._news.notify()

    def cancel(self, key: RoundKey) -> None:
        """Forget ``key``: what is not sent stays, what comes is thrown away."""
        with self._news:
            if self._current is not None and self._current.key == key:
                self._current = self._unsent = None

    def stream_state(self, rank: RankId, transfer: int, size_bytes: int, outbox_fd: int) -> bool:
        """Send a rank's outbox up, whatever becomes of the rank; False when it does not hold so many bytes.

        A rank that writes its next state meanwhile spoils the one that is being sent: that one does not arrive.
        """
        with self._news:
            if not 0 < size_bytes <= os.fstat(outbox_fd).st_size or len(self._states) >= MAX_STATES:
                return False
            if not self._is_closed:
                self._states.append(_State(rank, transfer, size_bytes, os.dup(outbox_fd)))
                self._news.notify()
            return True

    def close(self) -> None:
        """End both threads."""
        with self._news:
            self._is_closed = True
            self._current = self._unsent = None
            self._news.notify()
        self._frames.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever it is, rounds cannot go on without this connection
            if not self._is_closed:
                _log.debug("bulk connection over", exc_info=True)
                self._post(ControllerDropped(f"bulk connection: {error}"))

    def _send_until_closed(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                if isinstance(job, _Sum):
                    self._send_sum(job)
                elif not self._send_chunk(job):
                    with self._news:
                        self._states.popleft()
                    os.close(job.fd)
        finally:
            with self._news:
                left, self._states = self._states, deque()
            for state in left:
                os.close(state.fd)

    def _next_job(self) -> _Sum | _State | None:
        """A sum before anything else, else the state whose next chunk is to be sent."""
        with self._news:
            self._news.wait_for(lambda: self._is_closed or self._unsent is not None or self._states)
            if self._is_closed:
                return None
            if self._unsent is not None:
                job, self._unsent = self._unsent, None
                return job
            return self._states[0]

    def _send_sum(self, job: _Sum) -> None:
        assert self._plane is not None, "the threads start with it"
        job.image = image = np.frombuffer(self._plane.result(job.form.layout), np.uint8)
        total, scratch = job.form.total_bytes, np.empty(CHUNK_BYTES, np.uint8)
        for offset, length in chunk_ranges(total, CHUNK_BYTES):
            if self._current is not job:
                return
            header = ChunkHeader(ChunkKind.SUM_UP, job.key, offset, length, total)
            piece = job.form.encode(image, offset, offset + length, scratch)
            self._frames.send_buffers(pack_header(header), piece.data, timeout_s=STALL_S)

    def _send_chunk(self, state: _State) -> bool:
        """Send the next chunk of a state; False when there is nothing more to send."""
        # read, not mapped: a rank that shortened its outbox now would end a process that touched the mapping
        offset = state.sent_bytes
        piece = os.pread(state.fd, min(CHUNK_BYTES, state.size_bytes - offset), offset)
        if not piece:
            _log.warning("state not sent: rank=%d reason=it has shortened its outbox meanwhile", state.rank)
            return False
        header = ChunkHeader(ChunkKind.STATE_UP, state.transfer, offset, len(piece), state.size_bytes)
        self._frames.send_buffers(pack_header(header), piece, timeout_s=STALL_S)
        state.sent_bytes += len(piece)
        return state.sent_bytes < state.size_bytes

    def _receive_all(self) -> None:
        assert self._inbox is not None, "the threads start with it"
        raw, scratch = bytearray(HEADER_BYTES), memoryview(bytearray(CHUNK_BYTES))
        while True:
            self._frames.receive_into(raw, IDLE_S)
            header = unpack_header(raw, max_chunk_bytes=CHUNK_BYTES)
            if header.kind not in (ChunkKind.SUM_DOWN, ChunkKind.STATE_DOWN):
                raise RemoteProtocolError(f"bulk: {header.kind.name} does not go to a daemon")
            data = scratch[: header.length_bytes]
            self._frames.receive_into(data, STALL_S)
            if header.kind is ChunkKind.STATE_DOWN:
                landed = self._inbox.take(header, data)
                if landed is not None:
                    self._post(landed)
            elif self._land(header, data):
                assert isinstance(header.key, RoundKey), "sums have round keys"
                self._post(SumReturned(header.key))

    def _land(self, header: ChunkHeader, data: memoryview) -> bool:
        """Put a chunk of the total in its place, if its round is still open; True when it was the last one."""
        with self._news:
            job = self._current
            if job is None or job.image is None or header.key != job.key:
                return False
            if header.total_bytes != job.form.total_bytes or header.offset_bytes != job.received_bytes:
                raise RemoteProtocolError(f"bulk: {header} does not follow on byte {job.received_bytes} of the total")
            job.form.decode(np.frombuffer(data, np.uint8), header.offset_bytes, job.image)
            job.received_bytes += len(data)
            return job.received_bytes == header.total_bytes
