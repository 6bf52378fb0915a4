"""``fdl debug``: what somebody else needs to find a fault."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Final

import click

from flodl.errors import FlodlError
from flodl.launch import rundir
from flodl.launch.debug_bundle import DEFAULT_LINES, write_bundle
from flodl.launch.document import DocumentFault, load
from flodl.launch.plan import RunSpec
from flodl.launch.rundir import RunDir, read_document
from flodl_cli.runs import complete_any

MAX_ID_CHARS: Final = 64
"""Three times what fdl's own take."""

_ODD: Final = re.compile(r"[^A-Za-z0-9._-]")


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
    target = output or Path(_default_name(chosen.run_id))
    click.echo("fdl: looking at the run's hosts", err=True)
    done = write_bundle(chosen, target, lines, {"probe.json": _probed(chosen)})
    click.echo(f"{done.path}: {len(done.names) + 1} files, {done.size_bytes:,} bytes")
    if done.left_out:
        click.echo(f"fdl: no room for {', '.join(done.left_out)}; -n takes fewer lines of each", err=True)
    click.echo("fdl: what the script printed is in it as it is; look through it before you share it", err=True)
    return 0


def _default_name(run_id: str) -> str:
    """The archive's; an id that fdl has not made may hold what belongs into no file name."""
    return f"fdl-debug-{_ODD.sub('_', run_id)[:MAX_ID_CHARS]}.tar.gz"


def _probed(run: RunDir) -> dict[str, Any]:
    """What ``fdl probe`` finds now, where the run was; or why it finds nothing."""
    from flodl.launch.readiness import readiness

    try:
        found = readiness(load(RunSpec, read_document(run.run_json)))
    except (OSError, DocumentFault, FlodlError) as error:
        return {"error": str(error)}
    return {"findings": [dataclasses.asdict(finding) for finding in found.findings], "seconds": found.duration_s}
