"""``fdl join-config``: what a machine needs to walk in, made on the controller's machine."""

import getpass
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flodl.config.address import format_address, is_unspecified, parse_host, split_address
from flodl.errors import ConfigError
from flodl.launch import join_token, kit, kit_files
from flodl.launch.kit import KitRequest
from flodl.launch.kit_files import KitReport

if TYPE_CHECKING:
    from flodl.config.model import ControllerSpec

DEFAULT_PORT = 1337


@click.command("join-config", short_help="make what a machine needs to walk in")
@click.argument("name")
@click.option("-c", "--cluster", "cluster_file", type=click.Path(path_type=Path), help="The cluster file.")
@click.option(
    "--address", metavar="HOST:PORT", help="The controller's, as NAME reaches it; default: the cluster file's."
)
@click.option(
    "--login", metavar="[USER@]HOST", help="This machine, as NAME's ssh reaches it; default: you at its name."
)
@click.option("--dry-run", is_flag=True, help="Say what would be made; write nothing.")
@click.option("--regen", is_flag=True, help="Make everything anew: the old key and every walk-in's token stop working.")
def command(
    name: str, cluster_file: Path | None, address: str | None, login: str | None, dry_run: bool, regen: bool
) -> int:
    """On the controller's machine: make token, ssh key, settings and unit for the walk-in NAME; say what goes where.

    What is there already is kept. Address and port of the controller are the cluster file's: the one of -c, else the
    one that fdl launch would take; without one, 127.0.0.1:1337, which is reached through ssh only.
    """
    try:
        parse_host(name)
    except ConfigError as wrong:
        raise click.UsageError(f"{name!r}: expected {wrong}") from None
    controller = _controller(cluster_file)
    request = _request(name, controller, address, login or f"{getpass.getuser()}@{socket.gethostname()}")
    configured = controller.join.token_file if controller is not None else None
    path = Path(join_token.named(os.environ) or os.path.expanduser(configured or join_token.own_path()))
    report = kit_files.make(request, path, regenerate=regen, dry_run=dry_run)
    click.echo("\n".join(_lines(request, report, regen, dry_run)))
    return 0


def _controller(cluster_file: Path | None) -> "ControllerSpec | None":
    from flodl.config.cluster import find_cluster_file, load_cluster
    from flodl.config.relations import resolve_nothing

    path = cluster_file or find_cluster_file(Path.cwd(), os.environ)
    return None if path is None else load_cluster(path, resolve_nothing).controller


def _request(name: str, controller: "ControllerSpec | None", address: str | None, login: str) -> KitRequest:
    here, there, port = "127.0.0.1", "127.0.0.1", DEFAULT_PORT
    if controller is not None:
        port = controller.port
        here = here if is_unspecified(controller.host) else controller.host
        there = controller.advertise or here
    dialled = format_address(*(split_address(address, port) if address else (there, port)))
    return KitRequest(name, dialled, format_address(here, port), login)


def _lines(request: KitRequest, report: KitReport, regen: bool, dry_run: bool) -> list[str]:
    would = "would be " if dry_run else ""
    lines = [f"walk-in {request.host}:"]
    lines += [f"  {'kept' if what == 'kept' else would + what}: {path}" for what, path in report.done]
    if regen:
        lines += ["", "Stops working, and has to be copied anew:"]
        lines += [f"  the old key of {request.host}: take its line out of ~/.ssh/authorized_keys here"]
        lines += [f"  the old token of {host}" for host in sorted({request.host, *report.stale})]
        lines += [f"  the old token of {left}" for left in report.left]
        lines += ["  (a run that is under way goes on with the old join token)"]
    if report.moved:
        lines += ["", "Made for another address, and to be put in its place anew:"]
        for name, was, now in report.moved:
            what = "the line in ~/.ssh/authorized_keys here" if name == kit.AUTHORIZED_NAME else f"{name} there"
            lines.append(f"  {what}: made for {was}, the controller is now {now}")
    return [*lines, "", *kit.instructions(request, str(report.folder), report.public_key)]
