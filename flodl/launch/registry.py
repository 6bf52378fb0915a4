"""What the registry of runs says of each of them, from its directory alone: no controller is asked.

That costs some small files for each run, so that a list of the latest is quick among ten thousand.
"""

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flodl.launch.rundir import RunDir, outcome_exit_code, wall_time_s
from flodl.launch.snapshot import STARTING_S

DAMAGED: Final = "damaged"
"""The state of a directory that does not say what was launched: it is shown, and nothing more is read from it."""

_DONE: Final = {"completed": "done"}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list. Epochs count from 0; what is not known is None.

    ``state`` is a live run's phase, or how it ended: done, stopped, failed; vanished where its controller is gone
    without a word; damaged. ``duration_s`` counts from the launch to the end, to the last sign, or to now.
    ``lowest_loss`` is the mean loss of its best epoch, ``last_eval`` what the script's latest evaluation gave.
    """

    run_id: str
    name: str
    state: str
    is_live: bool
    exit_code: int | None
    created_s: float | None
    duration_s: float | None
    lowest_loss: Mapping[str, Any] | None
    last_eval: Mapping[str, Any] | None


def summaries(runs: Iterable[RunDir]) -> list[RunSummary]:
    """What is known of each now."""
    now_s = time.time()
    return [summary(run, now_s) for run in runs]


def summary(run: RunDir, now_s: float) -> RunSummary:
    """What its directory says of ``run``."""
    asked, state, outcome = (run.read_json(f"{name}.json") for name in ("run", "state", "outcome"))
    created_s = wall_time_s((asked or {}).get("created_s"))
    if asked is None or created_s is None:
        return RunSummary(run.run_id, "", DAMAGED, False, None, None, None, None, None)
    is_live = run.is_live()
    known = state or {}
    ended_s = now_s if is_live else _last_sign_s(run)
    return RunSummary(
        run.run_id,
        str(asked.get("name", "")),
        _state(run, known, outcome, is_live, now_s - created_s),
        is_live and outcome is None,
        None if outcome is None else outcome_exit_code(outcome),
        created_s,
        None if ended_s is None else max(ended_s - created_s, 0.0),
        _metric(known.get("lowest_loss")),
        _metric(known.get("last_eval")),
    )


def _state(
    run: RunDir, state: Mapping[str, Any], outcome: Mapping[str, Any] | None, is_live: bool, age_s: float
) -> str:
    if outcome is not None:
        status = str(outcome.get("status", "failed"))
        return _DONE.get(status, status)
    if is_live:
        return str(state.get("phase", "starting"))
    if run.controller() is not None:
        return "vanished"
    return "starting" if age_s < STARTING_S else "failed"


def _last_sign_s(run: RunDir) -> float | None:
    """When a run that is not live any more was last heard of."""
    for path in (run.outcome_json, run.state_json, run.controller_json):
        try:
            return os.stat(path).st_mtime
        except OSError:
            continue
    return None


def _metric(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) and _number(value.get("value")) is not None else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None
