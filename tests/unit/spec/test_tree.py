"""Nested values as JSON and tensors: what comes back is what was given, and what cannot be kept is named."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flodl.errors import CheckpointError
from flodl.spec.tree import MAX_DEPTH, NamedTensors, decode, encode


def there_and_back(value: Any) -> Any:
    tensors = NamedTensors({})
    text = json.dumps(encode(value, "optim", tensors), allow_nan=False)
    return decode(json.loads(text), "optim", lambda name, _: tensors.named[name])


def shape_of(value: Any) -> Any:
    """Types and values, so that 1, 1.0 and True differ, as do lists and tuples, and the order of keys counts."""
    if isinstance(value, dict):
        return type(value), [(shape_of(key), shape_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(item) for item in value]
    return type(value), repr(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**70),
        1.0,
        -0.0,
        0.1 + 0.2,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        "",
        "a/b \u2028 \udc80",
        [],
        (),
        {},
        [1, (2, [3, (4.0,)]), ((),)],
        {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "nested": {"a": [{}]}},
        {3: "int", "3": "str", 3.5: "float", False: "bool", None: "none", (1, "a", (2.0,)): "tuple"},
        {math.inf: math.nan},
        {"b": 1, "a": 2},
        {"tuple": [1], "dict": [["x", 1]], "tensor": "name", "float": "nan"},
        Counter({30: 2, 80: 1}),
        OrderedDict([("z", 1), ("a", 2)]),
        np.float64(0.1),
        np.float32(math.inf),
        np.float16(0.1),
        np.int64(-3),
        np.uint8(255),
        np.bool_(True),
        [np.float64(math.nan)],
    ],
)
def test_value_comes_back_exactly(value: Any) -> None:
    assert shape_of(there_and_back(value)) == shape_of(value)


def test_tensors_stand_under_the_path_at_which_they_were() -> None:
    tensors = NamedTensors({})
    first, second, third = torch.ones(1), torch.zeros(2), torch.eye(2)

    node = encode({"a": first, "history": [(second,), {7: third}]}, "optim/w", tensors)

    assert tensors.named == {"optim/w/a": first, "optim/w/history/0/0": second, "optim/w/history/1/7": third}
    found = decode(json.loads(json.dumps(node)), "optim/w", lambda name, _: tensors.named[name])
    assert found["history"][0][0] is second
    assert found["history"][1][7] is third


def test_decoder_is_told_the_key_under_which_a_tensor_stands() -> None:
    seen: list[object] = []
    node = encode({"step": torch.ones(1), "list": [torch.ones(1)], "in": {5: torch.ones(1)}}, "x", NamedTensors({}))

    decode([node, encode(torch.ones(1), "y", NamedTensors({}))], "x", lambda _, key: seen.append(key))

    assert seen == ["step", "list", 5, None]


def test_shared_tensor_is_stored_once_and_shared_again() -> None:
    rate = torch.tensor(0.1)
    tensors = NamedTensors({})

    assert encode([rate, rate], "x", tensors) == [{"tensor": "x/0"}, {"tensor": "x/0"}]
    assert list(tensors.named) == ["x/0"]


def test_names_that_would_collide_are_told_apart() -> None:
    tensors = NamedTensors({"x/a/b": torch.ones(1)})
    value = {"a/b": torch.ones(2), "a": {"b": torch.ones(3)}}

    node = encode(value, "x", tensors)

    assert [len(tensor) for tensor in tensors.named.values()] == [1, 2, 3]
    found = decode(node, "x", lambda name, _: tensors.named[name])
    assert (len(found["a/b"]), len(found["a"]["b"])) == (2, 3)


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"foo": lambda: None}, r"optim/0/foo holds a function; a checkpoint keeps None, bool"),
        ({"foo": [1, {2: Path("x")}]}, r"optim/0/foo/1/2 holds a PosixPath"),
        ({"foo": b"bytes"}, r"optim/0/foo holds a bytes"),
        ({"foo": 1j}, r"optim/0/foo holds a complex"),
        ({"foo": {1}}, r"optim/0/foo holds a set"),
        ({"foo": deque()}, r"optim/0/foo holds a deque"),
        ({"foo": defaultdict(list)}, r"optim/0/foo holds a defaultdict"),
        ({"foo": torch.Size([1])}, r"optim/0/foo holds a Size"),
        ({"foo": np.ones(2)}, r"optim/0/foo holds a ndarray"),
        ({"foo": object()}, r"optim/0/foo holds an object"),
        ({"foo": 1 << 10_001}, r"optim/0/foo holds an int of 10002 bits"),
        ({Fraction(1): 1}, r"optim/0 has a Fraction for a key"),
        ({(1, b""): 1}, r"optim/0 has a tuple for a key"),
        ({"foo": torch.eye(2).to_sparse()}, r"optim/0/foo holds a tensor of the kind sparse_coo"),
        ({"foo": torch.ones(2, device="meta")}, r"optim/0/foo holds a tensor of the kind meta"),
        ({"foo": torch.ones(2).as_subclass(Sub)}, r"optim/0/foo holds a Sub"),
        ({"foo": itself()}, rf"optim/0/foo/0/0.*… is nested more than {MAX_DEPTH} deep"),
    ],
)
def test_what_has_no_place_is_refused_where_it_stands(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value, "optim/0", NamedTensors({}))


def test_parameter_is_a_tensor_like_any_other() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert there_and_back({"anchor": weight})["anchor"] is weight


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"tuple": [value]}
    return value


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"tuple": [], "dict": []},
        {"tuple": "ab"},
        {"tuple": {"a": 1}},
        {"dict": {"a": 1}},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [["a"]]},
        {"dict": ["ab", 3]},
        {"dict": [[["list"], 1]]},
        {"dict": [[{"dict": []}, 1]]},
        {"dict": [[{"tensor": "there"}, 1]]},
        {"counter": 3},
        {"float": "1.5"},
        {"float": []},
        {"numpy": ["float128", 1.0]},
        {"numpy": ["float64"]},
        {"numpy": ["int8", 1000]},
        {"numpy": ["int8", [1, 2]]},
        {"numpy": ["int8", "1"]},
        {"numpy": [[], 1]},
        {"tensor": "nowhere"},
        {"tensor": []},
        {"tensor": None},
        {"pickle": "gASVAAAA"},
        deep(200),
    ],
)
def test_damaged_node_is_refused(node: Any) -> None:
    tensors = {"there": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"^x.* is damaged"):
        decode([node], "x", lambda name, _: tensors[name])
