"""Every message, with values made from its annotations: round trip, corruption, truncation."""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.errors import RemoteProtocolError
from flodl.messages import Message, WindowDone
from flodl.wire.codec import decode, encode
from flodl.wire.frames import PRE_AUTH_FRAME_BYTES, FrameDecoder, frame

CLASSES = typing.get_args(Message)
SCALARS = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    types.NoneType: st.none(),
}


def values(annotation) -> st.SearchStrategy:
    """A strategy for the values of an annotation that may stand in a message."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case None if annotation in SCALARS:
            return SCALARS[annotation]
        case None if issubclass(annotation, StrEnum):
            return st.sampled_from(annotation)
        case None if is_dataclass(annotation):
            return records(annotation)
        case types.UnionType | typing.Union:
            return st.one_of(*map(values, arguments))
        case origin if origin is tuple and arguments[-1] is ...:
            return st.lists(values(arguments[0]), max_size=3).map(tuple)
        case origin if origin is tuple:
            return st.tuples(*map(values, arguments))
        case origin if origin is Mapping:
            return st.dictionaries(st.text(max_size=8), values(arguments[1]), max_size=3)
    raise AssertionError(annotation)


def records(cls: type) -> st.SearchStrategy:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{each.name: values(hints[each.name]) for each in fields(cls)})


def kinds(value: object) -> object:
    """The types inside a value: what ``==`` alone does not tell apart (1, 1.0 and True)."""
    if is_dataclass(value):
        return [type(value), *(kinds(getattr(value, each.name)) for each in fields(value))]
    if isinstance(value, tuple | list):
        return [type(value), *map(kinds, value)]
    if isinstance(value, Mapping):
        return [type(value), *map(kinds, value.items())]
    return type(value)


ANY_MESSAGE = st.sampled_from(CLASSES).flatmap(records)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_message_survives_the_round_trip(cls, data):
    message = data.draw(records(cls))

    decoded = decode(encode(message), Message)

    assert decoded == message
    assert kinds(decoded) == kinds(message)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_losses_that_are_no_numbers_survive(loss):
    decoded = decode(encode(WindowDone(0, 1, 2, 3, loss, False, None, None, loss, {"a": (loss, 1)})), WindowDone)

    assert repr((decoded.loss_sum, decoded.window_ms, decoded.scalars)) == repr((loss, loss, {"a": (loss, 1)}))


@settings(max_examples=300, deadline=None)
@given(message=ANY_MESSAGE, data=st.data())
def test_a_changed_byte_gives_a_message_or_a_protocol_error(message, data):
    raw = bytearray(encode(message))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))

    try:
        decoded = decode(bytes(raw), Message)
    except RemoteProtocolError:
        return
    assert isinstance(decoded, CLASSES)
    encode(decoded)


@settings(max_examples=200, deadline=None)
@given(message=ANY_MESSAGE, data=st.data())
def test_a_message_cut_short_or_with_more_behind_it_is_refused(message, data):
    raw = encode(message)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    more = raw + data.draw(st.binary(min_size=1, max_size=5))

    for broken in (cut, more):
        with pytest.raises(RemoteProtocolError):
            decode(broken, Message)


@settings(max_examples=500, deadline=None)
@given(raw=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(raw):
    with pytest.raises(RemoteProtocolError):
        decode(raw, Message)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.binary(max_size=2), inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(cls=st.sampled_from(CLASSES), data=st.data())
def test_a_message_with_any_value_in_a_field_gives_a_message_or_a_protocol_error(cls, data):
    message = data.draw(records(cls))
    envelope = msgpack.unpackb(encode(message))
    name = data.draw(st.sampled_from([each.name for each in fields(cls)] or ["x"]))
    envelope[1][name] = data.draw(PLAIN)

    try:
        decoded = decode(msgpack.packb(envelope), Message)
    except RemoteProtocolError as error:
        refusal = str(error)
    else:
        encode(decoded)
        return
    assert refusal.startswith((f"{cls.__name__}.{name}", f"{cls.__name__}: ", "message: "))


@settings(max_examples=200, deadline=None)
@given(message=ANY_MESSAGE, data=st.data())
def test_a_frame_with_a_changed_byte_gives_a_message_nothing_or_a_protocol_error(message, data):
    raw = bytearray(frame(encode(message)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    decoder = FrameDecoder(PRE_AUTH_FRAME_BYTES, expect_preamble=False)

    try:
        for payload in decoder.feed(bytes(raw)):
            decode(payload, Message)
    except RemoteProtocolError:
        return
    assert decoder.buffered_bytes <= len(raw)
