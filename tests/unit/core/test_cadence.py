"""Propose, verdict, commit: who decides about the anchor, and what is written down about it."""

from dataclasses import replace
from typing import Any

import pytest

from flodl.core.actions import JobAction, Record, SendHead, Severity
from flodl.core.cadence import CLEAN_VERDICTS, VERDICT_DUE_S, Cadence
from flodl.core.elche import Phase
from flodl.messages import (
    CadenceSettings,
    GuardKind,
    GuardSettings,
    GuardVerdict,
    JudgeRound,
    Mode,
    RoundFigures,
    RoundJudged,
    WindowDone,
)

STABLE, SUPPRESS, NUDGE = GuardVerdict.STABLE, GuardVerdict.SUPPRESS_GROWTH, GuardVerdict.NUDGE_DOWN
USER = GuardSettings(GuardKind.USER)
HEAVY, FINE, LIGHT = 1.0, 0.04, 0.0  # overheads: × 3, no change, one less
RISING = (0.1, 0.2, 0.3, 0.4)


class Run:
    """Two equal ranks of 1 ms a batch, calibrated to Stable at an anchor of 10, and committed round by round."""

    def __init__(self, windows: int = 5, now_s: float = 0.0, **settings: Any) -> None:
        settings = {
            "mode": Mode.CPU_CADENCE,
            "guard": GuardSettings(GuardKind.TREND),
            "meta_controller": False,
        } | settings
        self.cadence = Cadence(CadenceSettings(**settings), [0, 1])
        self.version, self.now_s = 0, now_s
        for _ in range(windows):
            self.round(FINE, divergence=None)

    def round(
        self, overhead: float, divergence: float | None = 0.01, rates: tuple[float | None, ...] = (0.1, 0.1)
    ) -> list[JobAction]:
        self.version += 1
        counts = self.cadence.elche.plan(10_000)
        reports = {
            rank: WindowDone(rank, self.version - 1, count, count, 1.0, True, 1.0, 1.0, float(count), {}, rates[rank])
            for rank, count in counts.items()
        }
        reduce_ms = overhead * max(counts.values())
        return self.cadence.observe(self.version, reports, reduce_ms, divergence, self.now_s)

    def judge(self, verdict: GuardVerdict, factor: float = 1.0, error: str = "", version: int = 0) -> list[JobAction]:
        return self.cadence.on_judged(RoundJudged(version or self.version, verdict, factor, error))

    @property
    def anchor(self) -> int:
        return self.cadence.elche.anchor


def records(actions: list[JobAction], event: str) -> list[Record]:
    return [action for action in actions if isinstance(action, Record) and action.event == event]


def events(actions: list[JobAction]) -> list[str]:
    return [action.event for action in actions if isinstance(action, Record)]


# --------------------------------------------------------------------------------------------------- guards of ours
def test_stable_verdict_commits_growth_and_shrink() -> None:
    run = Run()
    run.round(HEAVY)
    assert run.anchor == 30
    run.round(LIGHT)
    assert run.anchor == 29


def test_growth_is_vetoed_before_it_lands_and_the_story_is_told() -> None:
    run = Run()
    for divergence in RISING[:3]:
        run.round(FINE, divergence)
    story, veto = run.round(HEAVY, RISING[3])
    assert run.anchor == 10
    assert isinstance(story, Record)
    assert (story.event, story.severity, story.detail) == (
        "cadence", Severity.INFO, "version 9: anchor 10, proposed 30, suppress_growth, committed 10",
    )  # fmt: skip
    assert story.fields == {
        "version": 9, "phase": "stable", "overhead": 1.0, "anchor": 10, "proposed_anchor": 30, "divergence": 0.4,
        "verdict": "suppress_growth", "note": "", "nudge": "", "committed_anchor": 10, "learning_rate": 0.1,
        "settled": False,
    }  # fmt: skip
    detail = "version 9: the guard vetoes the anchor's growth from 10 to 30"
    assert veto == Record("growth_vetoed", Severity.INFO, detail, {"version": 9})


def test_shrink_lands_in_spite_of_an_objection() -> None:
    run = Run()
    for divergence in RISING:
        actions = run.round(LIGHT if divergence == RISING[3] else FINE, divergence)
    assert run.anchor == 9
    assert events(actions) == ["cadence"]


def test_nudge_drops_the_proposal_and_cuts_the_anchor() -> None:
    run = Run(anchor=33, min_anchor=5, guard=GuardSettings(GuardKind.MSF, nudge_rounds=1, nudge_factor=0.5))
    run.round(FINE, 0.01)
    actions = run.round(HEAVY, 0.9)
    assert run.anchor == 16
    assert events(actions) == ["cadence", "growth_vetoed", "anchor_nudged"]
    nudged = records(actions, "anchor_nudged")[0]
    assert nudged.detail == "version 7: the anchor is cut from 33 to 16: the guard asks for it"
    assert nudged.fields == {"version": 7, "anchor": 16, "reason": "the guard asks for it"}


