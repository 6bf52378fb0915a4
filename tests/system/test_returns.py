"""A host that is out of reach for a while, with the clocks that users have: given up, sent away, and taken in anew."""

import time
from pathlib import Path

import pytest

from tests.runs import CLEAN_S, Fdl
from tests.system.lab import Lab
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(600)]

SIZE, EPOCHS = 40_003, 2
DEAD_S = (25.0, 40.0)
GOES_ON_S = 10.0
CUT_S = 45.0
GRACE_S = 5.0
BACK_S = 150.0
OLD, NEW = 2, 3


@pytest.mark.parametrize("mode", ["nccl_cadence", "cpu_cadence", "cpu_async"])
def test_host_without_its_cable_is_given_up_ends_and_comes_back_under_new_ranks(
    fdl: Fdl, hosts: Lab, tmp_path: Path, mode: str
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    home, away = hosts.hosts[:2]
    cluster = hosts.cluster(tmp_path / "c.yml", [hosts.worker(home, 2), hosts.worker(away, 1)], is_elastic=True)
    flags = {"mode": mode, "size": SIZE, "epochs": EPOCHS, "step_ms": 20, "batch_size": 8, "max_anchor": 20}
    run = fdl.job(options=("-c", cluster), log=log, note_steps=True, **flags)
    run.wait_for_training(version=3)

    def steps_of(rank: int) -> list[float]:
        path = log / f"steps-{rank}.log"
        return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    old_pid = run.pid_of(f"rank{OLD}", away.namespace)
    hosts.cut(away)
    cut_s = time.monotonic()
    try:
        fdl.wait_until(lambda: run.events("host_lost"), DEAD_S[1], run.story)
        dead_s = time.monotonic()
        fdl.wait_until(lambda: all(steps_of(rank)[-1] > dead_s for rank in (0, 1)), GOES_ON_S, run.story)
        fdl.wait_until(lambda: time.monotonic() - cut_s >= CUT_S, CUT_S, run.story)
    finally:
        hosts.heal(away)

    assert DEAD_S[0] <= dead_s - cut_s <= DEAD_S[1]
    fdl.wait_until(lambda: not Path(f"/proc/{old_pid}").exists(), GRACE_S + CLEAN_S, run.story)
    fdl.wait_until(lambda: steps_of(NEW), BACK_S, run.story)
    assert run.wait(300) == 0, run.story()
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert [(loss["rank"], loss["kind"]) for loss in outcome["losses"]] == [(-1, "host lost")]
    seen = witness_run(run.folder, log, SIZE, EPOCHS, lost=[OLD])
    assert (seen.faults, seen.ranks) == ([], [0, 1, OLD, NEW])
    run.wait_until_clean()
