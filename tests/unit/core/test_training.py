"""Windows, rounds, epochs and evaluations of one cohort, as JobCore lets them happen."""

from dataclasses import replace

import pytest

from flodl.core.actions import CloseReduction, JobAction, OpenReduction, Record, ResetStore, SendHost
from flodl.core.disagreement import MAX_DISSENTS
from flodl.core.events import HostDropped, Stalled
from flodl.core.formation import FORMATION_TIMEOUT_S, MAX_ATTEMPTS
from flodl.core.job import Phase
from flodl.core.training import MAX_ROUND_ATTEMPTS, PATIENCE_S
from flodl.messages import (
    AbortRound,
    CadenceSettings,
    CloseRound,
    CloseWindow,
    Commit,
    DescribeSum,
    EpochReport,
    EvalDone,
    EvalReport,
    FormGroup,
    GroupFormed,
    KillRank,
    MinReached,
    Mode,
    OpenRound,
    RankExited,
    Reduced,
    RunEnded,
    RunEval,
    SendState,
    StartRound,
    StateSent,
    SumDescribed,
    WindowDone,
    WindowPlan,
)
from tests.unit.core.cohort import Cohort, step

STALL_S = 300.0


def kill(cohort: Cohort, rank: int) -> list[JobAction]:
    return cohort.say(RankExited(rank, 0, 9, by_us=False))


def windows(cohort: Cohort) -> dict[int, WindowDone]:
    """The held windows of the latest version, not said yet."""
    plans = cohort.sent(WindowPlan)[-len(cohort.core.membership.live) :]
    return {plan.rank: cohort.window(plan) for plan in plans}


# ------------------------------------------------------------------------------------------------------------- commits
@pytest.mark.parametrize("mode", list(Mode))
def test_run_commits_every_sample_of_every_epoch(mode: Mode) -> None:
    cohort = Cohort(mode).get_ready()
    commits = [action for action in cohort.actions if isinstance(action, Record) and action.event == "commit"]
    spans = [span for commit in commits for span in commit.fields["spans"]]  # type: ignore[union-attr]
    merged = sorted((turn, p) for _, turn, start, count in spans for p in range(start, start + count))  # type: ignore[misc]
    assert merged == [(turn, p) for turn in range(2) for p in range(12)]
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("completed", 0)
    assert [commit.fields["version"] for commit in commits] == list(range(len(commits)))


def test_version_0_is_rank_0s_and_raw_buffers_are_taken_first_and_last() -> None:
    cohort = Cohort().get_ready()
    rounds = cohort.sent(StartRound)
    assert [(go.weight, go.buffer_weight, go.raw_source) for go in rounds[:3]] == [
        (1.0, 1.0, 0),
        (0.0, 0.0, 0),
        (0.0, 0.0, 0),
    ]
    assert [go.raw_source for go in rounds[3:-3]] == [None] * len(rounds[3:-3])
    assert [go.raw_source for go in rounds[-3:]] == [0, 0, 0]


def test_cpu_plane_is_opened_on_every_host_and_summed_over_several() -> None:
    cohort = Cohort().train_until(Reduced)
    opened = [action for action in cohort.actions if isinstance(action, OpenReduction)]
    assert [(action.key, action.hosts) for action in opened] == [(cohort.key, ("a", "b"))]
    assert [(order.ranks, order.hosts) for order in cohort.sent(OpenRound)] == [((0,), 2), ((1, 2), 2)]
    assert CloseReduction(cohort.key) in cohort.release(Reduced)


@pytest.mark.parametrize("bf16_wire", [False, True])
def test_first_and_last_version_cross_the_network_whole(bf16_wire: bool) -> None:
    cohort = Cohort(cadence=CadenceSettings(Mode.CPU_SYNC, bf16_wire=bf16_wire)).get_ready()
    forms = [action.bf16 for action in cohort.actions if isinstance(action, OpenReduction)]
    assert forms == [False, *([bf16_wire] * (len(forms) - 2)), False]
    assert len(forms) > 2
    assert [order.bf16 for order in cohort.sent(OpenRound)] == [form for form in forms for _ in ("a", "b")]


