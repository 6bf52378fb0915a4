"""Sets of sample positions as sorted spans: the cost grows with the pieces, never with the samples.

Invariants: spans are sorted, hold at least one sample each, never overlap and never touch (touching ones are joined).
Does not know what a sample, a batch or a rank is.
"""

from bisect import bisect_left
from collections.abc import Iterable

from flodl.errors import InvariantViolation
from flodl.ids import Span


class SpanSet:
    """A mutable set of positions."""

    __slots__ = ("_samples", "_spans")

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        """Args: spans in any order.

        Raises:
            InvariantViolation: two of them overlap, or one is empty.
        """
        self._spans: list[Span] = []
        self._samples = 0
        for span in spans:
            self.add(span)

    @property
    def samples(self) -> int:
        """How many positions the set holds."""
        return self._samples

    @property
    def spans(self) -> tuple[Span, ...]:
        """The set in its one normal form: sorted, adjacent spans joined."""
        return tuple(self._spans)

    def add(self, span: Span) -> None:
        """Put a span in and join it with its neighbours.

        Raises:
            InvariantViolation: the span is empty, or a position of it is in the set already.
        """
        if span.count < 1:
            raise InvariantViolation(f"an empty span cannot be a member: {span}")
        index = bisect_left(self._spans, span)
        before = self._spans[index - 1] if index > 0 else None
        after = self._spans[index] if index < len(self._spans) else None
        if (before is not None and before.stop > span.start) or (after is not None and after.start < span.stop):
            raise InvariantViolation(f"{span} overlaps {before} or {after}")
        first, last, start, stop = index, index, span.start, span.stop
        if before is not None and before.stop == span.start:
            first, start = index - 1, before.start
        if after is not None and after.start == span.stop:
            last, stop = index + 1, after.stop
        self._spans[first:last] = [Span(start, stop - start)]
        self._samples += span.count

    def update(self, spans: Iterable[Span]) -> None:
        """Put several spans in; raises as ``add``."""
        for span in spans:
            self.add(span)

    def remove(self, span: Span) -> None:
        """Take one span out.

        Raises:
            InvariantViolation: the span is empty, or a position of it is not in the set.
        """
        if span.count < 1:
            raise InvariantViolation(f"an empty span cannot be a member: {span}")
        index = bisect_left(self._spans, Span(span.start + 1, 0)) - 1
        around = self._spans[index] if index >= 0 else None
        if around is None or around.stop < span.stop:
            raise InvariantViolation(f"{span} is not in the set")
        left, right = Span(around.start, span.start - around.start), Span(span.stop, around.stop - span.stop)
        self._spans[index : index + 1] = [part for part in (left, right) if part.count]
        self._samples -= span.count

    def take(self, samples: int) -> tuple[Span, ...]:
        """Remove the first ``samples`` positions and return them, sorted.

        Raises:
            InvariantViolation: the set holds fewer.
        """
        if not 0 <= samples <= self._samples:
            raise InvariantViolation(f"cannot take {samples} of {self._samples} samples")
        taken: list[Span] = []
        whole, left = 0, samples
        while left:
            span = self._spans[whole]
            part = Span(span.start, min(left, span.count))
            taken.append(part)
            left -= part.count
            if part == span:
                whole += 1
            else:
                self._spans[whole] = Span(part.stop, span.count - part.count)
        del self._spans[:whole]
        self._samples -= samples
        return tuple(taken)
