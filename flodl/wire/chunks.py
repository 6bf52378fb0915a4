"""Chunks of bulk data, sans-IO: a fixed header, then raw bytes. No MessagePack, nothing is copied here.

A bulk connection carries transfers (the sum of a round, the final state), each cut into chunks, so that one transfer
never holds up the connection and sending, summing and receiving overlap. All sizes are 64-bit.

Header, big-endian, ``HEADER_BYTES`` long::

    magic "FDLC" · kind u32 · key 3 × u64 · offset u64 · total u64 · length u32

The key is (incarnation, version, attempt) for a round's sum and (transfer, 0, 0) for a state. A reader of frames that
meets a header by mistake reads its magic as a length over any limit and refuses it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import Final

from flodl.errors import LocalProtocolError, RemoteProtocolError
from flodl.ids import RoundKey

CHUNK_BYTES: Final = 1024 * 1024
"""Usual length of a chunk: a multiple of 64, so that no number is cut; small enough to overlap the stages of a sum."""

MAX_CHUNK_BYTES: Final = 16 * 1024 * 1024
"""Longest chunk that is accepted."""

MAX_TOTAL_BYTES: Final = 1 << 48
"""Longest transfer that is accepted where the reader knows no better: 256 TiB, above any model, below overflow."""

_HEADER: Final = Struct(">4sIQQQQQI")
_MAGIC: Final = b"FDLC"

HEADER_BYTES: Final = _HEADER.size
"""Size of a packed header."""


class ChunkKind(Enum):
    """What a transfer carries; up is towards the controller. The value is the number on the wire."""

    SUM_UP = 1
    SUM_DOWN = 2
    STATE_UP = 3
    STATE_DOWN = 4

    @property
    def is_sum(self) -> bool:
        """The key is a ``RoundKey``; else a transfer number."""
        return self in (ChunkKind.SUM_UP, ChunkKind.SUM_DOWN)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Says where the ``length_bytes`` raw bytes behind it belong.

    ``key`` names the round of a sum, or is the number of a state's transfer (≥ 0). They are bytes
    ``[offset_bytes, offset_bytes + length_bytes)`` of ``total_bytes``.
    """

    kind: ChunkKind
    key: RoundKey | int
    offset_bytes: int
    length_bytes: int
    total_bytes: int


def chunk_ranges(total_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the chunks of ``total_bytes``, in order; only the last may be shorter.

    Raises:
        LocalProtocolError: ``total_bytes`` < 0 or ``chunk_bytes`` outside 1 … ``MAX_CHUNK_BYTES``.
    """
    if total_bytes < 0 or not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise LocalProtocolError(f"chunk: cannot cut {total_bytes} bytes into pieces of {chunk_bytes}")
    return ((offset, min(chunk_bytes, total_bytes - offset)) for offset in range(0, total_bytes, chunk_bytes))


def pack_header(header: ChunkHeader) -> bytes:
    """The ``HEADER_BYTES`` bytes to send in front of the chunk.

    Raises:
        LocalProtocolError: the header breaks the rules that ``unpack_header`` checks.
    """
    if isinstance(header.key, RoundKey) != header.kind.is_sum:
        raise LocalProtocolError(
            f"chunk: a key of type {type(header.key).__name__} does not go with {header.kind.name}"
        )
    match header.key:
        case RoundKey(incarnation, version, attempt):
            key = (incarnation, version, attempt)
        case transfer:
            key = (transfer, 0, 0)
    fault = _fault(header, MAX_CHUNK_BYTES, MAX_TOTAL_BYTES)
    if fault is not None or not all(0 <= number < 1 << 63 for number in key):
        raise LocalProtocolError(f"chunk: {fault or 'key out of range'} in {header}")
    return _HEADER.pack(_MAGIC, header.kind.value, *key, header.offset_bytes, header.total_bytes, header.length_bytes)


def unpack_header(
    data: bytes | bytearray | memoryview,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    max_total_bytes: int = MAX_TOTAL_BYTES,
) -> ChunkHeader:
    """Read the ``HEADER_BYTES`` bytes of ``data``.

    Raises:
        RemoteProtocolError: wrong size, magic, kind or key, an empty or too long chunk, a transfer over
            ``max_total_bytes``, or bytes behind the transfer's end.
    """
    if len(data) != HEADER_BYTES:
        raise RemoteProtocolError(f"chunk: header of {len(data)} bytes, expected {HEADER_BYTES}")
    magic, code, first, second, third, offset, total, length = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise RemoteProtocolError("chunk: wrong magic, the stream is out of step")
    try:
        kind = ChunkKind(code)
    except ValueError:
        raise RemoteProtocolError(f"chunk: unknown kind {code}") from None
    if max(first, second, third) >= 1 << 63 or not (kind.is_sum or second == third == 0):
        raise RemoteProtocolError(f"chunk: key ({first}, {second}, {third}) does not go with {kind.name}")
    key = RoundKey(first, second, third) if kind.is_sum else first
    header = ChunkHeader(kind, key, offset, length, total)
    fault = _fault(header, max_chunk_bytes, max_total_bytes)
    if fault is not None:
        raise RemoteProtocolError(f"chunk: {fault} in {header}")
    return header


def _fault(header: ChunkHeader, max_chunk_bytes: int, max_total_bytes: int) -> str | None:
    if not 1 <= header.total_bytes <= max_total_bytes:
        return f"total outside 1 to {max_total_bytes}"
    if not 1 <= header.length_bytes <= max_chunk_bytes:
        return f"length outside 1 to {max_chunk_bytes}"
    if not 0 <= header.offset_bytes <= header.total_bytes - header.length_bytes:
        return "bytes outside the transfer"
    return None
