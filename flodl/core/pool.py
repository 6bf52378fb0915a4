"""One epoch's samples: who has which, and what is in a published version.

States of a sample:
    free: nobody has it.
    leased: granted to one rank, not trained yet.
    trained: in the weights of that rank, in no published version.
    merged: in a published version; final.

Transitions: free → leased (``lease``) → trained (``train``) → merged (``merge``); trained → free (``untrain``);
leased and trained → free (``reclaim``); free → merged (``cover``): in an earlier run.

Invariants: the four states partition the epoch's span exactly; at most one rank has a sample; a batch never crosses a
grant; ``remaining_batches`` counts what the free list and the ranks still have to train. Where a last batch of one
sample joins the batch before it, none of one sample comes up later either, whatever is reclaimed: what goes back is
whole batches, so the odd sample never comes without the batch that it has joined.

Positions are those of the epoch's order; which sample a position names is the permutation's business. Nothing is
kept per sample. Does not decide who gets how much.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flodl.core.spans import SpanSet
from flodl.errors import CoverageError, InvariantViolation
from flodl.ids import Grant, RankId, Span, batch_count


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool as plain values. ``leased`` and ``trained`` map a rank to its sample count and omit zeros."""

    pass_index: int
    size: int
    free_samples: int
    leased: Mapping[RankId, int]
    trained: Mapping[RankId, int]
    merged: tuple[Span, ...]


@dataclass(slots=True)
class _Holding:
    """What one rank has: open grants in order, what it trained since the last merge, and running totals."""

    grants: deque[SpanSet] = field(default_factory=deque)
    trained: SpanSet = field(default_factory=SpanSet)
    leased_samples: int = 0
    batches: int = 0


