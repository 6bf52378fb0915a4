"""The one port under strangers of every kind, while a daemon, a bulk connection and HTTP go on."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flodl.config.tls import TlsMode
from flodl.errors import HostUnreachable, JoinRefused, PreflightError
from flodl.messages import FromDaemon, HostStopped, StopHost, ToDaemon
from flodl.runtime import mux as mux_module
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.certificate import Security, make_certificate
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.dial import Controller, Identity, connect_bulk, connect_control
from flodl.runtime.line import Line
from flodl.runtime.mux import MAX_STRANGERS, Handlers, PortMux, Run
from flodl.runtime.ports import listen, port_of
from flodl.runtime.streams import ConnectionLost, FramedStream
from flodl.runtime.tls import NO_TLS, SEALED_RECORD_BYTES, client_context
from flodl.wire.codec import decode, encode
from flodl.wire.frames import PREAMBLE, FrameDecoder, frame
from flodl.wire.handshake import Channel, ClientHandshake, FromAccepting, Peer, Role, derive_host_secret
from tests.unit.runtime.tls_pair import certificate

LIMIT_S = 60.0
TOKEN = bytes(range(32))
BEAT = HostStopped("node-a", "a word")
PLAIN = Security(TlsMode.OFF)


class Desk:
    """A served port whose handlers answer: control with StopHost, bulk with the same bytes, HTTP with 204."""

    def __init__(self, security: Security) -> None:
        self.listeners = listen("127.0.0.1", 0)
        self.port = port_of(self.listeners)
        self.mux = PortMux(
            self.listeners,
            Run("run-1", TOKEN),
            Handlers(self.control, self.bulk, self.http, self.plain_http),
            MonotonicClock(),
            security,
        )
        self.peers: list[Peer] = []

    async def control(self, peer: Peer, stream: FramedStream) -> None:
        self.peers.append(peer)
        async with stream:
            while True:
                assert await stream.receive() == BEAT
                stream.send(StopHost("as you wish", 1.0))

    async def bulk(self, peer: Peer, line: Line) -> None:
        self.peers.append(peer)
        frames = BlockingFrames(line.sock, peer.host, FromDaemon, line.tls)
        buffer = bytearray(1 << 20)
        await asyncio.to_thread(frames.receive_into, buffer, LIMIT_S)
        await asyncio.to_thread(frames.send_buffers, buffer)
        frames.close()

    async def http(self, line: Line, status: bytes = b"204 No Content") -> None:
        try:
            await line.receive()
            await line.send(b"HTTP/1.1 " + status + b"\r\n\r\n")
            await line.finish(LIMIT_S, 65536)
        finally:
            line.sock.close()

    async def plain_http(self, line: Line) -> None:
        await self.http(line, b"308 Permanent Redirect")


def serve(scenario: Callable[[Desk], Awaitable[Any]], security: Security = PLAIN) -> Any:
    async def bounded() -> Any:
        desk = Desk(security)
        serving = asyncio.create_task(desk.mux.serve())
        try:
            async with asyncio.timeout(LIMIT_S):
                return await scenario(desk)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            for listener in desk.listeners:
                listener.close()
            if not serving.cancelled():
                serving.result()

    return asyncio.run(bounded())


SECRET = derive_host_secret(TOKEN, "node-a")


def identity(run_id: str = "run-1", token: bytes = TOKEN, role: Role = Role.DAEMON, host: str = "node-a") -> Identity:
    secret = derive_host_secret(token, "node-a") if role is Role.DAEMON else token
    return Identity(run_id, secret, role, host)


def where(desk: Desk, tls: TlsMode = TlsMode.AUTO) -> Controller:
    return Controller("127.0.0.1", desk.port, tls)


async def settle(predicate: Callable[[], Any]) -> None:
    while not predicate():
        await asyncio.sleep(0.002)


async def check_all_served(desk: Desk, tls: TlsMode = TlsMode.AUTO) -> None:
    """A daemon's two connections and an HTTP request, as a legitimate user makes them."""
    stream, local = await connect_control(where(desk, tls), identity(), ToDaemon)
    async with stream:
        stream.send(BEAT)
        assert await stream.receive() == StopHost("as you wish", 1.0)
    assert local == "127.0.0.1"

    line, _ = await connect_bulk(where(desk, tls), identity())
    frames, data = BlockingFrames(line.sock, "controller", ToDaemon, line.tls), os.urandom(1 << 20)
    echo = bytearray(1 << 20)
    await asyncio.to_thread(frames.send_buffers, data)
    await asyncio.to_thread(frames.receive_into, echo, LIMIT_S)
    frames.close()
    assert echo == data

    context = client_context() if tls is TlsMode.ON else None
    reader, writer = await asyncio.open_connection("127.0.0.1", desk.port, ssl=context)
    writer.write(b"GET /state.json HTTP/1.1\r\n\r\n")
    assert await reader.read() == b"HTTP/1.1 204 No Content\r\n\r\n"
    writer.close()
    await writer.wait_closed()


