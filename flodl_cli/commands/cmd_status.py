"""``fdl status``: the controller's snapshot while it lives, the last one on disk afterwards."""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import click

from flodl.launch import rundir
from flodl.launch.snapshot import snapshot
from flodl_cli.runs import complete_any

WATCH_EVERY_S: Final = 1.0


@click.command("status", short_help="show a run")
@click.argument("run", required=False, shell_complete=complete_any)
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


def _print(state: Mapping[str, Any], name: str, watch: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(state, indent=None if watch else 1))
        return
    from flodl_cli.render import status_text  # rich takes longer to import than all else here

    text = status_text(state, name, sys.stdout)
    if watch and sys.stdout.isatty():
        click.clear()
    click.echo(text)
