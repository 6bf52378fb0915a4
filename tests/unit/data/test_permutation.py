"""The order of an epoch: a bijection with random access that never changes between machines or releases."""

from collections import Counter

import numpy as np
import pytest

from flodl.data.permutation import EpochOrder
from flodl.ids import Span


def whole(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return EpochOrder(size, seed, epoch).indices([Span(0, size)]).tolist()


def test_golden_small_order_is_pinned() -> None:
    assert whole(10) == [4, 0, 6, 1, 3, 7, 8, 9, 2, 5]


def test_golden_order_of_a_real_dataset_is_pinned() -> None:
    order = EpochOrder(1437, 42, 3).indices([Span(0, 8)])
    assert order.tolist() == [837, 309, 792, 206, 558, 889, 1142, 1347]


def test_golden_order_beyond_any_table_is_pinned() -> None:
    order = EpochOrder(10**12, 42, 3).indices([Span(10**12 - 4, 4)])
    assert order.tolist() == [74864475008, 188340125248, 479608507243, 907953167428]


def test_golden_sum_of_position_times_index_is_pinned() -> None:
    order = EpochOrder(1_281_167, 7, 89).indices([Span(0, 1_281_167)])
    assert int((order * np.arange(order.size)).sum()) == 525764173294105889


@pytest.mark.parametrize("size", [*range(1, 130), 1437, 65_535, 65_536, 65_537, 100_003])
def test_every_index_appears_exactly_once(size: int) -> None:
    assert sorted(whole(size, seed=1, epoch=2)) == list(range(size))


def test_spans_cut_the_same_order_in_any_pieces() -> None:
    order = whole(1000, seed=3, epoch=4)
    pieces = EpochOrder(1000, 3, 4).indices([Span(900, 100), Span(0, 1), Span(17, 0), Span(450, 3)])
    assert pieces.tolist() == order[900:] + order[:1] + order[450:453]


def test_seed_and_epoch_each_change_the_order() -> None:
    orders = {tuple(whole(100, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_without_shuffle_position_is_index() -> None:
    assert EpochOrder(9, 1, 1, shuffle=False).indices([Span(2, 3)]).tolist() == [2, 3, 4]


def test_every_index_is_equally_likely_at_every_position() -> None:
    size, epochs = 37, 4000
    seen = np.zeros((size, size))
    for epoch in range(epochs):
        seen[np.arange(size), whole(size, seed=3, epoch=epoch)] += 1
    expected = epochs / size
    chi_square_per_degree = ((seen - expected) ** 2 / expected).sum() / (size - 1) ** 2
    assert 0.85 < chi_square_per_degree < 1.15


def test_neighbours_in_the_order_are_unrelated() -> None:
    size = 500
    steps = Counter(
        int(step) for epoch in range(400) for step in np.diff(np.array(whole(size, seed=5, epoch=epoch))) % size
    )
    expected = 400 * (size - 1) / (size - 1)
    assert 0.8 < sum((steps[s] - expected) ** 2 / expected for s in range(1, size)) / (size - 2) < 1.2


@pytest.mark.parametrize("span", [Span(-1, 2), Span(9, 2), Span(11, 1)])
def test_positions_outside_the_epoch_are_refused(span: Span) -> None:
    with pytest.raises(IndexError, match="outside an epoch of 10"):
        EpochOrder(10, 0, 0).indices([span])
