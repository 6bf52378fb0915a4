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
    DigestTensors,
    FormCollective,
    Pack,
    ReduceCollective,
    SumSlice,
    TakeResult,
)
from flodl.core.events import GroupSettled, Packed, SliceSummed, SumReady, TensorsDigested
from flodl.errors import InvariantViolation
from flodl.ids import RoundKey
from flodl.rank import planes
from flodl.rank.inbox import Inbox
from flodl.rank.planes import CollectiveRounds, SharedRounds, SoloRounds

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