class Pool:
    """The samples of one epoch."""

    def __init__(self, pass_index: int, size: int, batch_size: int, merge_single_tail: bool, start: int = 0) -> None:
        """All samples start free.

        Args:
            pass_index: the pass over the data whose order the positions count in, 0-based; every grant carries it.
            size: samples in the epoch, ≥ 0.
            batch_size: samples of a full batch, ≥ 1.
            merge_single_tail: a last batch of one sample joins the batch before it (``ids.batches_of``).
            start: the position in that order at which the epoch starts.
        """
        self.pass_index = pass_index
        self.size = size
        self._start = start
        self._batch_size = batch_size
        self._merge_single_tail = merge_single_tail
        self._free = SpanSet([Span(start, size)] if size else [])
        self._merged = SpanSet()
        self._holdings: dict[RankId, _Holding] = {}
        self._held_batches = 0

    @property
    def free_samples(self) -> int:
        """Samples that nobody has."""
        return self._free.samples

    @property
    def free_batches(self) -> int:
        """Batches that the free samples make."""
        return self._batches(self._free.samples)

    @property
    def remaining_batches(self) -> int:
        """Batches of the epoch that are still to be trained: the free ones and those that ranks hold."""
        return self.free_batches + self._held_batches

    @property
    def unmerged(self) -> int:
        """Samples that are in no published version yet."""
        return self.size - self._merged.samples

    @property
    def is_complete(self) -> bool:
        """Whether every sample of the epoch is merged."""
        return self.unmerged == 0

    @property
    def merged_spans(self) -> tuple[Span, ...]:
        """What is in a published version: sorted, adjacent spans joined."""
        return self._merged.spans

    def leased_samples(self, rank: RankId) -> int:
        """Samples granted to the rank and not trained yet."""
        return self._holding(rank).leased_samples

    def held_batches(self, rank: RankId) -> int:
        """Batches granted to the rank and not trained yet."""
        return self._holding(rank).batches

    def trained_samples(self, rank: RankId) -> int:
        """Samples that the rank trained since its last merge."""
        return self._holding(rank).trained.samples

    def cover(self, spans: Iterable[Span]) -> None:
        """These free samples were merged in an earlier run.

        Raises:
            CoverageError: one of them is not free: not of this epoch, named twice, or dealt already.
        """
        for span in spans:
            try:
                self._free.remove(span)
            except InvariantViolation as error:
                raise CoverageError(f"pass {self.pass_index}: {span} cannot be merged already: {error}") from None
            self._merged.add(span)

    def lease(self, rank: RankId, batches: int) -> Grant | None:
        """Grant the next free samples to a rank.

        Args:
            rank: who gets them; a rank unknown so far is welcome.
            batches: full batches wanted; the grant is smaller where the free samples end.

        Returns:
            The grant, or None when nothing is free or ``batches`` is not positive.
        """
        free_batches = self.free_batches
        if batches <= 0 or free_batches == 0:
            return None
        granted = min(batches, free_batches)
        # The last batch may be short, or one sample longer: it takes whatever is left.
        samples = self._free.samples if granted == free_batches else granted * self._batch_size
        spans = self._free.take(samples)
        holding = self._holdings.setdefault(rank, _Holding())
        holding.grants.append(SpanSet(spans))
        holding.leased_samples += samples
        holding.batches += granted
        self._held_batches += granted
        return Grant(self.pass_index, spans)

    def train(self, rank: RankId, samples: int) -> None:
        """Mark the rank's first ``samples`` outstanding samples, in grant order, as trained.

        Raises:
            CoverageError: more than the rank's leases hold, or the count ends inside a batch. Nothing is changed.
        """
        holding = self._holding(rank)
        leased = holding.leased_samples
        if not 0 <= samples <= leased:
            raise CoverageError(
                f"pass {self.pass_index}: rank {rank} trained {samples} samples, but has leased {leased}"
            )
        whole, left = 0, samples
        while left and left >= holding.grants[whole].samples:
            left -= holding.grants[whole].samples
            whole += 1
        if left and not self._is_batch_end(left, holding.grants[whole].samples):
            raise CoverageError(
                f"pass {self.pass_index}: rank {rank} trained {samples} samples, which ends inside a batch"
            )
        for _ in range(whole):
            grant = holding.grants.popleft()
            self._move_to_trained(holding, grant, grant.samples)
        if left:
            self._move_to_trained(holding, holding.grants[0], left)

    def merge(self, rank: RankId) -> tuple[Span, ...]:
        """Everything that the rank trained is now in a published version.

        Returns:
            What was merged: sorted, adjacent spans joined; empty when there was nothing.
        """
        spans = self._take_trained(rank)
        self._merged.update(spans)
        return spans

    def untrain(self, rank: RankId) -> int:
        """Return what the rank trained but has not merged to the free samples; its leases stay.

        Returns:
            How many samples went back.
        """
        spans = self._take_trained(rank)
        self._free.update(spans)
        return sum(span.count for span in spans)

    def reclaim(self, rank: RankId) -> int:
        """Return everything that the rank has, leased or trained, to the free samples, and forget the rank.

        The spans come back in their place in the epoch's order, so they are granted before what was never leased.

        Returns:
            How many samples went back.
        """
        returned = self.untrain(rank)
        holding = self._holdings.pop(rank, _Holding())
        for grant in holding.grants:
            self._free.update(grant.spans)
        self._held_batches -= holding.batches
        return returned + holding.leased_samples

    def snapshot(self) -> PoolSnapshot:
        """The pool as plain values."""
        holdings = sorted(self._holdings.items())
        return PoolSnapshot(
            pass_index=self.pass_index,
            size=self.size,
            free_samples=self._free.samples,
            leased={rank: holding.leased_samples for rank, holding in holdings if holding.leased_samples},
            trained={rank: holding.trained.samples for rank, holding in holdings if holding.trained.samples},
            merged=self._merged.spans,
        )

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            InvariantViolation: a sample is in no state or in two, or a running total is off.
        """
        everything = SpanSet(self._free.spans)  # SpanSet refuses a sample that is in two states
        everything.update(self._merged.spans)
        for rank, holding in self._holdings.items():
            everything.update(holding.trained.spans)
            for grant in holding.grants:
                everything.update(grant.spans)
            leased = sum(grant.samples for grant in holding.grants)
            batches = sum(self._batches(grant.samples) for grant in holding.grants)
            if (leased, batches) != (holding.leased_samples, holding.batches):
                raise InvariantViolation(
                    f"pass {self.pass_index}: rank {rank} holds {leased} samples, {batches} batches"
                )
        if everything.spans != ((Span(self._start, self.size),) if self.size else ()):
            raise InvariantViolation(f"pass {self.pass_index}: {everything.spans} is not all of {self.size} samples")
        held = sum(holding.batches for holding in self._holdings.values())
        if held != self._held_batches:
            raise InvariantViolation(f"pass {self.pass_index}: ranks hold {held} batches, counted {self._held_batches}")

    def _holding(self, rank: RankId) -> _Holding:
        return self._holdings.get(rank) or _Holding()

    def _batches(self, samples: int) -> int:
        return batch_count(samples, self._batch_size, self._merge_single_tail)

    def _is_batch_end(self, samples: int, of_samples: int) -> bool:
        """Whether a grant of ``of_samples`` has a batch that ends after its first ``samples``."""
        is_whole = self._batches(samples) + self._batches(of_samples - samples) == self._batches(of_samples)
        return is_whole and samples % self._batch_size == 0

    def _move_to_trained(self, holding: _Holding, grant: SpanSet, samples: int) -> None:
        before = self._batches(grant.samples)
        holding.trained.update(grant.take(samples))
        batches = before - self._batches(grant.samples)
        holding.leased_samples -= samples
        holding.batches -= batches
        self._held_batches -= batches

    def _take_trained(self, rank: RankId) -> tuple[Span, ...]:
        trained = self._holding(rank).trained
        return trained.take(trained.samples)
