"""``fdl status``: the controller's snapshot while it lives, the last one on disk afterwards."""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import click

from flodl.config.address import split_address
from flodl.errors import PeerLost
from flodl.launch import rundir
from flodl.launch.control import ControllerClient
from flodl.launch.rundir import RunDir

WATCH_EVERY_S: Final = 1.0
DEFAULT_PORT: Final = 1337


@click.command("status", short_help="show a run")
@click.argument("run", required=False)
@click.option("--addr", metavar="HOST:PORT", help="Ask the controller at this address; RUN says whose token to use.")
@click.option("-w", "--watch", is_flag=True, help="Again every second, until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="state.json as it is; with --watch one line each.")
def command(run: str | None, addr: str | None, watch: bool, as_json: bool) -> int:
    """Show phase, hosts, and each rank's rate, share, step and loss; of a plain run, how long each rank has run.

    RUN is a run's id, its beginning, or its name; default: the latest live run, else the latest.
    """
    chosen = rundir.find(run)
    name = rundir.run_name(chosen)
    while True:
        state = snapshot(chosen, addr)
        _print(state, name, watch, as_json)
        if not watch or state.get("outcome") or state.get("phase") == "ended" or not (addr or chosen.is_live()):
            return 0
        time.sleep(WATCH_EVERY_S)


def snapshot(run: RunDir, addr: str | None) -> Mapping[str, Any]:
    """The run's state: asked from its controller, else the last one written, else what the directory tells.

    Raises:
        FlodlError: ``addr`` was given and nobody answers there.
    """
    info = run.controller()
    if addr is not None:
        host, port = split_address(addr, DEFAULT_PORT)
        return ControllerClient(run.run_id, run.read_token(), host, port).state()
    if info is not None and run.is_live():
        try:
            return ControllerClient.of(run, info).state()
        except PeerLost:
            if run.is_live() and not run.outcome_json.exists():
                raise
    state = run.read_json("state.json") or {"run_id": run.run_id, "phase": "starting" if info is None else "ended"}
    outcome = run.read_json("outcome.json")
    if outcome is not None:
        return {**state, "outcome": outcome}
    if info is not None:
        return {**state, "phase": "vanished: its controller is gone without a word"}
    return state


def _print(state: Mapping[str, Any], name: str, watch: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(state, indent=None if watch else 1))
        return
    from flodl_cli.render import status_text  # rich takes longer to import than all else here

    text = status_text(state, name, sys.stdout)
    if watch and sys.stdout.isatty():
        click.clear()
    click.echo(text)