def test_cpu_plane_of_one_host_needs_no_reduction() -> None:
    cohort = Cohort(hosts={"a": 2}).train_until(Reduced)
    assert not any(isinstance(action, OpenReduction) for action in cohort.actions)
    assert [order.hosts for order in cohort.sent(OpenRound)] == [1]


def test_collective_plane_forms_before_its_first_round() -> None:
    cohort = Cohort(Mode.NCCL_SYNC).train_until(GroupFormed)
    assert cohort.sent(StartRound) == []
    assert ResetStore(1) in cohort.actions
    assert cohort.sent(FormGroup) == [FormGroup(rank, 1, 1, (0, 1, 2), FORMATION_TIMEOUT_S) for rank in range(3)]
    cohort.release(GroupFormed)
    assert cohort.core.phase is Phase.ENDED


def test_epochs_are_reported_with_means_and_shares() -> None:
    reports = Cohort().get_ready().sent(EpochReport)
    assert [(report.epoch, report.samples, report.avg_loss) for report in reports] == [(0, 12, 0.5), (1, 12, 0.5)]
    assert reports[0].per_rank_samples == {"0": 4, "1": 4, "2": 4}


# ------------------------------------------------------------------------------------------------------------- windows
def test_those_who_go_on_are_closed_when_all_have_done_their_least() -> None:
    cohort = Cohort(dataset_size=60).train_until(WindowDone)
    for rank in (0, 1):
        assert cohort.say(MinReached(rank, 0)) == []
    assert cohort.say(MinReached(2, 7)) == []
    assert cohort.say(MinReached(2, 0)) == [
        SendHost("a", CloseWindow(0, 0)), SendHost("b", CloseWindow(1, 0)), SendHost("b", CloseWindow(2, 0)),
    ]  # fmt: skip


def test_window_that_is_said_twice_or_late_counts_once() -> None:
    cohort = Cohort().train_until(WindowDone)
    first = windows(cohort)[0]
    cohort.say(first)
    assert cohort.say(first) == []
    assert cohort.say(replace(first, version=9)) == []


def test_rank_that_reports_more_than_its_leases_is_lost() -> None:
    cohort = Cohort().train_until(WindowDone)
    cohort.say(replace(windows(cohort)[2], samples=1000))
    assert "rank 2 on b lost: reported samples that it was not leased" in cohort.records("rank_lost")[0]
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


# ------------------------------------------------------------------------------------------------------------- losses
@pytest.mark.parametrize("mode", [Mode.CPU_CADENCE, Mode.NCCL_CADENCE])
def test_loss_inside_a_reduce_aborts_it_and_the_survivors_redo_it(mode: Mode) -> None:
    cohort = Cohort(mode).train_until(Reduced)
    stale = cohort.key
    actions = kill(cohort, 1)
    aborts = [AbortRound(rank, stale, "rank 1 is lost") for rank in (0, 2)]
    assert cohort.sent(AbortRound) == aborts
    if not mode.is_collective:
        assert CloseReduction(stale) in actions
        assert cohort.sent(CloseRound) == [CloseRound(stale), CloseRound(stale)]
    assert cohort.key.incarnation == 2
    assert [go.rank for go in cohort.sent(StartRound)[-2:]] == [0, 2]
    cohort.release(Reduced)
    assert {commit.key for commit in cohort.sent(Commit)} & {stale} == set()
    assert cohort.core.phase is Phase.ENDED


def test_loss_of_several_ranks_is_one_step() -> None:
    cohort = Cohort().train_until(Reduced)
    cohort.say(RankExited(9, 0, 9, by_us=False), "b")
    before = len(cohort.sent(StartRound))
    cohort.post(HostDropped("b", "reset"))
    assert [go.rank for go in cohort.sent(StartRound)[before:]] == [0]
    assert cohort.records("rank_lost") == ["rank 1, 2 on b lost: connection lost: reset"]


