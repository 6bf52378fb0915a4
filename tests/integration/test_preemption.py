"""Schedulers and spot machines: whoever gets SIGTERM or SIGUSR1, the run saves, then stops, and says by which."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flodl.checkpoint.reader import find
from flodl.core.position import SaveReason
from tests.runs import END_S, JOB, START_S, Fdl, Launched
from tests.witness import checkpoint_faults

pytestmark = pytest.mark.timeout(240)

SIZE = 403
CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 138}
long = pytest.mark.long


def start(fdl: Fdl, stem: Path, **flags: object) -> Launched:
    given: dict[str, object] = {"mode": "cpu_cadence", "size": SIZE, "batch_size": 4, "epochs": 10_000, "step_ms": 10}
    run = fdl.job(options=("--local", 3), save=stem, **{**given, **flags})
    run.wait_for_training()
    return run


def assert_saved_and_stopped(run: Launched, stem: Path, number: signal.Signals, ranks: int = 3) -> None:
    assert run.wait(END_S) == CODES[number], run.story()
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert (outcome["status"], outcome["exit_code"], outcome["losses"]) == ("stopped", CODES[number], [])
    assert number.name in outcome["message"]
    meta = find(stem).meta
    assert (meta.reason, meta.point.position.world_size) == (SaveReason.GRACEFUL_SHUTDOWN, ranks)
    assert meta.point.position.version == run.commits()[-1]["version"]
    assert checkpoint_faults(meta.point.position, SIZE, run.folder) == []
    run.wait_until_clean()


@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("launcher", signal.SIGUSR1),
        ("rank1", signal.SIGTERM),
        ("daemon", signal.SIGUSR1),
        *(
            pytest.param(role, number, marks=long)
            for role, number in [
                ("launcher", signal.SIGTERM),
                ("controller", signal.SIGTERM),
                ("controller", signal.SIGUSR1),
                ("rank1", signal.SIGUSR1),
                ("daemon", signal.SIGTERM),
                ("warden", signal.SIGTERM),
                ("head", signal.SIGTERM),
                ("head", signal.SIGUSR1),
            ]
        ),
    ],
)
def test_signal_to_one_process_saves_then_stops(fdl: Fdl, tmp_path: Path, role: str, number: signal.Signals) -> None:
    run = start(fdl, tmp_path / "run")

    run.kill(role, number=number)

    assert_saved_and_stopped(run, tmp_path / "run", number)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=long)])
@pytest.mark.parametrize("mode", ["nccl_cadence", pytest.param("cpu_async", marks=long)])
def test_signal_to_every_process_saves_then_stops(fdl: Fdl, tmp_path: Path, mode: str, number: signal.Signals) -> None:
    """As ``scancel`` does it: wardens pass on what their children have had already, and workers load data."""
    run = start(fdl, tmp_path / "run", mode=mode, num_workers=2)

    for line in run.leftovers():
        os.kill(int(line.split()[0]), number)
    run.kill("launcher", number=number)

    assert_saved_and_stopped(run, tmp_path / "run", number)


@long
def test_sigterm_behind_sigusr1_does_not_cut_the_save_off(fdl: Fdl, tmp_path: Path) -> None:
    run = start(fdl, tmp_path / "run", step_ms=300)

    run.kill("launcher", number=signal.SIGUSR1)
    run.wait_for_event("stop_requested")
    run.kill("launcher", number=signal.SIGTERM)

    assert_saved_and_stopped(run, tmp_path / "run", signal.SIGUSR1)


# ---------------------------------------------------------------------------------------------------------------- solo
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=long)])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=long)])
def test_solo_saves_then_ends_by_the_signals_code(
    fdl: Fdl, tmp_path: Path, number: signal.Signals, workers: int, deadline_factor: float
) -> None:
    arguments = [
        "--size",
        SIZE,
        "--epochs",
        10_000,
        "--step-ms",
        5,
        "--save",
        tmp_path / "run",
        "--num-workers",
        workers,
    ]
    process = subprocess.Popen(
        [sys.executable, str(JOB), *map(str, arguments)],
        env=fdl.env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "rank solo takes its first step\n"
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=START_S * deadline_factor)

    assert process.returncode == CODES[number], err
    assert f"flodl: {number.name}: stopping in order\n" in err
    assert (out, "Traceback" in err) == ("", False), "join() ends the script"
    meta = find(tmp_path / "run").meta
    assert meta.reason is SaveReason.GRACEFUL_SHUTDOWN
    assert sum(span.count for each in meta.point.position.covered for span in each.spans) > 0
