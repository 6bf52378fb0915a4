"""``kill -9`` of every process of a local run: what is promised happens, and nothing is left.

Every rank and the head have started a grandchild in a session of its own, with an empty environment and no parent.
"""

import signal
from pathlib import Path

import pytest

from tests.runs import CLEAN_S, END_S, Fdl, Launched
from tests.witness import witness_run

pytestmark = pytest.mark.timeout(240)

GRACE_S = 5.0


def endless(fdl: Fdl, **flags: object) -> Launched:
    run = fdl.job(step_ms=20, epochs=10_000, grandchild=True, **flags)
    run.wait_for_training()
    return run


def finite(fdl: Fdl, log: Path, **flags: object) -> Launched:
    """Long enough to be hit in the middle: 400 batches at 25 a second and rank."""
    log.mkdir()
    run = fdl.job(step_ms=40, size=1603, batch_size=8, epochs=2, log=log, grandchild=True, **flags)
    run.wait_for_training(version=2)
    return run


def test_killed_launcher_leaves_a_run_that_goes_on_and_is_found(fdl: Fdl, tmp_path: Path) -> None:
    run = finite(fdl, tmp_path / "log")

    run.kill("launcher")

    assert run.run_id in fdl.call("status").stdout
    assert run.wait_for_end()["exit_code"] == 0
    assert witness_run(run.folder, tmp_path / "log", size=1603, epochs=2).faults == []
    run.wait_until_clean()


@pytest.mark.parametrize(
    "mode",
    [
        "cpu_cadence",
        "nccl_cadence",
        pytest.param("cpu_async", marks=pytest.mark.long),
        pytest.param("cpu_sync", marks=pytest.mark.long),
        pytest.param("nccl_sync", marks=pytest.mark.long),
    ],
)
def test_killed_rank_is_survived_without_losing_a_sample(fdl: Fdl, tmp_path: Path, mode: str) -> None:
    run = finite(fdl, tmp_path / "log", options=("--local", 3), mode=mode)

    run.kill("rank1")

    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, tmp_path / "log", size=1603, epochs=2, lost=[1])
    assert (seen.faults, seen.samples) == ([], 3206)
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert [(loss["rank"], loss["signal"]) for loss in outcome["losses"]] == [(1, 9)]
    run.wait_until_clean()


def test_run_that_loses_all_its_ranks_has_too_few(fdl: Fdl) -> None:
    run = endless(fdl)

    for rank in ("rank0", "rank1"):
        run.kill(rank)

    assert run.wait(END_S) == 5, run.story()
    run.wait_until_clean()


@pytest.mark.long
def test_killed_rank_that_leaves_a_collective_mode_alone_stops_the_run(fdl: Fdl) -> None:
    run = endless(fdl, mode="nccl_cadence")

    run.kill("rank1")

    assert run.wait(END_S) == 5, run.story()
    run.wait_until_clean()


def test_killed_daemon_takes_its_only_host_and_the_run_with_it(fdl: Fdl) -> None:
    run = endless(fdl)

    run.kill("daemon")

    run.wait_until_rankless(CLEAN_S)
    assert run.wait(END_S) == 5, run.story()
    run.wait_until_clean()


def test_killed_warden_takes_its_daemon_with_it(fdl: Fdl) -> None:
    run = endless(fdl)

    run.kill("warden")

    run.wait_until_rankless(CLEAN_S)
    assert run.wait(END_S) != 0, run.story()
    run.wait_until_clean()


def test_killed_head_stops_the_run_with_its_signal_as_the_code(fdl: Fdl) -> None:
    run = endless(fdl)

    run.kill("head")

    assert run.wait(END_S) == 137, run.story()
    assert "the head" in run.stderr
    run.wait_until_clean()


def test_frozen_head_is_named_and_not_waited_for_beyond_the_stop_grace(fdl: Fdl) -> None:
    run = endless(fdl)
    pid = run.pid_of("head")
    run.kill("head", number=signal.SIGSTOP)

    stopped = fdl.call("stop", timeout_s=END_S)

    assert stopped.returncode == 0, stopped.stderr + run.story()
    assert f"pid {pid}, frozen by a signal: kill -CONT {pid} lets it go on" in stopped.stderr
    assert run.wait(END_S) == 143, run.story()
    assert "head_frozen" in run.stdout
    run.wait_until_clean()


def test_killed_controller_takes_everything_with_it(fdl: Fdl) -> None:
    run = endless(fdl)

    run.kill("controller")

    run.wait_until_clean(GRACE_S + CLEAN_S)
    assert run.wait(END_S) == 1, run.story()
    assert "vanished" in run.stderr
    assert "is gone without a word" in fdl.call("status").stdout
