"""Answers in a stream of noise, and what a hostile one may not do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.errors import RemoteProtocolError
from flodl.launch.probe.facts import (
    MAX_FRAME_BYTES,
    MAX_NOISE_BYTES,
    AnswerScanner,
    read_facts,
    read_reach,
)

NONCE = "5e" * 16
HELLO = f"\nFDL1 python {NONCE} 3.11.2\n".encode()


def frame(body: bytes, nonce: str = NONCE) -> bytes:
    return f"\nFDL1 {nonce} {len(body)}\n".encode() + body


@given(st.lists(st.integers(1, 40)), st.binary(max_size=200))
def test_answers_are_found_however_the_stream_is_cut(cuts: list[int], noise: bytes) -> None:
    stream = b"Welcome!\n" + noise + HELLO + b"warning\n" + frame(b'{"a": 1}') + b"bye" + frame(b"[\nFDL1 x]")
    scanner, bodies, at = AnswerScanner(NONCE), [], 0
    for size in (*cuts, len(stream)):
        bodies += scanner.feed(stream[at : at + size])
        at += size
    assert bodies == [b'{"a": 1}', b"[\nFDL1 x]"]
    assert scanner.python == "3.11.2"


def test_answer_with_another_nonce_is_noise() -> None:
    scanner = AnswerScanner(NONCE)
    assert scanner.feed(frame(b"{}", "6f" * 16) + b"\n" * 300) == []
    assert b"FDL1" in scanner.noise


@pytest.mark.parametrize("length", ["0", "-1", "1e3", "99999999999", "", str(MAX_FRAME_BYTES + 1), "x" * 500])
def test_length_that_is_none_is_refused(length: str) -> None:
    with pytest.raises(RemoteProtocolError):
        AnswerScanner(NONCE).feed(f"\nFDL1 {NONCE} {length}\n".encode())


def test_noise_without_end_is_refused() -> None:
    scanner = AnswerScanner(NONCE)
    for _ in range(MAX_NOISE_BYTES // 1000):
        assert scanner.feed(b"x" * 1000) == []
    with pytest.raises(RemoteProtocolError, match="no answer"):
        scanner.feed(b"x" * 2000)
    assert len(scanner.noise) < 10_000


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b'{"hostname": 1}', b"[" * 100_000, b'{"x": NaN}'])
def test_facts_that_do_not_fit_are_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_facts(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"heard_s": float("inf")},
        {"heard_s": "1"},
        {"controller": {"address": "", "source": ""}},
        {"peers": {"a": []}},
        {"more": 1},
    ],
)
def test_reach_that_does_not_fit_is_refused(changes: dict[str, object]) -> None:
    good = {"heard_s": 1.0, "said_s": 2, "controller": {"address": "", "source": "", "error": ""}, "peers": {}}
    assert read_reach(json.dumps(good).encode()).said_s == 2.0
    with pytest.raises(RemoteProtocolError):
        read_reach(json.dumps({**good, **changes}).encode())


def test_lines_that_end_as_on_a_terminal_are_understood() -> None:
    scanner = AnswerScanner("abc")
    assert scanner.feed(b"hello\r\n\r\nFDL1 python abc 3.11.2\r\n\r\nFDL1 abc 2\r\n{}") == [b"{}"]
    assert scanner.python == "3.11.2"
