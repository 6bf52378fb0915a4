"""``fdl attach``: the viewer of ``fdl launch`` for a run that goes on without one."""

import time
from typing import Final

import click

from flodl.errors import PeerLost
from flodl.launch.control import ControllerClient
from flodl.launch.rundir import ControllerInfo, RunDir
from flodl.launch.terminal import Terminal
from flodl.launch.viewer import Detached, Viewer
from flodl_cli.runs import complete_live, live_run

ANSWER_S: Final = 30.0
"""A controller that lives has answered by then, on the busiest machine."""

RETRY_S: Final = 0.2


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
    _wait_for_answer(chosen, info)
    end = Viewer(chosen, info, terminal, lines=lines).watch()
    return end.exit_code if isinstance(end, Detached) else end


def _wait_for_answer(run: RunDir, info: ControllerInfo) -> None:
    """Until the controller answers, or is gone, of which the viewer knows what to say.

    Raises:
        PeerLost: its process lives, and nothing has answered within ``ANSWER_S``.
    """
    client, deadline_s = ControllerClient.of(run, info), time.monotonic() + ANSWER_S
    while run.is_live():
        try:
            client.state()
            return
        except PeerLost as error:
            if time.monotonic() >= deadline_s:
                words = f"its process lives (pid {info.pid}), and nothing has answered for {ANSWER_S:g} s"
                raise PeerLost(f"{error}\n  {words}; to end it: fdl stop -x {run.run_id}") from None
        time.sleep(RETRY_S)
