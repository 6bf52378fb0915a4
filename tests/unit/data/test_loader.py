"""The rank's index stream: order, cuts, prefetch, errors by sample, dropping, loader processes."""

import collections
import os
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from flodl.data.device import to_device
from flodl.data.loader import Batch, BatchLoader, micro_batches
from flodl.data.permutation import EpochOrder
from flodl.errors import DeadlineExceeded, InvariantViolation
from flodl.ids import Grant, Span

TIMEOUT_S = 20.0


class Squares:
    """Sample i is (i, i²); remembers what was read and can be held or made to fail."""

    def __init__(self, size: int, broken: int | None = None, gate: threading.Event | None = None) -> None:
        self.size, self.broken, self.gate = size, broken, gate
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.gate is not None:
            assert self.gate.wait(TIMEOUT_S)
        if index == self.broken:
            raise ValueError("this image is no image")
        self.read.append(index)
        return index, index * index


class Fetched(Squares):
    """Reads whole batches at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        self.read.append(-len(indices))
        if self.broken in indices:
            raise KeyError(self.broken)
        return [(index, index * index) for index in indices]


class Where:
    """Sample i is (i, process id, a draw of the worker's generator)."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        if index == 13:
            raise ValueError("this image is no image")
        return index, os.getpid(), torch.rand(()).item()


def take(loader: BatchLoader) -> list[Batch]:
    batches = []
    while loader.pending_batches:
        batches.append(loader.next_batch(TIMEOUT_S))
    return batches


@pytest.fixture
def opened() -> Any:
    loaders: list[BatchLoader] = []

    def make(dataset: Any, batch_size: int = 4, merge_single_tail: bool = False, **options: Any) -> BatchLoader:
        loaders.append(BatchLoader(dataset, batch_size, 5, merge_single_tail, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
        assert loader._thread is None or not loader._thread.is_alive()


def test_batches_follow_the_order_of_the_epoch(opened: Any) -> None:
    loader = opened(Squares(10))
    loader.push(Grant(3, (Span(0, 10),)))
    batches = take(loader)
    indices = torch.cat([batch.parts[0].data[0] for batch in batches])
    assert indices.tolist() == EpochOrder(10, 5, 3).indices([Span(0, 10)]).tolist()
    assert torch.cat([batch.parts[0].data[1] for batch in batches]).equal(indices**2)
    assert [batch.samples for batch in batches] == [4, 4, 2]


def test_a_batch_knows_its_epoch_and_positions(opened: Any) -> None:
    loader = opened(Squares(20))
    loader.push(Grant(1, (Span(2, 3), Span(10, 0), Span(10, 4))))
    assert [(batch.epoch, batch.spans) for batch in take(loader)] == [
        (1, (Span(2, 3), Span(10, 1))),
        (1, (Span(11, 3),)),
    ]


def test_a_batch_never_crosses_a_grant(opened: Any) -> None:
    loader = opened(Squares(20))
    loader.push(Grant(0, (Span(0, 5),)))
    loader.push(Grant(0, (Span(5, 5),)))
    loader.push(Grant(1, (Span(0, 3),)))
    assert [(batch.epoch, batch.samples) for batch in take(loader)] == [(0, 4), (0, 1), (0, 4), (0, 1), (1, 3)]


def test_a_single_tail_joins_the_batch_before_it_where_asked(opened: Any) -> None:
    loader = opened(Squares(20), merge_single_tail=True)
    loader.push(Grant(0, (Span(0, 9),)))
    assert (loader.pending_batches, loader.pending_samples) == (2, 9)
    assert [batch.samples for batch in take(loader)] == [4, 5]
    assert (loader.pending_batches, loader.pending_samples) == (0, 0)


def test_getitems_reads_a_batch_in_one_call(opened: Any) -> None:
    dataset = Fetched(20)
    loader = opened(dataset)
    loader.push(Grant(0, (Span(0, 6),)))
    assert [batch.samples for batch in take(loader)] == [4, 2]
    assert dataset.read == [-4, -2]


def test_collate_fn_gets_the_samples(opened: Any) -> None:
    loader = opened(Squares(20), collate_fn=dict)
    loader.push(Grant(0, (Span(0, 4),)))
    data = loader.next_batch(TIMEOUT_S).parts[0].data
    assert data == {index: index * index for index in EpochOrder(20, 5, 0).indices([Span(0, 4)]).tolist()}


def test_no_more_than_prefetch_batches_are_loaded_ahead(opened: Any, wait_until: Any) -> None:
    dataset = Squares(100)
    loader = opened(dataset, prefetch=2)
    loader.push(Grant(0, (Span(0, 100),)))
    wait_until(lambda: len(dataset.read) == 12, TIMEOUT_S, "two batches queued, the third in the loader's hand")
    loader.next_batch(TIMEOUT_S)
    wait_until(lambda: len(dataset.read) == 16, TIMEOUT_S, "one batch taken, one more read")


def test_a_slow_dataset_runs_into_the_deadline_and_can_be_waited_for_again(opened: Any) -> None:
    gate = threading.Event()
    loader = opened(Squares(8, gate=gate))
    loader.push(Grant(0, (Span(0, 4),)))
    with pytest.raises(DeadlineExceeded):
        loader.next_batch(0.01)
    gate.set()
    assert loader.next_batch(TIMEOUT_S).samples == 4


def test_asking_for_more_than_was_leased_is_a_bug_of_the_caller(opened: Any) -> None:
    with pytest.raises(InvariantViolation):
        opened(Squares(8)).next_batch(TIMEOUT_S)


def test_an_exception_of_the_dataset_names_the_sample(opened: Any) -> None:
    loader = opened(Squares(8, broken=6))
    loader.push(Grant(0, (Span(0, 8),)))
    with pytest.raises(ValueError, match="no image") as caught:
        take(loader)
    assert caught.value.__notes__ == ["flodl: while loading sample 6"]


def test_an_exception_of_getitems_names_the_batch(opened: Any) -> None:
    loader = opened(Fetched(12, broken=6), batch_size=12)
    loader.push(Grant(0, (Span(0, 12),)))
    with pytest.raises(KeyError) as caught:
        take(loader)
    first = ", ".join(map(str, EpochOrder(12, 5, 0).indices([Span(0, 8)])))
    assert caught.value.__notes__ == [f"flodl: while loading the batch of samples {first} and 4 more"]


def test_drop_all_forgets_what_is_ahead_and_goes_on_with_new_leases(opened: Any) -> None:
    dataset = Squares(50)
    loader = opened(dataset)
    loader.push(Grant(0, (Span(0, 40),)))
    loader.next_batch(TIMEOUT_S)
    loader.drop_all()
    assert loader.pending_batches == 0
    loader.push(Grant(2, (Span(0, 4),)))
    assert [(batch.epoch, batch.spans) for batch in take(loader)] == [(2, (Span(0, 4),))]


def test_drop_all_clears_a_failed_batch(opened: Any) -> None:
    loader = opened(Squares(8, broken=6))
    loader.push(Grant(0, (Span(0, 8),)))
    with pytest.raises(ValueError, match="no image"):
        take(loader)
    loader.drop_all()
    loader.push(Grant(0, (Span(0, 8),)))
    with pytest.raises(ValueError, match="no image"):
        take(loader)


def test_closing_while_the_queue_is_full_ends_the_thread(opened: Any, wait_until: Any) -> None:
    dataset = Squares(100)
    loader = opened(dataset, prefetch=1)
    loader.push(Grant(0, (Span(0, 100),)))
    wait_until(lambda: dataset.read, TIMEOUT_S, "the first sample")


def test_loader_processes_deliver_in_order_over_several_grants(opened: Any) -> None:
    loader = opened(TensorDataset(torch.arange(60)), num_workers=2)
    loader.push(Grant(0, (Span(0, 21),)))
    loader.push(Grant(0, (Span(21, 9),)))
    batches = take(loader)
    loader.push(Grant(1, (Span(0, 30),)))
    batches += take(loader)
    expected = [*EpochOrder(60, 5, 0).indices([Span(0, 30)]), *EpochOrder(60, 5, 1).indices([Span(0, 30)])]
    assert torch.cat([batch.parts[0].data[0] for batch in batches]).tolist() == expected


def test_loader_processes_persist_survive_a_drop_and_draw_deterministically(opened: Any) -> None:
    first, second, other = (opened(Where(), num_workers=2, worker_seed=seed) for seed in (1, 1, 2))
    draws = []
    for loader in (first, second, other):
        loader.push(Grant(0, (Span(0, 12),)))
        batches = take(loader)
        assert os.getpid() not in torch.cat([batch.parts[0].data[1] for batch in batches])
        draws.append(torch.cat([batch.parts[0].data[2] for batch in batches]))
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
    pids = set(batches[0].parts[0].data[1].tolist())
    other.push(Grant(1, (Span(0, 12),)))
    other.drop_all()
    other.push(Grant(0, (Span(0, 4),)))
    (batch,) = take(other)
    assert set(batch.parts[0].data[1].tolist()) == pids


def test_an_exception_in_a_loader_process_names_the_sample(opened: Any) -> None:
    loader = opened(Where(), num_workers=1)
    loader.push(Grant(0, (Span(0, 40),)))
    with pytest.raises(ValueError, match="while loading sample 13"):
        take(loader)


Point = collections.namedtuple("Point", ["x", "y"])


def test_to_device_moves_every_tensor_and_keeps_the_containers() -> None:
    data = {"a": [torch.zeros(2), "text"], "b": Point(torch.ones(1), 3), "c": (torch.zeros(()), None)}
    moved = to_device(data, torch.device("meta"))
    assert (moved["a"][0].device.type, moved["a"][1]) == ("meta", "text")
    assert isinstance(moved["b"], Point)
    assert (moved["b"].x.device.type, moved["b"].y) == ("meta", 3)
    assert (moved["c"][0].device.type, moved["c"][1]) == ("meta", None)


def test_to_device_asks_objects_that_can_move_themselves() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3)])
    assert to_device(packed, torch.device("cpu")).data.equal(torch.ones(3))