def strangers(port: int, count: int, first_words: bytes = b"") -> list[socket.socket]:
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for sock in sockets:
        sock.sendall(first_words)
        sock.setblocking(False)
    return sockets


async def dropped(sock: socket.socket) -> bool:
    """Whether the port closes the connection without a word."""
    try:
        return await asyncio.get_running_loop().sock_recv(sock, 100) == b""
    except ConnectionResetError:
        return True


@pytest.fixture(autouse=True)
def enough_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= 4096


def test_control_bulk_and_http_share_the_port() -> None:
    async def scenario(desk: Desk) -> list[tuple[str, str, str]]:
        await check_all_served(desk)
        return [(peer.role, peer.channel, peer.host) for peer in desk.peers]

    assert serve(scenario) == [("daemon", "control", "node-a"), ("daemon", "bulk", "node-a")]


@pytest.mark.parametrize(
    "words",
    [
        b"\x00\x01\x02\x03" * 100,
        PREAMBLE[:2] + b"nonsense",
        PREAMBLE + b"\xff\xff\xff\xff",
        PREAMBLE + frame(b"\xdd\xff\xff\xff\xff"),
        PREAMBLE + frame(b"\x91" * 2000),
        PREAMBLE + frame(encode(BEAT)),
        PREAMBLE + frame(os.urandom(40_000)),
    ],
    ids=["random", "preamble", "huge frame", "huge array", "nesting", "word out of turn", "random frame"],
)
def test_stranger_is_dropped_at_once_and_the_others_are_served(words: bytes) -> None:
    async def scenario(desk: Desk) -> bool:
        (sock,) = strangers(desk.port, 1, words)
        is_dropped = await dropped(sock)
        sock.close()
        await check_all_served(desk)
        return is_dropped

    assert serve(scenario)


def test_three_hundred_idle_connections_do_not_keep_a_daemon_out() -> None:
    async def scenario(desk: Desk) -> tuple[int, int, int]:
        fds_before = len(os.listdir("/proc/self/fd"))
        idle = strangers(desk.port, 150) + strangers(desk.port, 150, PREAMBLE)
        await settle(lambda: desk.mux.stranger_count == MAX_STRANGERS)
        await check_all_served(desk)
        evicted = [sock for sock in idle[:44] if await dropped(sock)]
        for sock in idle:
            sock.close()
        await settle(lambda: desk.mux.stranger_count == 0)
        return len(evicted), fds_before, len(os.listdir("/proc/self/fd"))

    evicted, fds_before, fds_after = serve(scenario)

    assert evicted == 300 - MAX_STRANGERS
    assert fds_after <= fds_before + 2


def test_slow_drip_ends_at_its_deadline_however_it_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mux_module, "STRANGER_S", 0.3)

    async def drip(sock: socket.socket, words: bytes) -> int:
        for count, byte in enumerate(words):
            try:
                await asyncio.get_running_loop().sock_sendall(sock, bytes([byte]))
            except OSError:
                return count
            await asyncio.sleep(0.01)
        return len(words)

    async def scenario(desk: Desk) -> list[int]:
        sockets = strangers(desk.port, 20)
        words = PREAMBLE + (60_000).to_bytes(4, "big") + bytes(1000)
        drips = asyncio.gather(*(drip(sock, words) for sock in sockets))
        await settle(lambda: desk.mux.stranger_count == 20)
        counts = await drips
        for sock in sockets:
            sock.close()
        await check_all_served(desk)
        return counts

    assert max(serve(scenario)) < 200


