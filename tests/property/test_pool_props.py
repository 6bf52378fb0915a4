"""Pool against a naive model that keeps the state of every sample."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flodl.core.pool import Pool
from flodl.core.spans import SpanSet
from flodl.errors import CoverageError, InvariantViolation
from flodl.ids import Span, batch_count, batches_of

RANKS = st.integers(0, 3)


def positions(spans: tuple[Span, ...]) -> list[int]:
    return [position for span in spans for position in range(span.start, span.stop)]


def normalised(members: list[int]) -> tuple[Span, ...]:
    """The spans of a set of positions, found one position at a time."""
    starts = [p for p in members if p - 1 not in members]
    stops = [p + 1 for p in members if p + 1 not in members]
    return tuple(Span(start, stop - start) for start, stop in zip(sorted(starts), sorted(stops), strict=True))


class PoolMachine(RuleBasedStateMachine):
    """Leases, trainings, merges, reclaims and roll-backs in any order, behind a run with other batches."""

    @initialize(
        size=st.integers(0, 60),
        batch_size=st.integers(1, 7),
        merge_single_tail=st.booleans(),
        old_batch_size=st.integers(2, 7),
        done=st.sets(st.integers(0, 29)),
    )
    def start(self, size: int, batch_size: int, merge_single_tail: bool, old_batch_size: int, done: set[int]) -> None:
        self.pool = Pool(5, size, batch_size, merge_single_tail)
        self.size, self.batch_size, self.merge_single_tail = size, batch_size, merge_single_tail
        self.free = set(range(size))
        self.merged: set[int] = set()
        start = 0
        for number, count in enumerate(batches_of(size, old_batch_size, merge_single_tail)):
            if number in done:
                self.pool.cover([Span(start, count)])
                self.merged |= set(range(start, start + count))
            start += count
        self.free -= self.merged
        self.batches: dict[int, list[list[int]]] = defaultdict(list)  # per rank: leased batches, in grant order
        self.trained: dict[int, set[int]] = defaultdict(set)

    @rule(rank=RANKS, batches=st.integers(-1, 5))
    def lease(self, rank: int, batches: int) -> None:
        sizes = batches_of(len(self.free), self.batch_size, self.merge_single_tail)[: max(batches, 0)]
        expected = sorted(self.free)[: sum(sizes)]
        grant = self.pool.lease(rank, batches)
        assert (positions(grant.spans) if grant else []) == expected
        if grant is None:
            return
        if self.merge_single_tail and self.size > 1 and self.batch_size > 1:
            assert 1 not in sizes, "batch norm would get a sample alone"
        assert grant.pass_index == 5
        assert grant.spans == normalised(expected)
        assert batches_of(grant.samples, self.batch_size, self.merge_single_tail) == sizes
        for size in sizes:
            self.batches[rank].append(expected[:size])
            expected = expected[size:]
        self.free -= set(positions(grant.spans))

    @rule(rank=RANKS, count=st.integers(0, 4))
    def train(self, rank: int, count: int) -> None:
        done, self.batches[rank] = self.batches[rank][:count], self.batches[rank][count:]
        self.pool.train(rank, sum(map(len, done)))
        self.trained[rank].update(position for batch in done for position in batch)

    @rule(rank=RANKS, count=st.integers(0, 4), extra=st.integers(1, 6))
    def train_into_a_batch(self, rank: int, count: int, extra: int) -> None:
        ends = [sum(map(len, self.batches[rank][:index])) for index in range(len(self.batches[rank]) + 1)]
        samples = ends[min(count, len(ends) - 1)] + extra
        if samples not in ends:
            with pytest.raises(CoverageError):
                self.pool.train(rank, samples)

    @rule(rank=RANKS)
    def merge(self, rank: int) -> None:
        assert self.pool.merge(rank) == normalised(sorted(self.trained[rank]))
        self.merged |= self.trained.pop(rank)

    @rule(rank=RANKS)
    def untrain(self, rank: int) -> None:
        assert self.pool.untrain(rank) == len(self.trained[rank])
        self.free |= self.trained.pop(rank)

    @rule(rank=RANKS)
    def reclaim(self, rank: int) -> None:
        returned = self.trained.pop(rank, set()) | {p for batch in self.batches.pop(rank, []) for p in batch}
        assert self.pool.reclaim(rank) == len(returned)
        self.free |= returned

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        free_batches = len(batches_of(len(self.free), self.batch_size, self.merge_single_tail))
        assert self.pool.free_samples == len(self.free)
        assert self.pool.free_batches == free_batches
        assert self.pool.remaining_batches == free_batches + sum(map(len, self.batches.values()))
        assert self.pool.merged_spans == normalised(sorted(self.merged))
        assert self.pool.unmerged == self.size - len(self.merged)
        assert self.pool.is_complete == (len(self.merged) == self.size)
        for rank in range(4):
            assert self.pool.leased_samples(rank) == sum(map(len, self.batches[rank]))
            assert self.pool.held_batches(rank) == len(self.batches[rank])
            assert self.pool.trained_samples(rank) == len(self.trained[rank])

    def teardown(self) -> None:
        """Whatever happened, one rank that lives can finish the epoch."""
        if not hasattr(self, "pool"):
            return
        for rank in range(4):
            self.pool.reclaim(rank)
        grant = self.pool.lease(9, 1000)
        self.pool.train(9, grant.samples if grant else 0)
        assert self.pool.merge(9) == normalised(sorted(set(range(self.size)) - self.merged))
        assert self.pool.is_complete
        self.pool.check()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=30)


@given(st.integers(0, 200), st.integers(1, 9), st.booleans())
def test_batch_count_counts_what_batches_of_cuts(samples: int, batch_size: int, merge_single_tail: bool) -> None:
    sizes = batches_of(samples, batch_size, merge_single_tail)
    assert batch_count(samples, batch_size, merge_single_tail) == len(sizes)
    assert sum(sizes) == samples


@given(st.lists(st.builds(Span, st.integers(0, 40), st.integers(1, 6))), st.integers(0, 60))
def test_span_set_is_a_set_of_positions(spans: list[Span], samples: int) -> None:
    held, members = SpanSet(), set[int]()
    for span in spans:
        new = set(positions((span,)))
        if members & new:
            with pytest.raises(InvariantViolation):
                held.add(span)
        else:
            held.add(span)
            members |= new
    assert held.spans == normalised(sorted(members))
    taken = sorted(members)[:samples]
    assert held.take(len(taken)) == normalised(taken)
    assert held.spans == normalised(sorted(members)[samples:])
    assert held.samples == len(members) - len(taken)
