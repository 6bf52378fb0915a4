"""Who is taken to differ, whom it is asked of, and what is named."""

import pytest

from flodl.core.disagreement import MAX_ASKED, Difference, Disagreement
from flodl.ids import RankId, RoundKey
from flodl.messages import SumDescribed

KEY = RoundKey(1, 7, 1)


def described(rank: RankId, key: RoundKey = KEY, **tensors: str) -> SumDescribed:
    return SumDescribed(rank, key, tuple(tensors), b"".join(value.encode().ljust(8) for value in tensors.values()))


@pytest.mark.parametrize(
    ("digests", "dissenters", "has_majority", "asked"),
    [
        ("xyy", (0,), True, (1, 0)),
        ("yyx", (2,), True, (0, 2)),
        ("xy", (1,), False, (0, 1)),
        ("xyz", (1, 2), False, (0, 1, 2)),
        ("xxyz", (2, 3), False, (0, 2, 3)),
        ("xxxyz", (3, 4), True, (0, 3, 4)),
    ],
)
def test_minority_differs_and_the_lowest_rank_is_believed_in_a_tie(
    digests: str, dissenters: tuple[RankId, ...], has_majority: bool, asked: tuple[RankId, ...]
) -> None:
    found = Disagreement(KEY, dict(enumerate(digests)))
    assert (found.dissenters, found.has_majority, found.asked) == (dissenters, has_majority, asked)


def test_few_are_asked_however_many_differ() -> None:
    found = Disagreement(KEY, {rank: str(rank) for rank in range(1000)})
    assert found.asked == tuple(range(MAX_ASKED))


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_tensors_are_named_once_both_sides_are_known(order: tuple[RankId, ...]) -> None:
    found = Disagreement(KEY, {0: "x", 1: "x", 2: "y"})
    answers = {0: described(0, weight="a", bias="b"), 2: described(2, weight="a", bias="B")}
    assert found.hear(answers[order[0]]) == ()
    assert found.hear(answers[order[1]]) == (Difference(2, 0, ("bias",), 2),)
    assert found.hear(answers[order[1]]) == ()


def test_each_dissenter_is_named_when_it_answers() -> None:
    found = Disagreement(KEY, dict(enumerate("xxxyz")))
    found.hear(described(3, weight="b"))
    assert found.hear(described(0, weight="a")) == (Difference(3, 0, ("weight",), 1),)
    assert found.hear(described(4, weight="c")) == (Difference(4, 0, ("weight",), 1),)


def test_answers_of_other_ranks_and_attempts_say_nothing() -> None:
    found = Disagreement(KEY, dict(enumerate("xxy")))
    found.hear(described(0, weight="a"))
    assert found.hear(described(1, weight="b")) == ()
    assert found.hear(described(2, RoundKey(1, 7, 2), weight="b")) == ()


def test_tensors_that_only_one_side_has_differ() -> None:
    found = Disagreement(KEY, {0: "x", 1: "y"})
    found.hear(described(0, weight="a"))
    assert found.hear(described(1, bias="a")) == (Difference(1, 0, ("bias", "weight"), 2),)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((), "rank 2 differs from rank 0 in none of 9 tensors: it was transient"),
        (("a", "b"), "rank 2 differs from rank 0 in a, b (9 tensors compared)"),
        (tuple("abcdefg"), "rank 2 differs from rank 0 in a, b, c, d, e and 2 more (9 tensors compared)"),
    ],
)
def test_difference_in_words(tensors: tuple[str, ...], words: str) -> None:
    assert Difference(2, 0, tensors, 9).describe() == words


@pytest.mark.parametrize(
    ("tensors", "is_of_outer"),
    [
        (("w of the version before",), True),
        (("w of the version before", "slot 0 of the outer optimizer, torch.float32"), True),
        (("w", "w of the version before"), False),
        (("w", "slot 0 of the outer optimizer, torch.float32"), False),
    ],
)
def test_ranks_that_agree_on_the_sum_are_told_of_the_outer_optimizer(
    tensors: tuple[str, ...], is_of_outer: bool
) -> None:
    words = Difference(2, 0, tensors, 9).describe()
    assert (": the sums agree, what the outer optimizer made of the last one does not; give" in words) == is_of_outer