def test_loss_inside_a_window_closes_it_for_those_who_have_done_their_least() -> None:
    cohort = Cohort(dataset_size=60).train_until(WindowDone)
    for rank in (0, 2):
        cohort.say(MinReached(rank, 0))
    kill(cohort, 1)
    assert cohort.sent(CloseWindow) == [CloseWindow(0, 0), CloseWindow(2, 0)]


def test_losing_everybody_ends_the_run() -> None:
    cohort = Cohort().train_until(Reduced)
    for rank in range(3):
        kill(cohort, rank)
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("failed", 5)
    assert cohort.outcome.message == "too few ranks to go on: no rank is left; ended by signal 9"
    assert len(cohort.outcome.losses) == 2


# ----------------------------------------------------------------------------------------------------- failed attempts
def test_broken_reduce_waits_for_news_of_a_death_then_forms_anew() -> None:
    cohort = Cohort(Mode.NCCL_SYNC).train_until(Reduced)
    stale = cohort.key
    assert cohort.say(Reduced(1, stale, "", True, 0.0, 1.0, "reset")) == []
    assert cohort.say(Reduced(2, stale, "", True, 0.0, 1.0, "reset")) == []
    assert cohort.core.next_deadline_s() == cohort.now_s + PATIENCE_S
    cohort.tick(cohort.now_s + PATIENCE_S)
    assert cohort.records("round_failed") == ["round 0, attempt 1 failed: rank 1: reset"]
    assert cohort.sent(FormGroup)[-1].attempt == 2
    assert cohort.key.attempt == 2
    assert cohort.say(Reduced(0, stale, "d", True, 0.0, 1.0, "")) == []


def test_death_that_explains_a_broken_reduce_needs_no_patience() -> None:
    cohort = Cohort(Mode.NCCL_SYNC).train_until(Reduced)
    cohort.say(Reduced(1, cohort.key, "", True, 0.0, 1.0, "reset"))
    kill(cohort, 2)
    assert cohort.records("round_failed") == []
    assert (cohort.key.incarnation, cohort.key.attempt) == (2, 2)


def test_digest_that_differs_is_named_and_the_round_redone() -> None:
    cohort = Cohort().train_until(Reduced)
    for rank, digest in enumerate("xxy"):
        cohort.say(Reduced(rank, cohort.key, digest, True, 0.0, 1.0, ""))
    assert cohort.records("digest_mismatch") == ["round 0: rank 2 holds another consensus than the others"]
    assert cohort.sent(Commit) == []
    assert cohort.key.attempt == 2


def test_tensors_that_differ_are_named_while_the_round_is_redone() -> None:
    cohort = Cohort().train_until(Reduced)
    key = cohort.key
    assert cohort.say(SumDescribed(2, key, ("weight",), bytes(8))) == []
    for rank, digest in enumerate("xxy"):
        cohort.say(Reduced(rank, key, digest, True, 0.0, 1.0, ""))
    orders = [type(each.message) for each in cohort.actions if isinstance(each, SendHost) and each.host == "a"]
    assert [order.rank for order in cohort.sent(DescribeSum)] == [0, 2]
    assert orders.index(DescribeSum) < orders.index(AbortRound)
    cohort.say(SumDescribed(0, key, ("weight", "bias"), bytes(16)))
    cohort.say(SumDescribed(2, key, ("weight", "bias"), bytes(15) + b"x"))
    assert cohort.records("digest_difference") == ["round 0: rank 2 differs from rank 0 in bias (2 tensors compared)"]


def test_rank_that_differs_in_three_attempts_is_lost() -> None:
    cohort = Cohort().train_until(Reduced)
    for _ in range(MAX_DISSENTS):
        assert cohort.sent(KillRank) == []
        for rank, digest in enumerate("xxy"):
            cohort.say(Reduced(rank, cohort.key, digest, True, 0.0, 1.0, ""))
    assert cohort.sent(KillRank) == [KillRank(2, "held another consensus in 3 attempts at round 0")]
    assert cohort.core.membership.live == (0, 1)
    assert (cohort.key.incarnation, cohort.key.attempt) == (2, 4)
    assert cohort.sent(StartRound)[-1].key == cohort.key


