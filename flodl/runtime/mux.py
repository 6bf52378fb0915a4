"""One port for everything: each connection is told apart by its first byte, before anything is read.

0xC1 starts our protocol: the peer proves the run's token and goes on as a control stream or as a bulk line. A letter
starts an HTTP request. A TLS hello starts either of them inside TLS; where there is no TLS it is turned away by an
alert. Where TLS is required, our protocol in plain is refused in words, and HTTP in plain has a handler of its own.
Everything else is closed.

What strangers can cost is bounded: ``MAX_STRANGERS`` at once (a newer one replaces the oldest), each for at most
``STRANGER_S`` seconds and 64 KiB, TLS included, and a few log lines a minute. A peer that has proven the token is no
stranger; an HTTP connection is its handler's from its first letter, with that handler's own limits.
"""

import asyncio
import errno
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import flodl
from flodl.errors import PeerLost, ProtocolError, RemoteProtocolError
from flodl.messages import FromClient, FromDaemon, FromHead, FromWalkIn, Refused
from flodl.runtime.certificate import Security
from flodl.runtime.clock import Clock
from flodl.runtime.greeting import HANDSHAKE_FRAME_BYTES, converse
from flodl.runtime.line import Line
from flodl.runtime.streams import ConnectionLost, FramedStream, configure_tcp
from flodl.runtime.tls import TLS_HELLO, TURNED_AWAY, TlsLayer
from flodl.wire.codec import Vocabulary, encode
from flodl.wire.frames import FRAME_BYTES, PRE_AUTH_FRAME_BYTES, PREAMBLE, FrameDecoder, frame
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
    Role.WALK_IN: FromWalkIn,
}
"""Which messages each role may send on its control channel."""

NEEDS_TLS: Final = "this controller takes connections to this address under TLS only (`security.tls`)"

_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNUSABLE: Final = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """What a peer must know to be let in. ``join_token`` None takes no walk-ins."""

    run_id: str
    token: bytes = field(repr=False)
    join_token: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Handlers:
    """Who takes the connections over. Each runs in its connection's task and owns, thus closes, what it is given: a
    stream, or a line's socket. ``on_plain_http`` gets the requests in plain where TLS is required. ``on_refused`` is
    told of peers that spoke our protocol and were not let in, as often as they are logged: from where, and why.

    A ``PeerLost``, ``ProtocolError`` or ``OSError`` out of a handler ends its connection alone and is logged; any other
    exception ends the mux.
    """

    on_control: Callable[[Peer, FramedStream], Awaitable[None]]
    on_bulk: Callable[[Peer, Line], Awaitable[None]]
    on_http: Callable[[Line], Awaitable[None]]
    on_plain_http: Callable[[Line], Awaitable[None]]
    on_refused: Callable[[str, str], None] = lambda where, reason: None


Entrance = Callable[[], Awaitable[None]]
"""Takes an admitted connection to its handler."""


class PortMux:
    """Serves the listening sockets of ``flodl.runtime.ports.listen``; they stay the caller's."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        run: Run,
        handlers: Handlers,
        clock: Clock,
        security: Security,
    ) -> None:
        """``clock`` bounds the log, ``security`` says which connections are under TLS."""
        self._listeners = listeners
        self._run = run
        self._handlers = handlers
        self._security = security
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
        line, certificate = Line(sock), self._security.certificate
        first = await line.peek()
        if first == TLS_HELLO and certificate is not None:
            await line.secure(TlsLayer(certificate.context, is_server=True))
            first = await line.peek()
        elif first == TLS_HELLO:
            await self._turn_away(line, where, TURNED_AWAY, "sent a TLS hello; there is no TLS here")
            return None
        if first == PREAMBLE[:1]:
            return await self._admit_peer(line, where)
        if first.isalpha():
            configure_tcp(sock)
            serve = self._handlers.on_http if self._is_safe(line) else self._handlers.on_plain_http
            return lambda: serve(line)
        if first:
            self._complaints.add(where, f"does not speak flodl's protocol or HTTP: byte {first.hex()}")
        return None

    def _is_safe(self, line: Line) -> bool:
        return line.tls is not None or not self._security.mode.covers(str(line.sock.getsockname()[0]))

    async def _admit_peer(self, line: Line, where: str) -> Entrance | None:
        if not self._is_safe(line):
            await self._refuse_peer(line, where, f"was refused: {NEEDS_TLS}", frame(encode(Refused(NEEDS_TLS))))
            return None
        handshake, decoder = self._handshake(line), FrameDecoder(HANDSHAKE_FRAME_BYTES, expect_preamble=True)
        payloads = await converse(line, decoder, handshake, FromConnecting)
        peer = handshake.peer
        if not handshake.done or peer is None:
            claims = "" if peer is None else f"says it is {peer.role} {peer.host}, "
            await self._refuse_peer(line, where, f"{claims}was refused: {handshake.refusal}")
            return None
        payloads += decoder.raise_limit(FRAME_BYTES)
        if peer.channel is Channel.CONTROL:
            return lambda: self._open_control(peer, line, where, decoder, payloads)
        if payloads or decoder.buffered_bytes:
            raise RemoteProtocolError("bulk connection: bytes before the Welcome")
        configure_tcp(line.sock)
        line.sock.setblocking(True)
        return lambda: self._handlers.on_bulk(peer, line)

    def _handshake(self, line: Line) -> ServerHandshake:
        certificate = self._security.certificate
        binding = b"" if line.tls is None or certificate is None else certificate.sha256
        nonce = secrets.token_bytes(NONCE_BYTES)
        run = self._run
        return ServerHandshake(run.token, run.run_id, nonce, flodl.__version__, binding, run.join_token)

    async def _refuse_peer(self, line: Line, where: str, complaint: str, last_words: bytes = b"") -> None:
        if self._complaints.add(where, complaint):
            self._handlers.on_refused(where, complaint)
        await self._say_farewell(line, last_words)

    async def _turn_away(self, line: Line, where: str, last_words: bytes, complaint: str) -> None:
        self._complaints.add(where, complaint)
        await self._say_farewell(line, last_words)

    async def _say_farewell(self, line: Line, last_words: bytes) -> None:
        await line.send(last_words)
        await line.finish(FAREWELL_S, PRE_AUTH_FRAME_BYTES)

    async def _open_control(
        self, peer: Peer, line: Line, where: str, decoder: FrameDecoder, payloads: list[bytes]
    ) -> None:
        name, allowed = f"{peer.role} {peer.host} at {where}", VOCABULARY[peer.role]
        stream = await FramedStream.over(line.sock, name, allowed, decoder=decoder, payloads=payloads, tls=line.tls)
        await self._handlers.on_control(peer, stream)


class _Complaints:
    """Bad peers in the log, at a bounded rate; what was left out is counted in the next line."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window_start_s = -LOG_WINDOW_S
        self._logged = 0
        self._left_out = 0

    def add(self, where: str, reason: str) -> bool:
        """True when it was logged, and not only counted."""
        now_s = self._clock.now_s()
        if now_s - self._window_start_s >= LOG_WINDOW_S:
            self._window_start_s, self._logged = now_s, 0
        if self._logged >= LOGGED_STRANGERS:
            self._left_out += 1
            return False
        self._logged += 1
        _log.warning("bad peer: where=%s reason=%s left_out=%d", where, reason, self._left_out)
        self._left_out = 0
        return True
