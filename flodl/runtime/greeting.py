"""Carries a handshake over a line, for either side, within what a stranger may cost."""

from typing import Final

from flodl.messages import Handshake
from flodl.runtime.line import READ_BYTES, Line
from flodl.runtime.streams import ConnectionLost, Loss
from flodl.runtime.tls import SEALED_RECORD_BYTES
from flodl.wire.codec import Vocabulary, decode, encode
from flodl.wire.frames import PRE_AUTH_FRAME_BYTES, FrameDecoder, frame
from flodl.wire.handshake import ClientHandshake, HandshakeState, ServerHandshake

HANDSHAKE_FRAME_BYTES: Final = PRE_AUTH_FRAME_BYTES - READ_BYTES - SEALED_RECORD_BYTES
"""Longest frame in a handshake, so that with the bytes read on top, and a torn record of TLS, 64 KiB are never passed.
"""


async def converse(
    line: Line,
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
    rest: list[bytes] = []
    while _is_waiting(handshake):
        data = await line.receive()
        if not data:
            raise ConnectionLost("the peer", Loss.EOF, "in the middle of the handshake")
        for payload in decoder.feed(data):
            if not _is_waiting(handshake):
                rest.append(payload)
                continue
            words: list[Handshake] = handshake.receive(decode(payload, allowed))  # type: ignore[arg-type]
            if words:
                await line.send(b"".join(frame(encode(word)) for word in words))
    return rest


def _is_waiting(handshake: ServerHandshake | ClientHandshake) -> bool:
    return handshake.state is HandshakeState.WAITING
