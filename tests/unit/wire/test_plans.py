"""What each annotation takes and refuses, on both ways."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType

import numpy as np
import pytest

from flodl.errors import LocalProtocolError
from flodl.wire.plans import Mismatch, record_plan


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Number(IntEnum):
    TWO = 2


@dataclass(frozen=True, slots=True)
class Inner:
    depth: int


@dataclass(frozen=True, slots=True)
class Outer:
    integer: int = 1
    real: float = 1.0
    text: str = "a"
    raw: bytes = b"a"
    flag: bool = True
    maybe: int | None = None
    scalar: int | float | str | bool | None = None
    colour: Colour = Colour.RED
    many: tuple[int, ...] = ()
    row: tuple[int, str] = (1, "a")
    table: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    inner: Inner = Inner(1)
    inners: tuple[Inner, ...] = ()
    maybe_inner: Inner | None = None


LOWERED = {
    "integer": 1,
    "real": 1.0,
    "text": "a",
    "raw": b"a",
    "flag": True,
    "maybe": None,
    "scalar": None,
    "colour": "red",
    "many": [],
    "row": [1, "a"],
    "table": {},
    "inner": {"depth": 1},
    "inners": [],
    "maybe_inner": None,
}


@pytest.fixture
def plan():
    """Compiled in the test that asks for it, not once for all."""
    record_plan.cache_clear()
    return record_plan(Outer)


def test_a_record_is_lowered_to_a_map_of_all_its_fields(plan):
    assert plan.lower(Outer()) == LOWERED
    assert list(plan.lower(Outer())) == list(LOWERED)


def test_a_map_of_all_fields_is_lifted_to_the_record(plan):
    assert plan.lift(LOWERED) == Outer()


@pytest.mark.parametrize(
    ("name", "lowered", "lifted"),
    [
        ("integer", -(2**63), -(2**63)),
        ("integer", 2**63 - 1, 2**63 - 1),
        ("real", 0.5, 0.5),
        ("real", 3, 3.0),
        ("real", math.inf, math.inf),
        ("text", "ä", "ä"),
        ("flag", False, False),
        ("maybe", 3, 3),
        ("scalar", 3, 3),
        ("scalar", 3.0, 3.0),
        ("scalar", "x", "x"),
        ("scalar", False, False),
        ("colour", "blue", Colour.BLUE),
        ("many", [1, 2, 3], (1, 2, 3)),
        ("row", [2, "b"], (2, "b")),
        ("table", {"a": [1.5, 2], "": [0.0, 0]}, {"a": (1.5, 2), "": (0.0, 0)}),
        ("inners", [{"depth": 1}, {"depth": 2}], (Inner(1), Inner(2))),
        ("maybe_inner", {"depth": 3}, Inner(3)),
    ],
)
def test_fitting_values_pass_both_ways_with_their_types(plan, name, lowered, lifted):
    got = getattr(plan.lift({**LOWERED, name: lowered}), name)

    assert got == lifted
    assert type(got) is type(lifted)
    assert plan.lower(Outer(**{name: lifted}))[name] == lowered


def test_nan_is_a_float(plan):
    assert math.isnan(plan.lift({**LOWERED, "real": math.nan}).real)
    assert math.isnan(plan.lower(Outer(real=math.nan))["real"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("integer", True, ".integer: expected int, got bool"),
        ("integer", 1.0, ".integer: expected int, got float"),
        ("integer", "1", ".integer: expected int, got str"),
        ("integer", None, ".integer: expected int, got NoneType"),
        ("integer", 2**63, ".integer: int outside 64 bits"),
        ("integer", -(2**63) - 1, ".integer: int outside 64 bits"),
        ("real", False, ".real: expected float, got bool"),
        ("real", "1", ".real: expected float, got str"),
        ("real", 2**63, ".real: int outside 64 bits"),
        ("text", b"a", ".text: expected str, got bytes"),
        ("raw", "a", ".raw: expected bytes, got str"),
        ("flag", 1, ".flag: expected bool, got int"),
        ("flag", None, ".flag: expected bool, got NoneType"),
        ("maybe", "x", ".maybe: expected int, got str"),
        ("maybe", 2**63, ".maybe: int outside 64 bits"),
        ("scalar", b"x", ".scalar: expected int | float | str | bool | None, got bytes"),
        ("scalar", 2**63, ".scalar: expected int | float | str | bool | None, got int"),
        ("colour", "green", ".colour: expected one of red, blue"),
        ("colour", 1, ".colour: expected str, got int"),
        ("many", {}, ".many: expected tuple of int, got dict"),
        ("many", "12", ".many: expected tuple of int, got str"),
        ("many", [1, 2, "x"], ".many[2]: expected int, got str"),
        ("row", [1], ".row: expected (int, str), got list"),
        ("row", [1, "a", 1], ".row: expected (int, str), got list"),
        ("row", "ab", ".row: expected (int, str), got str"),
        ("row", [1, 2], ".row[1]: expected str, got int"),
        ("table", [], ".table: expected mapping of str to (float, int), got list"),
        ("table", {b"a": [1.0, 1]}, ".table: expected str as key, got bytes"),
        ("table", {"a": [1.0]}, ".table['a']: expected (float, int), got list"),
        ("table", {"a": [1.0, 1.0]}, ".table['a'][1]: expected int, got float"),
        ("table", {"k" * 90: 1}, f".table['{'k' * 40}']: expected (float, int), got int"),
        ("inner", [1], ".inner: expected Inner, got list"),
        ("inner", {"depth": "x"}, ".inner.depth: expected int, got str"),
        ("inner", {}, ".inner: field depth is missing"),
        ("inner", {"depth": 1, "x": 2}, ".inner: unknown field 'x'"),
        ("inner", {"depth": 1, b"y": 2, "z": 1}, ".inner: unknown field 'z'"),
        ("inner", {"depth": 1, "x" * 90: 2}, f".inner: unknown field '{'x' * 39}"),
        ("inners", [{"depth": 1}, {"depth": None}], ".inners[1].depth: expected int, got NoneType"),
        ("maybe_inner", {"depth": "x"}, ".maybe_inner.depth: expected int, got str"),
    ],
)
def test_lift_names_the_field_and_the_fault(plan, name, value, message):
    with pytest.raises(Mismatch) as caught:
        plan.lift({**LOWERED, name: value})

    assert f"{caught.value.where()}: {caught.value.fault}" == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("integer", True, ".integer: expected int, got bool"),
        ("integer", np.int64(1), ".integer: expected int, got int64"),
        ("integer", 2**63, ".integer: int outside 64 bits"),
        ("real", np.float32(1), ".real: expected float, got float32"),
        ("raw", bytearray(b"a"), ".raw: expected bytes, got bytearray"),
        ("colour", "red", ".colour: expected Colour, got str"),
        ("scalar", (), ".scalar: expected int | float | str | bool | None, got tuple"),
        ("many", [1], ".many: expected tuple of int, got list"),
        ("many", (1, "x"), ".many[1]: expected int, got str"),
        ("row", [1, "a"], ".row: expected (int, str), got list"),
        ("row", (1,), ".row: expected (int, str), got tuple"),
        ("row", ("a", "a"), ".row[0]: expected int, got str"),
        ("table", (), ".table: expected mapping of str to (float, int), got tuple"),
        ("table", {1: (1.0, 1)}, ".table: expected str as key, got int"),
        ("table", {"a": ("x", 1)}, ".table['a'][0]: expected float, got str"),
        ("inner", Outer(), ".inner: expected Inner, got Outer"),
        ("inner", {"depth": 1}, ".inner: expected Inner, got dict"),
        ("inners", (Inner("x"),), ".inners[0].depth: expected int, got str"),
        ("maybe_inner", Outer(), ".maybe_inner: expected Inner, got Outer"),
    ],
)
def test_lower_names_the_field_and_the_fault(plan, name, value, message):
    with pytest.raises(Mismatch) as caught:
        plan.lower(Outer(**{name: value}))

    assert f"{caught.value.where()}: {caught.value.fault}" == message


def test_subclasses_of_scalars_are_lowered(plan):
    lowered = plan.lower(Outer(integer=Number.TWO, real=np.float64(0.5), text=Colour.BLUE))

    assert (lowered["integer"], lowered["real"], lowered["text"]) == (2, 0.5, "blue")


def test_an_integer_for_a_float_field_is_sent_as_a_float(plan):
    assert type(plan.lower(Outer(real=3))["real"]) is float


def test_any_mapping_is_lowered(plan):
    assert plan.lower(Outer(table=MappingProxyType({"a": (1.0, 2)})))["table"] == {"a": [1.0, 2]}


def test_the_record_itself_is_checked_with_an_empty_path(plan):
    with pytest.raises(Mismatch, match=r"^expected Outer, got list$") as caught:
        plan.lift([])

    assert caught.value.where() == ""


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        (complex, "class 'complex'"),
        (list[int], r"list\[int\]"),
        (Mapping[int, int], r"collections\.abc\.Mapping\[int, int\]"),
        (IntEnum, "enum 'IntEnum'"),
    ],
)
def test_an_annotation_that_cannot_travel_is_refused(annotation, shown):
    @dataclass
    class Odd:
        odd: annotation

    with pytest.raises(LocalProtocolError, match=f"^annotation .*{shown}.*: cannot travel$"):
        record_plan(Odd)


def test_none_alone_is_an_annotation():
    @dataclass(frozen=True)
    class Nothing:
        value: None

    plan = record_plan(Nothing)

    assert plan.lift({"value": None}) == Nothing(None)
    with pytest.raises(Mismatch, match=r"^expected None, got int$"):
        plan.lift({"value": 0})


def test_the_fault_describes_what_was_expected_down_to_the_leaves():
    @dataclass
    class Nested:
        rows: tuple[tuple[Colour | None, tuple[int, ...], Mapping[str, bytes], int | str, Inner], ...]

    with pytest.raises(Mismatch) as caught:
        record_plan(Nested).lift({"rows": 1})

    assert caught.value.fault == (
        "expected tuple of (Colour | None, tuple of int, mapping of str to bytes, int | str, Inner), got int"
    )


def test_plans_are_compiled_once():
    assert record_plan(Outer) is record_plan(Outer)
