"""One port for everything: each connection is told apart by its first byte, before anything is read.

0xC1 starts our protocol: the peer proves the run's token and goes on as a control stream or as a bulk socket. A letter
starts an HTTP request. A TLS hello and everything else is closed.

What strangers can cost is bounded: ``MAX_STRANGERS`` at once (a newer one replaces the oldest), each for at most
``STRANGER_S`` seconds and 64 KiB, and a few log lines a minute. A peer that has proven the token is no stranger; an
HTTP connection is its handler's from the first byte, with that handler's own limits.
"""

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import flodl
from flodl.errors import PeerLost, ProtocolError, RemoteProtocolError
from flodl.messages import FromClient, FromDaemon, FromHead
from flodl.runtime.clock import Clock
from flodl.runtime.greeting import HANDSHAKE_FRAME_BYTES, READ_BYTES, converse
from flodl.runtime.streams import ConnectionLost, FramedStream, configure_tcp
from flodl.wire.codec import Vocabulary
from flodl.wire.frames import FRAME_BYTES, PRE_AUTH_FRAME_BYTES, PREAMBLE, FrameDecoder
from flodl.wire.handshake import NONCE_BYTES, Channel, FromConnecting, Peer, Role, ServerHandshake

MAX_STRANGERS: Final = 256
"""Peers at once that have proven nothing yet."""

STRANGER_S: Final = 10.0
"""How long a peer may take to prove itself."""

FAREWELL_S: Final = 1.0
"""How long a refused peer may take to read why."""

LOGGED_STRANGERS: Final = 10
"""Bad peers that are logged within ``LOG_WINDOW_S``; the others are counted."""

LOG_WINDOW_S: Final = 60.0

ACCEPT_PAUSE_S: Final = 0.2
"""Pause before the next accept when the system has no descriptors or memory left."""

VOCABULARY: Final[dict[Role, Vocabulary]] = {
    Role.DAEMON: FromDaemon,
    Role.HEAD: FromHead,
    Role.CLIENT: FromClient,
}
"""Which messages each role may send on its control channel."""

_TLS_HELLO: Final = b"\x16"
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNUSABLE: Final = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """What a peer must know to be let in."""

    run_id: str
    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Handlers:
    """Who takes the connections over. Each runs in its connection's task and owns, thus closes, what it is given: a
    stream, a blocking socket for a thread, a non-blocking socket with nothing read from it.

    A ``PeerLost``, ``ProtocolError`` or ``OSError`` out of a handler ends its connection alone and is logged; any other
    exception ends the mux.
    """

    on_control: Callable[[Peer, FramedStream], Awaitable[None]]
    on_bulk: Callable[[Peer, socket.socket], Awaitable[None]]
    on_http: Callable[[socket.socket], Awaitable[None]]


Entrance = Callable[[], Awaitable[None]]
"""Takes an admitted connection to its handler."""