# -------------------------------------------------------------------------------------------------------- micro-batches
@pytest.mark.parametrize("num_workers", [0, 1])
def test_micro_batches_are_the_batch_cut_before_it_is_collated(opened: Any, num_workers: int) -> None:
    loader = opened(TensorDataset(torch.arange(22)), accumulate=3, num_workers=num_workers)
    loader.push(Grant(0, (Span(0, 10),)))
    batches = take(loader)
    order = EpochOrder(22, 5, 0).indices([Span(0, 10)]).tolist()
    assert [[part.samples for part in batch.parts] for batch in batches] == [[2, 1, 1], [2, 1, 1], [1, 1]]
    assert [batch.samples for batch in batches] == [4, 4, 2]
    assert torch.cat([part.data[0] for batch in batches for part in batch.parts]).tolist() == order


@given(st.integers(1, 300), st.data())
def test_micro_batches_lose_nothing_and_stay_within_those_of_a_full_batch(batch_size: int, data: st.DataObject) -> None:
    accumulate = data.draw(st.integers(1, batch_size))
    samples = data.draw(st.integers(1, batch_size + 1))
    least = data.draw(st.sampled_from([1, 2]))
    parts = micro_batches(samples, batch_size, accumulate, least)
    assert sum(parts) == samples
    assert max(parts) - min(parts) <= 1
    assert len(parts) <= accumulate
    assert min(parts) >= min(least, samples)
    if batch_size >= least * accumulate:
        assert len(micro_batches(batch_size, batch_size, accumulate, least)) == accumulate
        assert max(parts) <= max(-(-batch_size // accumulate), least) + 1


def test_batch_that_took_the_lone_last_sample_in_stays_whole_without_micro_batches() -> None:
    assert micro_batches(5, 4, 1, 2) == (5,)
    assert micro_batches(5, 4, 2, 2) == (3, 2)