def test_stranger_cannot_make_the_port_hold_more_than_64_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    feed = mux_module.FrameDecoder.feed

    def watch(decoder: Any, data: bytes) -> list[bytes]:
        held.append(decoder.buffered_bytes + len(data))
        return feed(decoder, data)

    monkeypatch.setattr(mux_module.FrameDecoder, "feed", watch)

    async def scenario(desk: Desk) -> None:
        for size in (44_000, 65_536, 70_000):
            (sock,) = strangers(desk.port, 1)
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(sock, PREAMBLE + frame(bytes(size)) + bytes(200_000))
            assert await dropped(sock)
            sock.close()

    serve(scenario)

    assert 40_000 < max(held) <= 65_536 - SEALED_RECORD_BYTES


def test_thousands_who_connect_and_leave_cost_nothing() -> None:
    async def scenario(desk: Desk) -> tuple[int, int]:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            for sock in await asyncio.to_thread(strangers, desk.port, 100):
                sock.close()
        await check_all_served(desk)
        await settle(lambda: desk.mux.stranger_count == 0)
        return before, len(os.listdir("/proc/self/fd"))

    before, after = serve(scenario)

    assert after <= before + 2


def test_bad_peers_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario(desk: Desk) -> None:
        for sock in strangers(desk.port, 50, b"\x00"):
            assert await dropped(sock)
            sock.close()

    serve(scenario)

    lines = [record.getMessage() for record in caplog.records if "bad peer" in record.getMessage()]
    assert len(lines) == mux_module.LOGGED_STRANGERS
    assert "127.0.0.1 port" in lines[0]
    assert "byte 00" in lines[0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (identity(run_id="run-2"), "run run-2 is not served here"),
        (identity(token=bytes(32)), "it holds another token"),
        (identity(host="node-b"), "it holds another token"),
    ],
    ids=["run", "token", "host"],
)
def test_refused_peer_learns_why_and_the_log_tells_who(
    caplog: pytest.LogCaptureFixture, wrong: Identity, reason: str
) -> None:
    async def scenario(desk: Desk) -> str:
        with pytest.raises(JoinRefused) as error:
            await connect_control(where(desk), wrong, ToDaemon)
        await settle(lambda: desk.mux.stranger_count == 0)
        return str(error.value).replace(str(desk.port), "PORT")

    text = serve(scenario)

    assert text.startswith("controller 127.0.0.1:PORT: ")
    assert reason in text
    assert "was refused" in caplog.text
    assert TOKEN.hex() not in caplog.text + repr(wrong)