def test_nudge_never_goes_below_the_least_anchor_and_one_that_changes_nothing_is_no_event() -> None:
    run = Run(anchor=5, min_anchor=5, guard=GuardSettings(GuardKind.MSF, nudge_rounds=1))
    run.round(FINE, 0.01)
    assert events(run.round(FINE, 0.9)) == ["cadence"]
    assert run.anchor == 5


def test_no_guard_lets_growth_pass() -> None:
    run = Run(guard=GuardSettings(GuardKind.NONE))
    for divergence in RISING:
        run.round(FINE, divergence)
    run.round(HEAVY, 0.9)
    assert run.anchor == 30


def test_round_without_a_known_divergence_is_stable_and_not_judged() -> None:
    run = Run()
    for divergence in RISING[:3]:
        run.round(FINE, divergence)
    run.round(HEAVY, None)
    assert (run.anchor, run.cadence.divergence, run.cadence.verdict) == (30, None, STABLE)
    run.round(FINE, RISING[3])
    assert (run.cadence.divergence, run.cadence.verdict) == (0.4, SUPPRESS)


def test_new_cadence_knows_no_divergence_and_waits_for_nothing() -> None:
    cadence = Run(windows=0).cadence
    assert (cadence.divergence, cadence.verdict, cadence.is_settled) == (None, STABLE, False)
    assert (cadence.tick(1e9), cadence.next_deadline_s()) == ([], None)


def test_elche_learns_from_delivered_and_from_compute_times() -> None:
    run = Run(windows=0)
    reports = {
        0: WindowDone(0, 0, 5, 5, 1.0, True, 2.0, 1.5, 7.5),
        1: WindowDone(1, 0, 5, 5, 1.0, True, 4.0, 3.5, 17.5),
    }
    run.cadence.observe(1, reports, 0.0, None, 0.0)
    assert run.cadence.elche.ms_per_batch == {0: 2.0, 1: 4.0}
    other = Run(windows=0)
    other.cadence.observe(1, {**reports, 1: replace(reports[1], delivered_ms=None)}, 0.0, None, 0.0)
    assert other.cadence.elche.ms_per_batch == {0: 1.5, 1: 3.5}


def test_round_without_a_sample_is_judged_all_the_same() -> None:
    run = Run()
    for divergence in RISING[:3]:
        run.round(FINE, divergence)
    run.version += 1
    run.cadence.observe(run.version, {}, 1.0, RISING[3], 0.0)
    assert (run.anchor, run.cadence.verdict) == (10, SUPPRESS)


def test_round_without_windows_has_no_step_and_no_change() -> None:
    assert Run(guard=USER).cadence.observe(6, {}, 1.0, 0.5, 0.0) == [
        SendHead(JudgeRound(RoundFigures(6, 0.5, 0, 10, 10)))
    ]


def test_longest_window_is_the_guards_unit_of_time() -> None:
    run = Run(guard=USER)
    reports = {rank: WindowDone(rank, 5, 1, steps, 1.0, True, 1.0, 1.0, 1.0) for rank, steps in ((0, 3), (1, 7))}
    actions = run.cadence.observe(6, reports, 0.0, 0.25, 0.0)
    assert actions == [SendHead(JudgeRound(RoundFigures(6, 0.25, 7, 10, 9)))]


def test_sync_modes_are_judged_but_have_no_story() -> None:
    run = Run(mode=Mode.NCCL_SYNC)
    assert [events(run.round(HEAVY, divergence)) for divergence in RISING] == [[]] * 4
    assert (run.anchor, run.cadence.verdict) == (1, SUPPRESS)


# ---------------------------------------------------------------------------------------------------- meta-controller
def test_objections_in_a_row_shorten_the_window() -> None:
    run = Run(meta_controller=True)
    rising = [0.1 * n for n in range(1, 7)]
    actions = [run.round(FINE, divergence) for divergence in rising]
    assert [events(each) for each in actions[3:]] == [["cadence"], ["cadence"], ["cadence", "anchor_nudged"]]
    assert records(actions[-1], "cadence")[0].fields["nudge"] == "the guard objected 3 rounds in a row"
    assert records(actions[-1], "cadence")[0].fields["committed_anchor"] == 5
    assert run.anchor == 5
    assert records(actions[-1], "anchor_nudged")[0] == Record(
        "anchor_nudged",
        Severity.INFO,
        "version 11: the anchor is cut from 10 to 5: the guard objected 3 rounds in a row",
        {"version": 11, "anchor": 5, "reason": "the guard objected 3 rounds in a row"},
    )


