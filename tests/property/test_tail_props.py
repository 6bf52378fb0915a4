"""The epoch tail conserves every batch."""

import math

from hypothesis import given
from hypothesis import strategies as st

from flodl.core.tail import allocate, equal_shares, ratio_shares

COUNTS = st.dictionaries(st.integers(0, 20), st.integers(1, 30), min_size=1, max_size=6)


@st.composite
def tails(draw: st.DrawFn) -> tuple[int, dict[int, int], dict[int, int]]:
    """What is left (up to a little more than a window), the counts, and what is held of it."""
    counts = draw(COUNTS)
    held = {rank: draw(st.integers(0, 12)) for rank in draw(st.lists(st.sampled_from(sorted(counts)), unique=True))}
    free = draw(st.integers(0, sum(counts.values()) + len(counts) + 3))
    return sum(held.values()) + free, counts, held


@given(tails())
def test_every_batch_is_dealt_once(tail: tuple[int, dict[int, int], dict[int, int]]) -> None:
    remaining, counts, held = tail
    window = allocate(remaining, counts, held)
    assert list(window) == list(counts)
    assert all(window[rank] >= held.get(rank, 0) for rank in counts)
    is_full = sum(max(counts[rank], held.get(rank, 0)) for rank in counts) + len(counts) <= remaining
    if is_full:
        assert window == {rank: max(counts[rank], held.get(rank, 0)) for rank in counts}
    else:
        assert sum(window.values()) == remaining


@given(tails())
def test_no_rank_ends_with_a_single_batch_where_that_can_be_helped(
    tail: tuple[int, dict[int, int], dict[int, int]],
) -> None:
    remaining, counts, held = tail
    window = allocate(remaining, counts, held)
    if sum(window.values()) < remaining:
        return
    singles = [rank for rank, batches in window.items() if batches == 1]
    held_singles = [rank for rank, batches in held.items() if batches == 1]
    free = remaining - sum(held.values())
    if remaining != 1:
        assert set(singles) <= set(held_singles)
        assert len(singles) == max(0, len(held_singles) - free)


@given(COUNTS, st.integers(0, 150))
def test_tail_is_close_to_proportion(counts: dict[int, int], remaining: int) -> None:
    window = allocate(remaining, counts)
    total = sum(counts.values())
    if remaining < total:
        assert all(
            batches >= remaining * counts[rank] // total - 1 or remaining * counts[rank] < 2 * total
            for rank, batches in window.items()
        )
        # a rank takes in at most the singles of all the others
        assert all(batches <= remaining * counts[r] / total + len(counts) for r, batches in window.items())


@given(COUNTS, st.integers(0, 300), st.data())
def test_order_of_the_ranks_does_not_matter(counts: dict[int, int], remaining: int, data: st.DataObject) -> None:
    shuffled = {rank: counts[rank] for rank in data.draw(st.permutations(list(counts)))}
    assert allocate(remaining, shuffled) == allocate(remaining, counts)


@given(COUNTS, st.integers(1, 2000))
def test_an_epoch_ends_after_its_tail(counts: dict[int, int], epoch_batches: int) -> None:
    remaining, windows = epoch_batches, 0
    while remaining:
        remaining -= sum(allocate(remaining, counts).values())
        windows += 1
    assert windows <= math.ceil(epoch_batches / sum(counts.values()))


@given(st.integers(0, 1000), st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True))
def test_equal_shares_are_equal(total: int, ranks: list[int]) -> None:
    shares = equal_shares(total, ranks)
    assert list(shares) == ranks
    assert sum(shares.values()) == total
    assert max(shares.values()) - min(shares.values()) <= 1


@given(COUNTS, st.integers(0, 1000), st.data())
def test_ratio_shares_are_in_proportion_and_conserve_the_total(
    weights: dict[int, int], free: int, data: st.DataObject
) -> None:
    held = {rank: data.draw(st.integers(0, 20)) for rank in weights}
    shares = ratio_shares(free + sum(held.values()), weights, held)
    assert list(shares) == list(weights)
    assert sum(shares.values()) == free + sum(held.values())
    assert all(shares[rank] >= held[rank] for rank in weights)
    beyond = {rank: shares[rank] / weights[rank] for rank in weights if shares[rank] > held[rank]}
    for rank, share in beyond.items():
        assert all(share <= (shares[peer] + 1) / weights[peer] + 1 / weights[rank] for peer in weights)
