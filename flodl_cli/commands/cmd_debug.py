"""``fdl debug``: what somebody else needs to find a fault."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from flodl.errors import FlodlError
from flodl.launch import rundir
from flodl.launch.debug_bundle import DEFAULT_LINES, write_bundle
from flodl.launch.document import DocumentFault, load
from flodl.launch.plan import RunSpec
from flodl.launch.rundir import RunDir, read_document
from flodl_cli.runs import complete_any


@click.group("debug", short_help="gather what a bug report needs")
def command() -> None:
    """Gather what a bug report needs."""


@command.command("bundle")
@click.argument("run", required=False, shell_complete=complete_any)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The archive; default: fdl-debug-RUN.tar.gz here.",
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, 100_000),
    default=DEFAULT_LINES,
    show_default=True,
    metavar="N",
    help="Of each log and of the events, the last N lines.",
)
def bundle_command(run: str | None, output: Path | None, lines: int) -> int:
    """Write one archive for a bug report: what was asked, events, the last lines of all logs, versions, and what fdl
    probe finds on the run's hosts now.

    RUN is a run's id, its beginning, or its name; default: the latest live run, else the latest. No token and no key
    is in it, and of environment variables only those of NCCL, Gloo, OpenMP, MKL, CUDA and torch have their values. What
    the script printed is in it as it is: look through it before you share it.
    """
    chosen = rundir.find(run)
    target = output or Path(f"fdl-debug-{chosen.run_id}.tar.gz")
    click.echo("fdl: looking at the run's hosts", err=True)
    done = write_bundle(chosen, target, lines, {"probe.json": _probed(chosen)})
    click.echo(f"{done.path}: {len(done.names) + 1} files, {done.size_bytes:,} bytes")
    if done.left_out:
        click.echo(f"fdl: no room for {', '.join(done.left_out)}; -n takes fewer lines of each", err=True)
    click.echo("fdl: what the script printed is in it as it is; look through it before you share it", err=True)
    return 0


def _probed(run: RunDir) -> dict[str, Any]:
    """What ``fdl probe`` finds now, where the run was; or why it finds nothing."""
    from flodl.launch.readiness import readiness

    try:
        found = readiness(load(RunSpec, read_document(run.run_json)))
    except (OSError, DocumentFault, FlodlError) as error:
        return {"error": str(error)}
    return {"findings": [dataclasses.asdict(finding) for finding in found.findings], "seconds": found.duration_s}
