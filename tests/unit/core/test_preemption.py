"""What a signal that a scheduler sends to one process of a run means for the run."""

import pytest

from flodl.core.preemption import DAEMON, stop_asked
from flodl.messages import CheckpointSettings, StopWanted, WindowDone
from tests.unit.core.cohort import Cohort


@pytest.mark.parametrize(
    ("message", "source", "code"),
    [
        (StopWanted("b", 2, 15), "SIGTERM to rank 2 on b", 143),
        (StopWanted("b", 2, 10), "SIGUSR1 to rank 2 on b", 138),
        (StopWanted("a", DAEMON, 10), "SIGUSR1 to the daemon of a", 138),
        (StopWanted("a", 0, -4), "signal -4 to rank 0 on a", 143),
    ],
)
def test_signal_is_the_wish_for_an_orderly_stop(message: StopWanted, source: str, code: int) -> None:
    asked = stop_asked(message)
    assert (asked.source, asked.abort, asked.exit_code) == (source, False, code)


def test_run_saves_then_stops_and_says_so_once() -> None:
    cohort = Cohort(dataset_size=4000, checkpoint=CheckpointSettings("run")).train_until(WindowDone)
    for rank in (1, 2):
        cohort.say(StopWanted("b", rank, 10), "b")
    cohort.say(StopWanted("a", DAEMON, 15), "a")
    cohort.release(WindowDone)
    assert cohort.records("stop_requested") == ["stop requested by SIGUSR1 to rank 1 on b"]
    assert cohort.records("checkpoint") == ["version 1 is saved: run.fdl (GracefulShutdown)"]
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("stopped", 138)
