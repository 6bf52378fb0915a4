"""A line: what is looked at is not lost, plain or under TLS, whatever comes together in one piece."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flodl.errors import JoinRefused, RemoteProtocolError
from flodl.runtime.line import TLS_HANDSHAKE_BYTES, Line
from flodl.runtime.streams import ConnectionLost
from flodl.runtime.tls import SILENT_BYTES, TURNED_AWAY, TlsLayer, client_context
from tests.unit.runtime.tls_pair import certificate, open_pair, silent_bytes

LIMIT_S = 20.0
MANY = 1 << 20


def run(scenario: Callable[[Line, socket.socket], Awaitable[Any]]) -> Any:
    """A line, and the other end as a blocking socket."""

    async def bounded() -> Any:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.settimeout(LIMIT_S)
        with ours, theirs:
            async with asyncio.timeout(LIMIT_S):
                return await scenario(Line(ours), theirs)

    return asyncio.run(bounded())


def server() -> TlsLayer:
    return TlsLayer(certificate().context, is_server=True)


def client_with(last_flight_and: bytes, sock: socket.socket) -> TlsLayer:
    """A client that sends its first words in one piece with the end of its handshake."""
    client = TlsLayer(client_context(), is_server=False)
    client.shake_hands()
    while not client.is_open:
        sock.sendall(client.outgoing())
        client.shake_hands(sock.recv(4096))
    sock.sendall(client.outgoing() + client.encrypt(last_flight_and))
    return client


def test_first_byte_of_a_plain_line_is_left_to_its_next_owner() -> None:
    async def scenario(line: Line, peer: socket.socket) -> list[bytes]:
        peer.sendall(b"GET")
        return [await line.peek(), line.unread(), line.sock.recv(10)]

    assert run(scenario) == [b"G", b"", b"GET"]


def test_first_byte_under_tls_is_received_again() -> None:
    async def scenario(line: Line, peer: socket.socket) -> list[bytes]:
        line.tls, client = open_pair()[::-1]
        peer.sendall(client.encrypt(b"GET"))
        return [await line.peek(), await line.peek(), await line.receive()]

    assert run(scenario) == [b"G", b"G", b"GET"]


def test_what_was_looked_at_under_tls_is_there_for_the_next_owner() -> None:
    async def scenario(line: Line, peer: socket.socket) -> list[bytes]:
        line.tls, client = open_pair()[::-1]
        peer.sendall(client.encrypt(b"GET"))
        return [await line.peek(), line.unread(), line.unread()]

    assert run(scenario) == [b"G", b"GET", b""]


def test_words_in_one_piece_with_the_handshakes_end_are_heard() -> None:
    async def scenario(line: Line, peer: socket.socket) -> list[bytes]:
        calling = asyncio.create_task(asyncio.to_thread(client_with, b"at once", peer))
        await line.secure(server())
        client = await calling
        await line.send(b"heard")
        return [await line.receive(), client.decrypt(peer.recv(4096))]

    assert run(scenario) == [b"at once", b"heard"]


@pytest.mark.parametrize("how", ["closed", "farewell"])
def test_the_end_under_tls_is_empty(how: str) -> None:
    async def scenario(line: Line, peer: socket.socket) -> list[bytes]:
        line.tls, client = open_pair()[::-1]
        peer.sendall(client.encrypt(b"last") + (client.farewell() if how == "farewell" else b""))
        if how == "closed":
            peer.close()
        return [await line.receive(), await line.peek(), await line.receive()]

    assert run(scenario) == [b"last", b"", b""]


def test_a_line_is_secured_as_a_client_too() -> None:
    async def scenario(line: Line, peer: socket.socket) -> bytes:
        peer.setblocking(False)
        other = Line(peer)
        layer = TlsLayer(client_context(), is_server=False)
        await asyncio.gather(line.secure(server()), other.secure(layer))
        await line.send(b"word")
        assert layer.certificate_hash() == certificate().sha256
        return await other.receive()

    assert run(scenario) == b"word"


@pytest.mark.parametrize(
    ("answer", "error"),
    [(TURNED_AWAY, JoinRefused), (b"HTTP/1.1 400 Bad Request\r\n", RemoteProtocolError), (b"", ConnectionLost)],
)
def test_answer_that_is_no_tls_ends_the_handshake(answer: bytes, error: type[Exception]) -> None:
    async def scenario(line: Line, peer: socket.socket) -> None:
        peer.sendall(answer)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            await line.secure(TlsLayer(client_context(), is_server=False))
        assert line.tls is None

    run(scenario)


def test_handshake_that_does_not_end_is_cut_at_its_limit() -> None:
    async def scenario(line: Line, peer: socket.socket) -> str:
        hello = b"\x16\x03\x01\x40\x00\x01\x01\x00\x00"  # a record of 16 KiB in a hello of 64 KiB
        flood = asyncio.create_task(asyncio.to_thread(peer.sendall, hello + bytes(TLS_HANDSHAKE_BYTES + 4096)))
        with pytest.raises(RemoteProtocolError) as error:
            await line.secure(server())
        line.sock.close()
        await asyncio.wait([flood])
        return str(error.value)

    assert run(scenario) == f"TLS: more than {TLS_HANDSHAKE_BYTES} bytes before it was open"


def test_last_words_are_read_before_the_line_ends() -> None:
    async def scenario(line: Line, peer: socket.socket) -> tuple[bytes, bool]:
        line.tls, client = open_pair()[::-1]
        peer.sendall(client.encrypt(b"unread"))
        await line.send(b"no")
        finishing = asyncio.create_task(line.finish(LIMIT_S, MANY))
        data = client.decrypt(await asyncio.to_thread(peer.recv, 4096))
        while not client.has_ended:
            data += client.decrypt(await asyncio.to_thread(peer.recv, 4096))
        peer.close()
        await finishing
        return data, client.has_ended

    assert run(scenario) == (b"no", True)


def test_peer_that_does_not_close_is_not_waited_for() -> None:
    async def scenario(line: Line, peer: socket.socket) -> bytes:
        await line.finish(0.01, MANY)
        return peer.recv(10)

    assert run(scenario) == b""


def test_peer_that_sends_on_and_says_nothing_is_dropped() -> None:
    async def scenario(line: Line, peer: socket.socket) -> str:
        line.tls, _, silence = silent_bytes(500)
        assert len(silence) > SILENT_BYTES + 4096
        flood = asyncio.create_task(asyncio.to_thread(peer.sendall, silence))
        with pytest.raises(RemoteProtocolError) as error:
            await line.receive()
        line.sock.close()
        await asyncio.wait([flood])
        return str(error.value)

    assert run(scenario) == f"TLS: more than {SILENT_BYTES} bytes that say nothing"


def test_deadline_passes_while_bytes_that_say_nothing_keep_coming() -> None:
    async def scenario(line: Line, peer: socket.socket) -> None:
        line.tls, server, silence = silent_bytes(100)
        peer.sendall(silence + server.encrypt(b"word"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await line.receive()

    run(scenario)
