"""Convergence guards in a run: what the controller records of a round, asks of the head, and plans then."""

from typing import Any

from flodl.core.actions import JobAction, Record
from flodl.core.cadence import VERDICT_DUE_S
from flodl.core.events import HeadSaid
from flodl.messages import (
    CadenceSettings,
    GuardKind,
    GuardSettings,
    GuardVerdict,
    JudgeRound,
    Mode,
    Reduced,
    RoundJudged,
    WindowPlan,
)
from tests.unit.core.cohort import Cohort

FINE_MS, HEAVY_MS = 4.0, 50.0  # of averaging, for windows of 10 batches of 10 ms
RISING = (0.1, 0.2, 0.3, 0.4)


class GuardedRun:
    """Three equal ranks, whose every round is answered with a divergence and an averaging time of ours."""

    def __init__(self, **settings: Any) -> None:
        cadence = CadenceSettings(**({"mode": Mode.CPU_CADENCE} | settings))
        self.cohort = Cohort(dataset_size=60_000, cadence=cadence).train_until(Reduced)

    def round(self, divergence: float, reduce_ms: float = FINE_MS) -> list[JobAction]:
        cohort, key = self.cohort, self.cohort.key
        cohort.waiting.clear()
        seen = len(cohort.actions)
        for rank in cohort.core.membership.live:
            cohort.say(Reduced(rank, key, "d", True, divergence, reduce_ms, ""))
        return cohort.actions[seen:]

    def settle_down(self) -> None:
        """Version 0, and five rounds in which nothing is to be changed."""
        for _ in range(6):
            self.round(0.01)

    def say(self, verdict: GuardVerdict, factor: float = 1.0, error: str = "") -> list[JobAction]:
        version = self.cohort.sent(JudgeRound)[-1].figures.version
        return self.cohort.post(HeadSaid(RoundJudged(version, verdict, factor, error)))

    @property
    def planned_steps(self) -> int:
        plan: WindowPlan = self.cohort.sent(WindowPlan)[-1]
        return plan.max_steps


def story(actions: list[JobAction]) -> dict[str, Any]:
    """The fields of the one ``cadence`` record among ``actions``."""
    (record,) = [action for action in actions if isinstance(action, Record) and action.event == "cadence"]
    return dict(record.fields)


def test_growth_that_the_overhead_asks_for_is_vetoed_before_it_lands() -> None:
    run = GuardedRun()
    run.settle_down()
    stories = [story(run.round(divergence, HEAVY_MS if divergence == RISING[-1] else FINE_MS)) for divergence in RISING]
    assert [(each["proposed_anchor"], each["verdict"], each["committed_anchor"]) for each in stories] == [
        (10, "stable", 10), (10, "stable", 10), (10, "suppress_growth", 10), (30, "suppress_growth", 10),
    ]  # fmt: skip
    assert run.planned_steps == 10
    assert run.cohort.records("growth_vetoed") == ["version 9: the guard vetoes the anchor's growth from 10 to 30"]


def test_growth_lands_in_the_very_next_window_without_an_objection() -> None:
    run = GuardedRun()
    run.settle_down()
    assert story(run.round(0.01, HEAVY_MS))["committed_anchor"] == 30
    assert run.planned_steps == 30


def test_version_0_is_not_judged() -> None:
    run = GuardedRun(guard=GuardSettings(GuardKind.USER))
    run.round(9.0)
    assert run.cohort.sent(JudgeRound) == []


def test_round_does_not_wait_for_the_users_guard_and_its_verdict_counts_from_the_next_plan_on() -> None:
    run = GuardedRun(guard=GuardSettings(GuardKind.USER))
    run.settle_down()
    run.say(GuardVerdict.STABLE)
    run.round(0.02, HEAVY_MS)
    assert run.planned_steps == 10
    figures = run.cohort.sent(JudgeRound)[-1].figures
    assert (figures.divergence, figures.k_max, figures.anchor, figures.proposed_anchor) == (0.02, 10, 10, 30)
    assert story(run.say(GuardVerdict.STABLE))["committed_anchor"] == 30
    run.round(0.02)
    assert run.planned_steps == 30


def test_verdict_that_is_overdue_is_noticed_by_the_clock() -> None:
    run = GuardedRun(guard=GuardSettings(GuardKind.USER))
    run.round(0.01)
    run.round(0.01)
    due_s = run.cohort.now_s + VERDICT_DUE_S
    assert run.cohort.core.next_deadline_s() == due_s
    run.cohort.tick(due_s)
    assert run.cohort.records("guard_late") == [
        "version 1: the convergence guard in the head: no verdict within 100 ms; taken as stable"
    ]


def test_verdict_before_the_training_is_ignored() -> None:
    assert Cohort().post(HeadSaid(RoundJudged(1, GuardVerdict.NUDGE_DOWN, 0.5, ""))) == []
