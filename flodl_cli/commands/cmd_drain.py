"""``fdl drain``: asks the controller to let a host go; waits until it has left."""

import contextlib
import time
from typing import Final

import click

from flodl.errors import DeadlineExceeded, PeerLost
from flodl.launch.control import ControllerClient
from flodl.launch.rundir import RunDir
from flodl_cli.runs import complete_host, complete_live, live_run

LEAVE_S: Final = 900.0
"""Until the next commit, and the checkpoint that one of its ranks may be giving; then the ranks' own ends."""

POLL_S: Final = 0.2


@click.command("drain", short_help="let a host leave")
@click.argument("host", shell_complete=complete_host)
@click.argument("run", required=False, shell_complete=complete_live)
def command(host: str, run: str | None) -> int:
    """Let HOST leave a run that trains: at the next commit, when all that its ranks have trained is merged.

    RUN is a run's id, its beginning, or its name; default: the only live run. Ends once the host has left.
    """
    chosen, info, label = live_run(run)
    client = ControllerClient.of(chosen, info)
    ranks = ", ".join(map(str, client.drain(host, "fdl drain")))
    if ranks:
        click.echo(f"host {host} leaves run {label} at the next commit, without loss: rank {ranks}")
    else:
        click.echo(f"no rank of host {host} takes part in run {label}; it leaves now")
    click.echo(f"host {host} has left; the run goes on" if _wait(chosen, client, host) else f"run {label} has ended")
    return 0


def _wait(run: RunDir, client: ControllerClient, host: str) -> bool:
    """True once the host has left, False when the run has ended before."""
    deadline_s = time.monotonic() + LEAVE_S
    while run.is_live():
        with contextlib.suppress(PeerLost):  # it is about to end
            hosts = client.state().get("hosts", [])
            if not any(each["host"] == host and each["state"] != "gone" for each in hosts):
                return True
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded(
                f"host {host} has not left within {LEAVE_S:g} s; it still will at the next commit: see fdl status"
            )
        time.sleep(POLL_S)
    return False
