"""A run's state from whoever can tell it: its controller while that lives, else what the run's directory holds.

A run without an outcome whose controller is not there is no run that goes on: what is known of it is told as that.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from flodl.config.address import split_address
from flodl.errors import PeerLost
from flodl.launch.control import ControllerClient
from flodl.launch.rundir import CONTROLLER_START_S, RunDir

DEFAULT_PORT: Final = 1337

STARTING_S: Final = 2 * CONTROLLER_START_S
"""A run may be this old without a controller that listens; its launcher gives up, and says so, long before."""


def snapshot(run: RunDir, addr: str | None = None) -> Mapping[str, Any]:
    """state.json's content, as new as it can be had; ``outcome`` is in it once the run has ended.

    Args:
        run: its directory.
        addr: the controller's ``HOST:PORT``; None takes the one that the run announced.

    Raises:
        FlodlError: ``addr`` was given and nobody answers there, or the controller lives and does not answer.
    """
    if addr is not None:
        host, port = split_address(addr, DEFAULT_PORT)
        return ControllerClient(run.run_id, run.read_token(), host, port).state()
    info = run.controller()
    if info is not None and run.is_live():
        try:
            return ControllerClient.of(run, info).state()
        except PeerLost:
            if run.is_live() and not run.outcome_json.exists():
                raise
    state = run.read_json("state.json") or {"run_id": run.run_id, "phase": "ended"}
    outcome = run.read_json("outcome.json")
    if outcome is not None:
        return {**state, "outcome": outcome}
    if info is not None:
        return {**state, "phase": "vanished: its controller is gone without a word"}
    return {**state, **_beginning(run)}


def _beginning(run: RunDir) -> dict[str, str]:
    """Of a run whose controller has not announced itself: whether that can still come."""
    age_s = time.time() - _created_s(run)
    if age_s < STARTING_S:
        return {"phase": "starting"}
    words = f"its controller does not listen, {age_s:.0f} s after the launch, and nothing says why"
    return {"phase": "failed", "message": f"{words}; its log is {run.logs / 'controller.log'}"}


def _created_s(run: RunDir) -> float:
    asked = run.read_json("run.json") or {}
    created_s = asked.get("created_s")
    return float(created_s) if isinstance(created_s, (int, float)) else run.path.stat().st_mtime