def answer_and_more(port: int, channel: Channel, more: bytes) -> socket.socket:
    """A peer that holds the token and does not wait for the Welcome."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    peer = Peer(Role.DAEMON, channel, "node-a", "0.0")
    handshake = ClientHandshake(SECRET, "run-1", bytes(32), peer)
    sock.sendall(PREAMBLE + b"".join(frame(encode(word)) for word in handshake.start()))
    decoder, payloads = FrameDecoder(65_536, expect_preamble=False), list[bytes]()
    while not payloads:
        payloads = decoder.feed(sock.recv(4096))
    (answer,) = handshake.receive(decode(payloads[0], FromAccepting))
    sock.sendall(frame(encode(answer)) + more)
    return sock


def test_control_words_right_behind_the_handshake_are_heard() -> None:
    async def scenario(desk: Desk) -> bool:
        sock = await asyncio.to_thread(answer_and_more, desk.port, Channel.CONTROL, frame(encode(BEAT)) * 2)
        heard = b""
        while heard.count(b"as you wish") < 2:
            heard += await asyncio.to_thread(sock.recv, 4096)
        sock.close()
        return b"Welcome" in heard

    assert serve(scenario)


def test_bytes_before_the_welcome_end_a_bulk_connection() -> None:
    async def scenario(desk: Desk) -> list[Peer]:
        sock = await asyncio.to_thread(answer_and_more, desk.port, Channel.BULK, b"x" * 3000)
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.to_thread(sock.recv, 4096):
                continue
        sock.close()
        return desk.peers

    assert serve(scenario) == []


def test_handlers_peer_error_ends_its_connection_alone() -> None:
    async def scenario(desk: Desk) -> None:
        stream, _ = await connect_control(where(desk), identity(role=Role.HEAD), ToDaemon)
        async with stream:
            stream.send(BEAT)  # a head may not say this
            with pytest.raises(ConnectionLost):
                await stream.receive()
        await check_all_served(desk)

    serve(scenario)


def test_bug_in_a_handler_is_not_hidden() -> None:
    async def scenario() -> None:
        desk = Desk(PLAIN)

        async def broken(line: Line) -> None:
            line.sock.close()
            raise ValueError("a bug")

        handlers = Handlers(desk.control, desk.bulk, broken, broken)
        mux = PortMux(desk.listeners, Run("run-1", TOKEN), handlers, MonotonicClock(), PLAIN)
        serving = asyncio.create_task(mux.serve())
        (sock,) = strangers(desk.port, 1, b"GET")
        try:
            async with asyncio.timeout(LIMIT_S):
                await serving
        finally:
            sock.close()
            desk.listeners[0].close()

    with pytest.raises(ExceptionGroup) as error:
        asyncio.run(scenario())

    assert isinstance(error.value.exceptions[0], ValueError)


# ------------------------------------------------------------------------------------------------------------- TLS
def secured(mode: TlsMode = TlsMode.ON) -> Security:
    return Security(mode, certificate())


def test_control_bulk_and_http_share_the_port_under_tls() -> None:
    async def scenario(desk: Desk) -> list[tuple[str, str]]:
        await check_all_served(desk, TlsMode.ON)
        return [(peer.role, peer.channel) for peer in desk.peers]

    assert serve(scenario, secured()) == [("daemon", "control"), ("daemon", "bulk")]


def test_where_tls_is_not_required_both_are_served() -> None:
    async def scenario(desk: Desk) -> None:
        await check_all_served(desk, TlsMode.ON)
        await check_all_served(desk, TlsMode.OFF)

    serve(scenario, secured(TlsMode.AUTO))


@pytest.mark.parametrize("connect", [connect_control, connect_bulk])
def test_plain_peer_is_refused_in_words_where_tls_is_required(
    caplog: pytest.LogCaptureFixture, connect: Callable[..., Awaitable[Any]]
) -> None:
    async def scenario(desk: Desk) -> str:
        allowed = (ToDaemon,) if connect is connect_control else ()
        with pytest.raises(JoinRefused) as error:
            await connect(where(desk, TlsMode.OFF), identity(), *allowed)
        await check_all_served(desk, TlsMode.ON)
        return str(error.value).replace(str(desk.port), "PORT")

    assert serve(scenario, secured()) == f"controller 127.0.0.1:PORT: {mux_module.NEEDS_TLS}"
    assert f"was refused: {mux_module.NEEDS_TLS}" in caplog.text


def test_plain_http_where_tls_is_required_has_its_own_handler() -> None:
    async def scenario(desk: Desk) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", desk.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    assert serve(scenario, secured()) == b"HTTP/1.1 308 Permanent Redirect\r\n\r\n"


def test_tls_peer_is_refused_in_words_where_there_is_no_tls(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(desk: Desk) -> str:
        with pytest.raises(JoinRefused) as error:
            await connect_control(where(desk, TlsMode.ON), identity(), ToDaemon)
        await check_all_served(desk)
        return str(error.value).replace(str(desk.port), "PORT")

    assert serve(scenario) == f"controller 127.0.0.1:PORT: {NO_TLS}"
    assert "sent a TLS hello; there is no TLS here" in caplog.text


def test_a_relay_with_its_own_certificate_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It opens TLS to both sides and passes everything on: each side sees another certificate."""

    async def scenario(desk: Desk) -> str:
        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", desk.port, ssl=client_context())
            await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

        between = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=make_certificate().context)
        async with between:
            port = between.sockets[0].getsockname()[1]
            with pytest.raises(JoinRefused) as error:
                await connect_control(Controller("127.0.0.1", port, TlsMode.ON), identity(), ToDaemon)
            await settle(lambda: "was refused: the peer refused" in caplog.text)
        await check_all_served(desk, TlsMode.ON)
        return str(error.value)

    assert "someone sits in between" in serve(scenario, secured())