class PortMux:
    """Serves the listening sockets of ``flodl.runtime.ports.listen``; they stay the caller's."""

    def __init__(self, listeners: Sequence[socket.socket], run: Run, handlers: Handlers, clock: Clock) -> None:
        """``clock`` bounds the log."""
        self._listeners = listeners
        self._run = run
        self._handlers = handlers
        self._strangers: dict[asyncio.Task[None], socket.socket] = {}
        self._complaints = _Complaints(clock)

    @property
    def stranger_count(self) -> int:
        """Peers connected now that have proven nothing yet."""
        return len(self._strangers)

    async def serve(self) -> None:
        """Accept and hand over until cancelled; the connections' tasks are cancelled with it."""
        async with asyncio.TaskGroup() as tasks:
            for listener in self._listeners:
                tasks.create_task(self._accept(listener, tasks), name="accept")

    async def _accept(self, listener: socket.socket, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _UNUSABLE:
                    raise
                if error.errno in _EXHAUSTED:
                    self._complaints.add("a new connection", str(error.strerror))
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                continue  # else that one peer gave up before it was accepted
            task = tasks.create_task(self._meet(sock, f"{address[0]} port {address[1]}"), name="connection")
            self._strangers[task] = sock
            task.add_done_callback(self._part)
            while len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                oldest.cancel()
                await asyncio.wait([oldest])

    def _part(self, task: "asyncio.Task[None]") -> None:
        """Close the socket of a stranger that goes as one; admitted ones are their handlers'."""
        sock = self._strangers.pop(task, None)
        if sock is not None:
            sock.close()

    async def _meet(self, sock: socket.socket, where: str) -> None:
        """One connection's whole life."""
        entrance: Entrance | None = None
        try:
            async with asyncio.timeout(STRANGER_S):
                entrance = await self._admit(sock, where)
        except TimeoutError:
            self._complaints.add(where, f"has not proven itself within {STRANGER_S:g} s")
        except (ConnectionLost, RemoteProtocolError, OSError) as error:
            self._complaints.add(where, str(error))
        task = asyncio.current_task()
        if entrance is None or task is None:
            return
        self._strangers.pop(task, None)
        try:
            await entrance()
        except (PeerLost, ProtocolError, OSError) as error:
            self._complaints.add(where, str(error))

    async def _admit(self, sock: socket.socket, where: str) -> Entrance | None:
        await _until_readable(sock)
        first = sock.recv(1, socket.MSG_PEEK)
        if first == PREAMBLE[:1]:
            return await self._greet(sock, where)
        if first.isalpha():
            configure_tcp(sock)
            return lambda: self._handlers.on_http(sock)
        if first:
            kind = "a TLS hello; this port takes no TLS" if first == _TLS_HELLO else f"byte {first.hex()}"
            self._complaints.add(where, f"does not speak flodl's protocol or HTTP: {kind}")
        return None

    async def _greet(self, sock: socket.socket, where: str) -> Entrance | None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = ServerHandshake(self._run.token, self._run.run_id, nonce, flodl.__version__)
        decoder = FrameDecoder(HANDSHAKE_FRAME_BYTES, expect_preamble=True)
        payloads = await converse(sock, decoder, handshake, FromConnecting)
        peer = handshake.peer
        if not handshake.done or peer is None:
            self._complaints.add(where, f"was refused: {handshake.refusal}")
            await _say_farewell(sock)
            return None
        payloads += decoder.raise_limit(FRAME_BYTES)
        if peer.channel is Channel.CONTROL:
            return lambda: self._open_control(peer, sock, where, decoder, payloads)
        if payloads or decoder.buffered_bytes:
            raise RemoteProtocolError("bulk connection: bytes before the Welcome")
        configure_tcp(sock)
        sock.setblocking(True)
        return lambda: self._handlers.on_bulk(peer, sock)

    async def _open_control(
        self, peer: Peer, sock: socket.socket, where: str, decoder: FrameDecoder, payloads: list[bytes]
    ) -> None:
        name = f"{peer.role} {peer.host} at {where}"
        stream = await FramedStream.over(sock, name, VOCABULARY[peer.role], decoder=decoder, payloads=payloads)
        await self._handlers.on_control(peer, stream)


class _Complaints:
    """Bad peers in the log, at a bounded rate; what was left out is counted in the next line."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window_start_s = -LOG_WINDOW_S
        self._logged = 0
        self._left_out = 0

    def add(self, where: str, reason: str) -> None:
        now_s = self._clock.now_s()
        if now_s - self._window_start_s >= LOG_WINDOW_S:
            self._window_start_s, self._logged = now_s, 0
        if self._logged >= LOGGED_STRANGERS:
            self._left_out += 1
            return
        self._logged += 1
        _log.warning("bad peer: where=%s reason=%s left_out=%d", where, reason, self._left_out)
        self._left_out = 0


async def _until_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def _say_farewell(sock: socket.socket) -> None:
    """Let the peer read its refusal: closing with unread bytes would reset the connection and lose it."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(FAREWELL_S):
            for _ in range(PRE_AUTH_FRAME_BYTES // READ_BYTES):
                if not await loop.sock_recv(sock, READ_BYTES):
                    return
