"""Messages over a connected socket in the event loop.

A ``FramedStream`` works over TCP and over a local socketpair, sends frames of ``flodl.wire``, accepts only the messages
that the connection may carry, and reports its end as ``ConnectionLost`` with its kind: a peer that is gone (eof, reset)
is told at once and apart from one that fell silent. ``flodl.runtime.blocking`` has its twin for threads.
"""

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from flodl.errors import PeerLost, RemoteProtocolError
from flodl.messages import Message
from flodl.runtime.tls import TlsLayer
from flodl.wire.codec import Vocabulary, decode, encode
from flodl.wire.frames import FRAME_BYTES, FrameDecoder, frame

OUTBOUND_BYTES: Final = 32 * 1024 * 1024
"""Most bytes that wait for a slow peer: two of the longest frames. Beyond it the peer counts as clogged."""

INBOX_FRAMES: Final = 1024
"""Frames that wait for ``receive`` before the socket is left alone, so that a flood stays with its sender."""

INBOX_BYTES: Final = 4 * 1024 * 1024
"""Bytes that wait for ``receive`` before the socket is left alone."""

CLOSE_S: Final = 5.0
"""How long the last bytes may take to leave before the connection is cut."""

KEEPALIVE_IDLE_S: Final = 30
KEEPALIVE_INTERVAL_S: Final = 10
SILENCE_S: Final = 150
"""Unanswered keepalives or data end the connection after this long. A safety net only: heartbeats decide who is dead,
and a host that comes back within ``on_disconnect_s`` (120) must find its connection alive to be told so."""

UNSENT_BYTES: Final = 128 * 1024
"""Bytes that the kernel takes before it has sent them. On a slow network it would take megabytes, in front of every
heartbeat and out of sight of ``waiting_bytes``."""

_SILENT: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Loss(StrEnum):
    """How a connection ended.

    EOF: the peer closed it or died. RESET: it died with data under way. SILENT: nothing came back any more.
    CLOGGED: it did not read what we sent. CLOSED: we closed it ourselves.
    """

    EOF = "eof"
    RESET = "reset"
    SILENT = "silent"
    CLOGGED = "clogged"
    CLOSED = "closed"


class ConnectionLost(PeerLost):
    """The connection to ``peer`` is over; ``loss`` says how."""

    def __init__(self, peer: str, loss: Loss, detail: str = "") -> None:
        """``peer`` is written for a person: role, name, address."""
        self.peer, self.loss, self.detail = peer, loss, detail
        super().__init__(f"connection to {peer}: {loss}" + (f" ({detail})" if detail else ""))


