"""The cadence in whole simulated runs: guards in the head that are silent or answer late, and shares that follow."""

import random
from typing import Any

import pytest

from flodl.core import events as ev
from flodl.messages import (
    CadenceSettings,
    FromHead,
    GuardKind,
    GuardSettings,
    GuardVerdict,
    JudgeRound,
    Mode,
    RoundJudged,
)
from tests.sim.actor import wire
from tests.sim.world import HostSpec, Scenario, World

USER = GuardSettings(GuardKind.USER)
TWO_HOSTS = (HostSpec("a", (0.01,)), HostSpec("b", (0.01, 0.03)))
EQUAL = (HostSpec("a", (0.01, 0.01, 0.01)),)
WINDOWED = [mode for mode in Mode if not mode.is_sync]
FOLLOWED_IN = 3


def world_of(mode: Mode, hosts: tuple[HostSpec, ...], dataset_size: int, **cadence: Any) -> World:
    return World(Scenario(1, hosts, CadenceSettings(mode, **cadence), dataset_size=dataset_size))


def fields_of(world: World, event: str) -> list[dict[str, Any]]:
    return [dict(record.fields) for record in world.records if record.event == event]


class Head(list[Any]):
    """What the head hears; it judges every round, after a delay of up to a third of a second."""

    def __init__(self, world: World) -> None:
        self.world, self.random = world, random.Random(7)
        self.asked: list[int] = []

    def append(self, message: Any) -> None:
        super().append(message)
        if isinstance(message, JudgeRound):
            self.asked.append(message.figures.version)
            verdict = self.random.choice(list(GuardVerdict))
            judged = RoundJudged(message.figures.version, verdict, self.random.choice([0.5, 0.9, 7.0]), "")
            self.world.after(self.random.uniform(0, 0.33), lambda: self._answer(judged))

    def _answer(self, judged: RoundJudged) -> None:
        self.world.controller.post(ev.HeadSaid(wire(judged, FromHead)))


@pytest.mark.parametrize("mode", list(Mode))
def test_guard_that_never_answers_holds_up_nothing(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=400, guard=USER)
    assert world.run().status == "completed"
    world.assert_exact_coverage()
    assert len(fields_of(world, "guard_late")) == 1
    stories = fields_of(world, "cadence")
    assert bool(stories) is not mode.is_sync
    assert {story["verdict"] for story in stories} <= {"stable"}


@pytest.mark.parametrize("mode", list(Mode))
def test_guard_that_answers_late_early_or_nonsense_loses_no_sample(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=1000, guard=USER)
    world.controller.to_head = head = Head(world)
    assert world.run().status == "completed"
    world.assert_exact_coverage()
    assert head.asked == [commit["version"] for commit in fields_of(world, "commit")[1:]]
    for story in fields_of(world, "cadence"):
        assert story["verdict"] == "stable" or story["committed_anchor"] <= story["anchor"]


@pytest.mark.parametrize("mode", WINDOWED)
def test_shares_follow_a_device_that_turns_three_times_slower_within_three_windows(mode: Mode) -> None:
    world = world_of(mode, EQUAL, dataset_size=6000)
    world.after(20.0, lambda: world.slow_rank(2, 3.0))
    world.run()
    world.assert_exact_coverage()
    plans = [dict(commit["counts"]) for commit in fields_of(world, "commit")]
    before = [counts for counts in plans if abs(counts[2] - counts[0]) <= 0.2 * counts[0]]
    first_fair = next(at for at, counts in enumerate(plans) if counts[2] and counts[0] >= 2.4 * counts[2])
    assert len(before) >= 8
    last_equal = max(at for at, counts in enumerate(plans) if at < first_fair and counts in before)
    assert first_fair - last_equal <= FOLLOWED_IN


# ---------------------------------------------------------------------------------------------------------- sync modes
SYNC = [mode for mode in Mode if mode.is_sync]


def whole_windows(world: World) -> list[dict[int, int]]:
    """Steps by rank of the windows in which every rank had work, version 0 and the first window left out."""
    plans = [dict(commit["counts"]) for commit in fields_of(world, "commit")]
    return [counts for counts in plans[2:] if all(counts.values())]


@pytest.mark.parametrize("mode", SYNC)
def test_equal_ranks_of_a_sync_mode_do_one_step_per_round(mode: Mode) -> None:
    world = world_of(mode, EQUAL, dataset_size=600)
    world.run()
    world.assert_exact_coverage()
    windows = whole_windows(world)
    assert len(windows) >= 90
    assert windows == [{0: 1, 1: 1, 2: 1}] * len(windows)


@pytest.mark.parametrize("mode", SYNC)
def test_slowest_rank_of_a_sync_mode_does_one_step_per_round_and_the_fast_ones_several(mode: Mode) -> None:
    world = world_of(mode, (HostSpec("a", (0.01, 0.01, 0.03)),), dataset_size=1200)
    world.run()
    world.assert_exact_coverage()
    windows = whole_windows(world)
    assert len(windows) >= 30
    assert {counts[2] for counts in windows} == {1}
    assert {counts[0] for counts in windows[:-2]} == {3}


@pytest.mark.parametrize("mode", SYNC)
def test_sync_steps_follow_a_device_that_turns_slower_and_recovers(mode: Mode) -> None:
    world = world_of(mode, EQUAL, dataset_size=6000)
    world.after(20.0, lambda: world.slow_rank(2, 4.0))
    world.after(40.0, lambda: world.slow_rank(2, 0.25))
    world.run()
    world.assert_exact_coverage()
    steps = [(counts[0], counts[2]) for counts in whole_windows(world)]
    slow_from, fast_from = steps.index((4, 1)), len(steps) - steps[::-1].index((4, 1))
    assert set(steps[: slow_from - FOLLOWED_IN]) == {(1, 1)}
    assert set(steps[fast_from + FOLLOWED_IN :]) == {(1, 1)}
    assert set(steps[slow_from:fast_from]) == {(4, 1)}
