"""Nested values as JSON beside named tensors, and back: exact, and without pickle.

None, bool, int, finite floats and strings stand for themselves, lists for lists. Everything else is an object with one
key, which says what it is: ``{"tuple": […]}``, ``{"dict": [[key, value], …]}``, ``{"float": "nan"}``,
``{"tensor": name}``. Whatever has no place here is refused by the path at which it stands.
"""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from flodl.errors import CheckpointError

Node: TypeAlias = Any
"""What ``json`` writes and reads."""

TensorOf: TypeAlias = Callable[[str, object], Any]
"""Gives the tensor of a name; the second argument is the innermost key of a dict under which it stands, or None."""

MAX_DEPTH: Final = 50
"""Of nesting: deeper, it holds itself."""

MAX_INT_BITS: Final = 10_000
"""Python reads no longer number from text."""

_KEPT: Final = "None, bool, int, float, str, tensors and numpy numbers, and lists, tuples and dicts of them"
_MAPPINGS: Final[Mapping[str, type[dict[Any, Any]]]] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": collections.Counter,
}
"""MultiStepLR counts its milestones in a Counter."""

_MAPPING_TAGS: Final = {kind: tag for tag, kind in _MAPPINGS.items()}
_SIGNED: Final = (np.int8, np.int16, np.int32, np.int64)
_UNSIGNED: Final = (np.uint8, np.uint16, np.uint32, np.uint64)
_NUMPY_KINDS: Final[Mapping[str, type[Any]]] = {
    np.dtype(kind).name: kind for kind in (np.bool_, *_SIGNED, *_UNSIGNED, np.float16, np.float32, np.float64)
}
_NUMPY_TAGS: Final = {kind: name for name, kind in _NUMPY_KINDS.items()}


class NamedTensors:
    """Tensors under names that nobody else has: ``named``. One that comes twice has one name."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        """``named`` are there already; they keep their names, and are not found again."""
        self.named = dict(named)
        self._names: dict[int, str] = {}

    def add(self, wanted: str, tensor: torch.Tensor) -> str:
        """The name of ``tensor``: ``wanted``, or like it."""
        known = self._names.get(id(tensor))
        if known is not None:
            return known
        name, number = wanted, 2
        while name in self.named or not name:
            name, number = f"{wanted}~{number}", number + 1
        self.named[name] = tensor
        self._names[id(tensor)] = name
        return name


def encode(value: Any, where: str, tensors: NamedTensors) -> Node:
    """``value`` as JSON; its tensors are added to ``tensors`` under ``where`` and their place below it.

    Raises:
        CheckpointError: something in it has no place in a checkpoint; the message says what and where.
    """
    return _encode(value, where, tensors, 0)


def decode(node: Node, where: str, tensor_of: TensorOf) -> Any:
    """The value that ``encode`` was given, with what ``tensor_of`` returns in place of tensors.

    Raises:
        CheckpointError: ``node`` is nothing that ``encode`` returns; ``where`` begins the message.
    """
    return _decode(node, where, tensor_of, None, 0)


def _encode(value: Any, where: str, tensors: NamedTensors, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where:.200}… is nested more than {MAX_DEPTH} deep; a checkpoint holds no such value")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int and value.bit_length() <= MAX_INT_BITS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind in (list, tuple):
        items = [_encode(item, f"{where}/{index}", tensors, depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in _MAPPING_TAGS:
        return {_MAPPING_TAGS[kind]: [_encode_item(key, item, where, tensors, depth) for key, item in value.items()]}
    if kind in _NUMPY_TAGS:
        return {"numpy": [_NUMPY_TAGS[kind], _encode(value.item(), where, tensors, depth + 1)]}
    if isinstance(value, torch.Tensor):
        _refuse_odd(value, where)
        return {"tensor": tensors.add(where, value)}
    raise _refusal(where, _describe(value))


def _encode_item(key: Any, item: Any, where: str, tensors: NamedTensors, depth: int) -> Node:
    if not _is_plain_key(key):
        raise CheckpointError(
            f"{where} has {_describe(key)} for a key; a checkpoint keeps dicts by str, int, float, "
            "bool, None and tuples of them"
        )
    name = key if isinstance(key, str) else repr(key)
    return [_encode(key, where, tensors, depth + 1), _encode(item, f"{where}/{name}", tensors, depth + 1)]


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_plain_key(part) for part in key)
    return key is None or type(key) in (str, int, float, bool)


def _refuse_odd(tensor: torch.Tensor, where: str) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _refusal(where, _describe(tensor))
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"{where} holds a tensor of the kind {kind}; a checkpoint keeps ordinary, dense ones")


def _refusal(where: str, found: str) -> CheckpointError:
    return CheckpointError(f"{where} holds {found}; a checkpoint keeps {_KEPT}")


def _describe(value: Any) -> str:
    if type(value) is int:
        return f"an int of {value.bit_length()} bits"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _decode(node: Node, where: str, tensor_of: TensorOf, key: object, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise CheckpointError(f"{where:.200}… is damaged: nested more than {MAX_DEPTH} deep")
    if isinstance(node, list):
        return [_decode(item, f"{where}/{index}", tensor_of, key, depth + 1) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    try:
        ((tag, content),) = node.items()
        match tag:
            case "float":
                return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
            case "tuple":
                return tuple(_decode(_listed(content), where, tensor_of, key, depth + 1))
            case "dict" | "ordered" | "counter":
                return _decode_mapping(tag, _listed(content), where, tensor_of, depth)
            case "numpy":
                name, plain = _listed(content)
                return _NUMPY_KINDS[name](_number(_decode(plain, where, tensor_of, key, depth + 1)))
            case "tensor":
                return tensor_of(content, key)
            case _:
                raise KeyError(tag)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(f"{where} is damaged: it holds {node!r:.200}") from None


def _decode_mapping(tag: str, pairs: list[Any], where: str, tensor_of: TensorOf, depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = _MAPPINGS[tag]()
    for key_node, item in pairs:
        key = _decode(key_node, where, tensor_of, None, depth + 1)
        if not _is_plain_key(key) or key in found:
            raise KeyError(key)
        found[key] = _decode(item, f"{where}/{key}", tensor_of, key, depth + 1)
    return found


def _listed(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("no list")
    return content


def _number(value: Any) -> int | float:
    if not isinstance(value, int | float):
        raise TypeError("no number")
    return value
