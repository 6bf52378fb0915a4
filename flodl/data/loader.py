"""The rank's index stream turned into batches, loaded ahead of the step loop.

One thread takes the leased grants in order, maps their positions to samples and puts finished batches into a bounded
queue. With ``num_workers`` the same thread drives a torch DataLoader with persistent workers, one pass per grant: a
DataLoader fed by an endless, blocking sampler would hold finished batches back until the next lease arrives.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from flodl.data.permutation import EpochOrder
from flodl.errors import DeadlineExceeded, InvariantViolation
from flodl.ids import Grant, Span, batches_of

Collate = Callable[[list[Any]], Any]

CLOSE_TIMEOUT_S = 5.0
"""The dataset's own code may be stuck; the thread is a daemon thread and ends with the process."""

INDICES_IN_NOTE = 8
"""Samples named in the note of a failed batch; the rest is counted."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass consumes: ``data`` is what the collate function made of ``samples`` samples."""

    data: Any
    samples: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step consumes: ``samples`` samples of ``epoch``, in one micro-batch or several.

    ``spans`` are the positions of the epoch's order that the samples came from.
    """

    parts: tuple[MicroBatch, ...]
    samples: int
    epoch: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    epoch: int
    spans: tuple[Span, ...]
    parts: list[list[int]]

    @property
    def samples(self) -> int:
        return sum(len(part) for part in self.parts)


class BatchLoader:
    """Loads the batches of the pushed grants, in order, at most ``prefetch`` finished ones ahead."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int,
        merge_single_tail: bool,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        worker_seed: int = 0,
        accumulate: int = 1,
    ) -> None:
        """Nothing is started before the first ``push``.

        Args:
            dataset: has ``__len__`` and ``__getitem__``; ``__getitems__(list[int])`` is used where it exists.
            batch_size: samples per batch, at least 1.
            seed: of the epochs' order.
            merge_single_tail: a rest of one sample joins the batch before it.
            collate_fn: makes a batch from a list of samples; None takes torch's default.
            num_workers: loader processes; 0 loads on the thread.
            prefetch: finished batches kept ahead, at least 1.
            worker_seed: of the loader processes' random generators; should differ from rank to rank.
            accumulate: micro-batches of a full batch.
        """
        self._reader = _Reader(dataset, collate_fn or default_collate)
        self._size, self._batch_size = len(dataset), batch_size
        self._seed, self._worker_seed = seed, worker_seed
        self._merge_single_tail, self._num_workers, self._prefetch = merge_single_tail, num_workers, prefetch
        self._accumulate = accumulate
        self._changed = threading.Condition()
        self._grants: deque[Grant] = deque()
        self._ready: deque[Batch | BaseException] = deque()
        self._pending_batches = self._pending_samples = 0
        self._generation = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._workers: _Workers | None = None

    @property
    def pending_batches(self) -> int:
        """Batches pushed and not yet taken."""
        return self._pending_batches

    @property
    def pending_samples(self) -> int:
        """Samples pushed and not yet taken."""
        return self._pending_samples

    def push(self, grant: Grant) -> None:
        """Append a lease. Its batches never mix with another grant's."""
        with self._changed:
            self._grants.append(grant)
            self._pending_batches += len(batches_of(grant.samples, self._batch_size, self._merge_single_tail))
            self._pending_samples += grant.samples
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name="flodl-loader", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def next_batch(self, timeout_s: float) -> Batch:
        """The next batch in the order of the grants.

        Raises:
            InvariantViolation: nothing is leased: the caller counted wrong.
            DeadlineExceeded: the dataset has not delivered within ``timeout_s``; the next call waits on.
            Exception: whatever the dataset or the collate function raised, with a note that names the sample.
        """
        with self._changed:
            if not self._pending_batches:
                raise InvariantViolation("next_batch was called with no batch leased")
            if not self._changed.wait_for(lambda: self._ready, timeout_s):
                raise DeadlineExceeded(f"the dataset delivered no batch within {timeout_s} s")
            batch = self._ready[0]
            if isinstance(batch, BaseException):
                raise batch
            self._ready.popleft()
            self._pending_batches -= 1
            self._pending_samples -= batch.samples
            self._changed.notify_all()
            return batch

    def drop_all(self) -> None:
        """Forget every batch that was pushed and not taken."""
        with self._changed:
            self._generation += 1
            self._grants.clear()
            self._ready.clear()
            self._pending_batches = self._pending_samples = 0
            self._changed.notify_all()

    def close(self) -> None:
        """Drop everything, end the thread and the loader processes."""
        with self._changed:
            self._closed = True
        self.drop_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------- the loading thread
    def _load(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._grants or self._closed)
                if self._closed:
                    break
                grant, generation = self._grants.popleft(), self._generation
            try:
                plans = self._plans(grant)
                for plan, data in zip(plans, self._read(plans), strict=True):
                    parts = tuple(MicroBatch(each, len(part)) for each, part in zip(data, plan.parts, strict=True))
                    if not self._deliver(Batch(parts, plan.samples, plan.epoch, plan.spans), generation):
                        break
            except BaseException as error:  # noqa: BLE001  # every kind belongs to the caller of next_batch
                self._end_workers()
                self._deliver(error, generation)
        self._end_workers()

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _deliver(self, item: Batch | BaseException, generation: int) -> bool:
        """Queue one result when there is room; False when it is not wanted any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._ready) < self._prefetch or generation != self._generation or self._closed
            )
            if generation != self._generation or self._closed:
                return False
            self._ready.append(item)
            self._changed.notify_all()
            return True

    def _plans(self, grant: Grant) -> list[_Plan]:
        indices = EpochOrder(self._size, self._seed, grant.pass_index).indices(grant.spans).tolist()
        plans, start = [], 0
        for count in batches_of(len(indices), self._batch_size, self._merge_single_tail):
            stop = start + count
            parts = self._split(indices[start:stop])
            plans.append(_Plan(grant.pass_index, _cut(grant.spans, start, count), parts))
            start = stop
        return plans

    def _read(self, plans: Sequence[_Plan]) -> Iterator[Any]:
        if not self._num_workers:
            return (self._reader[plan.parts] for plan in plans)
        if self._workers is None:
            self._workers = _Workers(self._reader, self._num_workers, self._worker_seed)
        return self._workers.read([plan.parts for plan in plans])

    def _split(self, indices: list[int]) -> list[list[int]]:
        parts, start = [], 0
        least = 2 if self._merge_single_tail else 1
        for count in micro_batches(len(indices), self._batch_size, self._accumulate, least):
            parts.append(indices[start : start + count])
            start += count
        return parts


def micro_batches(samples: int, batch_size: int, accumulate: int, least: int) -> tuple[int, ...]:
    """Cut a batch of ``samples`` into near-equal parts, about as large as a full batch's: a short batch gives fewer.

    Args:
        samples: of this batch, ≥ 1; one more than ``batch_size`` where a lone last sample has joined it.
        batch_size: of a full batch.
        accumulate: parts of a full batch, 1 to ``batch_size``.
        least: no part is smaller, unless the batch itself is; then it stays whole.
    """
    parts = min(accumulate, -(-samples * accumulate // batch_size), max(1, samples // least))
    size, more = divmod(samples, parts)
    return (size + 1,) * more + (size,) * (parts - more)


class _Reader:
    """A dataset of batches: its "index" is a batch's indices by micro-batch. Runs on the thread or in a worker."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, parts: list[list[int]]) -> list[Any]:
        return [self._part(indices) for indices in parts]

    def _part(self, indices: list[int]) -> Any:
        getitems = getattr(self._dataset, "__getitems__", None)
        try:
            samples = getitems(indices) if getitems else [self._sample(index) for index in indices]
            return self._collate(samples)
        except Exception as error:
            if not getattr(error, "__notes__", None):
                shown = ", ".join(str(index) for index in indices[:INDICES_IN_NOTE])
                more = f" and {len(indices) - INDICES_IN_NOTE} more" if len(indices) > INDICES_IN_NOTE else ""
                error.add_note(f"flodl: while loading the batch of samples {shown}{more}")
            raise

    def _sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"flodl: while loading sample {index}")
            raise


