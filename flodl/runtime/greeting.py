"""Carries a handshake over a raw socket of the event loop, for either side, within what a stranger may cost.

The socket stays raw so that it can go on as a stream of the loop or as a blocking socket of a thread.
"""

import asyncio
import socket
from typing import Final

from flodl.messages import Handshake
from flodl.runtime.streams import ConnectionLost, Loss
from flodl.wire.codec import Vocabulary, decode, encode
from flodl.wire.frames import PRE_AUTH_FRAME_BYTES, FrameDecoder, frame
from flodl.wire.handshake import ClientHandshake, HandshakeState, ServerHandshake

READ_BYTES: Final = 4096
"""Bytes taken from a stranger at once; a handshake's message has some hundred."""

HANDSHAKE_FRAME_BYTES: Final = PRE_AUTH_FRAME_BYTES - READ_BYTES
"""Longest frame in a handshake, so that with the bytes read on top 64 KiB are never passed."""


async def converse(
    sock: socket.socket,
    decoder: FrameDecoder,
    handshake: ServerHandshake | ClientHandshake,
    allowed: Vocabulary,
) -> list[bytes]:
    """Exchange messages until ``handshake`` is open or refused; the caller sets the deadline.

    Returns:
        Frames that came behind the handshake's last one.

    Raises:
        ConnectionLost: the peer closed in the middle of it.
        RemoteProtocolError: the peer broke the protocol.
        OSError: the connection broke.
    """
    loop = asyncio.get_running_loop()
    rest: list[bytes] = []
    while _is_waiting(handshake):
        data = await loop.sock_recv(sock, READ_BYTES)
        if not data:
            raise ConnectionLost("the peer", Loss.EOF, "in the middle of the handshake")
        for payload in decoder.feed(data):
            if not _is_waiting(handshake):
                rest.append(payload)
                continue
            words: list[Handshake] = handshake.receive(decode(payload, allowed))  # type: ignore[arg-type]
            if words:
                await loop.sock_sendall(sock, b"".join(frame(encode(word)) for word in words))
    return rest


def _is_waiting(handshake: ServerHandshake | ClientHandshake) -> bool:
    return handshake.state is HandshakeState.WAITING
