"""The planes under the rank's actions: what is written, what is told, what is forgotten."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flodl.averaging.collective import CollectivePlane
from flodl.averaging.flat import FlatModel
from flodl.averaging.outer import SlowMomentum
from flodl.averaging.outer_step import OuterStep
from flodl.averaging.shared import SharedPlane
from flodl.core.actions import (
    AbandonReduce,
    Adopt,
    Blend,
    DigestTensors,
    FormCollective,
    Pack,
    ReduceCollective,
    SumSlice,
    TakeResult,
    TakeSnapshot,
)
from flodl.core.events import GroupSettled, Packed, SliceSummed, SnapshotTaken, SumReady, TensorsDigested
from flodl.errors import InvariantViolation
from flodl.ids import RoundKey
from flodl.rank import planes
from flodl.rank.inbox import Inbox
from flodl.rank.planes import AsyncRounds, CollectiveRounds, SharedRounds, SoloRounds

KEY, NEXT = RoundKey(1, 0, 1), RoundKey(1, 0, 2)


def model_of(value: float) -> nn.Module:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


@pytest.fixture
def plane_fd() -> Iterator[int]:
    fd = os.memfd_create("plane")
    yield fd
    os.close(fd)


def shared(plane_fd: int, *models: nn.Module) -> list[SharedRounds]:
    return [
        SharedRounds(FlatModel(model), SharedPlane(plane_fd, len(models), slot)) for slot, model in enumerate(models)
    ]


# ------------------------------------------------------------------------------------------------------- CPU plane
def test_two_ranks_average_in_shared_memory(plane_fd: int) -> None:
    models = [model_of(1.0), model_of(5.0)]
    ranks = shared(plane_fd, *models)

    for rank, weight in zip(ranks, (0.75, 0.25), strict=True):
        assert rank.execute(Pack(KEY, weight, 0.5, True, False)) == Packed(KEY, True)
    for index, rank in enumerate(ranks):
        assert rank.execute(SumSlice(KEY, index, 2, (0, 1))) == SliceSummed(KEY)
    ready = [rank.execute(TakeResult(KEY, True)) for rank in ranks]
    for rank in ranks:
        assert rank.execute(Adopt(KEY, True)) is None

    assert [values(model) for model in models] == [{2.0}, {2.0}]
    assert all(isinstance(each, SumReady) and not each.error for each in ready)
    assert len({each.digest for each in ready if isinstance(each, SumReady)}) == 1
    assert [each.divergence for each in ready if isinstance(each, SumReady)] == pytest.approx([0.5, 1.5])


def test_zeros_stand_in_for_what_is_not_finite(plane_fd: int) -> None:
    ranks = shared(plane_fd, model_of(float("nan")), model_of(5.0))

    told = [rank.execute(Pack(KEY, 0.5, 0.5, False, False)) for rank in ranks]
    for index, rank in enumerate(ranks):
        rank.execute(SumSlice(KEY, index, 2, (0, 1)))
    ready = ranks[1].execute(TakeResult(KEY, False))

    assert told == [Packed(KEY, False), Packed(KEY, True)]
    assert isinstance(ready, SumReady)
    assert ready.divergence == pytest.approx(1.0)  # of 5 from 2.5


def test_an_abandoned_sum_is_not_adopted(plane_fd: int) -> None:
    model = model_of(3.0)
    (rank,) = shared(plane_fd, model)
    rank.execute(Pack(KEY, 0.5, 0.5, False, False))
    rank.execute(SumSlice(KEY, 0, 1, (0,)))
    rank.execute(TakeResult(KEY, False))
    rank.execute(AbandonReduce(KEY, group_too=False))

    with pytest.raises(AssertionError):
        rank.execute(Adopt(KEY, False))
    assert values(model) == {3.0}


def test_a_disputed_sum_is_told_tensor_by_tensor(plane_fd: int) -> None:
    model = model_of(3.0)
    flat = FlatModel(model)
    outer = OuterStep(flat, SlowMomentum(), torch.optim.SGD(model.parameters(), 0.1))
    plain = SharedRounds(FlatModel(model), SharedPlane(plane_fd, 1, 0))
    rank = SharedRounds(flat, SharedPlane(plane_fd, 1, 0), outer)
    assert rank.execute(DigestTensors(KEY)) is None
    for each in (plain, rank):
        each.execute(Pack(KEY, 1.0, 1.0, False, False))
        each.execute(SumSlice(KEY, 0, 1, (0,)))
        each.execute(TakeResult(KEY, False))

    told = [each.execute(DigestTensors(KEY)) for each in (plain, rank)]

    assert all(isinstance(each, TensorsDigested) for each in told)
    names = ["weight", "bias", "(padding)"]
    assert list(told[0].names) == names  # type: ignore[union-attr]
    before = [f"{name} of the version before" for name in names]
    assert list(told[1].names) == [*names, *before, "slot 0 of the outer optimizer, torch.float32"]  # type: ignore[union-attr]
    assert told[1].digests.startswith(told[0].digests)  # type: ignore[union-attr]
    assert len(told[1].digests) == 8 * 7  # type: ignore[union-attr]


def test_a_model_of_many_tensors_is_told_in_bounded_space(plane_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "MAX_TENSORS", 2)
    (rank,) = shared(plane_fd, model_of(3.0))
    rank.execute(Pack(KEY, 1.0, 1.0, False, False))
    rank.execute(SumSlice(KEY, 0, 1, (0,)))
    rank.execute(TakeResult(KEY, False))

    told = rank.execute(DigestTensors(KEY))

    assert isinstance(told, TensorsDigested)
    assert (told.names, len(told.digests)) == (("weight", "one of 2 more tensors"), 16)


def test_an_aborted_round_does_not_advance_the_outer_optimizer(plane_fd: int) -> None:
    models = [model_of(1.0), model_of(5.0)]
    ranks = []
    for slot, model in enumerate(models):
        flat = FlatModel(model)
        outer = OuterStep(flat, SlowMomentum(lr=0.5, mu=0.5), torch.optim.SGD(model.parameters(), 0.1))
        ranks.append(SharedRounds(flat, SharedPlane(plane_fd, 2, slot), outer))

    def attempt(weights: tuple[float, float], end: Any) -> list[str]:
        for rank, weight in zip(ranks, weights, strict=True):
            rank.execute(Pack(KEY, weight, 0.5, False, False))
        for index, rank in enumerate(ranks):
            rank.execute(SumSlice(KEY, index, 2, (0, 1)))
        ready = [rank.execute(TakeResult(KEY, False)) for rank in ranks]
        for rank in ranks:
            rank.execute(end)
        return [each.digest for each in ready if isinstance(each, SumReady)]

    attempt((1.0, 0.0), Adopt(KEY, False))  # version 0: all hold 1.0
    for model, value in zip(models, (2.0, 4.0), strict=True):
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
    digests = attempt((0.5, 0.5), AbandonReduce(KEY, group_too=False))
    again = attempt((0.5, 0.5), Adopt(KEY, False))

    assert len({*digests, *again}) == 1  # the same sum on the same state
    assert [values(model) for model in models] == [{2.0}, {2.0}]  # m = 1 − 3; 1 − 0.5·m
    attempt((0.5, 0.5), Adopt(KEY, False))  # nobody moved: m = 0.5·(−2) + 0
    assert [values(model) for model in models] == [{2.5}, {2.5}]


# ------------------------------------------------------------------------------------------------ asynchronous rounds
def asynchronous(plane_fd: int, *models: nn.Module, alpha: float = 0.5) -> list[AsyncRounds]:
    return [
        AsyncRounds(FlatModel(model), SharedPlane(plane_fd, len(models), slot), alpha)
        for slot, model in enumerate(models)
    ]


def average(ranks: list[AsyncRounds], raw_source: int | None = None) -> None:
    """A round of equal weights up to its result."""
    share = 1.0 / len(ranks)
    takes_raw = raw_source is not None
    for slot, rank in enumerate(ranks):
        assert rank.execute(Pack(KEY, share, share, takes_raw, slot == raw_source)) == Packed(KEY, True)
    for index, rank in enumerate(ranks):
        rank.execute(SumSlice(KEY, index, len(ranks), tuple(range(len(ranks)))))
    for rank in ranks:
        rank.execute(TakeResult(KEY, takes_raw))


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_a_snapshot_is_averaged_and_blended_into_a_model_that_went_on(plane_fd: int) -> None:
    models = [model_of(1.0), model_of(5.0)]
    ranks = asynchronous(plane_fd, *models, alpha=0.25)
    for rank in ranks:
        assert rank.execute(TakeSnapshot(False)) == SnapshotTaken(True)
    for model in models:
        fill(model, 11.0)

    average(ranks)
    for rank in ranks:
        assert rank.execute(Blend(KEY)) is None

    assert [values(model) for model in models] == [{9.0}, {9.0}]  # 0.75 · 11 + 0.25 · 3


def test_a_whole_adoption_leaves_nothing_of_the_models_own(plane_fd: int) -> None:
    models = [model_of(1.0), model_of(5.0)]
    ranks = asynchronous(plane_fd, *models)
    for rank in ranks:
        rank.execute(TakeSnapshot(False))
    fill(models[0], 11.0)

    average(ranks, raw_source=1)
    for rank in ranks:
        rank.execute(Adopt(KEY, True))

    assert [values(model) for model in models] == [{3.0}, {3.0}]


def test_half_precision_is_blended_in_single(plane_fd: int) -> None:
    model = model_of(1.0).to(torch.bfloat16)
    (rank,) = asynchronous(plane_fd, model)
    rank.execute(TakeSnapshot(False))
    fill(model, 2.0)

    average([rank])
    rank.execute(Blend(KEY))

    assert values(model) == {1.5}


def test_an_untouched_rank_gives_the_consensus_and_its_own_raw_buffers(plane_fd: int) -> None:
    model = model_of(1.0)
    model.register_buffer("count", torch.tensor(7))
    (rank,) = asynchronous(plane_fd, model)
    rank.execute(TakeSnapshot(False))
    average([rank])
    rank.execute(Blend(KEY))
    fill(model, 9.0)

    rank.execute(TakeSnapshot(True))
    average([rank], raw_source=0)
    rank.execute(Adopt(KEY, True))

    assert values(model) == {1.0}
    assert model.count.item() == 7


def test_a_snapshot_that_is_not_finite_gives_zeros_and_says_so(plane_fd: int) -> None:
    ranks = asynchronous(plane_fd, model_of(float("nan")), model_of(5.0))

    assert [rank.execute(TakeSnapshot(False)) for rank in ranks] == [SnapshotTaken(False), SnapshotTaken(True)]
    assert ranks[0].execute(Pack(KEY, 0.5, 0.5, False, False)) == Packed(KEY, False)
    assert ranks[0].execute(Pack(NEXT, 0.0, 0.0, False, False)) == Packed(NEXT, True)
    ranks[1].execute(Pack(NEXT, 1.0, 1.0, False, False))
    for index, rank in enumerate(ranks):
        rank.execute(SumSlice(NEXT, index, 2, (0, 1)))
    ranks[0].execute(TakeResult(NEXT, False))
    ranks[0].execute(Adopt(NEXT, False))
    assert values(ranks[0]._flat._entries[0].owner) == {5.0}


def test_the_consensus_can_be_looked_at_without_disturbing_the_model(plane_fd: int) -> None:
    model = model_of(1.0)
    (rank,) = asynchronous(plane_fd, model)
    rank.execute(TakeSnapshot(False))
    average([rank])
    rank.execute(Blend(KEY))
    fill(model, 9.0)

    with rank.consensus():
        assert values(model) == {1.0}

    assert values(model) == {9.0}


def test_an_outer_optimizer_makes_the_consensus_that_is_blended_in(plane_fd: int) -> None:
    model = nn.Linear(2, 1)
    fill(model, 1.0)
    flat = FlatModel(model)
    outer = OuterStep(flat, SlowMomentum(lr=2.0, mu=0.0), torch.optim.SGD(model.parameters(), 0.1))
    rank = AsyncRounds(flat, SharedPlane(plane_fd, 1, 0), 1.0, outer)
    for value in (1.0, 2.0):  # version 0, then one step from 1 to 2
        fill(model, value)
        rank.execute(TakeSnapshot(False))
        average([rank])
        rank.execute(Blend(KEY))

    assert values(model) == {3.0}  # 1 + 2 · (2 − 1)


# ------------------------------------------------------------------------------------------------- collective plane
@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def collective(model: nn.Module, inbox: Inbox) -> CollectiveRounds:
    def no_store(*arguments: Any) -> Any:
        raise AssertionError("a single rank needs no rendezvous")

    plane = CollectivePlane(no_store, torch.device("cpu"), "127.0.0.1")
    rounds = CollectiveRounds(FlatModel(model), plane, 0, inbox)
    assert rounds.execute(FormCollective(1, 1, (0,), 5.0)) is None
    assert inbox.take(5.0) == GroupSettled(1, 1, "")
    return rounds


def test_a_landed_sum_is_digested_by_the_taker_of_the_inbox(inbox: Inbox) -> None:
    model = model_of(4.0)
    rounds = collective(model, inbox)

    assert rounds.execute(Pack(KEY, 0.5, 0.5, False, False)) == Packed(KEY, True)
    assert rounds.execute(ReduceCollective(KEY, False)) is None
    ready = inbox.take(5.0)
    rounds.execute(Adopt(KEY, False))

    assert isinstance(ready, SumReady)
    assert (ready.key, ready.error, ready.divergence) == (KEY, "", pytest.approx(1.0))
    assert values(model) == {2.0}
    assert not rounds.must_hard_exit


def test_a_sum_that_lands_after_its_round_was_abandoned_is_no_event(inbox: Inbox) -> None:
    rounds = collective(model_of(4.0), inbox)
    rounds.execute(Pack(KEY, 0.5, 0.5, False, False))
    rounds.execute(ReduceCollective(KEY, False))
    rounds.execute(AbandonReduce(KEY, group_too=False))

    assert inbox.take(1.0) is None

    rounds.execute(Pack(NEXT, 0.5, 0.5, False, False))
    rounds.execute(ReduceCollective(NEXT, False))
    ready = inbox.take(5.0)
    assert isinstance(ready, SumReady)
    assert ready.key == NEXT


def test_reducing_without_a_group_is_an_error_of_the_round(inbox: Inbox) -> None:
    rounds = collective(model_of(4.0), inbox)
    rounds.execute(AbandonReduce(KEY, group_too=True))
    rounds.execute(Pack(KEY, 1.0, 1.0, False, False))

    ready = rounds.execute(ReduceCollective(KEY, False))

    assert isinstance(ready, SumReady)
    assert "no group stands" in ready.error


# ------------------------------------------------------------------------------------------------------------- solo
def test_the_only_rank_is_the_consensus() -> None:
    model = model_of(1.0)
    rounds = SoloRounds(model)

    assert rounds.execute(FormCollective(1, 1, (0,), 5.0)) == GroupSettled(1, 1, "")
    assert rounds.execute(Pack(KEY, 1.0, 1.0, True, True)) == Packed(KEY, True)
    ready = rounds.execute(ReduceCollective(KEY, True))
    assert rounds.execute(Adopt(KEY, True)) is None
    assert rounds.execute(AbandonReduce(KEY, False)) is None

    assert isinstance(ready, SumReady)
    assert ready.error == ""
    assert values(model) == {1.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_only_rank_tells_that_it_is_not_finite(bad: float) -> None:
    assert SoloRounds(model_of(bad)).execute(Pack(KEY, 1.0, 1.0, True, True)) == Packed(KEY, False)
    assert SoloRounds(nn.ReLU()).execute(Pack(KEY, 1.0, 1.0, True, True)) == Packed(KEY, True)


def test_a_plane_refuses_the_other_planes_actions(plane_fd: int, inbox: Inbox) -> None:
    (rank,) = shared(plane_fd, model_of(1.0))
    for rounds, action in (
        (rank, FormCollective(1, 1, (0,), 5.0)),
        (collective(model_of(1.0), inbox), SumSlice(KEY, 0, 1, (0,))),
        (SoloRounds(model_of(1.0)), TakeResult(KEY, False)),
        (SoloRounds(model_of(1.0)), DigestTensors(KEY)),
    ):
        with pytest.raises(InvariantViolation):
            rounds.execute(action)