class _Workers:
    """A DataLoader whose worker processes persist over the passes."""

    def __init__(self, reader: _Reader, num_workers: int, seed: int) -> None:
        self._batches: list[list[list[int]]] = []
        self._is_closing = multiprocessing.RawValue("b", 0)
        self._loader: DataLoader[Any] = DataLoader(
            reader,  # type: ignore[arg-type]  # map-style by behaviour
            batch_size=None,
            sampler=_Rereadable(self._batches),
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=True,
            worker_init_fn=partial(_withstand, self._is_closing),
            generator=torch.Generator().manual_seed(seed),
        )

    def read(self, batches: list[list[list[int]]]) -> Iterator[Any]:
        """Load ``batches`` in order. The pass before must have been exhausted or given up."""
        self._batches[:] = batches
        return iter(self._loader)

    def close(self) -> None:
        """Whoever asks the processes to end from now on is torch."""
        self._is_closing.value = 1


def _withstand(is_closing: Any, _worker: int) -> None:
    """A scheduler signals every process that it knows of. The rank saves first; its workers end when it closes them."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if is_closing.value else None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch


class _Rereadable:
    """A sampler over a list that its owner refills between passes."""

    def __init__(self, batches: list[list[list[int]]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[list[int]]]:
        return iter(list(self._batches))

    def __len__(self) -> int:
        return len(self._batches)


def _cut(spans: Sequence[Span], start: int, count: int) -> tuple[Span, ...]:
    """The positions ``start`` to ``start + count`` of the concatenated ``spans``, as spans."""
    parts, skipped = [], 0
    for span in spans:
        first = max(start - skipped, 0)
        last = min(start + count - skipped, span.count)
        if first < last:
            parts.append(Span(span.start + first, last - first))
        skipped += span.count
    return tuple(parts)
