"""The epoch tail: everything is dealt, nobody is left with a single batch."""

import pytest

from flodl.core.tail import allocate, equal_shares, ratio_shares
from flodl.errors import InvariantViolation


def test_full_windows_are_what_was_planned() -> None:
    assert allocate(100, {0: 10, 1: 10, 2: 3}) == {0: 10, 1: 10, 2: 3}


def test_window_with_one_more_batch_per_rank_left_is_still_full() -> None:
    assert allocate(26, {0: 10, 1: 10, 2: 3}) == {0: 10, 1: 10, 2: 3}


@pytest.mark.parametrize(
    ("remaining", "window"),
    [(23, {0: 10, 1: 10, 2: 3}), (24, {0: 10, 1: 10, 2: 4}), (25, {0: 10, 1: 11, 2: 4})],
)
def test_too_few_for_another_window_are_folded_into_this_one_slow_ranks_first(
    remaining: int, window: dict[int, int]
) -> None:
    assert allocate(remaining, {0: 10, 1: 10, 2: 3}) == window


@pytest.mark.parametrize(
    ("remaining", "window"),
    [
        (22, {0: 10, 1: 9, 2: 3}),
        (12, {0: 5, 1: 5, 2: 2}),
        (8, {0: 4, 1: 4, 2: 0}),  # 3, 3 and a single of the slow rank, which moves
        (5, {0: 3, 1: 2, 2: 0}),
        (3, {0: 3, 1: 0, 2: 0}),
        (2, {0: 2, 1: 0, 2: 0}),
        (1, {0: 1, 1: 0, 2: 0}),
        (0, {0: 0, 1: 0, 2: 0}),
    ],
)
def test_less_than_a_window_is_dealt_in_proportion_without_singles(remaining: int, window: dict[int, int]) -> None:
    assert allocate(remaining, {0: 10, 1: 10, 2: 3}) == window


def test_largest_remainders_get_what_does_not_divide() -> None:
    assert allocate(11, {0: 7, 1: 5, 2: 6}) == {0: 4, 1: 3, 2: 4}


def test_equal_remainders_go_to_the_fast_then_to_the_lower_rank() -> None:
    assert allocate(6, {0: 2, 1: 6}) == {0: 0, 1: 6}  # 1.5 and 4.5, then the single moves
    assert allocate(10, {0: 2, 1: 6, 2: 6, 3: 2}) == {0: 2, 1: 4, 2: 4, 3: 0}


def test_single_moves_onto_the_smallest_peer_that_has_one() -> None:
    assert allocate(13, {0: 12, 1: 6, 2: 2}) == {0: 8, 1: 5, 2: 0}


def test_two_singles_become_a_pair() -> None:
    assert allocate(10, {0: 8, 1: 1, 2: 1}) == {0: 8, 1: 2, 2: 0}


def test_counts_of_one_end_as_pairs() -> None:
    assert allocate(4, {0: 1, 1: 1, 2: 1}) == {0: 2, 1: 0, 2: 2}


def test_held_batches_raise_a_full_window() -> None:
    assert allocate(100, {0: 10, 1: 10}, {0: 14}) == {0: 14, 1: 10}


def test_held_batches_count_as_part_of_the_full_window() -> None:
    assert allocate(26, {0: 10, 1: 10}, {0: 14}) == {0: 14, 1: 10}
    assert allocate(25, {0: 10, 1: 10}, {0: 14}) == {0: 14, 1: 11}


def test_held_batches_stay_where_they_are_in_the_tail() -> None:
    assert allocate(12, {0: 10, 1: 10, 2: 10}, {0: 6}) == {0: 6, 1: 3, 2: 3}


def test_what_is_held_pushes_others_below_their_held_share_no_further() -> None:
    assert allocate(12, {0: 10, 1: 10, 2: 10}, {0: 7, 1: 3}) == {0: 7, 1: 3, 2: 2}
    assert allocate(12, {0: 10, 1: 10, 2: 10}, {0: 6, 1: 4}) == {0: 6, 1: 4, 2: 2}


def test_rank_that_becomes_pinned_by_anothers_holding_keeps_what_it_holds() -> None:
    assert allocate(30, {0: 10, 1: 10, 2: 20}, {0: 15, 1: 7}) == {0: 15, 1: 7, 2: 8}


