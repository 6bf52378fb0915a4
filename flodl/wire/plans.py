"""What may stand in each field of a message, compiled once per class from its annotations.

A ``Plan`` works both ways: ``lift`` checks what MessagePack gave and builds the field's value, ``lower`` checks the
value and gives what MessagePack takes. Both raise ``Mismatch``, which carries the field's path and never a value.
"""

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import repeat
from typing import Final, TypeAlias

from flodl.errors import LocalProtocolError

Convert: TypeAlias = Callable[[object], object]

_INT_STOP: Final = 1 << 63


class Mismatch(Exception):
    """A value is not as annotated; ``fault`` says how, ``where()`` at which field."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self._path: list[str] = []
        super().__init__(fault)

    def inside(self, step: str) -> None:
        """Note that the value lies in ``step`` (``.field`` or ``[index]``) of the one around it."""
        self._path.insert(0, step)

    def where(self) -> str:
        """The path from the message, like ``.grants[0].epoch``; empty for the message itself."""
        return "".join(self._path)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one annotation travels. ``expected`` describes it in error texts."""

    expected: str
    lift: Convert
    lower: Convert


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """How a dataclass travels: as a map of all its fields."""

    cls: type
    fields: tuple[tuple[str, Plan], ...]
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(name for name, _ in self.fields))

    def lift(self, value: object) -> object:
        """Build the dataclass from a map of exactly its fields."""
        if not isinstance(value, dict):
            raise _mismatch(self.cls.__name__, value)
        if value.keys() != self.names:
            raise Mismatch(self._field_fault(value))
        arguments = []
        name = ""
        try:
            for name, plan in self.fields:
                arguments.append(plan.lift(value[name]))
        except Mismatch as mismatch:
            mismatch.inside(f".{name}")
            raise
        return self.cls(*arguments)

    def lower(self, value: object) -> object:
        """The map of the dataclass's fields."""
        if type(value) is not self.cls:
            raise _mismatch(self.cls.__name__, value)
        lowered = {}
        name = ""
        try:
            for name, plan in self.fields:
                lowered[name] = plan.lower(getattr(value, name))
        except Mismatch as mismatch:
            mismatch.inside(f".{name}")
            raise
        return lowered

    def _field_fault(self, value: dict[object, object]) -> str:
        missing = sorted(self.names - value.keys())
        if missing:
            return f"field {missing[0]} is missing"
        unknown = sorted(repr(name)[:40] for name in value.keys() - self.names)
        return f"unknown field {unknown[0]}"


@cache
def record_plan(cls: type) -> RecordPlan:
    """The plan of a dataclass, compiled on first use.

    Raises:
        LocalProtocolError: an annotation that cannot travel.
    """
    hints = typing.get_type_hints(cls)
    return RecordPlan(cls, tuple((each.name, _plan(hints[each.name])) for each in fields(cls)))


def _plan(annotation: typing.Any) -> Plan:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _union_plan(tuple(_plan(each) for each in arguments))
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _sequence_plan(_plan(arguments[0]))
    if origin is tuple:
        return _row_plan(tuple(_plan(each) for each in arguments))
    if origin is Mapping and arguments[0] is str:
        return _mapping_plan(_plan(arguments[1]))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _enum_plan(annotation)
    if is_dataclass(annotation) and isinstance(annotation, type):
        record = record_plan(annotation)
        return Plan(annotation.__name__, record.lift, record.lower)
    raise LocalProtocolError(f"annotation {annotation}: cannot travel")


def _mismatch(expected: str, value: object) -> Mismatch:
    return Mismatch(f"expected {expected}, got {type(value).__name__}")


def _none(value: object) -> None:
    if value is not None:
        raise _mismatch("None", value)


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise _mismatch("bool", value)
    return value


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _mismatch("int", value)
    if not -_INT_STOP <= value < _INT_STOP:
        raise Mismatch("int outside 64 bits")
    return value


