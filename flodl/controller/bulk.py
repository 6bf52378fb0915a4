"""The controller's bulk connections: hosts' sums come up and the total goes down; states come up and go down.

Two threads per host over a blocking socket: bytes go straight into a sum's buffer, and a chunk is sent back as soon as
every host has delivered it. The loop's thread only opens and closes. A state goes straight from the socket into its
file, and from a file into the socket, a chunk at a time: whatever its size, no more of it is in memory, and a sum waits
for one chunk of it at most. What nobody expects, or does not expect any more, is read past.
"""

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flodl.averaging.reducer import BufferPool, HostSums
from flodl.controller.states import Arrived, Expected, IncomingState
from flodl.errors import CheckpointError, DeadlineExceeded, PeerLost, ProtocolError, RemoteProtocolError
from flodl.ids import HostName, RoundKey
from flodl.messages import FromDaemon, HostHello, Layout
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.tls import TlsLayer
from flodl.wire.chunks import CHUNK_BYTES, HEADER_BYTES, ChunkHeader, ChunkKind, pack_header, unpack_header

STALL_S: Final = 120.0
"""A host that moves no byte in the middle of a transfer for this long is dropped; its beats say whether it lives."""

IDLE_S: Final = 3600.0 * 24 * 365
QUEUED_CHUNKS: Final = 1 << 16
"""Chunks waiting to go down to one host: 64 GiB of model. A host that is further behind is dropped."""

QUEUED_STATES: Final = 16
"""States waiting to go down to one host, which keeps only the last of them."""

SPARE_BUFFERS: Final = 16

_log = logging.getLogger(__name__)

_Piece = tuple[HostSums, int, int]


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A state on its way down to one host; ``fd`` is its own. Bytes before ``sent_bytes`` have left."""

    transfer: int
    fd: int
    size_bytes: int
    sent_bytes: int = 0


class BulkHub:
    """All bulk connections of a run."""

    def __init__(self) -> None:
        self._pool = BufferPool(SPARE_BUFFERS)
        self._sums: dict[RoundKey, HostSums] = {}
        self._links: dict[HostName, Link] = {}
        self._expected: dict[int, Expected] = {}
        self._unsent: dict[HostName, list[_Outgoing]] = {}
        self._lock = threading.Lock()

    # -------------------------------------------------------------------------------------------------- connections
    def link(self, host: HostName, sock: socket.socket, tls: TlsLayer | None = None) -> "Link":
        """A host's new connection, with its open ``tls``; it takes no part before ``attach``. Else close it."""
        return Link(self, host, sock, tls)

    def attach(self, link: "Link") -> bool:
        """Let a connection take part; False when its host has one already."""
        with self._lock:
            if link.host in self._links:
                return False
            self._links[link.host] = link
            for state in self._unsent.pop(link.host, []):
                link.send_state(state)
        link.start()
        return True

    def drop(self, host: HostName) -> None:
        """Close the host's connection."""
        with self._lock:
            link = self._links.pop(host, None)
            unsent = self._unsent.pop(host, [])
        for state in unsent:
            os.close(state.fd)
        if link is not None:
            link.close()

    def close(self) -> None:
        """Close everything."""
        with self._lock:
            hosts, sums = {*self._links, *self._unsent}, list(self._sums.values())
            self._sums, self._expected = {}, {}
        for host in hosts:
            self.drop(host)
        for each in sums:
            each.close()

    # --------------------------------------------------------------------------------------------------------- sums
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

    # ------------------------------------------------------------------------------------------------------- states
    def expect(
        self,
        transfer: int,
        host: HostName,
        place: Callable[[], Path],
        on_arrived: Callable[[Arrived], None],
        or_memory: bool = False,
    ) -> None:
        """Take the state that ``host`` sends as ``transfer``; say so before the host can send it.

        When it is all there, or the disk did not take it, ``on_arrived`` hears of it once, unless ``forget`` comes
        first. A connection that breaks off is no end of a transfer: the host is lost then. See ``Expected`` for both
        functions, which are called from threads, and for ``or_memory``.
        """
        with self._lock:
            self._expected[transfer] = Expected(transfer, host, place, on_arrived, or_memory)

    def forget(self, transfer: int) -> None:
        """Throw away what there is of ``transfer`` and what comes of it; nothing is heard of it any more."""
        with self._lock:
            self._expected.pop(transfer, None)

    def expected(self, host: HostName, transfer: int) -> Expected | None:
        """Whether and how ``transfer`` is expected from ``host``."""
        with self._lock:
            found = self._expected.get(transfer)
        return found if found is not None and found.host == host else None

    def settle(self, expected: Expected, arrived: Arrived) -> bool:
        """The transfer has ended; False when nobody waits for it any more."""
        with self._lock:
            if self._expected.get(expected.transfer) is not expected:
                return False
            del self._expected[expected.transfer]
        expected.on_arrived(arrived)
        return True

    def send_state(self, transfer: int, hosts: Sequence[HostName], fd: int, size_bytes: int) -> None:
        """Send the first ``size_bytes`` (> 0) of a file down to each of these hosts; ``fd`` stays the caller's.

        A host that is not connected yet gets it when it is. One for which the file cannot be read is cut off: it could
        not say what it has.
        """
        with self._lock:
            for host in hosts:
                state = _Outgoing(transfer, os.dup(fd), size_bytes)
                if host in self._links:
                    self._links[host].send_state(state)
                else:
                    self._unsent.setdefault(host, []).append(state)


