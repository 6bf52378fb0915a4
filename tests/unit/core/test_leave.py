"""A walk-in that is told to go: what becomes of it, and of the run, in every phase."""

import pytest

from flodl.core.events import DrainAsked
from flodl.core.job import Phase
from flodl.messages import CheckpointSettings, LeaveWanted, Mode, RankReady, StopHost, WindowDone
from tests.unit.core.cohort import Cohort, step, training

SOURCE = "SIGTERM to its daemon"


def leave(cohort: Cohort, host: str = "b") -> None:
    cohort.say(LeaveWanted(host, SOURCE), host)


def test_host_that_can_be_spared_is_drained_and_the_run_goes_on() -> None:
    cohort = training(dataset_size=4000)
    leave(cohort)
    leave(cohort)
    assert cohort.records("draining") == [f"{SOURCE} drains b: ranks 1, 2 leave at the next commit"]
    step(cohort)
    assert cohort.records("host_left") == ["b has left the run"]
    assert cohort.core.membership.live == (0,)
    assert cohort.core.phase is Phase.TRAINING
    assert not cohort.core.ending.is_decided


@pytest.mark.parametrize(("mode", "hosts"), [(Mode.CPU_CADENCE, {"b": 2}), (Mode.NCCL_CADENCE, {"a": 1, "b": 2})])
def test_run_that_cannot_spare_the_host_saves_and_stops(mode: Mode, hosts: dict[str, int]) -> None:
    cohort = Cohort(mode, hosts, dataset_size=4000, checkpoint=CheckpointSettings("run")).train_until(WindowDone)
    leave(cohort)
    leave(cohort)
    cohort.release(WindowDone)
    assert cohort.records("stop_requested") == [f"stop requested by {SOURCE} on b"]
    assert cohort.records("checkpoint") == ["version 1 is saved: run.fdl (GracefulShutdown)"]
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("stopped", 143)


def test_host_that_is_drained_already_is_not_asked_for_again() -> None:
    cohort = training(dataset_size=4000)
    cohort.post(DrainAsked("b", "fdl drain"))
    leave(cohort)
    assert len(cohort.records("draining")) == 1
    assert not cohort.core.ending.is_decided


def test_host_may_leave_before_the_start_and_come_again() -> None:
    cohort = Cohort(hosts={"a": 1, "b": 1})
    cohort.devices.pop("a")
    cohort.join()
    leave(cohort)
    assert cohort.records("leaving") == [f"b leaves before the start: {SOURCE}"]
    assert cohort.sent(StopHost) == [StopHost(SOURCE, 30.0)]
    assert cohort.records("host_left") == ["b has left the run"]
    assert cohort.core.phase is Phase.WAITING
    cohort.join()
    assert set(cohort.core.hosts) == {"b"}


def test_host_that_leaves_while_ranks_start_is_lost_to_the_start() -> None:
    cohort = Cohort(min_rank_start=1)
    cohort.held.add(RankReady)
    cohort.join()
    leave(cohort)
    assert cohort.records("leaving") == [f"b leaves before the start: {SOURCE}"]
    assert cohort.core.phase is Phase.STAGING
    assert cohort.records("rank_lost") == [f"rank 1, 2 on b lost: stopped: {SOURCE}"]


def test_run_that_ends_anyway_lets_the_word_pass() -> None:
    cohort = training(dataset_size=4000)
    cohort.stop()
    leave(cohort)
    assert cohort.records("draining") == cohort.records("leaving") == []
    assert cohort.outcome is None
    cohort.release(WindowDone)
    leave(cohort)
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 130