def _float(value: object) -> float:
    if isinstance(value, float):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise _mismatch("float", value)
    return float(_int(value))


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise _mismatch("str", value)
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise _mismatch("bytes", value)
    return value


_SCALARS: Final[dict[object, Plan]] = {
    types.NoneType: Plan("None", _none, _none),
    bool: Plan("bool", _bool, _bool),
    int: Plan("int", _int, _int),
    float: Plan("float", _float, _float),
    str: Plan("str", _str, _str),
    bytes: Plan("bytes", _bytes, _bytes),
}


def _enum_plan(cls: type[StrEnum]) -> Plan:
    members = {member.value: member for member in cls}
    expected = "one of " + ", ".join(members)

    def lift(value: object) -> StrEnum:
        member = members.get(_str(value))
        if member is None:
            raise Mismatch(f"expected {expected}")
        return member

    def lower(value: object) -> str:
        if not isinstance(value, cls):
            raise _mismatch(cls.__name__, value)
        return value.value

    return Plan(cls.__name__, lift, lower)


def _sequence_plan(item: Plan) -> Plan:
    expected = f"tuple of {item.expected}"

    def lift(value: object) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise _mismatch(expected, value)
        return tuple(_each(repeat(item.lift), value))

    def lower(value: object) -> list[object]:
        if not isinstance(value, tuple):
            raise _mismatch(expected, value)
        return _each(repeat(item.lower), value)

    return Plan(expected, lift, lower)


def _row_plan(items: tuple[Plan, ...]) -> Plan:
    expected = "(" + ", ".join(item.expected for item in items) + ")"
    lifts, lowers = tuple(item.lift for item in items), tuple(item.lower for item in items)

    def lift(value: object) -> tuple[object, ...]:
        if not isinstance(value, list) or len(value) != len(items):
            raise _mismatch(expected, value)
        return tuple(_each(lifts, value))

    def lower(value: object) -> list[object]:
        if not isinstance(value, tuple) or len(value) != len(items):
            raise _mismatch(expected, value)
        return _each(lowers, value)

    return Plan(expected, lift, lower)


def _mapping_plan(item: Plan) -> Plan:
    expected = f"mapping of str to {item.expected}"

    def convert(mapping: Mapping[object, object], one: Convert) -> dict[str, object]:
        converted: dict[str, object] = {}
        for key, value in mapping.items():
            if not isinstance(key, str):
                raise Mismatch(f"expected str as key, got {type(key).__name__}")
            try:
                converted[key] = one(value)
            except Mismatch as mismatch:
                mismatch.inside(f"[{key[:40]!r}]")
                raise
        return converted

    def lift(value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise _mismatch(expected, value)
        return convert(value, item.lift)

    def lower(value: object) -> dict[str, object]:
        if not isinstance(value, Mapping):
            raise _mismatch(expected, value)
        return convert(value, item.lower)

    return Plan(expected, lift, lower)


def _union_plan(members: tuple[Plan, ...]) -> Plan:
    expected = " | ".join(member.expected for member in members)
    others = tuple(member for member in members if member is not _SCALARS[types.NoneType])
    if len(others) == 1:
        return _optional_plan(others[0])

    def first(value: object, converts: tuple[Convert, ...]) -> object:
        for convert in converts:
            try:
                return convert(value)
            except Mismatch:
                continue
        raise _mismatch(expected, value)

    lifts, lowers = tuple(member.lift for member in members), tuple(member.lower for member in members)
    return Plan(expected, lambda value: first(value, lifts), lambda value: first(value, lowers))


def _optional_plan(some: Plan) -> Plan:
    return Plan(
        f"{some.expected} | None",
        lambda value: None if value is None else some.lift(value),
        lambda value: None if value is None else some.lower(value),
    )


def _each(converts: Iterable[Convert], values: Sequence[object]) -> list[object]:
    converted: list[object] = []
    try:
        for value, convert in zip(values, converts, strict=False):
            converted.append(convert(value))
    except Mismatch as mismatch:
        mismatch.inside(f"[{len(converted)}]")
        raise
    return converted