def test_everything_held_is_dealt_as_held() -> None:
    assert allocate(5, {0: 10, 1: 10}, {0: 4, 1: 1}) == {0: 4, 1: 1}


def test_held_single_gets_a_second_from_the_largest_peer() -> None:
    assert allocate(8, {0: 20, 1: 20, 2: 2}, {2: 1}) == {0: 3, 1: 3, 2: 2}
    assert allocate(9, {0: 20, 1: 20, 2: 2}, {2: 1}) == {0: 4, 1: 3, 2: 2}


def test_held_single_is_not_helped_by_a_peer_that_would_be_left_with_a_held_single() -> None:
    assert allocate(3, {0: 20, 1: 2}, {0: 1, 1: 1}) == {0: 2, 1: 1}


def test_held_single_is_not_helped_by_a_peer_that_holds_all_it_has() -> None:
    assert allocate(5, {0: 20, 1: 2}, {0: 4, 1: 1}) == {0: 4, 1: 1}


def test_peer_that_gives_one_of_two_gives_both() -> None:
    assert allocate(3, {0: 2, 1: 6}, {0: 1}) == {0: 3, 1: 0}


def test_held_single_is_helped_by_a_peer_that_keeps_two() -> None:
    assert allocate(4, {0: 1, 1: 20}, {0: 1, 1: 2}) == {0: 2, 1: 2}


def test_held_singles_share_a_pair() -> None:
    assert allocate(4, {0: 3, 1: 3, 2: 5}, {0: 1, 1: 1}) == {0: 2, 1: 2, 2: 0}


@pytest.mark.parametrize(
    ("remaining", "counts", "held", "message"),
    [
        (4, {}, {}, "needs a count of at least 1: {}"),
        (4, {0: 3, 1: 0}, {}, "needs a count of at least 1: {0: 3, 1: 0}"),
        (4, {0: 3}, {0: 5}, r"of 4 batches {0: 5} are held, by ranks \[0\]"),
        (4, {0: 3}, {1: 2}, r"of 4 batches {1: 2} are held, by ranks \[0\]"),
        (-1, {0: 3}, {}, r"of -1 batches {} are held"),
    ],
)
def test_impossible_plans_are_refused(
    remaining: int, counts: dict[int, int], held: dict[int, int], message: str
) -> None:
    with pytest.raises(InvariantViolation, match=message):
        allocate(remaining, counts, held)


@pytest.mark.parametrize(
    ("total", "ranks", "shares"),
    [
        (9, [0, 1, 2], {0: 3, 1: 3, 2: 3}),
        (11, [4, 2, 7], {4: 4, 2: 4, 7: 3}),
        (1, [0, 1], {0: 1, 1: 0}),
        (0, [3], {3: 0}),
    ],
)
def test_equal_shares_differ_by_at_most_one(total: int, ranks: list[int], shares: dict[int, int]) -> None:
    assert equal_shares(total, ranks) == shares


def test_equal_shares_leave_a_rank_what_it_holds() -> None:
    assert equal_shares(12, [0, 1, 2], {0: 7, 1: 1}) == {0: 7, 1: 3, 2: 2}


def test_equal_shares_need_a_rank() -> None:
    with pytest.raises(InvariantViolation, match=r"every live rank needs a count of at least 1: {}"):
        equal_shares(5, [])


def test_equal_shares_cannot_leave_more_than_there_is() -> None:
    with pytest.raises(InvariantViolation, match=r"of 5 batches {1: 6} are held, by ranks \[0, 1\]"):
        equal_shares(5, [0, 1], {1: 6})


@pytest.mark.parametrize(
    ("total", "weights", "held", "shares"),
    [
        (10, {0: 5, 1: 3, 2: 2}, {}, {0: 5, 1: 3, 2: 2}),
        (11, {0: 5, 1: 3, 2: 2}, {}, {0: 6, 1: 3, 2: 2}),
        (3, {0: 98, 1: 1, 2: 1}, {}, {0: 3, 1: 0, 2: 0}),
        (10, {0: 5, 1: 5}, {1: 8}, {0: 2, 1: 8}),
        (0, {0: 5, 1: 5}, {}, {0: 0, 1: 0}),
    ],
)
def test_ratio_shares_follow_the_weights_and_leave_what_is_held(
    total: int, weights: dict[int, int], held: dict[int, int], shares: dict[int, int]
) -> None:
    assert ratio_shares(total, weights, held) == shares