def test_drop_of_the_median_learning_rate_shortens_the_window() -> None:
    run = Run(meta_controller=True)
    run.round(FINE, rates=(0.2, 0.1))
    run.round(FINE, rates=(0.02, 0.1))  # the lower of two
    assert run.anchor == 5
    run.round(FINE, rates=(None, float("nan")))
    run.round(FINE, rates=(0.02, 9.0))
    assert run.anchor == 5


@pytest.mark.parametrize(
    ("rates", "median"),
    [
        ((0.3,), 0.3),
        ((0.1, 0.3), 0.1),
        ((0.9, 0.1, 0.3), 0.3),
        ((0.9, 0.1, 0.3, 0.2), 0.2),
        ((0.9, 0.1, 0.3, 0.2, 0.4), 0.3),
        ((None, float("inf"), 0.2), 0.2),
        ((None, float("nan")), None),
        ((), None),
    ],
)
def test_learning_rate_of_a_round_is_the_median_of_those_known(
    rates: tuple[float | None, ...], median: float | None
) -> None:
    reports = {rank: WindowDone(rank, 5, 1, 1, 1.0, True, None, 1.0, 1.0, {}, rate) for rank, rate in enumerate(rates)}
    actions = Run().cadence.observe(6, reports, 0.0, None, 0.0)
    assert records(actions, "cadence")[0].fields["learning_rate"] == median


def test_settled_is_known_after_ten_rounds_at_one_anchor() -> None:
    run = Run()
    assert not run.cadence.is_settled
    for _ in range(5):
        actions = run.round(FINE)
    assert run.cadence.is_settled
    assert records(actions, "cadence")[0].fields["settled"] is True


# ----------------------------------------------------------------------------------------------------------- relax_up
def test_relaxing_earns_one_batch_for_every_five_clean_verdicts() -> None:
    run = Run(relax_up=True)
    anchors = []
    for _ in range(3 * CLEAN_VERDICTS):
        run.round(FINE)
        anchors.append(run.anchor)
    assert anchors == [10] * 5 + [11] * 5 + [12] * 5


def test_relaxing_waits_while_the_overhead_asks_for_something_else() -> None:
    run = Run(relax_up=True)
    for _ in range(CLEAN_VERDICTS):
        run.round(FINE)
    run.round(LIGHT)
    assert run.anchor == 9
    run.round(FINE)
    assert run.anchor == 10


def test_objection_starts_the_count_of_clean_verdicts_anew() -> None:
    run = Run(relax_up=True)
    for divergence in (0.1, 0.1, *RISING[1:]):
        run.round(FINE, divergence)
    assert run.cadence.verdict is SUPPRESS
    while run.cadence.verdict is SUPPRESS:
        run.round(FINE)
    for _ in range(CLEAN_VERDICTS - 1):
        run.round(FINE)
    assert run.anchor == 10
    run.round(FINE)
    assert run.anchor == 11


def test_rounds_that_nobody_judged_earn_nothing() -> None:
    run = Run(relax_up=True)
    for _ in range(2 * CLEAN_VERDICTS):
        run.round(FINE, None)
    assert run.anchor == 10


@pytest.mark.parametrize("settings", [{"relax_up": False}, {"relax_up": True, "max_anchor": 10}])
def test_nothing_is_relaxed_unasked_or_beyond_the_bound(settings: dict[str, Any]) -> None:
    run = Run(**settings)
    for _ in range(2 * CLEAN_VERDICTS):
        run.round(FINE)
    assert run.anchor == 10


def test_nothing_is_relaxed_before_stable() -> None:
    run = Run(windows=0, relax_up=True)
    for version in range(1, 1 + CLEAN_VERDICTS):
        run.cadence.observe(version, {}, 1.0, 0.01, 0.0)
    for _ in range(4):
        run.round(FINE)
        assert run.anchor == 10
    run.round(FINE)
    assert (run.cadence.elche.phase, run.anchor) == (Phase.STABLE, 11)


# --------------------------------------------------------------------------------------------------- the user's guard
def test_users_guard_is_asked_and_its_verdict_decides() -> None:
    run = Run(guard=USER)
    actions = run.round(HEAVY, 0.25)
    assert actions == [SendHead(JudgeRound(RoundFigures(6, 0.25, 10, 10, 30)))]
    assert run.anchor == 10
    assert events(run.judge(STABLE)) == ["cadence"]
    assert run.anchor == 30
    run.round(HEAVY)
    assert events(run.judge(SUPPRESS)) == ["cadence", "growth_vetoed"]
    run.round(HEAVY)
    assert events(run.judge(NUDGE, 0.5)) == ["cadence", "growth_vetoed", "anchor_nudged"]
    assert run.anchor == 15


