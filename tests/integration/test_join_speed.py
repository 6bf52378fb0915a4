"""What a rank is worth that is added to a running training, and how soon. Steps sleep: two cores carry three ranks."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Figures
from tests.runs import END_S, START_S, Fdl

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

STEP_S = 2.0
"""The most from a newcomer's readiness to its first step."""
ROUNDS = 10
"""The most until it does its share."""
LEAST_GAIN = 1.4
"""A third rank as fast as the two: half as much again would be ideal."""
MEASURED = 20
"""Rounds over which a rate is taken: of five steps or more, so that ten seconds are measured."""


@pytest.mark.parametrize("mode", ["cpu_cadence", "nccl_cadence", "cpu_async", "cpu_sync"])
def test_third_equal_rank_steps_soon_does_its_share_and_speeds_the_run_up(
    fdl: Fdl, tmp_path: Path, figures: Figures, mode: str
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    run = fdl.job(mode=mode, step_ms=100, min_anchor=5, size=8000, epochs=10_000, log=log, note_steps=True)
    run.wait_for_training(version=ROUNDS + MEASURED)

    started = len(run.commits())
    fdl.join(run, "--devices", "cpu", "--host", "extra")
    run.wait_for_event("rank_joined")
    joined = run.events("rank_joined")[0]["fields"]["version"]
    fdl.wait_until(lambda: run.commits()[-1]["version"] >= joined + ROUNDS + MEASURED, 2 * START_S, run.story)
    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()

    commits = run.commits()
    took_s = first_step_s(log, rank=2) - run.events("newcomer_ready")[0]["ts"] / 1e3
    rounds = rounds_to_share([each for each in commits if each["version"] > joined], newcomer=2)
    before = rate(commits[:started][-MEASURED:])
    after = rate([each for each in commits if each["version"] > joined + ROUNDS][:MEASURED])
    figures.update(stepping_s=took_s, rounds=rounds, gain=after / before, before=before, after=after)
    assert took_s <= STEP_S
    assert rounds <= ROUNDS
    assert after / before >= LEAST_GAIN


def test_long_windows_do_not_keep_a_newcomer_waiting(fdl: Fdl, tmp_path: Path, figures: Figures) -> None:
    """Of 10 s: it would wait for the rest of one, and for the whole of the next."""
    log = tmp_path / "log"
    log.mkdir()
    run = fdl.job(step_ms=100, anchor=100, min_anchor=100, size=80_000, epochs=10_000, log=log, note_steps=True)
    run.wait_for_training(version=1)

    fdl.join(run, "--devices", "cpu", "--host", "extra")
    run.wait_for_event("rank_joined")
    fdl.wait_until((log / "steps-2.log").exists, START_S, run.story)
    fdl.wait_until((log / "steps-2.log").read_text, START_S, run.story)
    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()

    took_s = first_step_s(log, rank=2) - run.events("newcomer_ready")[0]["ts"] / 1e3
    figures.update(stepping_s=took_s)
    assert took_s <= STEP_S


def first_step_s(log: Path, rank: int) -> float:
    """Wall time of the rank's first step; it notes the monotonic one, which is this machine's."""
    began_s = float((log / f"steps-{rank}.log").read_text().split()[0])
    return began_s + time.time() - time.monotonic()


def rounds_to_share(commits: list[dict[str, Any]], newcomer: int) -> int:
    """The first round from which on the newcomer does, over five rounds, nine tenths of what an old rank does."""
    steps = [dict(commit["counts"]) for commit in commits]
    for number in range(1, len(steps) - 3):
        done = {rank: sum(each[rank] for each in steps[number - 1 : number + 4]) for rank in steps[0]}
        if done[newcomer] >= 0.9 * (sum(done.values()) - done[newcomer]) / (len(done) - 1):
            return number
    return len(steps)


def rate(commits: list[dict[str, Any]]) -> float:
    """Samples per second from the first of these commits to the last one."""
    samples = sum(count for commit in commits[1:] for *_, count in commit["spans"])
    return samples / ((commits[-1]["ts"] - commits[0]["ts"]) / 1e3)