class Link:
    """One host's bulk connection and its two threads; see ``BulkHub.link``."""

    def __init__(self, hub: BulkHub, host: HostName, sock: socket.socket, tls: TlsLayer | None) -> None:
        self.host = host
        self._hub = hub
        self._frames = BlockingFrames(sock, f"host {host} (bulk)", FromDaemon, tls)
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        self._incoming: IncomingState | None = None
        self._news = threading.Condition()
        self._pieces: deque[_Piece] = deque()
        self._outgoing: deque[_Outgoing] = deque()
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
        for name, *work in (
            ("receive", self._receive_all, self._discard),
            ("send", self._send_all, self._close_outgoing),
        ):
            threading.Thread(target=self._live, args=work, name=f"bulk-{name}-{self.host}", daemon=True).start()

    def send(self, sums: HostSums, offset: int, length: int) -> None:
        """Queue a range of the total; never waits."""
        with self._news:
            is_full = len(self._pieces) >= QUEUED_CHUNKS
            if not is_full:
                self._pieces.append((sums, offset, length))
                self._news.notify()
        if is_full:
            _log.warning("bulk connection dropped: host=%s reason=%d chunks behind", self.host, QUEUED_CHUNKS)
            self.close()

    def send_state(self, state: _Outgoing) -> None:
        """Queue a state, behind all sums; never waits."""
        with self._news:
            is_full = len(self._outgoing) >= QUEUED_STATES
            is_queued = not is_full and not self._is_closed
            if is_queued:
                self._outgoing.append(state)
                self._news.notify()
        if not is_queued:
            os.close(state.fd)
        if is_full:
            _log.warning("bulk connection dropped: host=%s reason=%d states behind", self.host, QUEUED_STATES)
            self.close()

    def close(self) -> None:
        """End both threads."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._frames.close()

    def _live(self, work: Callable[[], None], tidy: Callable[[], None]) -> None:
        try:
            work()
        except (PeerLost, ProtocolError, DeadlineExceeded) as error:
            _log.log(logging.DEBUG if self._is_closed else logging.INFO, "bulk: host=%s reason=%s", self.host, error)
        except CheckpointError as error:
            _log.error("bulk connection dropped: host=%s reason=%s", self.host, error)
        except Exception:  # noqa: BLE001  # the host notices the end of its connection and leaves
            _log.exception("bulk: host=%s", self.host)
        finally:
            self.close()
            tidy()

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
        assert isinstance(header.key, int), "states have transfer numbers for keys"
        if header.offset_bytes == 0:
            self._discard()
            self._open_state(header.key, header.total_bytes)
        state = self._incoming
        if state is None:
            return
        if self._hub.expected(self.host, state.expected.transfer) is not state.expected:
            self._discard()
            return
        try:
            is_whole = state.write(header, data)
        except OSError as error:
            self._discard()
            self._settle_failure(state.expected, header.total_bytes, error)
            return
        if is_whole:
            self._incoming = None
            name = f"bulk-sync-{self.host}"  # a thread of its own: a disk may take minutes, and sums come behind it
            threading.Thread(target=self._sync, args=(state,), name=name, daemon=True).start()

    def _open_state(self, transfer: int, size_bytes: int) -> None:
        expected = self._hub.expected(self.host, transfer)
        if expected is None:
            _log.debug("state not expected: host=%s transfer=%d bytes=%d", self.host, transfer, size_bytes)
            return
        try:
            self._incoming = IncomingState(expected, size_bytes)
        except OSError as error:  # the state is read and thrown away
            self._settle_failure(expected, size_bytes, error)

    def _sync(self, state: IncomingState) -> None:
        try:
            arrived = state.sync()
        except OSError as error:
            state.discard()
            self._settle_failure(state.expected, state.size_bytes, error)
            return
        if not self._hub.settle(state.expected, arrived):
            arrived.discard()

    def _settle_failure(self, expected: Expected, size_bytes: int, error: OSError) -> None:
        self._hub.settle(expected, Arrived(expected.transfer, self.host, size_bytes, None, "", error))

    def _discard(self) -> None:
        if self._incoming is not None:
            self._incoming.discard()
            self._incoming = None

    def _send_all(self) -> None:
        scratch = memoryview(bytearray(CHUNK_BYTES))
        while (job := self._next_job()) is not None:
            if isinstance(job, _Outgoing):
                self._send_chunk(job, scratch)
            else:
                self._send_sum(*job)

    def _close_outgoing(self) -> None:
        while self._outgoing:  # nothing is queued any more: we are closed
            os.close(self._outgoing.popleft().fd)

    def _next_job(self) -> _Piece | _Outgoing | None:
        """A range of a sum before anything else, else the state whose next chunk is to be sent."""
        with self._news:
            self._news.wait_for(lambda: self._is_closed or self._pieces or self._outgoing)
            if self._is_closed:
                return None
            return self._pieces.popleft() if self._pieces else self._outgoing[0]

    def _send_sum(self, sums: HostSums, offset: int, length: int) -> None:
        with contextlib.ExitStack() as held:
            try:
                view = held.enter_context(sums.sending(offset, length))
            except RemoteProtocolError:  # closed in the meantime
                return
            self._send_range(sums, offset, view)

    def _send_range(self, sums: HostSums, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            header = ChunkHeader(ChunkKind.SUM_DOWN, sums.key, offset + start, len(piece), sums.total_bytes)
            self._frames.send_buffers(pack_header(header), piece, timeout_s=STALL_S)

    def _send_chunk(self, state: _Outgoing, scratch: memoryview) -> None:
        offset = state.sent_bytes
        data = scratch[: min(CHUNK_BYTES, state.size_bytes - offset)]
        try:
            count = os.preadv(state.fd, [data], offset)
        except OSError as error:
            raise CheckpointError(f"the state of transfer {state.transfer} cannot be read: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(f"the state of transfer {state.transfer} ends at byte {offset} of {state.size_bytes}")
        header = ChunkHeader(ChunkKind.STATE_DOWN, state.transfer, offset, count, state.size_bytes)
        self._frames.send_buffers(pack_header(header), data[:count], timeout_s=STALL_S)
        state.sent_bytes += count
        if state.sent_bytes == state.size_bytes:
            with self._news:
                self._outgoing.popleft()
            os.close(state.fd)