def test_nobody_is_cast_out_without_a_majority_against_it() -> None:
    cohort = Cohort(Mode.CPU_SYNC, {"a": 2}).train_until(Reduced)
    for _ in range(MAX_DISSENTS):
        for rank, digest in enumerate("xy"):
            cohort.say(Reduced(rank, cohort.key, digest, True, 0.0, 1.0, ""))
    assert cohort.core.membership.live == (0, 1)


def test_round_that_fails_again_and_again_stops_the_run() -> None:
    cohort = Cohort().train_until(Reduced)
    for _ in range(MAX_ROUND_ATTEMPTS):
        for rank in range(3):
            cohort.say(Reduced(rank, cohort.key, str(rank), True, 0.0, 1.0, ""))
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 5
    assert cohort.outcome.message.startswith("round 0 failed 10 times; the last time: ")
    assert cohort.records("round_failed")[-1].endswith(cohort.outcome.message.partition("last time: ")[2])


def test_loss_renews_the_patience_with_a_round() -> None:
    cohort = Cohort().train_until(Reduced)
    for _ in range(MAX_ROUND_ATTEMPTS - 1):
        for rank in range(3):
            cohort.say(Reduced(rank, cohort.key, str(rank), True, 0.0, 1.0, ""))
    kill(cohort, 2)
    for rank in range(2):
        cohort.say(Reduced(rank, cohort.key, str(rank), True, 0.0, 1.0, ""))
    assert cohort.outcome is None


def test_reduce_that_does_not_end_stops_the_run_and_names_whom_it_waits_for() -> None:
    cohort = Cohort(Mode.CPU_SYNC, {"a": 2}).train_until(Reduced)
    cohort.say(Reduced(0, cohort.key, "d", True, 0.0, 1.0, ""))
    cohort.trust()
    cohort.tick(cohort.now_s + STALL_S)
    assert cohort.outcome is not None
    assert cohort.outcome.message == "round 0 did not finish within 300 s; waiting for 1"


def test_group_that_does_not_form_is_retried_on_error_and_by_deadline() -> None:
    cohort = Cohort(Mode.NCCL_SYNC).train_until(GroupFormed)
    cohort.say(GroupFormed(1, 1, 1, "refused"))
    assert cohort.sent(FormGroup)[-1].attempt == 2
    cohort.trust()
    cohort.tick(cohort.now_s + FORMATION_TIMEOUT_S)
    assert cohort.sent(FormGroup)[-1].attempt == 3
    cohort.say(GroupFormed(2, 1, 3, "refused again"))
    assert cohort.outcome is not None
    expected = "the collective group of ranks (0, 1, 2) does not form: rank 2: refused again"
    assert (cohort.outcome.message, cohort.outcome.exit_code) == (expected, 5)


def test_rank_that_never_answers_is_left_out_of_the_group() -> None:
    cohort = Cohort(Mode.NCCL_SYNC).train_until(GroupFormed)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        for rank in (0, 2):
            cohort.say(GroupFormed(rank, 1, attempt, ""))
        cohort.trust()
        assert cohort.outcome is None
        cohort.tick(cohort.now_s + FORMATION_TIMEOUT_S)
    assert [kill.rank for kill in cohort.sent(KillRank)] == [1]
    assert (cohort.sent(FormGroup)[-1].ranks, cohort.sent(FormGroup)[-1].attempt) == ((0, 2), 1)
    assert cohort.outcome is None


def test_time_in_which_the_controller_did_not_run_breaks_no_round() -> None:
    cohort = Cohort().train_until(Reduced)
    cohort.post(Stalled(1e5))
    cohort.tick(cohort.now_s + 1e5)
    assert cohort.outcome is None


