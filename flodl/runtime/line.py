"""A connected socket in the event loop, plain or under TLS, until a stream, a server or a thread takes it over.

Nothing is read ahead that the next owner would miss: on a plain socket the first byte is only looked at, and what has
come out of TLS beyond it stays here until it is received.
"""

import asyncio
import contextlib
import socket
from typing import Final

from flodl.errors import RemoteProtocolError
from flodl.runtime.streams import ConnectionLost, Loss
from flodl.runtime.tls import TlsLayer

READ_BYTES: Final = 4096
"""Bytes taken from a stranger at once; a handshake's message has some hundred."""

TLS_HANDSHAKE_BYTES: Final = 16 * 1024
"""Most that a peer may send until TLS is open: a hello with the longest key shares in use has two thousand."""


class Line:
    """One connection. ``sock`` is non-blocking; ``tls`` is None without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.tls: TlsLayer | None = None
        self._unread = b""

    async def peek(self) -> bytes:
        """The first byte that will be received; empty at the end.

        Raises:
            RemoteProtocolError: the peer breaks TLS.
            OSError: the connection broke.
        """
        if self.tls is None:
            await _until_readable(self.sock)
            return self.sock.recv(1, socket.MSG_PEEK)
        if not self._unread:
            self._unread = await self.receive()
        return self._unread[:1]

    async def receive(self) -> bytes:
        """What comes next, some thousand bytes at most; empty at the end.

        Raises:
            RemoteProtocolError: the peer breaks TLS.
            OSError: the connection broke.
        """
        if self.tls is None:
            return await self._read()
        data = self.unread() or self.tls.decrypt(b"")  # it may have come together with the handshake's end
        while not data and not self.tls.has_ended and (sealed := await self._read()):
            data = self.tls.decrypt(sealed)
        return data

    def unread(self) -> bytes:
        """What has been received and is to be used before anything else; for the next owner."""
        data, self._unread = self._unread, b""
        return data

    async def send(self, data: bytes) -> None:
        """Send all of ``data``.

        Raises:
            RemoteProtocolError: the peer has broken TLS.
            OSError: the connection broke.
        """
        sealed = data if self.tls is None else self.tls.encrypt(data)
        await asyncio.get_running_loop().sock_sendall(self.sock, sealed)

    async def secure(self, tls: TlsLayer) -> None:
        """Put the connection under ``tls``; the caller sets the deadline.

        Raises:
            JoinRefused: the peer takes no TLS.
            ConnectionLost: the peer closed in the middle of it.
            RemoteProtocolError: the peer does not speak TLS 1.3.
            OSError: the connection broke.
        """
        loop, received_bytes, data = asyncio.get_running_loop(), 0, b""
        while True:
            try:
                tls.shake_hands(data)
            finally:
                with contextlib.suppress(OSError):  # it shows at the next read
                    await loop.sock_sendall(self.sock, tls.outgoing())
            if tls.is_open:
                self.tls = tls
                return
            data = await self._read()
            received_bytes += len(data)
            if not data:
                raise ConnectionLost("the peer", Loss.EOF, "in the middle of the TLS handshake")
            if received_bytes > TLS_HANDSHAKE_BYTES:
                raise RemoteProtocolError(f"TLS: more than {TLS_HANDSHAKE_BYTES} bytes before it was open")

    async def finish(self, timeout_s: float, limit_bytes: int) -> None:
        """Let the peer read what was sent: closing with unread bytes would reset the connection and lose it."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self.tls is not None:
                    await loop.sock_sendall(self.sock, self.tls.farewell())
                self.sock.shutdown(socket.SHUT_WR)
                for _ in range(limit_bytes // READ_BYTES):
                    if not await self._read():
                        return

    async def _read(self) -> bytes:
        """Bytes of the socket. The loop gets its turn first: the library takes what is there without a pause, and a
        peer that always has more would stop everything else, our deadlines too.
        """
        await asyncio.sleep(0)
        return await asyncio.get_running_loop().sock_recv(self.sock, READ_BYTES)


async def _until_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
