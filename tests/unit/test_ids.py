"""Spans, grants and how a grant is cut into batches."""

import pytest

from flodl.ids import Grant, Span, batch_count, batches_of


def test_span_is_half_open() -> None:
    assert Span(start=3, count=4).stop == 7


def test_grant_holds_the_samples_of_its_spans() -> None:
    assert Grant(pass_index=0, spans=(Span(0, 3), Span(10, 4))).samples == 7


@pytest.mark.parametrize(
    ("samples", "merge_single_tail", "expected"),
    [
        (0, False, ()),
        (8, False, (4, 4)),
        (10, False, (4, 4, 2)),
        (9, False, (4, 4, 1)),
        (9, True, (4, 5)),
        (10, True, (4, 4, 2)),
        (5, True, (5,)),
        (1, True, (1,)),
        (3, True, (3,)),
    ],
)
def test_batches_are_full_but_the_last(samples: int, merge_single_tail: bool, expected: tuple[int, ...]) -> None:
    assert batches_of(samples, batch_size=4, merge_single_tail=merge_single_tail) == expected


@pytest.mark.parametrize("merge_single_tail", [False, True])
@pytest.mark.parametrize("samples", range(14))
def test_batch_count_agrees_with_the_batches(samples: int, merge_single_tail: bool) -> None:
    batches = batches_of(samples, 4, merge_single_tail)

    assert batch_count(samples, 4, merge_single_tail) == len(batches)
