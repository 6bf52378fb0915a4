"""Whole runs on this machine: everything is merged once, all ranks end alike, and people can look at it and stop it."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.runs import DIGITS, END_S, JOB, TRANSFORMER, Fdl
from tests.witness import witness_run, witness_solo

pytestmark = pytest.mark.timeout(240)

MODES = ["nccl_cadence", "cpu_cadence", "nccl_sync", "cpu_sync", "cpu_async"]
GOOD_ACCURACY = 0.95
GOOD_BITS = 4.5
"""Two epochs of a short text; how often each character occurs tells 4.64."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def accuracy(text: str) -> float:
    return float(re.findall(r"held-out accuracy (\d\.\d+)", text)[-1])


def bits_per_character(text: str) -> float:
    return float(re.findall(r"held-out bits per character (\d\.\d+)", text)[-1])


# -------------------------------------------------------------------------------------------------------- the witness
@pytest.mark.parametrize("mode", MODES)
def test_every_sample_is_merged_once_and_all_ranks_end_alike(fdl: Fdl, log: Path, mode: str) -> None:
    run = fdl.job(options=("--local", 3), mode=mode, size=101, batch_size=4, epochs=2, log=log)

    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, size=101, epochs=2)
    assert (seen.faults, seen.samples, seen.ranks) == ([], 202, [0, 1, 2])
    assert "joined: completed after 2 epoch(s)" in run.stdout
    run.wait_until_clean()


def test_solo_reads_every_sample_once_per_epoch(fdl: Fdl, log: Path) -> None:
    done = fdl.python(JOB, "--size", 101, "--batch-size", 4, "--epochs", 2, "--log", log)

    assert done.returncode == 0, done.stderr
    assert witness_solo(log, size=101, epochs=2).faults == []
    assert "joined: completed after 2 epoch(s)" in done.stdout


# -------------------------------------------------------------------------------------------------------- the example
@pytest.mark.parametrize("mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.long) for mode in MODES[1:])])
def test_digits_are_learned_by_three_local_ranks(fdl: Fdl, mode: str) -> None:
    run = fdl.launch("--local", 3, DIGITS, "--mode", mode)

    assert run.wait() == 0, run.story()
    assert accuracy(run.stdout) >= GOOD_ACCURACY
    run.wait_until_clean()


def test_digits_are_learned_solo(fdl: Fdl) -> None:
    done = fdl.python(DIGITS)

    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= GOOD_ACCURACY


@pytest.mark.parametrize(
    ("guard", "outer"), [("msf", "slowmo"), pytest.param("none", "diloco", marks=pytest.mark.long)]
)
def test_transformer_reads_python_over_three_local_ranks(fdl: Fdl, guard: str, outer: str) -> None:
    run = fdl.launch("--local", 3, TRANSFORMER, "--epochs", 2, "--guard", guard, "--outer", outer)

    assert run.wait() == 0, run.story()
    assert bits_per_character(run.stdout) <= GOOD_BITS
    run.wait_until_clean()


# ------------------------------------------------------------------------------------------------------- from outside
def test_status_tail_and_stop_from_another_shell(fdl: Fdl) -> None:
    run = fdl.job(step_ms=20, epochs=10_000, log=fdl.folder)
    run.wait_for_training()

    state = json.loads(fdl.call("status", "--json").stdout)
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1]
    assert all(rank["rate"] > 0 and 0 < rank["share"] < 1 for rank in state["ranks"])
    assert "takes its first step" in fdl.call("tail", "--rank", "1").stdout

    stopped = fdl.call("stop", timeout_s=END_S)
    assert stopped.returncode == 0, stopped.stderr
    assert run.wait(END_S) == 143, run.story()
    assert "joined: stopped" in run.stdout
    run.wait_until_clean()


@pytest.mark.long
def test_abort_ends_the_run_at_once(fdl: Fdl) -> None:
    run = fdl.job(step_ms=20, epochs=10_000, grandchild=True)
    run.wait_for_training()

    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    run.wait_until_clean()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_signal_to_the_launcher_stops_the_run_in_order(fdl: Fdl, number: signal.Signals, code: int) -> None:
    run = fdl.job(step_ms=20, epochs=10_000)
    run.wait_for_training()

    run.kill("launcher", number=number)

    assert run.wait(END_S) == code, run.story()
    assert "joined: stopped" in run.stdout
    run.wait_until_clean()


@pytest.mark.long
def test_second_interrupt_forces_the_end(fdl: Fdl) -> None:
    run = fdl.job(step_ms=60_000, epochs=10_000)
    run.wait_for_log("rank1.stdout.log", "takes its first step")

    run.kill("launcher", number=signal.SIGINT)
    run.wait_for_text("stopping in order")
    run.kill("launcher", number=signal.SIGINT)

    assert run.wait(5.0) == 130, run.story()
    run.wait_until_clean()


@pytest.mark.long
def test_interrupt_while_ranks_start_ends_the_run(fdl: Fdl) -> None:
    run = fdl.job(step_ms=20, epochs=10_000)
    run.wait_for_text("starting 2 ranks")

    run.kill("launcher", number=signal.SIGINT)

    assert run.wait(END_S) == 130, run.story()
    run.wait_until_clean()


@pytest.mark.long
def test_hangup_of_the_launcher_leaves_the_run_alone(fdl: Fdl) -> None:
    run = fdl.job(step_ms=20, size=800, epochs=2)
    run.wait_for_training()

    run.kill("launcher", number=signal.SIGHUP)

    assert run.wait(END_S) == 129, run.story()
    assert f"fdl: detached by SIGHUP; run {run.run_id} goes on" in run.stderr
    assert run.wait_for_end()["status"] == "completed"
    run.wait_until_clean()


def under(redirection: str) -> tuple[str, ...]:
    return "sh", "-c", f'exec "$@" {redirection}', "sh"


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_launch_with_a_closed_stream_runs(fdl: Fdl, tmp_path: Path, closed: str) -> None:
    (tmp_path / "short.py").write_text("print('ran')\n")
    run = fdl.launch("--local", 1, "--plain", "short.py", under=under(closed))
    assert run.wait() == 0, run.story()
    run.wait_until_clean()


def test_launch_whose_output_is_lost_says_that_the_run_goes_on(fdl: Fdl, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("import time\nwhile True:\n    print('word', flush=True)\n    time.sleep(0.1)\n")
    run = fdl.launch("--local", 1, "--plain", "talk.py", under=under(">/dev/full"))
    assert run.wait() == 1, run.story()
    assert f"fdl: run {run.run_id} goes on; fdl attach {run.run_id}, fdl stop {run.run_id}" in run.stderr
    assert run.stderr.endswith("fdl: stdout: No space left on device\n")
    assert fdl.call("stop", run.run_id).returncode == 0
    assert run.wait_for_end()["status"] == "stopped"
    run.wait_until_clean()
