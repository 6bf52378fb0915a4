"""``fdl attach``: the viewer of ``fdl launch`` for a run that goes on without one."""

import click

from flodl.launch.terminal import Terminal
from flodl.launch.viewer import Detached, Viewer
from flodl_cli.runs import complete_live, live_run


@click.command("attach", short_help="watch a live run")
@click.argument("run", required=False, shell_complete=complete_live)
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=20, show_default=True, metavar="N", help="Of the past, this many."
)
def command(run: str | None, lines: int) -> int:
    """Watch a live run as fdl launch does, to its end.

    RUN is a run's id, its beginning, or its name; default: the only live run. Ctrl-C stops the run in order, d leaves
    it alone. Ends with the run's exit code.
    """
    chosen, info, label = live_run(run)
    terminal = Terminal()
    terminal.say(f"fdl: run {label} on {info.address}:{info.port}")
    end = Viewer(chosen, info, terminal, lines=lines).watch()
    return end.exit_code if isinstance(end, Detached) else end
