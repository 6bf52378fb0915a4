"""The run's samples, epoch by epoch: which are dealt now, which are merged, which epochs are complete.

An epoch is one of ``epoch_splits`` parts of a pass; the parts of a pass are whole batches of the same order, disjoint
and jointly complete. Each open epoch is a ``Pool``. In lockstep modes the next epoch opens when the one before is
complete; in the asynchronous mode as soon as nothing of it is free, so that a rank streams across the boundary.

Invariants: those of every open pool; epochs complete in order; what a rank reports as trained is what it was granted
first. Does not decide who gets how much.
"""

from collections import deque
from dataclasses import dataclass

from flodl.core.pool import Pool
from flodl.core.position import START, Covered, Position
from flodl.errors import CoverageError, InvariantViolation
from flodl.ids import Grant, RankId, Span, batch_count
from flodl.messages import Settings


@dataclass(frozen=True, slots=True)
class Merged:
    """Samples that a commit merged: ``span`` counts in the order of pass ``pass_index``, within ``epoch``."""

    epoch: int
    pass_index: int
    span: Span


@dataclass(slots=True)
class _Lease:
    """``samples`` of one grant that are not trained yet."""

    epoch: int
    samples: int


class Supply:
    """See the module docstring."""

    def __init__(self, settings: Settings, merge_single_tail: bool, position: Position = START) -> None:
        """Nothing is leased; ``settings`` give the size, the batch, the passes, their splits and the mode.

        Raises:
            CoverageError: ``position`` covers samples that its epochs do not have.
        """
        self._settings, self._merge_single_tail = settings, merge_single_tail
        self._is_streaming = settings.cadence.mode.is_async
        self._pools: dict[int, Pool] = {}
        self._leases: dict[RankId, deque[_Lease]] = {}
        self._opened = self.epoch = min(position.epoch, self.epochs)
        self.merged_samples = sum(self.span(epoch).count for epoch in range(self.epoch))
        if self.epoch < self.epochs:
            self._open()
        for covered in position.covered:
            self._cover(covered)

    @property
    def epochs(self) -> int:
        """How many epochs the run has."""
        return self._settings.num_epochs * self._settings.epoch_splits

    @property
    def is_exhausted(self) -> bool:
        """Whether every sample of every epoch is merged."""
        return self.epoch == self.epochs

    @property
    def epoch_batches(self) -> int:
        """Batches of the first epoch; others differ by one at most."""
        return batch_count(self.span(0).count, self._settings.batch_size, self._merge_single_tail)

    @property
    def epoch_merged(self) -> int:
        """Samples of the current epoch that are merged; 0 behind the last one."""
        return 0 if self.is_exhausted else self._pools[self.epoch].size - self._pools[self.epoch].unmerged

    @property
    def epoch_size(self) -> int:
        """Samples of the current epoch; 0 behind the last one."""
        return 0 if self.is_exhausted else self._pools[self.epoch].size

    @property
    def remaining_batches(self) -> int:
        """Batches still to be trained of what may be dealt: of the current epoch, or of the run when streaming."""
        open_batches = sum(pool.remaining_batches for pool in self._pools.values())
        return open_batches + (self._unopened_batches() if self._is_streaming else 0)

    @property
    def is_last_dealt(self) -> bool:
        """Whether every batch of the run has been trained, as far as the ranks have reported."""
        return self._opened == self.epochs and not any(pool.remaining_batches for pool in self._pools.values())

    @property
    def covered(self) -> tuple[Covered, ...]:
        """What is merged of the epochs that are not complete."""
        parts = (Covered(epoch, pool.merged_spans) for epoch, pool in self._pools.items())
        return tuple(part for part in parts if part.spans)

    def held_batches(self, rank: RankId) -> int:
        """Batches granted to the rank and not trained yet."""
        return sum(pool.held_batches(rank) for pool in self._pools.values())

    def lease(self, rank: RankId, batches: int) -> tuple[Grant, ...]:
        """Grant the next free batches: at most ``batches``, fewer where nothing more may be dealt."""
        grants: list[Grant] = []
        wanted = batches
        while wanted > 0:
            epoch = self._free_epoch()
            grant = None if epoch is None else self._pools[epoch].lease(rank, wanted)
            if epoch is None or grant is None:
                break
            grants.append(grant)
            self._leases.setdefault(rank, deque()).append(_Lease(epoch, grant.samples))
            wanted -= batch_count(grant.samples, self._settings.batch_size, self._merge_single_tail)
        return tuple(grants)

    def train(self, rank: RankId, samples: int) -> None:
        """Mark the rank's first ``samples`` outstanding samples, in grant order, as trained.

        Raises:
            CoverageError: more than it holds, or the count ends inside a batch. The rank can only be given up then.
        """
        leases = self._leases.get(rank, deque())
        leased = sum(lease.samples for lease in leases)
        if not 0 <= samples <= leased:
            raise CoverageError(f"epoch {self.epoch}: rank {rank} trained {samples} samples, but has leased {leased}")
        while samples:
            lease = leases[0]
            taken = min(samples, lease.samples)
            self._pools[lease.epoch].train(rank, taken)
            lease.samples -= taken
            samples -= taken
            if not lease.samples:
                leases.popleft()

    def merge(self, rank: RankId) -> tuple[Merged, ...]:
        """Everything that the rank trained is in a published version now; what that was."""
        merged = tuple(
            Merged(epoch, pool.pass_index, span) for epoch, pool in self._pools.items() for span in pool.merge(rank)
        )
        self.merged_samples += sum(each.span.count for each in merged)
        return merged

    def untrain(self, rank: RankId) -> None:
        """What the rank trained but has not merged is free again; its leases stay."""
        for pool in self._pools.values():
            pool.untrain(rank)

    def reclaim(self, rank: RankId) -> None:
        """Everything that the rank has is free again."""
        for pool in self._pools.values():
            pool.reclaim(rank)
        self._leases.pop(rank, None)

    def close_epochs(self) -> tuple[int, ...]:
        """Move on behind the epochs that are complete; returns them, in order."""
        first = self.epoch
        while not self.is_exhausted and self._pools[self.epoch].is_complete:
            del self._pools[self.epoch]
            self.epoch += 1
            if self.epoch == self._opened < self.epochs:
                self._open()
        return tuple(range(first, self.epoch))

    def check(self) -> None:
        """Verify every invariant. Raises InvariantViolation, naming the first that does not hold."""
        for pool in self._pools.values():
            pool.check()
        for rank, leases in self._leases.items():
            leased = sum(lease.samples for lease in leases)
            pooled = sum(pool.leased_samples(rank) for pool in self._pools.values())
            if leased != pooled:
                raise InvariantViolation(f"rank {rank} has leases of {leased} samples, and {pooled} in the pools")

    def _cover(self, covered: Covered) -> None:
        """Samples that an earlier run has merged."""
        if not self.epoch <= covered.epoch < self.epochs:
            raise CoverageError(f"epoch {covered.epoch} is covered in part, but {self.epoch} of {self.epochs} are done")
        while self._opened <= covered.epoch:
            self._open()
        self._pools[covered.epoch].cover(covered.spans)
        self.merged_samples += sum(span.count for span in covered.spans)

    def _free_epoch(self) -> int | None:
        """The first open epoch with something free; opens the next one where it may."""
        for epoch, pool in self._pools.items():
            if pool.free_samples:
                return epoch
        if self._is_streaming and self._opened < self.epochs:
            self._open()
            return self._opened - 1
        return None

    def _open(self) -> None:
        span, settings = self.span(self._opened), self._settings
        pass_index = self._opened // settings.epoch_splits
        self._pools[self._opened] = Pool(
            pass_index, span.count, settings.batch_size, self._merge_single_tail, span.start
        )
        self._opened += 1

    def span(self, epoch: int) -> Span:
        """The part of its pass that an epoch is: whole batches, as equal as they can be."""
        settings = self._settings
        splits, part = settings.epoch_splits, epoch % settings.epoch_splits
        batches = batch_count(settings.dataset_size, settings.batch_size, self._merge_single_tail)
        start = batches * part // splits * settings.batch_size
        is_last = part + 1 == splits
        stop = settings.dataset_size if is_last else batches * (part + 1) // splits * settings.batch_size
        return Span(start, stop - start)

    def _unopened_batches(self) -> int:
        spans = (self.span(epoch) for epoch in range(self._opened, self.epochs))
        return sum(batch_count(s.count, self._settings.batch_size, self._merge_single_tail) for s in spans)
