"""Frozen dataclasses ↔ JSON documents, checked strictly on the way in.

Serves the files of a run directory and what a daemon reads at its start: every field present or defaulted, none
unknown, each of its annotated type. Strings may hold lone surrogates (undecodable bytes of arguments): JSON escapes
carry them unchanged.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class DocumentFault(ValueError):
    """The document does not fit; the text names the field and never quotes a value (it may be a secret)."""


def dump(record: Any, *, indent: int | None = None) -> str:
    """The JSON text of a dataclass instance, plain ASCII."""
    return json.dumps(dataclasses.asdict(record), indent=indent, allow_nan=False)


def load(cls: type[T], text: str | bytes) -> T:
    """The instance of ``cls`` in ``text``.

    Raises:
        DocumentFault: not JSON, or a field is missing, unknown or of another type.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise DocumentFault("not a JSON document") from None
    lifted: T = _lift(cls, data, cls.__name__)
    return lifted


def _lift(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin is UnionType:
        return None if value is None else _lift(next(a for a in get_args(kind) if a is not NoneType), value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, "a list")
        return tuple(_lift(get_args(kind)[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        _expect(isinstance(value, dict), where, "an object")
        return {key: _lift(get_args(kind)[1], item, f"{where}[…]") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _lift_record(kind, value, where)
    if issubclass(kind, StrEnum):
        _expect(value in list(kind), where, "one of " + ", ".join(kind))
        return kind(value)
    if kind is float:
        _expect(type(value) in (int, float) and abs(value) <= sys.float_info.max, where, "a number")
        return float(value)
    _expect(type(value) is kind, where, f"a {kind.__name__}")
    return value


def _lift_record(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object")
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)
    unknown = sorted(set(value) - {field.name for field in fields})
    _expect(not unknown, where, f"no field {', '.join(unknown)}")
    for field in fields:
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        _expect(field.name in value or has_default, f"{where}.{field.name}", "to be present")
    return kind(**{name: _lift(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _expect(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise DocumentFault(f"{where}: expected {expected}")
