"""``fdl stop``: asks the controller; waits until the run has ended."""

import contextlib
import os
import signal
import sys
import time
from typing import Final

import click

from flodl.errors import DeadlineExceeded, PeerLost
from flodl.launch.control import ControllerClient
from flodl.launch.rundir import ControllerInfo, RunDir
from flodl.launch.waiting import Waiting
from flodl_cli.runs import complete_live, live_run

EXIT_TERMINATED: Final = 143
ABORT_WAIT_S: Final = 15.0
EXTRA_WAIT_S: Final = 90.0
"""On top of the stop grace: the last round, the final state, the hosts' farewell."""

POLL_S: Final = 0.1
LOOK_EVERY_S: Final = 1.0


@click.command("stop", short_help="end a run")
@click.argument("run", required=False, shell_complete=complete_live)
@click.option("-x", "--abort", is_flag=True, help="At once: no last round, nothing is kept.")
@click.option("-y", "--yes", is_flag=True, help="With -x on a terminal: do not ask.")
def command(run: str | None, abort: bool, yes: bool) -> int:
    """End a run in order: one more round, then every rank on every host stops.

    RUN is a run's id, its beginning, or its name; default: the only live run.
    """
    chosen, info, label = live_run(run)
    if abort and not yes and sys.stdin.isatty():
        click.confirm(f"End run {label} at once?", abort=True, err=True)
    client = ControllerClient.of(chosen, info)
    try:
        phase = client.stop("fdl stop", abort=abort, exit_code=EXIT_TERMINATED)
    except PeerLost:
        if not abort or not chosen.is_live():
            raise
        _kill(chosen, info, label)
        return 0
    click.echo(f"fdl: run {label} is {'ending at once' if abort else 'stopping in order'} (it was {phase})", err=True)
    _wait(chosen, client, label, ABORT_WAIT_S if abort else EXTRA_WAIT_S + _grace_s(chosen))
    click.echo(f"fdl: run {label} has ended", err=True)
    return 0


def _kill(run: RunDir, info: ControllerInfo, label: str) -> None:
    """A controller that does not answer is ended by us: its hosts notice at once, and stop by themselves."""
    click.echo(f"fdl: the controller of run {label} (pid {info.pid}) does not answer; ending it", err=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(info.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + ABORT_WAIT_S
    while run.is_live():
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded(f"process {info.pid} does not end: it hangs in the kernel, on a disk as a rule")
        time.sleep(POLL_S)
    click.echo(f"fdl: run {label} has ended; its hosts stop by themselves", err=True)


def _wait(run: RunDir, client: ControllerClient, label: str, timeout_s: float) -> None:
    waiting = Waiting()
    deadline_s, look_at_s = time.monotonic() + timeout_s, 0.0
    while run.is_live():
        now_s = time.monotonic()
        if now_s >= deadline_s:
            whom = f"; it waits for {waiting.whom}" if waiting.whom else ""
            raise DeadlineExceeded(
                f"run {label} has not ended within {timeout_s:g} s{whom}; at once: fdl stop -x {run.run_id}"
            )
        if now_s >= look_at_s:
            look_at_s = now_s + LOOK_EVERY_S
            _tell(client, waiting, now_s)
        time.sleep(POLL_S)


def _tell(client: ControllerClient, waiting: Waiting, now_s: float) -> None:
    with contextlib.suppress(PeerLost):  # it is about to end
        line = waiting.look(client.state(), now_s)
        if line:
            click.echo(f"fdl: {line}", err=True)


def _grace_s(run: RunDir) -> float:
    grace = (run.read_json("run.json") or {}).get("stop_timeout_s", 30.0)
    return float(grace) if isinstance(grace, (int, float)) else 30.0
