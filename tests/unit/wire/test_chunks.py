"""Chunk headers and the cutting of transfers."""

import struct
from dataclasses import replace

import pytest

from flodl.errors import LocalProtocolError, RemoteProtocolError
from flodl.ids import RoundKey
from flodl.wire.chunks import (
    CHUNK_BYTES,
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_TOTAL_BYTES,
    ChunkHeader,
    ChunkKind,
    chunk_ranges,
    pack_header,
    unpack_header,
)
from flodl.wire.frames import FRAME_BYTES, FrameDecoder

SUM = ChunkHeader(ChunkKind.SUM_UP, RoundKey(1, 2, 3), offset_bytes=4, length_bytes=5, total_bytes=9)
STATE = ChunkHeader(ChunkKind.STATE_UP, 7, offset_bytes=0, length_bytes=1, total_bytes=1)


def raw(
    magic: bytes = b"FDLC",
    kind: int = 1,
    key: tuple[int, int, int] = (1, 2, 3),
    offset: int = 4,
    total: int = 9,
    length: int = 5,
) -> bytes:
    return struct.pack(">4sIQQQQQI", magic, kind, *key, offset, total, length)


def test_header_has_a_fixed_big_endian_layout():
    assert HEADER_BYTES == 52
    assert pack_header(SUM) == raw()
    assert pack_header(STATE) == raw(kind=3, key=(7, 0, 0), offset=0, total=1, length=1)


def test_sizes_are_what_every_peer_knows():
    assert CHUNK_BYTES == 1048576
    assert MAX_CHUNK_BYTES == 16777216
    assert MAX_TOTAL_BYTES == 281474976710656


@pytest.mark.parametrize(
    ("kind", "number"),
    [(ChunkKind.SUM_UP, 1), (ChunkKind.SUM_DOWN, 2), (ChunkKind.STATE_UP, 3), (ChunkKind.STATE_DOWN, 4)],
)
def test_kinds_keep_their_numbers(kind, number):
    assert kind.value == number


@pytest.mark.parametrize("kind", [ChunkKind.SUM_UP, ChunkKind.SUM_DOWN])
def test_sums_go_by_round_key(kind):
    header = replace(SUM, kind=kind)

    assert unpack_header(pack_header(header)) == header


@pytest.mark.parametrize("kind", [ChunkKind.STATE_UP, ChunkKind.STATE_DOWN])
def test_states_go_by_transfer_number(kind):
    header = replace(STATE, kind=kind)

    assert unpack_header(pack_header(header)) == header


def test_offsets_beyond_four_gibibytes_survive():
    header = ChunkHeader(ChunkKind.SUM_DOWN, RoundKey(0, 0, 0), 5 << 30, CHUNK_BYTES, (5 << 30) + CHUNK_BYTES)

    assert unpack_header(memoryview(pack_header(header))) == header


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (replace(SUM, key=7), "a key of type int does not go with SUM_UP"),
        (replace(STATE, key=RoundKey(0, 0, 0)), "a key of type RoundKey does not go with STATE_UP"),
        (replace(STATE, key=-1), "key out of range"),
        (replace(STATE, key=1 << 63), "key out of range"),
        (replace(SUM, key=RoundKey(0, 0, 1 << 63)), "key out of range"),
        (replace(SUM, key=RoundKey(0, -1, 0)), "key out of range"),
        (replace(SUM, length_bytes=0), "length outside"),
        (replace(SUM, offset_bytes=-1), "bytes outside the transfer"),
        (replace(SUM, offset_bytes=5), "bytes outside the transfer"),
        (replace(SUM, length_bytes=MAX_CHUNK_BYTES + 1, total_bytes=1 << 40), "length outside"),
        (replace(SUM, total_bytes=MAX_TOTAL_BYTES + 1), "total outside"),
        (replace(SUM, total_bytes=0), "total outside"),
    ],
)
def test_a_header_that_no_reader_takes_is_not_packed(header, fault):
    with pytest.raises(LocalProtocolError, match=f"^chunk: {fault}"):
        pack_header(header)