def test_verdict_that_is_overdue_counts_as_stable_with_a_note() -> None:
    run = Run(guard=USER, now_s=50.0)
    run.round(HEAVY)
    assert run.cadence.next_deadline_s() == 50.0 + VERDICT_DUE_S
    assert run.cadence.tick(50.0 + VERDICT_DUE_S / 2) == []
    late, story = run.cadence.tick(50.0 + VERDICT_DUE_S)
    assert isinstance(late, Record)
    assert (late.event, late.severity) == ("guard_late", Severity.WARNING)
    assert late.detail == "version 6: the convergence guard in the head: no verdict within 100 ms; taken as stable"
    assert isinstance(story, Record)
    assert (story.fields["verdict"], story.fields["note"]) == ("stable", "no verdict within 100 ms")
    assert (run.anchor, run.cadence.next_deadline_s()) == (30, None)
    assert run.cadence.tick(51.0) == []
    assert run.judge(NUDGE, 0.5) == []
    assert run.anchor == 30


def test_next_round_does_not_wait_for_a_verdict() -> None:
    run = Run(guard=USER)
    run.round(HEAVY)
    actions = run.round(FINE)
    assert records(actions, "guard_late")[0].fields == {"version": 6, "reason": "the next round came first"}
    assert [type(action) for action in actions] == [Record, Record, SendHead]
    assert events(actions) == ["guard_late", "cadence"]
    assert run.anchor == 30
    assert run.judge(NUDGE, 0.5, version=6) == []
    assert run.anchor == 30


def test_failing_guard_counts_as_stable_and_warns_once_in_a_row() -> None:
    run = Run(guard=USER)
    run.round(HEAVY)
    failed = run.judge(STABLE, error="KeyError: 'x'")
    assert events(failed) == ["guard_failed", "cadence"]
    assert records(failed, "guard_failed")[0].fields == {"version": 6, "reason": "KeyError: 'x'"}
    assert run.anchor == 30
    run.round(FINE)
    again = run.judge(STABLE, error="KeyError: 'x'")
    assert events(again) == ["cadence"]
    assert records(again, "cadence")[0].fields["note"] == "KeyError: 'x'"
    run.round(FINE)
    run.judge(STABLE)
    run.round(FINE)
    assert events(run.judge(STABLE, error="KeyError: 'x'")) == ["guard_failed", "cadence"]


@pytest.mark.parametrize("factor", [0.0, 1.0, 7.0, -1.0, float("nan")])
def test_factor_that_no_guard_may_ask_for_is_a_failure(factor: float) -> None:
    run = Run(guard=USER)
    run.round(HEAVY)
    failed, story = run.judge(NUDGE, factor)
    assert isinstance(failed, Record)
    assert isinstance(story, Record)
    assert str(failed.fields["reason"]).startswith(f"factor is {factor!r}; the anchor is multiplied by it")
    assert (failed.event, story.event, run.anchor) == ("guard_failed", "cadence", 30)


def test_verdicts_that_nobody_asked_for_change_nothing() -> None:
    run = Run(guard=USER)
    assert run.judge(NUDGE, 0.5) == []
    run.round(HEAVY)
    assert run.judge(NUDGE, 0.5, version=99) == []
    assert run.anchor == 10


def test_clean_verdicts_from_the_head_earn_relaxing() -> None:
    run = Run(guard=USER, relax_up=True)
    for _ in range(1 + CLEAN_VERDICTS):
        run.round(FINE)
        run.judge(STABLE)
    assert run.anchor == 11


def test_silent_and_failing_guards_earn_no_relaxing() -> None:
    run = Run(guard=USER, relax_up=True)
    for _ in range(2 * CLEAN_VERDICTS):
        run.round(FINE)
        run.judge(STABLE, error="boom")
    assert run.anchor == 10


# ---------------------------------------------------------------------------------------------------------------- state
def test_restored_cadence_objects_where_the_other_would_have() -> None:
    run, other = Run(), Run(windows=0)
    for divergence in RISING[:3]:
        run.round(FINE, divergence)
    other.cadence.restore(run.cadence.state())
    assert other.cadence.state() == run.cadence.state()
    assert other.cadence.state().trend_history == RISING[:3]
    other.round(HEAVY, RISING[3])
    assert (other.anchor, other.cadence.verdict) == (10, SUPPRESS)


def test_history_of_another_guard_is_not_carried_over() -> None:
    run, other = Run(), Run(windows=0, guard=GuardSettings(GuardKind.MSF))
    run.round(FINE, 0.5)
    other.cadence.restore(run.cadence.state())
    assert other.cadence.state() == replace(run.cadence.state(), trend_history=())
