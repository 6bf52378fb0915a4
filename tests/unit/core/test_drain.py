"""Who leaves on purpose, and which losses end a run."""

from typing import Any

import pytest

from flodl.core.actions import DropHost, OpenSave, Record
from flodl.core.counted import counted
from flodl.core.events import DrainAsked, HostDropped, SaveSettled
from flodl.core.job import Phase
from flodl.core.membership import RankStatus
from flodl.core.position import SaveReason
from flodl.messages import (
    CheckpointSettings,
    FinishRank,
    FormGroup,
    Mode,
    OnError,
    RankError,
    RankExited,
    RankFinished,
    RunEval,
    SendState,
    StateLoaded,
    StopHost,
    WindowDone,
    WindowPlan,
)
from tests.unit.core.cohort import Cohort, hello, step, training


def drain(cohort: Cohort, host: str) -> None:
    cohort.post(DrainAsked(host, "fdl drain"))


def kill(cohort: Cohort, rank: int) -> None:
    cohort.say(RankExited(rank, 0, 9, by_us=False))


def live(cohort: Cohort) -> tuple[int, ...]:
    return cohort.core.membership.live


def merged(cohort: Cohort) -> list[tuple[int, int]]:
    commits = [action.fields for action in cohort.actions if isinstance(action, Record) and action.event == "commit"]
    spans = [span for commit in commits for span in commit["spans"]]  # type: ignore[union-attr]
    return sorted((turn, p) for _, turn, start, count in spans for p in range(start, start + count))  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------------------- drain
@pytest.mark.parametrize("mode", [Mode.CPU_SYNC, Mode.CPU_CADENCE, Mode.CPU_ASYNC, Mode.NCCL_CADENCE])
def test_host_leaves_behind_a_commit_and_nothing_is_lost(mode: Mode) -> None:
    cohort = training(mode, dataset_size=300)
    drain(cohort, "a")
    assert cohort.records("draining") == ["fdl drain drains a: rank 0 leaves at the next commit"]
    assert live(cohort) == (0, 1, 2)
    step(cohort)
    assert cohort.records("rank_left") == ["rank 0 left at version 1; 2 ranks train on"]
    assert cohort.sent(FinishRank) == [FinishRank(0, "its host is drained")]
    assert cohort.sent(StopHost) == [StopHost("it is drained", 30.0)]
    assert cohort.records("host_left") == ["a has left the run"]
    assert DropHost("a", "stopped: it is drained") in cohort.actions
    assert "a" not in cohort.core.hosts
    cohort.release(WindowDone)
    assert merged(cohort) == [(turn, place) for turn in range(2) for place in range(300)]
    assert cohort.outcome is not None
    assert (cohort.outcome.exit_code, cohort.outcome.losses) == (0, ())
    assert cohort.records("host_lost") == cohort.records("rank_lost") == []


def test_host_goes_when_the_last_of_its_ranks_has_ended() -> None:
    cohort = training()
    cohort.held |= {RankFinished, RankExited}
    drain(cohort, "b")
    step(cohort)
    assert live(cohort) == (0,)
    cohort.say(RankFinished(1))
    cohort.say(RankFinished(1))
    assert cohort.sent(StopHost) == []
    cohort.say(RankExited(2, 0, 0, by_us=True))
    assert cohort.sent(StopHost) == [StopHost("it is drained", 30.0)]


def test_group_is_formed_without_those_who_left() -> None:
    cohort = training(Mode.NCCL_CADENCE)
    drain(cohort, "a")
    formed = len(cohort.sent(FormGroup))
    step(cohort)
    assert {group.ranks for group in cohort.sent(FormGroup)[formed:]} == {(1, 2)}
    assert {plan.rank for plan in cohort.sent(WindowPlan)[-2:]} == {1, 2}


def test_host_may_come_back_after_it_was_drained() -> None:
    cohort = training()
    drain(cohort, "a")
    step(cohort)
    cohort.say(hello("a"), "a")
    cohort.say(cohort.ready(3), "a")
    step(cohort)
    assert live(cohort) == (1, 2, 3)


def test_rank_that_gives_a_checkpoint_leaves_when_that_is_made_and_gives_no_other() -> None:
    cohort = training(Mode.CPU_SYNC, checkpoint=CheckpointSettings("run", every=1), dataset_size=6, num_epochs=9)
    cohort.held.add(SaveSettled)
    step(cohort)
    assert [order.rank for order in cohort.sent(SendState)] == [0]
    drain(cohort, "a")
    step(cohort)
    assert live(cohort) == (0, 1, 2)
    cohort.release(SaveSettled)
    step(cohort)
    assert live(cohort) == (1, 2)
    assert {order.rank for order in cohort.sent(SendState)[1:]} == {1}


def test_evaluation_of_a_rank_that_leaves_is_another_ones() -> None:
    cohort = training(Mode.CPU_SYNC, eval_samples=5, dataset_size=6, num_epochs=9)
    drain(cohort, "a")
    step(cohort)
    assert [word.rank for word in cohort.sent(RunEval)] == [0, 1]
    assert len(cohort.records("eval")) == 1
    assert cohort.records("early") == []


