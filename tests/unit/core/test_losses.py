"""How many lost ranks a run bears."""

import pytest

from flodl.core.losses import Losses


def lost(size: int, count: int) -> Losses:
    losses = Losses()
    losses.begin(size)
    losses.add(count)
    return losses


@pytest.mark.parametrize(("limit", "size", "count"), [(None, 3, 2), (2, 3, 1), (0.5, 4, 1), (0.34, 3, 1), (5, 3, 3)])
def test_losses_below_the_limit_are_borne(limit: float | None, size: int, count: int) -> None:
    assert lost(size, count).verdict(limit) == ""


@pytest.mark.parametrize(
    ("limit", "size", "count", "words"),
    [
        (1, 3, 1, "1 rank lost, and max_failure is 1"),
        (2, 3, 3, "3 ranks lost, and max_failure is 2"),
        (0.5, 4, 2, "2 ranks lost, and max_failure is 0.5 of 4"),
    ],
)
def test_losses_at_the_limit_are_too_many(limit: float, size: int, count: int, words: str) -> None:
    assert lost(size, count).verdict(limit) == words


def test_losses_before_the_formation_do_not_count() -> None:
    losses = Losses()
    losses.add(2)
    losses.begin(3)
    assert losses.count == 0
