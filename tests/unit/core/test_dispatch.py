"""Plans of windows: who does how much, from which leases."""

from dataclasses import replace

import pytest

from flodl.core.dispatch import AHEAD_BATCHES, Dispatch
from flodl.core.elche import ElChe, WindowTiming
from flodl.core.supply import Supply
from flodl.errors import InvariantViolation
from flodl.ids import Grant, RankId, Span
from flodl.messages import CadenceSettings, Mode, Settings, WindowPlan

BATCH_SIZE = 4


class Epoch:
    """An epoch of ``batches`` batches under ``settings``, planned window by window."""

    def __init__(self, settings: CadenceSettings, batches: int, live: tuple[RankId, ...] = (0, 1)) -> None:
        self.elche = ElChe(settings, live)
        self.supply = Supply(Settings(batches * BATCH_SIZE, BATCH_SIZE, 1, 0, settings), merge_single_tail=False)
        self.dispatch, self.live = Dispatch(settings), live

    def plan(self, version: int = 0) -> dict[RankId, WindowPlan]:
        return self.dispatch.plan(version, self.live, self.elche, self.supply)

    def train(self, steps: dict[RankId, int]) -> None:
        for rank, done in steps.items():
            self.supply.train(rank, done * BATCH_SIZE)
            self.supply.merge(rank)
        self.dispatch.settle(steps)


def measured(settings: CadenceSettings, batches: int, ms: dict[RankId, float]) -> Epoch:
    epoch = Epoch(settings, batches, tuple(ms))
    epoch.elche.observe({rank: WindowTiming(10, cost, cost, 10 * cost) for rank, cost in ms.items()}, 0.0)
    return epoch


def test_cadence_plans_what_elche_counts_and_leases_ahead() -> None:
    epoch = measured(CadenceSettings(Mode.NCCL_CADENCE, anchor=10), 400, {0: 1.0, 1: 2.0})
    plans = epoch.plan(version=3)
    assert plans[0] == WindowPlan(0, 3, 20, 20, (Grant(0, (Span(0, 88),)),), stride=1.5)
    assert plans[1] == WindowPlan(1, 3, 10, 10, (Grant(0, (Span(88, 48),)),), stride=3.0)
    assert epoch.supply.held_batches(0) == 20 + AHEAD_BATCHES


def test_next_window_leases_only_what_is_not_held() -> None:
    epoch = measured(CadenceSettings(Mode.NCCL_CADENCE, anchor=10), 400, {0: 1.0, 1: 2.0})
    epoch.plan()
    epoch.train({0: 20, 1: 10})
    plans = epoch.plan(version=1)
    assert [plan.grants[0].samples for plan in plans.values()] == [80, 40]


def test_lease_ahead_does_not_raise_a_small_count_in_the_next_window() -> None:
    epoch = measured(CadenceSettings(Mode.NCCL_CADENCE, anchor=1), 400, {0: 1.0, 1: 3.0})
    for version in range(3):
        plans = epoch.plan(version)
        assert [plan.max_steps for plan in plans.values()] == [3, 1]
        epoch.train({0: 3, 1: 1})


@pytest.mark.parametrize("anchor", [2, 3, 4])
def test_lease_ahead_fits_into_the_window_of_an_anchor_that_has_shrunk_by_one(anchor: int) -> None:
    epoch = measured(CadenceSettings(Mode.NCCL_CADENCE, anchor=anchor), 400, {0: 1.0, 1: 3.0})
    epoch.plan()
    epoch.train({0: 3 * anchor, 1: anchor})
    epoch.elche.restore(replace(epoch.elche.state(), anchor=anchor - 1))
    assert [plan.max_steps for plan in epoch.plan(version=1).values()] == [3 * (anchor - 1), anchor - 1]


def test_rank_that_holds_more_than_its_count_is_back_at_it_after_one_window() -> None:
    epoch = measured(CadenceSettings(Mode.NCCL_CADENCE, anchor=1), 400, {0: 1.0, 1: 3.0})
    epoch.supply.lease(1, 2)
    assert epoch.plan()[1].max_steps == 2
    epoch.train({0: 3, 1: 2})
    assert epoch.plan(version=1)[1].max_steps == 1


def test_nothing_is_leased_ahead_near_the_end() -> None:
    epoch = measured(CadenceSettings(Mode.NCCL_CADENCE, anchor=10), 60, {0: 1.0, 1: 2.0})
    plans = epoch.plan()
    assert [plan.grants[0].samples for plan in plans.values()] == [80, 40]


def test_last_window_of_an_epoch_is_exactly_what_is_left() -> None:
    epoch = measured(CadenceSettings(Mode.CPU_CADENCE, anchor=10), 40, {0: 1.0, 1: 2.0})
    epoch.plan()
    epoch.train({0: 20, 1: 10})
    plans = epoch.plan()
    assert sum(plan.max_steps for plan in plans.values()) == 10
    assert all(plan.min_steps == plan.max_steps for plan in plans.values())
    assert epoch.supply.lease(0, 1) == ()


