"""A host that is frozen in any phase of a round, given up, and woken: it disturbs nobody and ends by itself.

On one machine a silent rank is ended by its daemon. Here rank, daemon and warden of the second host freeze together,
so nobody can; the rank wakes first, in the middle of its phase and with all its connections to the others.
"""

import json
import signal
from pathlib import Path

import pytest

from tests.faulted import VERSION, fault, launch, moments
from tests.runs import CLEAN_S, START_S, Fdl
from tests.system.lab import Lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

GRACE_S = 5.0
ZOMBIE = 2


@pytest.mark.parametrize(("mode", "phase"), moments())
def test_zombie_of_any_phase_disturbs_nobody_and_ends_by_itself(
    fdl: Fdl, hosts: Lab, tmp_path: Path, mode: str, phase: str
) -> None:
    stop = fault(phase, "stop", rank=ZOMBIE)
    env = {"OMP_NUM_THREADS": "1", "FLODL_TEST_FAULTS": f"[{json.dumps(stop)}]"}
    workers = [hosts.worker(hosts.hosts[0], 2), hosts.worker(hosts.hosts[1], 1, env=env)]
    liveness = {"heartbeat_s": 0.5, "suspect_s": 2.0 * fdl.deadline_factor, "dead_s": 5.0 * fdl.deadline_factor}
    cluster = hosts.cluster(tmp_path / "c.yml", workers, liveness=liveness)
    there = hosts.hosts[1].namespace
    job = launch(fdl, ("-c", cluster), mode, size=1603, step_ms=40)

    fdl.wait_until(lambda: job.struck(ZOMBIE), START_S, job.run.story)
    for role in ("warden", "daemon"):
        job.run.kill(role, there, signal.SIGSTOP)
    fdl.wait_until(lambda: job.run.events("host_lost"), 30, job.run.story)
    job.run.wait_for_training(VERSION + 2)
    job.run.kill(f"rank{ZOMBIE}", there, signal.SIGCONT)
    fdl.wait_until(lambda: job.struck(ZOMBIE) == ["fault", "woke"], 10, job.run.story)
    for role in ("daemon", "warden"):
        job.run.kill(role, there, signal.SIGCONT)

    fdl.wait_until(lambda: not job.run.leftovers_on(there), GRACE_S + CLEAN_S, job.run.story)
    assert job.run.wait() == 0, job.run.story()
    assert [(rank, kind) for rank, kind, _ in job.losses()] == [(-1, "host lost")]
    assert job.wrongs(ZOMBIE) == []
    job.run.wait_until_clean()