def refusal_without_binding(port: int) -> str | None:
    """What a peer finds that was made to speak plain, by whatever means, with a relay that speaks TLS for it."""
    peer = Peer(Role.DAEMON, Channel.CONTROL, "node-a", "0.0")
    handshake = ClientHandshake(SECRET, "run-1", bytes(32), peer)
    with client_context().wrap_socket(socket.create_connection(("127.0.0.1", port), LIMIT_S)) as relayed:
        relayed.sendall(PREAMBLE + b"".join(frame(encode(word)) for word in handshake.start()))
        decoder, payloads = FrameDecoder(65_536, expect_preamble=False), list[bytes]()
        while not payloads:
            payloads = decoder.feed(relayed.recv(4096))
        handshake.receive(decode(payloads[0], FromAccepting))
    return handshake.refusal


def test_a_relay_that_strips_tls_is_refused() -> None:
    async def scenario(desk: Desk) -> str | None:
        return await asyncio.to_thread(refusal_without_binding, desk.port)

    assert "someone sits in between" in serve(scenario, secured())


@pytest.mark.parametrize(
    "words",
    [
        b"\x16\x03\x01\x00\x05hello",
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x16\x03\x01\x40\x00\x01\x01\xff\xff" + bytes(70_000),
        b"\x15\x03\x03\x00\x02\x02\x31",
    ],
    ids=["nonsense", "long record", "long hello", "alert"],
)
def test_stranger_that_breaks_tls_is_dropped_at_once_and_the_others_are_served(words: bytes) -> None:
    async def scenario(desk: Desk) -> None:
        (sock,) = strangers(desk.port, 1)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(sock, words)
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(sock, 100):
                continue
        sock.close()
        await check_all_served(desk, TlsMode.ON)

    serve(scenario, secured())


@pytest.mark.parametrize("hello", [b"\x16", b"\x16\x03\x01\x02\x00\x01"])
def test_tls_that_is_begun_and_left_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hello: bytes
) -> None:
    monkeypatch.setattr(mux_module, "STRANGER_S", 0.1)

    async def scenario(desk: Desk) -> bool:
        (sock,) = strangers(desk.port, 1, hello)
        is_dropped = await dropped(sock)
        sock.close()
        return is_dropped

    assert serve(scenario, secured())
    assert "has not proven itself within 0.1 s" in caplog.text


def test_tls_without_a_word_inside_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mux_module, "STRANGER_S", 0.5)

    async def scenario(desk: Desk) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", desk.port, ssl=client_context())
        assert desk.mux.stranger_count == 1
        said = await reader.read()
        writer.close()
        return said

    assert serve(scenario, secured()) == b""


def test_strangers_under_tls_make_room_for_a_daemon() -> None:
    async def scenario(desk: Desk) -> int:
        idle = strangers(desk.port, MAX_STRANGERS + 10, b"\x16")
        await settle(lambda: desk.mux.stranger_count == MAX_STRANGERS)
        await check_all_served(desk, TlsMode.ON)
        evicted = [sock for sock in idle[:10] if await dropped(sock)]
        for sock in idle:
            sock.close()
        await settle(lambda: desk.mux.stranger_count == 0)
        return len(evicted)

    assert serve(scenario, secured()) == 10


def test_stranger_under_tls_cannot_make_the_port_hold_more_than_64_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    feed = mux_module.FrameDecoder.feed

    def watch(decoder: Any, data: bytes) -> list[bytes]:
        held.append(decoder.buffered_bytes + len(data))
        return feed(decoder, data)

    monkeypatch.setattr(mux_module.FrameDecoder, "feed", watch)

    async def scenario(desk: Desk) -> None:
        for size in (44_000, 65_536):
            reader, writer = await asyncio.open_connection("127.0.0.1", desk.port, ssl=client_context())
            writer.write(PREAMBLE + frame(bytes(size)) + bytes(200_000))
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()

    serve(scenario, secured())

    assert 40_000 < max(held) <= 65_536


def test_peer_refused_under_tls_learns_why() -> None:
    async def scenario(desk: Desk) -> str:
        with pytest.raises(JoinRefused) as error:
            await connect_control(where(desk, TlsMode.ON), identity(run_id="run-2"), ToDaemon)
        return str(error.value)

    assert "run run-2 is not served here" in serve(scenario, secured())