def test_rank_that_gets_nothing_of_the_tail_is_planned_without_a_grant() -> None:
    epoch = measured(CadenceSettings(Mode.CPU_CADENCE, anchor=10), 2, {0: 1.0, 1: 9.0})
    plans = epoch.plan()
    assert sorted(plan.max_steps for plan in plans.values()) == [0, 2]
    assert next(plan for plan in plans.values() if not plan.max_steps).grants == ()


@pytest.mark.parametrize(
    ("ms", "most"),
    [
        ({}, [1, 1]),
        ({0: 5.0, 1: 5.0}, [1, 1]),
        ({0: 5.0, 1: 15.0}, [3, 1]),
    ],
)
def test_sync_asks_for_one_step_and_allows_what_fits_into_one_of_the_slowest(
    ms: dict[RankId, float], most: list[int]
) -> None:
    epoch = measured(CadenceSettings(Mode.NCCL_SYNC), 100, ms)
    epoch.live = (0, 1)
    epoch.elche = epoch.elche if ms else ElChe(CadenceSettings(Mode.NCCL_SYNC), (0, 1))
    assert [(plan.min_steps, plan.max_steps) for plan in epoch.plan().values()] == [(1, steps) for steps in most]
    assert [epoch.supply.held_batches(rank) for rank in (0, 1)] == [steps + AHEAD_BATCHES for steps in most]


def test_sync_lease_shrinks_with_the_steps_and_returns_nothing() -> None:
    epoch = measured(CadenceSettings(Mode.CPU_SYNC), 100, {0: 5.0, 1: 50.0})
    assert [plan.max_steps for plan in epoch.plan().values()] == [10, 1]
    epoch.train({0: 4, 1: 1})
    epoch.elche = measured(CadenceSettings(Mode.CPU_SYNC), 100, {0: 5.0, 1: 5.0}).elche
    plans = epoch.plan(version=1)
    assert [(plan.max_steps, plan.grants != ()) for plan in plans.values()] == [(1, False), (1, True)]
    assert epoch.supply.held_batches(0) == 8


def test_slowest_that_is_through_with_its_share_lets_the_next_one_do_one_step() -> None:
    settings = CadenceSettings(Mode.CPU_SYNC, partition_ratios=(0.5, 0.4, 0.1))
    epoch = measured(settings, 30, {0: 1.0, 1: 2.0, 2: 4.0})
    assert [plan.max_steps for plan in epoch.plan().values()] == [4, 2, 1]
    epoch.train({0: 4, 1: 2, 2: 3})
    assert [plan.max_steps for plan in epoch.plan(version=1).values()] == [2, 1, 0]


@pytest.mark.parametrize(
    ("settings", "strides"),
    [
        (CadenceSettings(Mode.CPU_CADENCE, anchor=10), [1.75, 3.5, 7.0]),
        (CadenceSettings(Mode.CPU_SYNC), [1.75, 3.5, 7.0]),
        (CadenceSettings(Mode.CPU_SYNC, partition_ratios=(0.2, 0.3, 0.5)), [1.75, 3.5, 7.0]),
        (CadenceSettings(Mode.CPU_SYNC, max_batch_diff=1), [2.5, 2.5, 5.0]),
        (CadenceSettings(Mode.CPU_SYNC, max_batch_diff=0), [3.0, 3.0, 3.0]),
    ],
)
def test_stride_is_what_everyone_does_during_a_step_of_one(settings: CadenceSettings, strides: list[float]) -> None:
    epoch = measured(settings, 400, {0: 1.0, 1: 2.0, 2: 4.0})
    assert [plan.stride for plan in epoch.plan().values()] == pytest.approx(strides)


def test_rank_that_is_through_with_its_share_slows_no_stride() -> None:
    epoch = measured(CadenceSettings(Mode.CPU_SYNC), 20, {0: 1.0, 1: 10.0})
    epoch.plan()
    epoch.train({0: 10, 1: 3})
    assert [plan.stride for plan in epoch.plan().values()] == [1.0, 1.0]


def test_sync_shares_shrink_by_what_is_done() -> None:
    epoch = measured(CadenceSettings(Mode.CPU_SYNC), 20, {0: 1.0, 1: 9.0})
    assert [plan.max_steps for plan in epoch.plan().values()] == [9, 1]
    epoch.train({0: 9, 1: 1})
    assert [(plan.min_steps, plan.max_steps) for plan in epoch.plan(version=1).values()] == [(1, 1), (1, 1)]
    epoch.train({0: 1, 1: 1})
    plans = epoch.plan(version=2)
    assert (plans[0].min_steps, plans[0].max_steps, plans[0].grants) == (0, 0, ())
    assert (plans[1].min_steps, plans[1].max_steps) == (1, 8)


