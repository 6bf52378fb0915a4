"""Root cause, collateral and the exit code."""

import pytest

from flodl.core import ending as end
from flodl.core.actions import Failure, Outcome
from flodl.core.ending import Ending, process_exit_code


def failure(kind: str = end.KIND_EXCEPTION, rank: int = 1, code: int = 1) -> Failure:
    return Failure(kind, "a", rank, "boom", "", code, 0)


@pytest.mark.parametrize(("code", "signal", "said"), [(0, 0, 0), (3, 0, 3), (0, 9, 137), (0, 15, 143)])
def test_end_of_a_process_is_said_as_a_shell_says_it(code: int, signal: int, said: int) -> None:
    assert process_exit_code(code, signal) == said


def test_run_that_nothing_befell_is_completed() -> None:
    ending = Ending()
    assert not ending.is_decided
    assert ending.finish(0) == Outcome("completed", 0, "", None, (), 0)


def test_tolerated_losses_are_told_and_change_nothing() -> None:
    ending = Ending()
    ending.tolerate(failure(end.KIND_SIGNAL))
    assert ending.finish(0) == Outcome("completed", 0, "", None, (failure(end.KIND_SIGNAL),), 0)


def test_head_that_fails_behind_the_training_gives_its_code() -> None:
    assert Ending().finish(7).exit_code == 7
    stopped = Ending()
    stopped.stop(130, "stopped")
    assert stopped.finish(7).exit_code == 130


def test_first_stop_counts() -> None:
    ending = Ending()
    ending.stop(130, "by ctrl-c")
    ending.stop(143, "by SIGTERM")
    assert ending.is_decided
    assert (ending.status, ending.message, ending.finish(0).exit_code) == ("stopped", "by ctrl-c", 130)


def test_first_failure_is_the_root_and_the_next_are_counted() -> None:
    ending = Ending()
    ending.fail(failure(rank=1, code=3), "rank 1 failed")
    ending.fail(failure(rank=2, code=4), "rank 2 failed")
    ending.fail(failure(end.KIND_STALL), "stalled")
    ending.stop(130, "stopped")
    assert ending.finish(0) == Outcome("failed", 3, "rank 1 failed", failure(rank=1, code=3), (), 2)


def test_scripts_own_exception_outranks_the_loss_it_caused() -> None:
    ending = Ending()
    ending.fail(failure(end.KIND_SILENCE, rank=0, code=5), "rank 0 lost")
    ending.fail(failure(rank=1), "rank 1 failed")
    ending.fail(failure(rank=2), "rank 2 failed")
    assert ending.finish(0) == Outcome("failed", 1, "rank 1 failed", failure(rank=1), (), 2)


def test_failure_behind_a_stop_is_collateral() -> None:
    ending = Ending()
    ending.stop(130, "stopped")
    ending.fail(failure(), "rank 1 failed")
    assert ending.finish(0) == Outcome("stopped", 130, "stopped", None, (), 1)


def test_exit_code_of_the_roots_process_is_the_runs() -> None:
    ending = Ending()
    assert not ending.correct_exit_code(1, 3)
    ending.fail(failure(rank=1), "rank 1 failed")
    assert not ending.correct_exit_code(2, 9)
    assert ending.correct_exit_code(1, 42)
    assert ending.finish(0).exit_code == 42
    assert ending.root == failure(rank=1, code=42)


def test_root_that_exits_with_0_has_failed_all_the_same() -> None:
    ending = Ending()
    ending.fail(failure(rank=1), "rank 1 failed")
    assert ending.correct_exit_code(1, 0)
    assert ending.finish(0).exit_code == 1


def test_root_that_was_no_exception_has_its_code_already() -> None:
    ending = Ending()
    ending.fail(failure(end.KIND_SIGNAL, rank=1, code=137), "rank 1 lost")
    assert not ending.correct_exit_code(1, 143)
    assert ending.finish(0).exit_code == 137


def test_signal_gives_its_code_unless_it_ends_the_last_of_several() -> None:
    ending = Ending()
    killed, raised = failure(end.KIND_SIGNAL, rank=1, code=137), failure(rank=2, code=3)
    assert ending.exhausted(killed) == killed
    ending.tolerate(killed)
    assert ending.exhausted(failure(end.KIND_SIGNAL, rank=2, code=139)).exit_code == 5
    assert ending.exhausted(raised) == raised
