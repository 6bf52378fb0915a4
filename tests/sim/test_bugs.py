"""The simulation is worth its time only if it finds what it is there to find."""

import pytest

from flodl.errors import FlodlError
from tests.sim.bugs import PLANTED
from tests.sim.schedule import play, schedule_of

SEEDS = 200


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    for seed in range(SEEDS):
        try:
            play(schedule_of(seed))
        except (AssertionError, FlodlError):
            return
    pytest.fail(f"{bug} was not found within {SEEDS} seeds")
