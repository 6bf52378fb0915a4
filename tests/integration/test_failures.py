"""A script that fails on one rank: the first failure is the headline, and the exit code is the table's."""

from pathlib import Path

import pytest

from flodl.checkpoint.reader import find
from flodl.core.position import SaveReason
from tests.runs import Fdl, Launched
from tests.witness import checkpoint_faults, witness_run

pytestmark = pytest.mark.timeout(240)

FAILS = {
    "raise": (1, "ValueError: planted on rank 1"),
    "exit-0": (2, "without finishing"),
    "exit-1": (1, "exited with code 1"),
    "exit-3": (3, "exited with code 3"),
    "exit-text": (1, "planted text"),
    "_exit-7": (7, "exited with code 7"),
}
REPRESENTATIVES = {"raise", "_exit-7"}
SIGNALS = {"segv": 11, "kill": 9}


def headline(run: Launched) -> str:
    """From the first failure on."""
    _, found, rest = run.stderr.partition("first failure: ")
    assert found, run.story()
    return rest


def marked(name: str) -> object:
    return pytest.param(name, marks=[] if name in REPRESENTATIVES else [pytest.mark.long])


@pytest.mark.parametrize("fault", [marked(name) for name in FAILS])
def test_failure_of_the_script_on_one_rank_is_the_headline(fdl: Fdl, fault: str) -> None:
    code, words = FAILS[fault]
    run = fdl.job(fault=fault, epochs=10_000, step_ms=5, grandchild=True)

    assert run.wait() == code, run.story()
    assert headline(run).startswith("rank 1 on localhost (cpu:1): "), run.story()
    assert words in headline(run)
    run.wait_until_clean()


def test_exception_outranks_the_lost_connections_that_it_causes(fdl: Fdl) -> None:
    run = fdl.job(options=("--local", 3), fault="raise", mode="nccl_cadence", epochs=10_000, step_ms=5)

    assert run.wait() == 1, run.story()
    first, _, rest = headline(run).partition("\n")
    assert first == "rank 1 on localhost (cpu:1): ValueError: planted on rank 1"
    assert "  |     raise ValueError" in rest
    assert run.stderr.count("first failure") == 1
    run.wait_until_clean()


@pytest.mark.parametrize("fault", ["segv", pytest.param("kill", marks=pytest.mark.long)])
def test_rank_that_dies_by_a_signal_is_survived_and_named(fdl: Fdl, fault: str) -> None:
    run = fdl.job(fault=fault, size=400, step_ms=5, grandchild=True)

    assert run.wait() == 0, run.story()
    assert "1 loss was tolerated: rank 1 on localhost" in run.stderr
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert [(loss["rank"], loss["signal"]) for loss in outcome["losses"]] == [(1, SIGNALS[fault])]
    run.wait_until_clean()


@pytest.mark.parametrize("fault", ["segv", pytest.param("kill", marks=pytest.mark.long)])
def test_only_rank_that_dies_by_a_signal_gives_its_code(fdl: Fdl, fault: str) -> None:
    run = fdl.job(options=("--local", 1), fault=fault, fault_rank=0, epochs=10_000, step_ms=5)

    assert run.wait() == 128 + SIGNALS[fault], run.story()
    assert f"signal {SIGNALS[fault]}" in headline(run)
    run.wait_until_clean()


# ------------------------------------------------------------------------------------------- on_error and max_failure
THREE = ("--local", 3)


@pytest.mark.parametrize("fault", ["raise", pytest.param("_exit-7", marks=pytest.mark.long)])
def test_failure_of_the_script_on_one_rank_may_cost_that_rank_alone(fdl: Fdl, tmp_path: Path, fault: str) -> None:
    run = fdl.job(options=THREE, fault=fault, size=403, epochs=3, step_ms=5, on_error="shrink", log=tmp_path)

    assert run.wait() == 0, run.story()
    assert "1 loss was tolerated: rank 1 on localhost" in run.stderr
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert [(loss["rank"], loss["error"]) for loss in outcome["losses"]] == [(1, FAILS[fault][1])]
    assert [event["detail"] for event in run.events("rank_failed")] == [f"rank 1: {FAILS[fault][1]}"]
    assert witness_run(run.folder, tmp_path, size=403, epochs=3, lost=[1]).faults == []
    run.wait_until_clean()


@pytest.mark.parametrize("fault", ["raise", pytest.param("_exit-7", marks=pytest.mark.long)])
def test_failure_of_the_script_on_one_rank_saves_and_ends_with_its_code(fdl: Fdl, tmp_path: Path, fault: str) -> None:
    run = fdl.job(options=THREE, fault=fault, epochs=10_000, size=403, step_ms=5, save=tmp_path / "run")

    assert run.wait() == FAILS[fault][0], run.story()
    meta = find(tmp_path / "run").meta
    assert (meta.reason, meta.point.position.world_size) == (SaveReason.GRACEFUL_SHUTDOWN, 2)
    assert meta.point.position.version == run.commits()[-1]["version"]
    assert checkpoint_faults(meta.point.position, 403, run.folder) == []
    run.wait_until_clean()


@pytest.mark.parametrize(("limit", "of"), [(1, "1"), pytest.param(0.3, "0.3 of 3", marks=pytest.mark.long)])
def test_losses_that_are_too_many_save_and_stop(fdl: Fdl, tmp_path: Path, limit: float, of: str) -> None:
    run = fdl.job(
        options=THREE, fault="kill", epochs=10_000, size=403, step_ms=5, max_failure=limit, save=tmp_path / "run"
    )

    assert run.wait() == 5, run.story()
    outcome = run.read("outcome.json")
    assert outcome is not None
    words = f"1 rank lost, and max_failure is {of}; the last one: ended by signal 9"
    assert (outcome["status"], outcome["message"]) == ("stopped", words)
    assert words in run.stderr
    meta = find(tmp_path / "run").meta
    assert (meta.reason, meta.point.position.world_size) == (SaveReason.MAX_FAILURE_EXCEEDED, 2)
    assert checkpoint_faults(meta.point.position, 403, run.folder) == []
    run.wait_until_clean()


@pytest.mark.long
def test_exception_in_a_thread_of_the_script_ends_nothing(fdl: Fdl) -> None:
    run = fdl.job(fault="thread")

    assert run.wait() == 0, run.story()
    assert "ValueError: planted on rank 1" in run.log("rank1.stderr.log")
    run.wait_until_clean()


def test_script_that_fails_behind_join_gives_the_run_its_code(fdl: Fdl) -> None:
    run = fdl.job(options=("--local", 1), exit_after_join=3)

    assert run.wait() == 3, run.story()
    assert "joined: completed" in run.stdout
    run.wait_until_clean()