def test_largest_key_and_chunk_pass():
    header = ChunkHeader(
        ChunkKind.SUM_UP,
        RoundKey((1 << 63) - 1, 0, 0),
        offset_bytes=MAX_TOTAL_BYTES - MAX_CHUNK_BYTES,
        length_bytes=MAX_CHUNK_BYTES,
        total_bytes=MAX_TOTAL_BYTES,
    )

    assert unpack_header(pack_header(header)) == header


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (raw()[:-1], "header of 51 bytes, expected 52$"),
        (raw() + b"\x00", "header of 53 bytes, expected 52$"),
        (raw(magic=b"FDLX"), "wrong magic, the stream is out of step$"),
        (raw(kind=0), "unknown kind 0$"),
        (raw(kind=5), "unknown kind 5$"),
        (raw(key=(1 << 63, 0, 0)), r"key \(9223372036854775808, 0, 0\) does not go with SUM_UP$"),
        (raw(key=(0, 1 << 63, 0)), r"key \(0, 9223372036854775808, 0\) does not go with SUM_UP$"),
        (raw(key=(0, 0, 1 << 63)), r"key \(0, 0, 9223372036854775808\) does not go with SUM_UP$"),
        (raw(kind=3, key=(1, 1, 0)), r"key \(1, 1, 0\) does not go with STATE_UP$"),
        (raw(kind=4, key=(1, 0, 1)), r"key \(1, 0, 1\) does not go with STATE_DOWN$"),
        (raw(kind=3, key=(1, 1, 1)), r"key \(1, 1, 1\) does not go with STATE_UP$"),
        (raw(length=0), "length outside 1 to 16777216 in ChunkHeader"),
        (raw(length=MAX_CHUNK_BYTES + 1, total=1 << 40), "length outside 1 to 16777216 in"),
        (raw(total=0), "total outside 1 to 281474976710656 in"),
        (raw(total=MAX_TOTAL_BYTES + 1), "total outside 1 to 281474976710656 in"),
        (raw(offset=5), "bytes outside the transfer in"),
        (raw(length=10, offset=0), "bytes outside the transfer in"),
        (raw(offset=(1 << 64) - 1), "bytes outside the transfer in"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused(data, fault):
    with pytest.raises(RemoteProtocolError, match=f"^chunk: {fault}"):
        unpack_header(data)


def test_reader_who_knows_the_sizes_refuses_larger_ones():
    assert unpack_header(raw(), max_chunk_bytes=5, max_total_bytes=9) == SUM
    with pytest.raises(RemoteProtocolError, match=r"length outside 1 to 4"):
        unpack_header(raw(), max_chunk_bytes=4)
    with pytest.raises(RemoteProtocolError, match=r"total outside 1 to 8"):
        unpack_header(raw(), max_total_bytes=8)


def test_a_reader_of_frames_refuses_a_chunk():
    with pytest.raises(RemoteProtocolError, match=r"length"):
        FrameDecoder(FRAME_BYTES, expect_preamble=False).feed(pack_header(SUM))


@pytest.mark.parametrize(
    ("total", "size", "ranges"),
    [
        (0, 4, []),
        (1, 4, [(0, 1)]),
        (4, 4, [(0, 4)]),
        (9, 4, [(0, 4), (4, 4), (8, 1)]),
        (CHUNK_BYTES + 1, CHUNK_BYTES, [(0, CHUNK_BYTES), (CHUNK_BYTES, 1)]),
        (MAX_CHUNK_BYTES, MAX_CHUNK_BYTES, [(0, MAX_CHUNK_BYTES)]),
        (2, 1, [(0, 1), (1, 1)]),
    ],
)
def test_ranges_cover_the_transfer_in_order(total, size, ranges):
    assert list(chunk_ranges(total, size)) == ranges


def test_ranges_are_usual_chunks_and_are_not_listed_in_memory():
    ranges = chunk_ranges(3 << 40)

    assert next(ranges) == (0, CHUNK_BYTES)
    assert next(ranges) == (CHUNK_BYTES, CHUNK_BYTES)


@pytest.mark.parametrize(("total", "size"), [(-1, 4), (4, 0), (4, -1), (4, MAX_CHUNK_BYTES + 1)])
def test_ranges_of_impossible_sizes_are_refused_at_once(total, size):
    with pytest.raises(LocalProtocolError, match=f"^chunk: cannot cut {total} bytes into pieces of {size}$"):
        chunk_ranges(total, size)
