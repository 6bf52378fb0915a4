"""Messages and raw bytes over a connected socket, for threads: the blocking twin of ``FramedStream``.

The ranks' agent talks to its daemon through it, and bulk connections send their chunks: a header and a view of the
buffer, in one piece and without copying. It reads exactly what is asked for, so frames and chunks can share a socket.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flodl.errors import DeadlineExceeded, RemoteProtocolError
from flodl.messages import Message
from flodl.runtime.streams import ConnectionLost, Loss, configure_tcp, loss_of
from flodl.runtime.tls import TlsLayer
from flodl.wire.codec import Vocabulary, decode, encode
from flodl.wire.frames import LENGTH_BYTES, frame, payload_bytes

SEND_S: Final = 30.0
"""How long a blocking send waits for a peer that does not read: as long as a peer may be silent before it is dead."""

TLS_PIECE_BYTES: Final = 256 * 1024
"""Bytes that are encrypted before they are sent, and read before they are decrypted: few calls, within the caches."""

LONGEST_POLL_S: Final = 3600.0
"""poll takes milliseconds in a C int; a longer wait is several polls."""


class BlockingFrames:
    """One connection for threads: any thread sends, one thread receives. Takes over ``sock`` (connected)."""

    def __init__(self, sock: socket.socket, peer: str, allowed: Vocabulary, tls: TlsLayer | None = None) -> None:
        """``peer``, ``allowed`` and ``tls`` as in ``FramedStream.over``."""
        self._sock = sock
        self._peer = peer
        self._allowed = allowed
        self._tls = tls
        self._received = memoryview(bytearray(0 if tls is None else TLS_PIECE_BYTES))
        self._send_lock = threading.Lock()
        self._frame = bytearray(LENGTH_BYTES)
        self._filled = 0
        self._is_payload = False
        self._is_closed = False
        sock.setblocking(False)
        configure_tcp(sock)

    def send(self, message: Message, timeout_s: float = SEND_S) -> None:
        """Send one message.

        Raises:
            ConnectionLost: the connection is over, or the peer has not read for ``timeout_s`` seconds (clogged); after
                that the connection is cut, for a frame may be half sent.
            LocalProtocolError: the message cannot be encoded.
        """
        self.send_buffers(frame(encode(message)), timeout_s=timeout_s)

    def send_buffers(self, *buffers: bytes | bytearray | memoryview, timeout_s: float = SEND_S) -> None:
        """Send raw bytes in one piece, without copying but for TLS: a chunk's header and its data.

        Raises:
            ConnectionLost: as ``send``.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        with self._send_lock:
            if self._tls is None:
                self._send_all(views, timeout_s)
                return
            for piece in _pieces(views):
                self._send_all([memoryview(self._sealed_by(self._tls, piece))], timeout_s)

    def receive(self, timeout_s: float) -> Message:
        """The next message.

        Raises:
            DeadlineExceeded: no complete message came within ``timeout_s`` seconds; call again, nothing is lost.
            ConnectionLost: the connection is over.
            RemoteProtocolError: the peer sent what it may not; the connection is cut.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            return decode(self._receive_payload(deadline_s, timeout_s), self._allowed)
        except RemoteProtocolError:
            self.close()
            raise

    def receive_into(self, buffer: bytearray | memoryview, timeout_s: float) -> None:
        """Fill ``buffer`` with the next bytes, without copying.

        Raises:
            DeadlineExceeded: ``timeout_s`` seconds without a byte. The connection is cut: it is out of step.
            ConnectionLost: the connection is over.
        """
        view = memoryview(buffer).cast("B")
        while view:
            count = self._read_into(view, timeout_s)
            if count is None:
                self.close()
                raise DeadlineExceeded(f"{self._peer}: no byte for {timeout_s:g} s in the middle of a chunk")
            view = view[count:]

    def close(self) -> None:
        """Close it; a thread that waits in it gets ConnectionLost."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # not connected any more, or closed before
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _sealed_by(self, tls: TlsLayer, piece: Sequence[memoryview]) -> bytes:
        try:
            return tls.encrypt(*piece)
        except RemoteProtocolError as error:  # what came last has broken it
            self.close()
            raise ConnectionLost(self._peer, Loss.CLOSED, str(error)) from error

    def _send_all(self, views: list[memoryview], timeout_s: float) -> None:
        while views:
            sent = self._attempt(lambda: self._sock.sendmsg(views), select.POLLOUT, timeout_s)
            if sent is None:
                self.close()
                raise ConnectionLost(self._peer, Loss.CLOGGED, f"it has not read for {timeout_s:g} s")
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _receive_payload(self, deadline_s: float, timeout_s: float) -> bytes:
        while True:
            if self._filled == len(self._frame):
                if self._is_payload:
                    payload = bytes(self._frame)
                    self._frame, self._is_payload, self._filled = bytearray(LENGTH_BYTES), False, 0
                    return payload
                self._frame, self._is_payload, self._filled = bytearray(payload_bytes(self._frame)), True, 0
            left_s = max(deadline_s - time.monotonic(), 0.0)
            count = self._read_into(memoryview(self._frame)[self._filled :], left_s)
            if count is None:
                raise DeadlineExceeded(f"{self._peer}: no message within {timeout_s:g} s")
            self._filled += count

    def _read_into(self, view: memoryview, timeout_s: float) -> int | None:
        count = self._attempt(lambda: self._receive_some(view), select.POLLIN, timeout_s)
        if count == 0:
            self.close()
            torn = f"{self._filled} bytes of a torn frame" if self._filled else ""
            raise ConnectionLost(self._peer, Loss.EOF, torn)
        return count

    def _receive_some(self, view: memoryview) -> int:
        """Bytes that are there now, 0 at the end; BlockingIOError when there are none."""
        if self._tls is None:
            return self._sock.recv_into(view)
        count = self._tls.decrypt_into(view)
        while not count and not self._tls.has_ended and (size := self._sock.recv_into(self._received)):
            count = self._tls.decrypt_into(view, self._received[:size])
        return count

    def _attempt(self, operation: Callable[[], int], readiness: int, timeout_s: float) -> int | None:
        """Do it now or as soon as the socket is ready; None when that is not within ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return operation()
            except (BlockingIOError, InterruptedError):
                left_s = deadline_s - time.monotonic()
            except RemoteProtocolError:
                self.close()
                raise
            except OSError as error:
                is_ours = self._is_closed
                self.close()
                raise ConnectionLost(self._peer, Loss.CLOSED) if is_ours else loss_of(self._peer, error) from error
            if left_s <= 0:
                return None
            self._wait_ready(readiness, left_s)

    def _wait_ready(self, readiness: int, timeout_s: float) -> None:
        fd = self._sock.fileno()
        if fd < 0:
            raise ConnectionLost(self._peer, Loss.CLOSED)
        poller = select.poll()
        poller.register(fd, readiness)
        poller.poll(min(timeout_s, LONGEST_POLL_S) * 1000)


def _pieces(views: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    """The same bytes, ``TLS_PIECE_BYTES`` at a time; a chunk's header together with its first data."""
    cut = [view[at : at + TLS_PIECE_BYTES] for view in views for at in range(0, len(view), TLS_PIECE_BYTES)]
    yield cut[:2]
    for piece in cut[2:]:
        yield (piece,)
