"""Frame streams under any split, and chunk headers."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.errors import RemoteProtocolError
from flodl.ids import RoundKey
from flodl.wire.chunks import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_TOTAL_BYTES,
    ChunkHeader,
    ChunkKind,
    chunk_ranges,
    pack_header,
    unpack_header,
)
from flodl.wire.frames import LENGTH_BYTES, PREAMBLE, FrameDecoder, frame

LIMIT = 20
PAYLOADS = st.lists(st.binary(min_size=1, max_size=LIMIT), max_size=6)
BROKEN = st.sampled_from([b"", b"\x00\x00\x00\x00", b"\x00\x00\x00\x15", b"\xff\xff\xff\xffrest"])


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:stop] for start, stop in pairwise(edges)]


def outcome(parts: list[bytes]) -> tuple[list[bytes], str]:
    """The payloads that come out, and the error after them ("" without)."""
    decoder = FrameDecoder(LIMIT, expect_preamble=True)
    payloads = []
    try:
        for part in [*parts, b""]:
            payloads += decoder.feed(part)
            assert decoder.buffered_bytes < LENGTH_BYTES + LIMIT + len(part)
    except RemoteProtocolError as error:
        assert decoder.buffered_bytes == 0
        return payloads, str(error)
    return payloads, ""


@settings(deadline=None)
@given(payloads=PAYLOADS, tail=BROKEN, cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_any_split_of_a_stream_gives_the_same_payloads_and_error(payloads, tail, cuts):
    stream = PREAMBLE + b"".join(map(frame, payloads)) + tail

    whole = outcome([stream])

    assert whole[0] == payloads
    assert bool(whole[1]) == bool(tail)
    assert outcome(pieces(stream, cuts)) == whole
    assert outcome([bytes([byte]) for byte in stream]) == whole


@settings(max_examples=300, deadline=None)
@given(stream=st.binary(max_size=80), cuts=st.lists(st.integers(0, 1000), max_size=10))
def test_arbitrary_streams_end_in_payloads_within_the_limit_or_a_protocol_error(stream, cuts):
    payloads, error = outcome(pieces(PREAMBLE + stream, cuts))

    assert all(1 <= len(payload) <= LIMIT for payload in payloads)
    assert (payloads, error) == outcome([PREAMBLE + stream])


@st.composite
def headers(draw: st.DrawFn) -> ChunkHeader:
    kind = draw(st.sampled_from(ChunkKind))
    number = st.integers(0, 2**63 - 1)
    total = draw(st.integers(1, MAX_TOTAL_BYTES))
    length = draw(st.integers(1, min(total, MAX_CHUNK_BYTES)))
    return ChunkHeader(
        kind,
        draw(st.builds(RoundKey, number, number, number) if kind.is_sum else number),
        offset_bytes=draw(st.integers(0, total - length)),
        length_bytes=length,
        total_bytes=total,
    )


@settings(deadline=None)
@given(header=headers())
def test_chunk_headers_survive_the_round_trip(header):
    assert unpack_header(pack_header(header)) == header


@settings(max_examples=300, deadline=None)
@given(header=headers(), at=st.integers(0, HEADER_BYTES - 1), mask=st.integers(1, 255))
def test_a_chunk_header_with_a_changed_byte_stays_within_the_rules_or_is_refused(header, at, mask):
    raw = bytearray(pack_header(header))
    raw[at] ^= mask

    try:
        got = unpack_header(raw)
    except RemoteProtocolError:
        return
    assert pack_header(got) == raw


@given(total=st.integers(0, 5000), size=st.integers(1, 700))
def test_ranges_touch_every_byte_once_in_order(total, size):
    ranges = list(chunk_ranges(total, size))

    assert [at for offset, length in ranges for at in range(offset, offset + length)] == list(range(total))
    assert all(length == size for _, length in ranges[:-1])
