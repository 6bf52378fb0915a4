"""Numbers with their nouns."""

import pytest

from flodl.core.counted import counted, numbered, there


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (2, "rank", "2 ranks"),
        (1, "loss", "1 loss"),
        (3, "loss", "3 losses"),
    ],
)
def test_noun_follows_its_number(count: int, noun: str, words: str) -> None:
    assert counted(count, noun) == words


def test_ranks_are_named_by_their_numbers() -> None:
    assert (numbered("rank", [3]), numbered("rank", (0, 2))) == ("rank 3", "ranks 0, 2")


@pytest.mark.parametrize(
    ("count", "wanted", "words"),
    [
        (0, 1, "0 of 1 rank is there"),
        (1, 2, "1 of 2 ranks are there"),
        (2, 2, "2 of 2 ranks are there"),
        (3, 2, "3 ranks are there, 2 would do"),
        (1, None, "1 rank is there"),
        (2, None, "2 ranks are there"),
    ],
)
def test_more_than_are_wanted_are_no_part_of_them(count: int, wanted: int | None, words: str) -> None:
    assert there(count, wanted, "rank") == words
