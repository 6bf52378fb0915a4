"""Random runs under random faults. A failure names the one command that runs its seed again."""

from collections import Counter

import pytest

from tests.sim.schedule import KINDS, play, schedule_of
from tests.sim.world import World

CI_SEEDS = 150
LONG_SEEDS = 3000
FIRED_AT_LEAST = 200


def run_seed(seed: int) -> World:
    schedule = schedule_of(seed)
    try:
        world = play(schedule)
    except Exception as error:
        raise AssertionError(f"seed {seed} failed; run it again with: {schedule.replay}") from error
    return world


@pytest.mark.parametrize("seed", range(CI_SEEDS))
def test_every_sample_is_absorbed_once_whatever_befalls_the_run(seed: int) -> None:
    run_seed(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_schedule_of_thousands_breaks_a_promise() -> None:
    fired: Counter[str] = Counter()
    for seed in range(LONG_SEEDS):
        fired.update(run_seed(seed).fired)
    assert {kind for kind in KINDS if fired[kind] < FIRED_AT_LEAST} == set(), fired
