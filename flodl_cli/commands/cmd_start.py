"""``fdl start``: closes a join window that is held, so that the run starts with whoever is there."""

import click

from flodl.core.counted import counted
from flodl.launch.control import ControllerClient
from flodl_cli.runs import complete_live, live_run


@click.command("start", short_help="start a run that is held")
@click.argument("run", required=False, shell_complete=complete_live)
def command(run: str | None) -> int:
    """Start a run whose join window is held (join.start: manual or hybrid) with the hosts that are there.

    RUN is a run's id, its beginning, or its name; default: the only live run. At least join.min_rank_start ranks must
    be there; without it target_ranks, or every host of the roster.
    """
    chosen, info, label = live_run(run)
    ranks, hosts = ControllerClient.of(chosen, info).start("fdl start")
    click.echo(f"run {label} starts with {counted(ranks, 'rank')} on {', '.join(hosts)}")
    return 0
