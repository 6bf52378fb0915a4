"""What the dialling side says of whoever hangs up on it."""

import asyncio
import socket
import struct

import pytest

from flodl.errors import HostUnreachable
from flodl.messages import ToClient
from flodl.runtime.dial import Controller, Identity, connect_control
from flodl.wire.handshake import Role


@pytest.mark.parametrize(
    ("lingers", "words"), [(True, "it hung up in the middle of the handshake"), (False, "Connection reset by peer")]
)
def test_peer_that_hangs_up_is_told_in_words_and_by_its_name(lingers: bool, words: str) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if lingers:
            await reader.read(1 << 16)
        else:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async def body() -> HostUnreachable:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, asyncio.timeout(30):
            controller = Controller("127.0.0.1", port, shown="boss:1337 through gate")
            with pytest.raises(HostUnreachable) as caught:
                await connect_control(controller, Identity("", b"\x5e" * 32, Role.CLIENT, "box"), ToClient)
        return caught.value

    error = asyncio.run(body())
    assert (error.host, error.stage, error.reason) == ("boss:1337 through gate", "join", words)