def configure_tcp(sock: socket.socket) -> None:
    """No delay for small messages, little unsent, and keepalives; a socket of another family is left as it is.

    asyncio sets TCP_NODELAY only where the socket's ``proto`` says TCP, which an accepted socket's may not.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES),
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, SILENCE_S // KEEPALIVE_INTERVAL_S),
        (socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class FramedStream:
    """One connection in the event loop. ``send`` never waits; ``receive`` has one caller at a time."""

    def __init__(
        self,
        peer: str,
        allowed: Vocabulary,
        decoder: FrameDecoder,
        outbound_bytes: int = OUTBOUND_BYTES,
        tls: TlsLayer | None = None,
    ) -> None:
        """See ``over``, which also connects it."""
        self.peer = peer
        self._allowed = allowed
        self._decoder = decoder
        self._outbound_bytes = outbound_bytes
        self._tls = tls
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._end: Exception | None = None
        self._news = asyncio.Event()
        self._closed = asyncio.Event()

    @classmethod
    async def over(
        cls,
        sock: socket.socket,
        peer: str,
        allowed: Vocabulary,
        *,
        decoder: FrameDecoder | None = None,
        payloads: Sequence[bytes] = (),
        outbound_bytes: int = OUTBOUND_BYTES,
        tls: TlsLayer | None = None,
    ) -> Self:
        """Take ``sock`` (connected; it belongs to the stream from here) into the running loop.

        Args:
            sock: TCP or a local socketpair's end.
            peer: role, name and address, for messages.
            allowed: the messages that may come; any other ends the connection.
            decoder: holds what an earlier reader took from the socket; None starts afresh, without a preamble.
            payloads: frames that the earlier reader found and did not use.
            outbound_bytes: most bytes that may wait for the peer.
            tls: open on this connection; None sends in plain.
        """
        stream = cls(peer, allowed, decoder or FrameDecoder(FRAME_BYTES, expect_preamble=False), outbound_bytes, tls)
        stream._store(payloads)
        configure_tcp(sock)
        sock.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: _StreamProtocol(stream), sock)
        return stream

    async def __aenter__(self) -> Self:
        """The stream itself; it is closed on leaving."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    @property
    def is_open(self) -> bool:
        """Messages can still be sent."""
        return self._end is None

    @property
    def waiting_bytes(self) -> int:
        """Bytes sent but not yet taken by the kernel."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: Message) -> bool:
        """Send ``message`` when the peer takes it; never waits.

        Returns False when the connection is over, also when this very message found the peer clogged and ended it:
        ``receive`` reports how.

        Raises:
            LocalProtocolError: the message cannot be encoded.
        """
        data = frame(encode(message))
        if self._end is not None or self._transport is None:
            return False
        if self.waiting_bytes + len(data) > self._outbound_bytes:
            detail = f"{self.waiting_bytes} bytes were waiting, the limit is {self._outbound_bytes}"
            self.abort(ConnectionLost(self.peer, Loss.CLOGGED, detail))
            return False
        self._transport.write(data if self._tls is None else self._tls.encrypt(data))
        return True

    async def receive(self) -> Message:
        """The next message. What came before the connection's end is still returned. Waits as long as it lives: the
        peer's silence is judged by heartbeats, and by keepalives after ``SILENCE_S``.

        Raises:
            ConnectionLost: the connection is over.
            RemoteProtocolError: the peer sent what it may not; the connection is cut.
        """
        while not self._inbox:
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        payload = self._inbox.popleft()
        self._inbox_bytes -= len(payload)
        self._regulate()
        try:
            return decode(payload, self._allowed)
        except RemoteProtocolError as error:
            self.abort(error)
            self._inbox.clear()
            raise

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let the last bytes arrive, then close; after ``timeout_s`` cut the connection.

        It says that nothing follows and waits for the peer to close too: closing with bytes of the peer unread would
        reset the connection and take our last words with it.
        """
        if self._transport is None or self._closed.is_set():
            return
        if self._end is None and self._tls is not None:
            self._transport.write(self._tls.farewell())
        self._finish(ConnectionLost(self.peer, Loss.CLOSED))
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            self._transport.abort()
            await self._closed.wait()

    def abort(self, error: Exception | None = None) -> None:
        """Cut the connection now; ``receive`` raises ``error`` (None: closed by us)."""
        self._finish(error or ConnectionLost(self.peer, Loss.CLOSED))
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------------ called by _StreamProtocol
    def _connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._regulate()

    def _take(self, data: bytes) -> None:
        if self._end is not None:
            return
        try:
            self._store(self._decoder.feed(data if self._tls is None else self._tls.decrypt(data)))
        except RemoteProtocolError as error:
            self.abort(error)
        if self._tls is not None and self._tls.has_ended and self._transport is not None:
            self._transport.close()

    def _store(self, payloads: Sequence[bytes]) -> None:
        self._inbox.extend(payloads)
        self._inbox_bytes += sum(map(len, payloads))
        self._regulate()
        self._news.set()

    def _finish(self, error: Exception) -> None:
        if self._end is None:
            self._end = error
        self._news.set()

    def _lost(self, error: Exception | None) -> None:
        torn = f"{self._decoder.buffered_bytes} bytes of a torn frame" if self._decoder.buffered_bytes else ""
        self._finish(loss_of(self.peer, error) if error else ConnectionLost(self.peer, Loss.EOF, torn))
        self._closed.set()

    def _regulate(self) -> None:
        """Read on only while there is room."""
        if self._transport is None or self._transport.is_closing() or self._end is not None:
            return
        is_full = len(self._inbox) >= INBOX_FRAMES or self._inbox_bytes >= INBOX_BYTES
        if is_full and self._transport.is_reading():
            self._transport.pause_reading()
        elif not is_full and not self._transport.is_reading():
            self._transport.resume_reading()


class _StreamProtocol(asyncio.Protocol):
    def __init__(self, stream: FramedStream) -> None:
        self._stream = stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._stream._connected(transport)

    def data_received(self, data: bytes) -> None:
        self._stream._take(data)

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def connection_lost(self, error: Exception | None) -> None:
        self._stream._lost(error)


def loss_of(peer: str, error: Exception) -> ConnectionLost:
    """What a socket's error means for the connection."""
    number = error.errno if isinstance(error, OSError) else None
    return ConnectionLost(peer, Loss.SILENT if number in _SILENT else Loss.RESET, str(error))
