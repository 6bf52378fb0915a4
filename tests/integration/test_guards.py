"""A convergence guard of the user's own in a whole run: it decides, fails and sleeps, and nobody waits for it."""

from typing import Any

import pytest

from tests.runs import Fdl
from tests.scripts.job import GUARD_SLEEPS_S

pytestmark = pytest.mark.timeout(240)


def of_version(events: list[dict[str, Any]], version: int) -> dict[str, Any]:
    """The fields of the one event about ``version``."""
    (fields,) = [event["fields"] for event in events if event["fields"]["version"] == version]
    return dict(fields)


@pytest.mark.parametrize("mode", ["cpu_cadence", pytest.param("nccl_cadence", marks=pytest.mark.long)])
def test_guard_in_the_head_decides_and_holds_up_no_round(fdl: Fdl, mode: str) -> None:
    run = fdl.job("--guard", mode=mode, step_ms=20, size=400, epochs=2, anchor=4, max_anchor=4)

    assert run.wait() == 0, run.story()
    stories = run.events("cadence")
    first, second = of_version(stories, 1), of_version(stories, 2)
    assert (first["verdict"], first["anchor"], first["committed_anchor"]) == ("nudge_down", 4, 2)
    assert first["divergence"] > 0
    assert (second["verdict"], second["note"]) == ("stable", "ValueError: planted in the guard")
    assert of_version(run.events("anchor_nudged"), 1)["anchor"] == 2
    assert of_version(run.events("guard_failed"), 2)["reason"] == "ValueError: planted in the guard"
    assert of_version(run.events("guard_late"), 4)["reason"] in (
        "no verdict within 100 ms",
        "the next round came first",
    )
    commits = {commit["version"]: commit["ts"] for commit in run.commits()}
    assert commits[5] - commits[4] < GUARD_SLEEPS_S * 1e3
    assert "rank solo judges version 1" in run.log("head.stdout.log") + run.stdout
    run.wait_until_clean()
