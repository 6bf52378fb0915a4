"""The tests' own tools: bounded waiting."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

Wait = Callable[[Callable[[], Any], float, Any], Any]


def test_wait_returns_the_first_truthy_value(wait_until: Wait) -> None:
    answers = itertools.chain([None, 0, "third"])

    assert wait_until(lambda: next(answers), 5, "an answer") == "third"


def test_wait_fails_naming_what_it_waited_for(wait_until: Wait) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"not within .* the cat to come home"):
        wait_until(lambda: False, 0.05, "the cat to come home")


def test_wait_asks_for_the_state_only_when_it_fails(wait_until: Wait) -> None:
    with pytest.raises(pytest.fail.Exception, match="phase was forming"):
        wait_until(lambda: False, 0.05, lambda: "phase was forming")
