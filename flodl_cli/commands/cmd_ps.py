"""``fdl ps``: this user's runs on this machine, live and past."""

import dataclasses
import json
import sys
from typing import Any, Final

import click

from flodl.launch import rundir
from flodl.launch.progress import duration
from flodl.launch.registry import RunSummary, summaries

LATEST: Final = 10
"""Runs that are shown where nobody says how many."""

MAX_CHARS: Final = 64
"""Of one cell: a column is as wide as its longest, and a name may be anything. ``--json`` has all of it."""

HEADER: Final = ("RUN", "NAME", "STATE", "EXIT", "DURATION", "LOWEST LOSS", "LAST EVAL")


@click.command("ps", short_help="list runs")
@click.option("-a", "--all", "show_all", is_flag=True, help="All runs there ever were.")
@click.option("-n", "--lines", type=click.IntRange(1), metavar="N", help="The N latest runs.")
@click.option("--json", "as_json", is_flag=True, help="One document.")
def command(show_all: bool, lines: int | None, as_json: bool) -> int:
    """List the runs of this user on this machine, the newest first; without -a or -n the 10 latest, and all live ones.

    A run is forgotten when its directory is removed; nothing removes it by itself.
    """
    if show_all and lines is not None:
        raise click.UsageError("-a and -n exclude each other.")
    found = _chosen(show_all, lines)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
    elif found:
        from flodl_cli.render import table_text  # rich takes longer to import than all else here

        click.echo(table_text(HEADER, [_row(each) for each in found], sys.stdout))
    else:
        click.echo("no runs yet; start one with: fdl launch train.py", err=True)
    return 0


def _chosen(show_all: bool, lines: int | None) -> list[RunSummary]:
    if show_all or lines is not None:
        return summaries(rundir.all_runs()[:lines])
    runs = rundir.all_runs()[:LATEST]
    return summaries([*runs, *(run for run in rundir.live_runs() if run not in runs)])


def _row(run: RunSummary) -> tuple[str, ...]:
    return (
        _cut(run.run_id),
        _cut(run.name),
        _cut(run.state),
        "" if run.exit_code is None else str(run.exit_code),
        "" if run.duration_s is None else duration(run.duration_s),
        _metric(run.lowest_loss),
        _metric(run.last_eval),
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"


def _metric(found: Any) -> str:
    if found is None:
        return ""
    epoch = found.get("epoch")
    return f"{found['value']:.4g}" + (f" (epoch {epoch + 1})" if isinstance(epoch, int) else "")
