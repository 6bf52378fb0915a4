"""What is believed of a run's own words."""

import json
from typing import Any

import pytest

from flodl.launch.reported import reported


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"a\ud800b"', "a\\ud800b"),
        (r'"\ud83d\ude00 é"', "\U0001f600 é"),
        (str(2**53), 2**53),
        (str(-(2**53) - 1), None),
        ("1" + "0" * 400, None),
        ("1e999", None),
        ("NaN", None),
        ("1e300", 1e300),
        ("true", True),
        ("null", None),
    ],
)
def test_values_come_as_they_can_be_shown(text: str, value: object) -> None:
    data = json.loads('{"hosts": [{"x": %s, "y": [%s]}], "z": {"z": %s}, "m": %s}' % ((text,) * 4))
    assert reported(data) == {"hosts": [{"x": value, "y": [value]}], "z": {"z": value}, "m": value}


def test_keys_come_as_they_can_be_shown() -> None:
    assert reported({"a\ud800": {"b\ud800": 1}}) == {"a\\ud800": {"b\\ud800": 1}}


@pytest.mark.parametrize("key", ["hosts", "ranks", "absent", "losses"])
@pytest.mark.parametrize("value", [7, "ab", True, {"a": {}}, [1], [{}, None]])
def test_lists_that_hold_no_records_are_damage(key: str, value: Any) -> None:
    assert reported({key: value}) is None


@pytest.mark.parametrize("data", [None, [], 7, "x"])
def test_what_is_no_object_is_none(data: object) -> None:
    assert reported(data) is None