@pytest.mark.parametrize(("lead", "most"), [(0, 1), (3, 4), (99, 10)])
def test_batch_diff_bounds_the_lead_of_sync(lead: int, most: int) -> None:
    epoch = measured(CadenceSettings(Mode.CPU_SYNC, max_batch_diff=lead), 100, {0: 1.0, 1: 10.0})
    assert [plan.max_steps for plan in epoch.plan().values()] == [most, 1]


def test_sync_shares_are_dealt_anew_when_a_rank_is_lost() -> None:
    epoch = Epoch(CadenceSettings(Mode.CPU_SYNC), 20)
    epoch.plan()
    epoch.train({0: 2, 1: 2})
    epoch.supply.reclaim(1)
    epoch.elche.remove_rank(1)
    epoch.live = (0,)
    assert epoch.plan().keys() == {0}
    epoch.dispatch.settle({1: 5})
    while left := epoch.supply.remaining_batches:
        assert [(plan.min_steps, plan.max_steps) for plan in epoch.plan().values()] == [(1, min(left, 16))]
        epoch.train({0: 1})
    assert epoch.supply.remaining_batches == 0


def test_sync_deals_by_the_ratios_of_the_settings() -> None:
    settings = CadenceSettings(Mode.CPU_SYNC, partition_ratios=(0.6, 0.3, 0.1))
    epoch = measured(settings, 20, {0: 1.0, 1: 1.0, 2: 16.0})
    assert [(plan.min_steps, plan.max_steps) for plan in epoch.plan().values()] == [(1, 12), (1, 6), (1, 1)]
    epoch.supply.reclaim(0)
    epoch.elche.remove_rank(0)
    epoch.live = (1, 2)
    assert [plan.max_steps for plan in epoch.plan().values()] == [15, 1]


def test_ratio_that_is_next_to_nothing_is_dealt_all_the_same() -> None:
    settings = CadenceSettings(Mode.CPU_SYNC, partition_ratios=(1 - 1e-12, 1e-12))
    assert [plan.max_steps for plan in Epoch(settings, 20).plan().values()] == [16, 0]


def test_samples_that_came_back_are_dealt_again() -> None:
    epoch = measured(CadenceSettings(Mode.CPU_SYNC), 4, {0: 1.0, 1: 2.0})
    epoch.plan()
    epoch.supply.train(0, 2 * BATCH_SIZE)
    epoch.supply.untrain(0)
    epoch.train({1: 2})
    epoch.dispatch.settle({0: 2})
    assert sum(plan.max_steps for plan in epoch.plan().values()) == 2


@pytest.mark.parametrize("mode", [Mode.CPU_SYNC, Mode.CPU_CADENCE])
def test_plan_for_nothing_is_a_bug(mode: Mode) -> None:
    with pytest.raises(InvariantViolation, match="0 batches are left and no rank of"):
        Epoch(CadenceSettings(mode), 0).plan()


# --------------------------------------------------------------------------------------------------- asynchronous mode
def asynchronous(batches: int, max_overshoot: int | None = None) -> Epoch:
    """Counts of 20 and 10."""
    settings = CadenceSettings(Mode.CPU_ASYNC, anchor=10, max_overshoot=max_overshoot)
    return measured(settings, batches, {0: 1.0, 1: 2.0})


@pytest.mark.parametrize(("overshoot", "most"), [(None, (40, 20)), (3, (23, 13)), (0, (20, 10))])
def test_async_rank_may_overshoot_its_count_into_leases_ahead(overshoot: int | None, most: tuple[int, int]) -> None:
    plans = asynchronous(400, overshoot).plan()
    assert [(plan.min_steps, plan.max_steps) for plan in plans.values()] == [(20, most[0]), (10, most[1])]


def test_async_count_is_kept_whatever_is_held() -> None:
    epoch = asynchronous(400)
    epoch.plan()
    epoch.train({0: 20, 1: 10})
    plans = epoch.plan(version=1)
    assert [(plan.min_steps, plan.max_steps) for plan in plans.values()] == [(20, 40), (10, 20)]


def test_leases_ahead_near_the_end_of_the_run_are_in_proportion() -> None:
    epoch = asynchronous(75)
    epoch.plan()
    assert (epoch.supply.held_batches(0), epoch.supply.held_batches(1)) == (40, 20)
    epoch.train({0: 20, 1: 10})
    epoch.plan(version=1)
    assert (epoch.supply.held_batches(0), epoch.supply.held_batches(1)) == (30, 15)


def test_last_async_window_is_exactly_what_is_left() -> None:
    epoch = asynchronous(31)
    plans = epoch.plan()
    assert [(plan.min_steps, plan.max_steps) for plan in plans.values()] == [(20, 20), (11, 11)]


def test_async_window_is_one_epoch_at_most() -> None:
    settings = CadenceSettings(Mode.CPU_ASYNC, anchor=10)
    epoch = measured(settings, 40, {0: 1.0, 1: 9.0})
    epoch.supply = Supply(Settings(40 * BATCH_SIZE, BATCH_SIZE, 10, 0, settings), merge_single_tail=False)
    assert [plan.min_steps for plan in epoch.plan().values()] == [36, 4]