def test_stranger_in_the_place_of_a_tls_controller_is_told_as_join(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def scenario() -> HostUnreachable:
        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(HostUnreachable) as error:
                await connect_control(Controller("127.0.0.1", port, TlsMode.ON), identity(), ToDaemon)
        return error.value

    error = asyncio.run(scenario())
    assert (error.stage, error.reason) == ("join", "TLS: WRONG_VERSION_NUMBER")


def test_controller_that_closes_in_the_tls_handshake_is_told_as_join() -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.close()

    async def scenario() -> HostUnreachable:
        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(HostUnreachable) as error:
                await connect_control(Controller("127.0.0.1", port, TlsMode.ON), identity(), ToDaemon)
        return error.value

    assert asyncio.run(scenario()).stage == "join"


# ---------------------------------------------------------------------------------------------------------- dialing
def test_nobody_there_is_told_with_stage_and_address() -> None:
    listeners = listen("127.0.0.1", 0)
    port = port_of(listeners)
    listeners[0].close()

    with pytest.raises(
        HostUnreachable, match=rf"127\.0\.0\.1:{port}: connect: 127\.0\.0\.1: Connection refused"
    ) as error:
        asyncio.run(connect_control(Controller("127.0.0.1", port), identity(), ToDaemon))

    assert error.value.stage == "connect"


def test_name_that_does_not_resolve_is_told_with_its_stage() -> None:
    with pytest.raises(HostUnreachable) as error:
        asyncio.run(connect_control(Controller("no-such-host.invalid", 1337), identity(), ToDaemon))

    assert error.value.stage == "resolve"
    assert "no-such-host.invalid:1337" in str(error.value)


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["mute", "http", "closes"])
def test_stranger_at_the_controllers_address_is_told_as_join(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr("flodl.runtime.dial.HANDSHAKE_S", 0.2)

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            writer.write(answer)
            writer.write_eof()
        await reader.read()
        writer.close()

    async def scenario() -> HostUnreachable:
        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(HostUnreachable) as error:
                await connect_control(Controller("127.0.0.1", port), identity(), ToDaemon)
        return error.value

    assert asyncio.run(scenario()).stage == "join"


def test_every_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> str:
        loop = asyncio.get_running_loop()

        async def two_addresses(host: str, port: int, **_: Any) -> list[Any]:
            return [(socket.AF_INET, 1, 6, "", (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

        monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
        stream, local = await connect_control(Controller("controller.lab", desk.port), identity(), ToDaemon)
        async with stream:
            return local

    assert serve(scenario) == "127.0.0.1"


# -------------------------------------------------------------------------------------------------------- listening
def test_taken_port_names_its_owner_and_the_remedy() -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        with pytest.raises(PreflightError) as error:
            listen("127.0.0.1", port, remedy="use --port")

    assert f"port {port} is taken by pid {owner.pid} ({sys.executable} -c" in str(error.value)
    assert str(error.value).endswith("\n  use --port")


def test_one_of_two_wins_the_port() -> None:
    first = listen("127.0.0.1", 0)

    with pytest.raises(PreflightError, match="is taken"):
        listen("127.0.0.1", port_of(first))

    first[0].close()


def test_port_in_time_wait_is_free() -> None:
    listeners = listen("127.0.0.1", 0)
    port = port_of(listeners)
    client = socket.create_connection(("127.0.0.1", port))
    listeners[0].setblocking(True)
    accepted, _ = listeners[0].accept()
    for sock in (accepted, client, *listeners):
        sock.close()

    again = listen("127.0.0.1", port)

    assert port_of(again) == port
    again[0].close()


def test_every_family_is_bound_on_the_same_port_and_a_missing_one_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr("flodl.runtime.ports.socket.getaddrinfo", lambda *_, **__: found)

    listeners = listen("localhost", 0)
    ports = {sock.getsockname()[1] for sock in listeners}
    families = [sock.family for sock in listeners]
    for sock in listeners:
        sock.close()

    assert len(ports) == 1
    assert families in ([socket.AF_INET6, socket.AF_INET], [socket.AF_INET])


@pytest.mark.parametrize(
    ("host", "fault"),
    [
        ("192.0.2.77", "is not an address of this machine"),
        ("no-such-host.invalid", "the name does not resolve"),
    ],
)
def test_host_that_is_not_ours_is_told(host: str, fault: str) -> None:
    with pytest.raises(PreflightError, match=fault):
        listen(host, 0)