# ---------------------------------------------------------------------------------------------------------- not finite
@pytest.mark.parametrize(
    ("found", "what"), [("window", "the loss of its step 2"), ("reduce", "its parameters after its step 2")]
)
def test_contribution_that_is_not_finite_takes_part_with_zeros(found: str, what: str) -> None:
    cohort = Cohort().train_until(WindowDone)
    done = windows(cohort)
    if found == "window":
        done[1] = replace(done[1], is_finite=False, loss_sum=float("nan"), nonfinite_step=2)
    else:
        done[1] = replace(done[1], total_steps=2)
    cohort.held = {Reduced}
    for report in done.values():
        cohort.say(report)
    if found == "reduce":
        for rank in range(3):
            cohort.say(Reduced(rank, cohort.key, "d", rank != 1, 0.0, 1.0, ""))
    assert [(go.rank, go.weight) for go in cohort.sent(StartRound)[-3:]] == [(0, 0.5), (1, 0.0), (2, 0.5)]
    cohort.release(Reduced)
    assert cohort.records("nonfinite") == [f"version 1: not finite and left out: rank 1 ({what})"]
    assert cohort.sent(EpochReport)[0].avg_loss == 0.5
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


def test_run_that_is_finite_nowhere_stops() -> None:
    cohort = Cohort().train_until(WindowDone)
    for report in windows(cohort).values():
        cohort.say(replace(report, is_finite=False, nonfinite_step=1))
    assert cohort.outcome is not None
    assert cohort.outcome.message == (
        "loss or parameters are not finite on every rank: rank 0 (the loss of its step 1), "
        "rank 1 (the loss of its step 1), rank 2 (the loss of its step 1); "
        "lower the learning rate, set max_grad_norm, or look at the data"
    )
    assert cohort.sent(SendState) == []


def say_windows(cohort: Cohort, sick: int | None) -> None:
    done = windows(cohort)
    cohort.waiting.clear()
    for report in done.values():
        cohort.say(replace(report, is_finite=False, nonfinite_step=7) if report.rank == sick else report)


def lockstep(max_nonfinite: int) -> Cohort:
    cadence = CadenceSettings(Mode.CPU_SYNC, max_batch_diff=0)
    return Cohort(dataset_size=90, cadence=cadence, max_nonfinite=max_nonfinite).train_until(WindowDone)


def test_round_in_a_row_too_many_that_is_not_finite_hands_the_consensus_over_and_stops_the_run() -> None:
    cohort = lockstep(max_nonfinite=3)
    for _ in range(2):
        say_windows(cohort, sick=2)
    say_windows(cohort, sick=None)
    for _ in range(3):
        assert cohort.sent(SendState) == []
        say_windows(cohort, sick=2)
    assert cohort.sent(SendState) == [SendState(0, 0, False)]
    (ended,) = cohort.sent(RunEnded)
    assert (ended.outcome, ended.state_path) == ("failed", "/state")
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 5
    assert cohort.outcome.message == (
        "not finite in 3 rounds in a row (max_nonfinite); at last version 6: "
        "not finite and left out: rank 2 (the loss of its step 7); "
        "lower the learning rate, set max_grad_norm, or look at the data"
    )


def test_owner_that_is_lost_while_a_run_that_was_not_finite_ends_is_replaced() -> None:
    cohort = lockstep(max_nonfinite=1)
    cohort.held.add(StateSent)
    say_windows(cohort, sick=2)
    kill(cohort, 0)
    assert cohort.sent(SendState) == [SendState(0, 0, False), SendState(1, 1, False)]
    cohort.release(StateSent)
    assert cohort.sent(RunEnded)[0].state_path == "/state"


def test_rank_that_was_not_finite_and_is_lost_is_not_blamed() -> None:
    cohort = Cohort(dataset_size=60).train_until(WindowDone)
    done = windows(cohort)
    cohort.held = {Reduced}
    for report in done.values():
        cohort.say(replace(report, is_finite=report.rank != 2, nonfinite_step=1))
    kill(cohort, 2)
    cohort.release(Reduced)
    assert cohort.records("nonfinite") == []


def test_plan_tells_how_much_of_the_run_is_merged() -> None:
    cohort = Cohort(Mode.CPU_SYNC, dataset_size=60, num_epochs=2).get_ready()
    told = [plan.progress_samples for plan in cohort.sent(WindowPlan) if plan.rank == 0]
    assert told == list(range(0, 120, 6))


