"""SpanSet: one normal form, whatever the order of additions."""

import pytest

from flodl.core.spans import SpanSet
from flodl.errors import InvariantViolation
from flodl.ids import Span


def test_empty_set_holds_nothing() -> None:
    assert SpanSet().spans == ()
    assert SpanSet().samples == 0


def test_spans_are_sorted() -> None:
    held = SpanSet([Span(20, 5), Span(0, 5), Span(10, 5)])
    assert held.spans == (Span(0, 5), Span(10, 5), Span(20, 5))
    assert held.samples == 15


def test_span_joins_the_one_before() -> None:
    assert SpanSet([Span(0, 5), Span(5, 3), Span(10, 1)]).spans == (Span(0, 8), Span(10, 1))


def test_span_joins_the_one_behind() -> None:
    assert SpanSet([Span(0, 2), Span(5, 3), Span(3, 2)]).spans == (Span(0, 2), Span(3, 5))


def test_span_that_fills_a_gap_joins_both_neighbours() -> None:
    held = SpanSet([Span(0, 5), Span(7, 3), Span(20, 1), Span(5, 2)])
    assert held.spans == (Span(0, 10), Span(20, 1))
    assert held.samples == 11


@pytest.mark.parametrize(
    "span", [Span(10, 5), Span(8, 3), Span(14, 3), Span(11, 2), Span(8, 20), Span(10, 4), Span(10, 6), Span(14, 1)]
)
def test_overlap_is_refused_and_changes_nothing(span: Span) -> None:
    held = SpanSet([Span(10, 5), Span(30, 5)])
    with pytest.raises(InvariantViolation, match=r"overlaps .*Span\(start=10, count=5\)"):
        held.add(span)
    assert held.spans == (Span(10, 5), Span(30, 5))
    assert held.samples == 10


@pytest.mark.parametrize("count", [0, -1])
def test_empty_span_is_refused(count: int) -> None:
    with pytest.raises(InvariantViolation, match=rf"an empty span .* count={count}\)"):
        SpanSet([Span(3, count)])


def test_update_adds_each_span() -> None:
    held = SpanSet([Span(0, 1)])
    held.update([Span(4, 2), Span(1, 1)])
    assert held.spans == (Span(0, 2), Span(4, 2))


def test_take_cuts_a_span() -> None:
    held = SpanSet([Span(10, 5)])
    assert held.take(2) == (Span(10, 2),)
    assert held.spans == (Span(12, 3),)
    assert held.samples == 3


def test_take_spends_whole_spans_first() -> None:
    held = SpanSet([Span(0, 2), Span(5, 2), Span(10, 4)])
    assert held.take(5) == (Span(0, 2), Span(5, 2), Span(10, 1))
    assert held.spans == (Span(11, 3),)


def test_take_everything_leaves_nothing() -> None:
    held = SpanSet([Span(0, 2), Span(5, 2)])
    assert held.take(4) == (Span(0, 2), Span(5, 2))
    assert held.spans == ()
    assert held.samples == 0


def test_take_nothing_changes_nothing() -> None:
    held = SpanSet([Span(0, 2)])
    assert held.take(0) == ()
    assert held.spans == (Span(0, 2),)


@pytest.mark.parametrize("samples", [-1, 3])
def test_take_of_more_than_there_is_is_refused(samples: int) -> None:
    with pytest.raises(InvariantViolation, match=f"cannot take {samples} of 2 samples"):
        SpanSet([Span(0, 2)]).take(samples)


@pytest.mark.parametrize(
    ("span", "left"),
    [
        (Span(4, 2), (Span(2, 2), Span(6, 4), Span(20, 5))),
        (Span(2, 3), (Span(5, 5), Span(20, 5))),
        (Span(7, 3), (Span(2, 5), Span(20, 5))),
        (Span(20, 5), (Span(2, 8),)),
    ],
)
def test_remove_leaves_what_is_around(span: Span, left: tuple[Span, ...]) -> None:
    spans = SpanSet([Span(2, 8), Span(20, 5)])
    spans.remove(span)
    assert spans.spans == left
    assert spans.samples == 13 - span.count


@pytest.mark.parametrize(
    "span", [Span(0, 1), Span(1, 2), Span(9, 2), Span(12, 1), Span(2, 20), Span(25, 1), Span(4, 0)]
)
def test_remove_of_what_is_not_there_is_refused_and_changes_nothing(span: Span) -> None:
    spans = SpanSet([Span(2, 8), Span(20, 5)])
    with pytest.raises(InvariantViolation):
        spans.remove(span)
    assert (spans.spans, spans.samples) == ((Span(2, 8), Span(20, 5)), 13)
