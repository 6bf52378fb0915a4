"""Stream framing, sans-IO: a preamble once, then frames of a 4-byte big-endian length and that many payload bytes.

The connecting side sends ``PREAMBLE`` before its first frame, so that one port can carry our protocol, TLS and HTTP:
0xC1 is the one byte that MessagePack never uses and that starts neither a TLS record nor an HTTP request line.

``FrameDecoder`` takes bytes as they come, in any pieces. A length over the limit is refused when its four bytes are
known, before anything of that size is held. It does not look into payloads: ``flodl.wire.codec`` does.
"""

from typing import Final

from flodl.errors import LocalProtocolError, RemoteProtocolError

PREAMBLE: Final = b"\xc1FDL1"
"""First bytes of a connection, from the side that connects."""

LENGTH_BYTES: Final = 4
"""Size of a frame's length field."""

PRE_AUTH_FRAME_BYTES: Final = 64 * 1024
"""Longest frame before the handshake is done: a stranger can make us hold no more than this."""

FRAME_BYTES: Final = 16 * 1024 * 1024
"""Longest control frame: far above any plan or report, far below what could hurt. Bulk data travels as chunks."""


def frame(payload: bytes, max_frame_bytes: int = FRAME_BYTES) -> bytes:
    """One frame with ``payload`` (1 … ``max_frame_bytes`` bytes).

    Raises:
        LocalProtocolError: the payload is empty or too long for a frame.
    """
    if not 1 <= len(payload) <= max_frame_bytes:
        raise LocalProtocolError(f"frame: payload of {len(payload)} bytes, expected 1 to {max_frame_bytes}")
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def payload_bytes(header: bytes | bytearray, max_frame_bytes: int = FRAME_BYTES) -> int:
    """The payload's size as announced by the ``LENGTH_BYTES`` bytes of ``header``; for readers of exact sizes.

    Raises:
        RemoteProtocolError: the size is zero or over ``max_frame_bytes``.
    """
    size = int.from_bytes(header, "big")
    if not 1 <= size <= max_frame_bytes:
        raise RemoteProtocolError(f"frame: length {size}, expected 1 to {max_frame_bytes}")
    return size


class FrameDecoder:
    """Cuts a byte stream into frame payloads.

    Whatever the split of the input, the same payloads come out, in order, before the same error. Between two calls
    it holds less than one frame of the limit, but for the bytes of one ``feed`` behind a frame that broke the limit.
    """

    def __init__(self, max_frame_bytes: int, expect_preamble: bool) -> None:
        """``expect_preamble`` is set on the accepting side, whose peer sends ``PREAMBLE`` first."""
        self._max_frame_bytes = max_frame_bytes
        self._expect_preamble = expect_preamble
        self._buffer = bytearray()
        self._refusal: str | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes taken in and not yet given out; more than 0 at the stream's end means a torn frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Take ``data`` and return the payloads that are now complete.

        Payloads in front of a broken frame are returned first; the error comes with the next call.

        Raises:
            RemoteProtocolError: wrong preamble, or a length of zero or over the limit. Every later call raises it too.
        """
        if self._refusal is not None:
            raise RemoteProtocolError(self._refusal)
        self._buffer += data
        payloads: list[bytes] = []
        try:
            while (payload := self._next_payload()) is not None:
                payloads.append(payload)
        except RemoteProtocolError as error:
            if not payloads:
                self._refusal = str(error)
                self._buffer.clear()
                raise
        return payloads

    def raise_limit(self, max_frame_bytes: int) -> list[bytes]:
        """Allow longer frames, once the peer is authenticated; returns payloads that are complete under the new limit.

        Raises:
            RemoteProtocolError: as ``feed``.
        """
        self._max_frame_bytes = max_frame_bytes
        return self.feed(b"")

    def _next_payload(self) -> bytes | None:
        if self._expect_preamble and not self._take_preamble():
            return None
        if len(self._buffer) < LENGTH_BYTES:
            return None
        stop = LENGTH_BYTES + payload_bytes(self._buffer[:LENGTH_BYTES], self._max_frame_bytes)
        if len(self._buffer) < stop:
            return None
        with memoryview(self._buffer) as view:
            payload = bytes(view[LENGTH_BYTES:stop])
        del self._buffer[:stop]
        return payload

    def _take_preamble(self) -> bool:
        start = self._buffer[: len(PREAMBLE)]
        if not PREAMBLE.startswith(start):
            raise RemoteProtocolError("preamble: the peer does not speak flodl's protocol")
        if len(start) < len(PREAMBLE):
            return False
        del self._buffer[: len(PREAMBLE)]
        self._expect_preamble = False
        return True
