"""Frames: limits, preamble, order of payloads and errors."""

import pytest

from flodl.errors import LocalProtocolError, RemoteProtocolError
from flodl.wire.frames import (
    FRAME_BYTES,
    LENGTH_BYTES,
    PRE_AUTH_FRAME_BYTES,
    PREAMBLE,
    FrameDecoder,
    frame,
    payload_bytes,
)


def test_wire_constants_are_what_every_peer_knows():
    assert PREAMBLE == b"\xc1FDL1"
    assert LENGTH_BYTES == 4
    assert PRE_AUTH_FRAME_BYTES == 65536
    assert FRAME_BYTES == 16777216


def test_frame_is_a_big_endian_length_and_the_payload():
    assert frame(b"abc") == b"\x00\x00\x00\x03abc"
    assert frame(b"x" * 258)[:4] == b"\x00\x00\x01\x02"


def test_frame_refuses_an_empty_and_a_too_long_payload():
    assert frame(b"12345", max_frame_bytes=5) == b"\x00\x00\x00\x0512345"
    with pytest.raises(LocalProtocolError, match=r"^frame: payload of 6 bytes, expected 1 to 5$"):
        frame(b"123456", max_frame_bytes=5)
    with pytest.raises(LocalProtocolError, match=r"payload of 0 bytes"):
        frame(b"")


def test_payload_bytes_reads_a_length_and_checks_it():
    assert payload_bytes(b"\x00\x00\x00\x01") == 1
    assert payload_bytes(b"\x01\x00\x00\x00") == FRAME_BYTES
    with pytest.raises(RemoteProtocolError, match=r"^frame: length 16777217, expected 1 to 16777216$"):
        payload_bytes(b"\x01\x00\x00\x01")
    with pytest.raises(RemoteProtocolError, match=r"length 0,"):
        payload_bytes(b"\x00\x00\x00\x00")
    with pytest.raises(RemoteProtocolError, match=r"expected 1 to 4$"):
        payload_bytes(b"\x00\x00\x00\x05", max_frame_bytes=4)


def test_decoder_returns_all_complete_payloads_and_keeps_the_rest():
    decoder = FrameDecoder(100, expect_preamble=False)

    assert decoder.feed(frame(b"one") + frame(b"two") + frame(b"three")[:-1]) == [b"one", b"two"]
    assert decoder.buffered_bytes == 8
    assert decoder.feed(b"e") == [b"three"]
    assert decoder.buffered_bytes == 0


def test_decoder_takes_the_stream_byte_by_byte():
    decoder = FrameDecoder(100, expect_preamble=True)
    stream = PREAMBLE + frame(b"one") + frame(b"two")

    assert [decoder.feed(stream[at : at + 1]) for at in range(len(stream))] == (
        [[]] * 11 + [[b"one"]] + [[]] * 6 + [[b"two"]]
    )


def test_accepting_side_takes_the_preamble_once():
    decoder = FrameDecoder(100, expect_preamble=True)

    assert decoder.feed(PREAMBLE) == []
    assert decoder.buffered_bytes == 0
    assert decoder.feed(frame(b"x")) == [b"x"]
    with pytest.raises(RemoteProtocolError, match=r"length"):
        decoder.feed(PREAMBLE)


def test_a_frame_that_comes_with_the_preamble_is_returned_at_once():
    decoder = FrameDecoder(100, expect_preamble=True)

    assert decoder.feed(PREAMBLE + frame(b"hello")) == [b"hello"]


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"\xc1FDL2", b"\xc1X", b"\x00"])
def test_wrong_preamble_is_refused_at_its_first_wrong_byte(start):
    decoder = FrameDecoder(100, expect_preamble=True)

    with pytest.raises(RemoteProtocolError, match=r"^preamble: the peer does not speak flodl's protocol$"):
        decoder.feed(start)


def test_too_long_a_frame_is_refused_by_its_length_alone():
    decoder = FrameDecoder(PRE_AUTH_FRAME_BYTES, expect_preamble=False)

    with pytest.raises(RemoteProtocolError, match=r"^frame: length 4294967295, expected 1 to 65536$"):
        decoder.feed(b"\xff\xff\xff\xff")
    assert decoder.buffered_bytes == 0


def test_frame_of_exactly_the_limit_passes():
    decoder = FrameDecoder(5, expect_preamble=False)

    assert decoder.feed(frame(b"12345")) == [b"12345"]
    with pytest.raises(RemoteProtocolError, match=r"length 6"):
        decoder.feed(frame(b"123456"))


def test_payloads_before_a_broken_frame_are_returned_and_the_error_comes_next():
    decoder = FrameDecoder(5, expect_preamble=False)

    assert decoder.feed(frame(b"good") + b"\x00\x00\x00\x00") == [b"good"]
    with pytest.raises(RemoteProtocolError, match=r"length 0"):
        decoder.feed(b"")


def test_a_broken_stream_stays_broken_and_holds_nothing():
    decoder = FrameDecoder(5, expect_preamble=False)
    with pytest.raises(RemoteProtocolError) as first:
        decoder.feed(b"\x00\x00\x00\x06")

    with pytest.raises(RemoteProtocolError) as second:
        decoder.feed(frame(b"fine"))

    assert str(second.value) == str(first.value)
    assert decoder.buffered_bytes == 0


def test_raised_limit_lets_a_frame_pass_that_came_with_the_last_short_one():
    decoder = FrameDecoder(10, expect_preamble=False)
    assert decoder.feed(frame(b"welcome") + frame(b"x" * 11)) == [b"welcome"]

    assert decoder.raise_limit(11) == [b"x" * 11]
    assert decoder.buffered_bytes == 0
    with pytest.raises(RemoteProtocolError, match=r"expected 1 to 11$"):
        decoder.feed(frame(b"x" * 12))


def test_raised_limit_still_refuses_what_is_over_it():
    decoder = FrameDecoder(10, expect_preamble=False)
    assert decoder.feed(frame(b"welcome") + frame(b"x" * 12)) == [b"welcome"]

    with pytest.raises(RemoteProtocolError, match=r"length 12, expected 1 to 11$"):
        decoder.raise_limit(11)
