"""A rank or the controller falls silent for most of a minute, with the clocks that users have.

A rank is suspect after 10 s of silence and dead after 30; its daemon then ends it. A controller that did not run itself
counts that time against nobody.
"""

import itertools
import signal
import time
from pathlib import Path

import pytest

from tests.runs import Fdl, Launched
from tests.witness import witness_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

MODES = ["nccl_cadence", "cpu_cadence", "nccl_sync", "cpu_sync", "cpu_async"]
RANKS = 3
SIZE, EPOCHS = 12_003, 2
DEAD_S = (25.0, 40.0)
GOES_ON_S = 10.0
CONTROLLER_S = 60.0


def steps(log: Path, rank: int) -> list[float]:
    """When each step of the rank began, in monotonic seconds."""
    path = log / f"steps-{rank}.log"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [float(line.split()[0]) for line in lines if line.endswith("\n")]


def trained(fdl: Fdl, log: Path, mode: str) -> Launched:
    flags = {"mode": mode, "size": SIZE, "epochs": EPOCHS, "step_ms": 20, "batch_size": 8, "max_anchor": 20}
    run = fdl.job(options=("--local", RANKS), log=log, note_steps=True, **flags)
    run.wait_for_training(version=3)
    return run


@pytest.mark.parametrize("mode", MODES)
def test_frozen_rank_is_dead_when_its_time_is_up_and_the_others_go_on(fdl: Fdl, tmp_path: Path, mode: str) -> None:
    run = trained(fdl, tmp_path, mode)

    pid = run.pid_of("rank1")
    run.kill("rank1", number=signal.SIGSTOP)
    frozen_s = time.monotonic()
    fdl.wait_until(lambda: run.events("rank_lost"), DEAD_S[1], run.story)
    dead_s = time.monotonic()

    assert DEAD_S[0] <= dead_s - frozen_s <= DEAD_S[1]
    fdl.wait_until(lambda: all(steps(tmp_path, rank)[-1] > dead_s for rank in (0, 2)), GOES_ON_S, run.story)
    fdl.wait_until(lambda: not Path(f"/proc/{pid}").exists(), GOES_ON_S, run.story)
    assert run.wait(200) == 0, run.story()
    assert witness_run(run.folder, tmp_path, SIZE, EPOCHS, lost=[1]).faults == []
    run.wait_until_clean()


@pytest.mark.parametrize("mode", MODES)
def test_controller_that_is_frozen_for_a_minute_kills_nobody(fdl: Fdl, tmp_path: Path, mode: str) -> None:
    run = trained(fdl, tmp_path, mode)

    run.kill("controller", number=signal.SIGSTOP)
    frozen_s = time.monotonic()
    fdl.wait_until(lambda: time.monotonic() - frozen_s >= CONTROLLER_S, CONTROLLER_S + 5, run.story)
    run.kill("controller", number=signal.SIGCONT)

    assert run.wait(200) == 0, run.story()
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert (outcome["losses"], run.events("rank_lost"), run.events("host_lost")) == ([], [], [])
    assert witness_run(run.folder, tmp_path, SIZE, EPOCHS).faults == []
    for rank in range(RANKS):
        begun = steps(tmp_path, rank)
        longest_s = max(after - before for before, after in itertools.pairwise(begun))
        assert begun[-1] > frozen_s + CONTROLLER_S, "the rank went on"
        assert longest_s < CONTROLLER_S + GOES_ON_S
    run.wait_until_clean()