@pytest.mark.parametrize(
    ("host", "changes", "reason"),
    [
        ("x", {}, "host x is not in the run; there are: a, b"),
        (
            "b",
            {"mode": Mode.NCCL_CADENCE},
            "without b only 1 rank would be left, and the mode needs 2: use fdl stop",
        ),
        ("a", {"hosts": {"a": 2}}, "without a only 0 ranks would be left, and the mode needs 1: use fdl stop"),
    ],
)
def test_drain_that_cannot_be_is_refused_with_the_reason(host: str, changes: dict[str, Any], reason: str) -> None:
    cohort = training(**changes)
    drain(cohort, host)
    assert cohort.records("drain_refused") == [reason]
    step(cohort)
    assert cohort.records("rank_left") == []


def test_drain_is_asked_once_and_while_the_run_trains() -> None:
    early = Cohort().join()
    drain(early, "a")
    assert early.records("drain_refused") == ["the run is staging: a host is drained while it trains"]
    cohort = training()
    drain(cohort, "a")
    drain(cohort, "a")
    assert cohort.records("drain_refused") == ["host a is being drained already"]


def test_drain_waits_while_nobody_else_would_be_left() -> None:
    cohort = training()
    drain(cohort, "a")
    kill(cohort, 1)
    kill(cohort, 2)
    step(cohort)
    assert live(cohort) == (0,)
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


def test_host_that_is_lost_while_it_is_drained_is_lost() -> None:
    cohort = training()
    drain(cohort, "a")
    cohort.post(HostDropped("a", "reset"))
    assert cohort.records("host_lost") == ["a: connection lost: reset"]
    step(cohort)
    assert live(cohort) == (1, 2)


def test_newcomer_on_a_host_that_is_drained_goes_at_once() -> None:
    cohort = training()
    cohort.say(hello("c"), "c")
    cohort.say(cohort.ready(3), "c")
    cohort.held.add(StateLoaded)
    drain(cohort, "c")
    assert cohort.records("join_refused") == ["rank 3 on c does not take part: its host is drained"]
    assert cohort.core.membership[3].status is RankStatus.DEAD
    assert cohort.sent(StopHost) == [StopHost("it is drained", 30.0)]


def test_host_without_a_live_rank_leaves_at_once() -> None:
    cohort = training()
    kill(cohort, 0)
    assert "a" in cohort.core.hosts  # of the roster: it stays until it is told
    assert cohort.sent(StopHost) == []
    drain(cohort, "a")
    assert cohort.records("draining") == ["fdl drain drains a: no rank of it takes part; it leaves now"]
    assert cohort.sent(StopHost) == [StopHost("it is drained", 30.0)]
    assert cohort.records("host_left") == ["a has left the run"]
    assert "a" not in cohort.core.hosts


def test_guest_leaves_with_its_last_rank_and_may_join_again() -> None:
    cohort = training()
    for rank in (3, 5):
        cohort.say(hello("c", 2), "c")
        for each in (rank, rank + 1):
            cohort.say(cohort.ready(each), "c")
        step(cohort)
        assert live(cohort) == (0, 1, 2, rank, rank + 1)
        stopped = len(cohort.sent(StopHost))
        cohort.say(RankExited(rank, 0, 9, by_us=False), "c")
        assert len(cohort.sent(StopHost)) == stopped
        assert "c" in cohort.core.hosts
        cohort.say(RankExited(rank + 1, 0, 9, by_us=False), "c")
        assert cohort.sent(StopHost)[stopped:] == [StopHost("its last rank is lost", 30.0)]
        assert "c" not in cohort.core.hosts
    assert cohort.records("host_left") == ["c has left the run"] * 2
    assert cohort.records("host_lost") == []


# ---------------------------------------------------------------------------------------------- what losses amount to
@pytest.mark.parametrize(("limit", "losses"), [(1, 1), (2, 2), (0.3, 1), (0.5, 2), (0.34, 2)])
def test_run_that_has_lost_too_many_saves_and_stops(limit: float, losses: int) -> None:
    cohort = training(max_failure=limit, checkpoint=CheckpointSettings("run"))
    for rank in range(losses):
        assert cohort.core.phase is Phase.TRAINING
        assert cohort.core.training is not None
        assert not cohort.core.training.is_stopping
        kill(cohort, rank)
    cohort.release(WindowDone)
    (save,) = [action for action in cohort.actions if isinstance(action, OpenSave)]
    assert save.reason is SaveReason.MAX_FAILURE_EXCEEDED
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("stopped", 5)
    of = f"{limit:g}" if limit >= 1 else f"{limit:g} of 3"
    assert (
        cohort.outcome.message
        == f"{counted(losses, 'rank')} lost, and max_failure is {of}; the last one: ended by signal 9"
    )


@pytest.mark.parametrize("word", ["error", "exit"])
def test_error_of_the_script_may_cost_its_rank_alone(word: str) -> None:
    cohort = training(on_error=OnError.SHRINK, dataset_size=300)
    cohort.say(RankError(1, "OSError: disk", "") if word == "error" else RankExited(1, 3, 0, by_us=False))
    assert live(cohort) == (0, 2)
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("completed", 0)
    assert [loss.rank for loss in cohort.outcome.losses] == [1]
    assert merged(cohort) == [(turn, place) for turn in range(2) for place in range(300)]


def test_error_of_the_script_in_every_rank_is_its_failure_all_the_same() -> None:
    cohort = training(on_error=OnError.SHRINK)
    for rank in range(3):
        cohort.say(RankError(rank, "KeyError: 'label'", "Traceback"))
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("failed", 1)
    assert cohort.outcome.failure is not None
    assert cohort.outcome.failure.error == "KeyError: 'label'"
