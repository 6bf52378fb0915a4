"""A peer that is killed, stopped or woken in every phase of a round, on both planes, with real processes.

After each: the run ends as it should, every sample is merged once, and every consensus is recounted from what its
participants packed (tests/recount.py). Zombies, which wake after they were given up, are in tests/system.
"""

import signal

import pytest

from tests.faulted import VERSION, fault, impatient_cluster, launch, moments
from tests.runs import START_S, Fdl

pytestmark = pytest.mark.timeout(240)

MODES = ["nccl_cadence", "cpu_cadence", "cpu_async"]
KILLED = (1, "signal", signal.SIGKILL)


@pytest.mark.parametrize(("mode", "phase"), moments(("nccl_cadence", "reducing")))
def test_peer_killed_in_any_phase_leaves_nothing_in_the_consensus(fdl: Fdl, mode: str, phase: str) -> None:
    job = launch(fdl, ("--local", 3), mode, fault(phase, "kill"))

    assert job.run.wait() == 0, job.run.story()
    assert job.struck() == ["fault"]
    assert job.losses() == [KILLED]
    assert job.wrongs(1) == []
    job.run.wait_until_clean()


@pytest.mark.parametrize(("mode", "phase"), moments(("nccl_cadence", "reducing")))
def test_peer_that_wakes_in_time_in_any_phase_is_not_lost(fdl: Fdl, mode: str, phase: str) -> None:
    job = launch(fdl, impatient_cluster(fdl, 3, dead_s=30.0), mode, fault(phase, "stop"))
    fdl.wait_until(job.is_missed, START_S, job.run.story)

    job.run.kill("rank1", number=signal.SIGCONT)

    assert job.run.wait() == 0, job.run.story()
    assert job.struck() == ["fault", "woke"]
    assert job.losses() == []
    assert job.wrongs() == []
    job.run.wait_until_clean()


@pytest.mark.parametrize(("mode", "phase"), moments(("cpu_cadence", "packing")))
def test_peer_that_stays_stopped_in_any_phase_is_ended_and_survived(fdl: Fdl, mode: str, phase: str) -> None:
    job = launch(fdl, impatient_cluster(fdl, 3, dead_s=5.0), mode, fault(phase, "stop"))

    assert job.run.wait() == 0, job.run.story()
    assert job.struck() == ["fault"]
    assert job.losses() == [(1, "silent", 0)]
    assert job.wrongs(1) == []
    job.run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["packing", "reducing", "reduced", "holding", "adopting"])
@pytest.mark.parametrize("mode", MODES)
def test_second_peer_killed_while_the_round_is_redone_is_out_as_well(fdl: Fdl, mode: str, phase: str) -> None:
    first = fault("reduced", "kill")
    job = launch(fdl, ("--local", 4), mode, first, fault(phase, "kill", rank=2, attempt=2))

    assert job.run.wait() == 0, job.run.story()
    assert (job.struck(1), job.struck(2)) == (["fault"], ["fault"])
    assert job.losses() == [KILLED, (2, "signal", signal.SIGKILL)]
    assert job.wrongs(1, 2) == []
    job.run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["packing", "reducing", "reduced", "holding", "adopting", "adopted"])
@pytest.mark.parametrize("version", [0, "last"])
@pytest.mark.parametrize("mode", MODES)
def test_source_killed_in_the_first_or_last_round_is_replaced(
    fdl: Fdl, mode: str, version: int | str, phase: str
) -> None:
    job = launch(fdl, ("--local", 3), mode, fault(phase, "kill", rank=0, version=version))

    assert job.run.wait() == 0, job.run.story()
    assert job.struck(0) == ["fault"]
    assert job.losses() == [(0, "signal", signal.SIGKILL)]
    assert job.wrongs(0) == []
    job.run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES[:1])
def test_second_peer_killed_while_the_group_forms_anew_is_out_as_well(fdl: Fdl, mode: str) -> None:
    second = fault("forming", "kill", rank=2, version=2)
    job = launch(fdl, ("--local", 4), mode, fault("reducing", "kill", version=VERSION), second)

    assert job.run.wait() == 0, job.run.story()
    assert job.losses() == [KILLED, (2, "signal", signal.SIGKILL)]
    assert job.wrongs(1, 2) == []
    job.run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize(("action", "loss"), [("kill", KILLED), ("stop", (1, "silent", 0))])
def test_peer_lost_while_the_first_group_forms_is_left_behind(fdl: Fdl, action: str, loss: tuple[object, ...]) -> None:
    job = launch(fdl, impatient_cluster(fdl, 3, dead_s=5.0), MODES[0], fault("forming", action, version=1))

    assert job.run.wait() == 0, job.run.story()
    assert job.losses() == [loss]
    assert job.wrongs(1) == []
    job.run.wait_until_clean()


@pytest.mark.long
def test_peer_that_wakes_while_the_others_form_the_group_is_in_it(fdl: Fdl) -> None:
    job = launch(fdl, impatient_cluster(fdl, 3, dead_s=30.0), MODES[0], fault("forming", "stop", version=1))
    fdl.wait_until(job.is_missed, START_S, job.run.story)

    job.run.kill("rank1", number=signal.SIGCONT)

    assert job.run.wait() == 0, job.run.story()
    assert job.losses() == []
    assert job.wrongs() == []
    job.run.wait_until_clean()