def test_version_0_comes_from_the_first_rank_whose_weights_are_finite() -> None:
    cohort = Cohort().train_until(Reduced)
    for rank in range(3):
        cohort.say(Reduced(rank, cohort.key, "d", rank != 0, 0.0, 1.0, ""))
    assert [(go.rank, go.weight) for go in cohort.sent(StartRound)[-3:]] == [(0, 0.0), (1, 1.0), (2, 0.0)]


# ---------------------------------------------------------------------------------------------------------- evaluation
def test_evaluation_is_asked_of_the_owner_and_told_to_the_head() -> None:
    cohort = Cohort(eval_samples=4).get_ready()
    assert cohort.sent(RunEval) == [RunEval(0, 0), RunEval(0, 1)]
    assert cohort.sent(EvalReport) == [EvalReport(0, 0.5), EvalReport(1, 0.5)]


def test_evaluation_that_fails_is_noted_and_training_goes_on() -> None:
    cohort = Cohort(eval_samples=4).train_until(EvalDone)
    assert cohort.core.phase is Phase.FINISHING
    cohort.say(EvalDone(0, 0, 0.0, "ZeroDivisionError"))
    assert cohort.records("eval_failed") == ["eval_fn failed on rank 0 after epoch 1: ZeroDivisionError"]
    assert cohort.say(EvalDone(0, 0, 0.7, "")) == []
    cohort.say(EvalDone(0, 1, 0.7, ""))
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


@pytest.mark.parametrize(("mode", "is_at_once"), [(Mode.CPU_CADENCE, False), (Mode.CPU_ASYNC, True)])
def test_evaluation_of_an_owner_that_is_lost_in_a_window_waits_for_a_consensus(mode: Mode, is_at_once: bool) -> None:
    cohort = Cohort(mode, eval_samples=4, num_epochs=3).train_until(WindowDone, EvalDone)
    while not cohort.sent(RunEval):
        step(cohort)
    asked = cohort.sent(RunEval)
    cohort.waiting = [(kind, answer) for kind, answer in cohort.waiting if kind is not EvalDone]
    kill(cohort, asked[0].rank)
    again = cohort.sent(RunEval)[len(asked) :]
    assert bool(again) is is_at_once
    while not again:
        step(cohort)
        again = cohort.sent(RunEval)[len(asked) :]
    assert again[0].epoch == 0
    assert again[0].rank != asked[0].rank


def test_evaluation_of_a_lost_owner_is_asked_of_the_next() -> None:
    cohort = Cohort(eval_samples=4).train_until(EvalDone)
    kill(cohort, 0)
    assert cohort.sent(RunEval)[-2:] == [RunEval(1, 0), RunEval(1, 1)]
    kill(cohort, 2)
    assert len(cohort.sent(RunEval)) == 4
    assert cohort.sent(StateSent) == []


def test_evaluation_is_answered_by_the_rank_that_is_asked_and_by_no_other() -> None:
    cohort = Cohort(eval_samples=4).train_until(EvalDone)
    kill(cohort, 0)
    assert cohort.say(EvalDone(2, 0, 0.1, "")) == []
    assert cohort.sent(EvalReport) == []
    cohort.say(EvalDone(1, 0, 0.7, ""))
    assert cohort.sent(EvalReport) == [EvalReport(0, 0.7)]


# ---------------------------------------------------------------------------------------------------------------- stop
def test_stop_closes_the_window_and_merges_one_last_round() -> None:
    cohort = Cohort(dataset_size=600).train_until(WindowDone)
    cohort.stop()
    assert len(cohort.sent(CloseWindow)) == 3
    cohort.release(WindowDone)
    assert {go.raw_source for go in cohort.sent(StartRound)[-3:]} == {0}
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("stopped", 130)


def test_loss_during_a_stop_ends_the_window_with_those_left() -> None:
    cohort = Cohort(dataset_size=600).train_until(WindowDone)
    cohort.stop()
    kill(cohort, 2)
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert cohort.outcome.status == "stopped"
