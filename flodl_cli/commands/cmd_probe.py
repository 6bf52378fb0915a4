"""``fdl probe``: what preflight would say, without a run."""

import dataclasses
import json
import sys
from pathlib import Path

import click

from flodl.launch.launcher import LaunchOptions, local_request
from flodl.launch.plan import NO_SCRIPT, plan
from flodl.launch.preflight import check_script
from flodl_cli.commands.cmd_launch import cluster_of
from flodl_cli.runs import complete_file


@click.command("probe", short_help="check whether hosts are ready")
@click.argument("script", required=False, shell_complete=complete_file)
@click.option("--local", type=click.IntRange(1), metavar="N", help="N CPU ranks on this machine; no cluster file.")
@click.option("-c", "--cluster", "cluster_file", type=click.Path(path_type=Path), help="The cluster file.")
@click.option("--json", "as_json", is_flag=True, help="One document.")
def command(script: str | None, local: int | None, cluster_file: Path | None, as_json: bool) -> int:
    """Check this machine and every host of the cluster, all at once, without starting anything.

    Which machines: as in fdl launch. With SCRIPT, also whether each host has it and what it imports. Exit code 0 when
    a run may start, warnings or not; 2 when SCRIPT is not here; 3 when something has to be put right first; 4 when a
    host cannot be reached.
    """
    if local is not None and cluster_file is not None:
        raise click.UsageError("--local and -c exclude each other.")
    spec = plan(cluster_of(local, cluster_file), local_request(LaunchOptions((script or NO_SCRIPT,))))

    if script is not None:
        check_script(spec)

    from flodl.launch.probe.finding import exit_code
    from flodl.launch.readiness import hosts_of, readiness

    found = readiness(spec)
    code = exit_code(found.findings)
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in found.findings]
        document = {"hosts": hosts_of(spec), "findings": findings, "seconds": found.duration_s, "exit_code": code}
        click.echo(json.dumps(document, indent=1))
        return code
    from flodl_cli.probe_table import report_text  # rich takes longer to import than all else here

    click.echo(report_text(found, hosts_of(spec), sys.stdout))
    return code
