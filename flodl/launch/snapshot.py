"""A run's state from whoever can tell it: its controller while that lives, else what the run's directory holds.

A run without an outcome whose controller is not there is no run that goes on: what is known of it is told as that.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flodl.config.address import split_address
from flodl.config.tls import TlsMode
from flodl.errors import FlodlError, PeerLost
from flodl.launch.control import ControllerClient
from flodl.launch.progress import duration
from flodl.launch.rundir import CONTROLLER_START_S, ControllerInfo, RunDir, wall_time_s

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
    info = run.controller()
    if addr is not None:
        host, port = split_address(addr, DEFAULT_PORT)
        tls = TlsMode.AUTO if info is None else info.tls
        try:
            return ControllerClient(run.run_id, run.read_token(), host, port, tls=tls).state()
        except PeerLost as error:
            remedy = f"check address and port: fdl status {run.run_id} without --addr, on its machine, knows them"
            raise PeerLost(f"{error}\n  {remedy}") from None
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
    return {**state, **(_beginning(run) if info is None else _vanished(run, info))}


def _beginning(run: RunDir) -> dict[str, str]:
    """Of a run whose controller has not announced itself: whether that can still come."""
    age_s = time.time() - _created_s(run)
    if age_s < STARTING_S:
        return {"phase": "starting"}
    words = f"its controller does not listen, {age_s:.0f} s after the launch, and nothing says why"
    return {"phase": "failed", "message": f"{words}; its log is {run.logs / 'controller.log'}"}


def _vanished(run: RunDir, info: ControllerInfo) -> dict[str, Any]:
    """Of a run whose controller was killed: since when, and what can be done. Everything else is as of that moment."""
    as_of_s = max(_written_s(path) for path in (run.state_json, run.controller_json))
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(as_of_s))
    age = duration(max(time.time() - as_of_s, 0.0))
    gone = f"its controller (pid {info.pid}) is gone without a word; its last sign, and all figures, are of {when}"
    checkpoint, remedy = _way_on(run)
    return {
        "phase": "vanished",
        "message": f"{gone}, {age} ago\n{remedy}",
        "vanished": {"pid": info.pid, "as_of_s": as_of_s, "checkpoint": checkpoint},
    }


def _way_on(run: RunDir) -> tuple[str | None, str]:
    """The stem of the run's last checkpoint, where it has one, and what to do about it."""
    from flodl.launch.resumption import last_checkpoint  # a run that is well does not need it

    try:
        stem = last_checkpoint(run)
    except FlodlError as error:
        return None, f"nothing to go on from: {error}"
    return str(stem), f"to go on from its last checkpoint, {stem}: fdl launch --resume {run.run_id}"


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _created_s(run: RunDir) -> float:
    asked = run.read_json("run.json") or {}
    created_s = wall_time_s(asked.get("created_s"))
    return run.path.stat().st_mtime if created_s is None else created_s
