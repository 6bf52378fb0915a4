"""Frozen dataclasses ↔ plain JSON values, by field name, as their annotations say.

``lift`` reads what anybody may have written: each value is checked for type and range, and whatever is wrong is named
by its path. Unknown fields are ignored and missing ones take their defaults, so that a file of a later version can be
read as far as this one knows its words, and one of an earlier version wholly. A StrEnum travels by its value, an
IntEnum by its name in small letters, a mapping by number with the number as text. Floats survive bit by bit; there are
no infinite ones and no NaN.
"""

import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache
from typing import Any, Final

from flodl.errors import CheckpointError

MAX_WHOLE: Final = 2**63 - 1
MAX_TEXT: Final = 4096
"""Characters; the longest text is a path."""


def lower(value: Any) -> Any:
    """What ``json.dumps`` takes for ``value``."""
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [lower(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): lower(item) for key, item in value.items()}
    if is_dataclass(value):
        return {each.name: lower(getattr(value, each.name)) for each in fields(value)}
    return value


def lift(annotation: Any, value: object, where: str, least: Mapping[str, int]) -> Any:
    """The value of type ``annotation`` that JSON's ``value`` stands for.

    Args:
        annotation: bool, int, float, str, an enum, ``X | None``, ``tuple[X, ...]``, ``Mapping[int | str, X]``, or a
            dataclass of such fields.
        value: from ``json.loads``.
        where: its path, for complaints.
        least: the least of a whole number by the name of its field; 0 where it has none. No float is below 0.

    Raises:
        CheckpointError: something is not as annotated; the message begins with its path.
    """
    if annotation in _SCALARS:
        return _SCALARS[annotation](value, where, least.get(_field_of(where), 0))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType:
        some = next(each for each in arguments if each is not types.NoneType)
        return None if value is None else lift(some, value, where, least)
    if origin is tuple:
        items = expect(list, value, where)
        return tuple(lift(arguments[0], item, f"{where}[{place}]", least) for place, item in enumerate(items))
    if origin is Mapping:
        pairs = expect(dict, value, where).items()
        return {
            _key(arguments[0], key, where): lift(arguments[1], item, f"{where}[{_short(key)}]", least)
            for key, item in pairs
        }
    if issubclass(annotation, StrEnum | IntEnum):
        return _member(annotation, value, where)
    return _record(annotation, value, where, least)


def expect(kind: type, value: object, where: str) -> Any:
    """``value``, which must be a JSON object (dict) or array (list).

    Raises:
        CheckpointError: it is something else.
    """
    if not isinstance(value, kind):
        raise CheckpointError(f"{where} is {_short(value)}, expected {'an object' if kind is dict else 'an array'}")
    return value


def _record(cls: type, value: object, where: str, least: Mapping[str, int]) -> Any:
    given, found = expect(dict, value, where), {}
    for name, (annotation, each) in _shape(cls).items():
        if name in given:
            found[name] = lift(annotation, given[name], f"{where}.{name}", least)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise CheckpointError(f"{where}.{name} is missing")
    return cls(**found)


@cache
def _shape(cls: Any) -> dict[str, tuple[Any, "Field[Any]"]]:
    hints = typing.get_type_hints(cls)
    return {each.name: (hints[each.name], each) for each in fields(cls)}


def _member(cls: type[StrEnum] | type[IntEnum], value: object, where: str) -> StrEnum | IntEnum:
    members: dict[str, StrEnum | IntEnum] = {lower(member): member for member in cls}
    if not isinstance(value, str) or value not in members:
        raise CheckpointError(f"{where} is {_short(value)}, this flodl knows {', '.join(members)}")
    return members[value]


def _key(annotation: Any, key: str, where: str) -> int | str:
    if annotation is str:
        return _text(key, f"a name in {where}", 0)
    if not (key.isascii() and key.isdecimal() and str(int(key[:20])) == key):
        raise CheckpointError(f"{where} has {_short(key)}, expected whole numbers as names")
    return int(key)


def _truth(value: object, where: str, _least: int) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{where} is {_short(value)}, expected true or false")
    return value


def _whole(value: object, where: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_WHOLE:
        raise CheckpointError(f"{where} is {_short(value)}, expected a whole number of at least {least}")
    return value


def _number(value: object, where: str, _least: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise CheckpointError(f"{where} is {_short(value)}, expected a finite number of at least 0")
    return float(value)


def _text(value: object, where: str, _least: int) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise CheckpointError(f"{where} is {_short(value)}, expected a text of at most {MAX_TEXT} characters")
    return value


_SCALARS: Final[Mapping[Any, Any]] = {bool: _truth, int: _whole, float: _number, str: _text}


def _field_of(where: str) -> str:
    """The name of the field that ``a.b.name[3]`` lies in."""
    return where.rpartition(".")[2].partition("[")[0]


def _short(value: object) -> str:
    """``value`` for a message; what it says came from outside."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
