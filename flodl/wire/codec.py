"""Messages ↔ bytes: plain MessagePack, ``[name, {field: value, …}]``, checked field by field on both ways.

Any MessagePack library can read it: nested dataclasses are maps of their fields, tuples are arrays, enums strings.
Every field is present; there are no defaults on the wire. Integers are 64-bit signed, floats may be NaN or infinite
(losses can be), a float field takes an integer and makes it a float, a bool is never a number.

``decode`` bounds nesting and element counts with one pass over the raw bytes before anything is built: msgpack alone
reserves 8 bytes per announced array element, nested 1,024 deep. What a class's fields must look like is compiled once
per class (``flodl.wire.plans``).
"""

from collections.abc import Iterable
from functools import cache
from types import UnionType
from typing import Final, TypeAlias, get_args

import msgpack

from flodl.errors import LocalProtocolError, RemoteProtocolError
from flodl.messages import Message
from flodl.wire.bounds import bounds_fault
from flodl.wire.plans import Mismatch, RecordPlan, record_plan

MAX_DEPTH: Final = 12
"""Deepest nesting that is accepted; the deepest message (a plan's grants' spans) has 6 levels."""

MAX_ELEMENTS: Final = 1 << 18
"""Most values, keys and containers in one message: an epoch report of 1,000 ranks has 10,000."""

Vocabulary: TypeAlias = UnionType | type | tuple[type, ...]
"""The messages that a connection may carry, for instance ``flodl.messages.FromDaemon``."""


def encode(message: Message) -> bytes:
    """The bytes of ``message``, without framing.

    Raises:
        LocalProtocolError: not a message, a field that does not fit its annotation, or too many elements.
    """
    name = type(message).__name__
    plan = _plans(Message).get(name)
    if plan is None or plan.cls is not type(message):
        raise LocalProtocolError(f"{name}: not a message")
    try:
        data: bytes = msgpack.packb([name, plan.lower(message)])
    except Mismatch as mismatch:
        raise LocalProtocolError(f"{name}{mismatch.where()}: {mismatch.fault}") from None
    except UnicodeEncodeError:
        raise LocalProtocolError(f"{name}: a string that is not Unicode text") from None
    if len(data) > MAX_ELEMENTS and (fault := bounds_fault(data, MAX_DEPTH, MAX_ELEMENTS)):
        raise LocalProtocolError(f"{name}: {fault}")
    return data


def decode(data: bytes, allowed: Vocabulary) -> Message:
    """The message in ``data``, which must be one of ``allowed``.

    Raises:
        RemoteProtocolError: not MessagePack, too deep, too many elements, not a message of ``allowed``, or a field
            missing, unknown or not as annotated. The text names message and field and quotes no value.
    """
    name, fields = _envelope(data)
    plan = _plans(allowed).get(name)
    if plan is None:
        fault = "not expected here" if name in _plans(Message) else "unknown message"
        raise RemoteProtocolError(f"{name[:40]!r}: {fault}")
    try:
        message: Message = plan.lift(fields)  # type: ignore[assignment]
    except Mismatch as mismatch:
        raise RemoteProtocolError(f"{name}{mismatch.where()}: {mismatch.fault}") from None
    return message


def _envelope(data: bytes) -> tuple[str, object]:
    if fault := bounds_fault(data, MAX_DEPTH, MAX_ELEMENTS):
        raise RemoteProtocolError(f"message: {fault}")
    try:
        envelope = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"message: not MessagePack ({type(error).__name__})") from None
    match envelope:
        case [str(name), fields]:
            return name, fields
        case _:
            raise RemoteProtocolError("message: expected [name, fields]")


@cache
def _plans(allowed: Vocabulary) -> dict[str, RecordPlan]:
    classes: Iterable[type] = get_args(allowed) or (allowed if isinstance(allowed, tuple) else (allowed,))
    return {cls.__name__: record_plan(cls) for cls in classes}
