"""In cpu_async no rank waits for an averaging: its steps follow one another, however long the round takes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import Figures
from tests.runs import Fdl, Launched

pytestmark = pytest.mark.timeout(240)

RANKS = 3
STEP_S = 0.1
WINDOW = 30
AVERAGING_S = 2.0
LONGEST_GAP_S = 1.5 * STEP_S


def steps_of(log: Path, rank: int) -> list[tuple[float, float]]:
    """When each step of the rank began and ended, in monotonic seconds."""
    path = log / f"steps-{rank}.log"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    pairs = [line.split() for line in lines if line.endswith("\n")]
    return [(float(began), float(ended)) for began, ended in pairs]


@contextmanager
def frozen(run: Launched, role: str) -> Iterator[None]:
    run.kill(role, number=signal.SIGSTOP)
    try:
        yield
    finally:
        run.kill(role, number=signal.SIGCONT)


@pytest.mark.parametrize("role", ["controller", pytest.param("daemon", marks=pytest.mark.long)])
def test_no_step_waits_for_a_round_of_two_seconds(fdl: Fdl, tmp_path: Path, figures: Figures, role: str) -> None:
    """Whoever carries the round is frozen just before the ranks report to it, and for two seconds after that."""
    anchor = {"anchor": WINDOW, "min_anchor": WINDOW, "max_anchor": WINDOW}
    run = fdl.job(
        options=("--local", RANKS),
        mode="cpu_async",
        step_ms=STEP_S * 1e3,
        size=100_000,
        log=tmp_path,
        note_steps=True,
        **anchor,
    )
    run.wait_for_training(version=1)
    version = run.commits()[-1]["version"]
    begun = [len(steps_of(tmp_path, rank)) for rank in range(RANKS)]

    def every_rank_has_done(steps: float) -> bool:
        return all(len(steps_of(tmp_path, rank)) >= begun[rank] + steps for rank in range(RANKS))

    fdl.wait_until(lambda: every_rank_has_done(WINDOW * 2 / 3), 30.0, run.story)
    with frozen(run, role):
        first = [len(steps_of(tmp_path, rank)) for rank in range(RANKS)]
        fdl.wait_until(lambda: every_rank_has_done(WINDOW + AVERAGING_S / STEP_S), 30.0, run.story)
        last = [len(steps_of(tmp_path, rank)) for rank in range(RANKS)]
        assert run.commits()[-1]["version"] == version, "the round was not in flight"

    run.wait_for_training(version=version + 1)
    steps = [steps_of(tmp_path, rank)[first[rank] : last[rank]] for rank in range(RANKS)]
    gaps_s = [began - ended for each in steps for (_, ended), (began, _) in pairwise(each)]
    figures["longest_gap_s"], figures["step_s"] = max(gaps_s), STEP_S
    assert min(each[-1][1] - each[0][0] for each in steps) >= AVERAGING_S
    assert max(gaps_s) <= LONGEST_GAP_S, sorted(gaps_s)[-5:]
    assert fdl.call("stop", "-x", run.run_id, timeout_s=60).returncode == 0
    run.wait()
    run.wait_until_clean()
