"""``fdl join``: this machine's devices for a run, as long as the command lives."""

import dataclasses
import os
from pathlib import Path
from typing import Final

import click

from flodl.config.address import split_address
from flodl.config.tls import TlsMode
from flodl.errors import ConfigError
from flodl.launch import rundir
from flodl.launch.join import JoinRequest, join
from flodl.launch.keeper import keep
from flodl.launch.plan import SshSpec
from flodl.runtime.service import Service
from flodl_cli.offer import DEFAULT_PORT, device_words, host_name, keeper_request, ssh_spec
from flodl_cli.runs import complete_live, live_run

SSH_TARGET: Final = "127.0.0.1:1337"


@click.command("join", short_help="offer this machine's devices to a run")
@click.argument("target", metavar="[RUN|HOST:PORT]", required=False, shell_complete=complete_live)
@click.option("--token-file", type=click.Path(path_type=Path), help="The run's token, copied from its directory.")
@click.option(
    "--ssh",
    "login",
    metavar="[USER@]HOST[:PORT]",
    help=f"Through an ssh login to the controller's machine; HOST:PORT is as seen there then, {SSH_TARGET} by default.",
)
@click.option("-i", "--identity", type=click.Path(exists=True, dir_okay=False), help="With --ssh: the private key.")
@click.option("--devices", help="0,1 for GPUs; cpu,cpu for two CPU ranks; default: all.")
@click.option("--host", default=None, metavar="NAME", help="The name in the run; default: this machine's.")
@click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False),
    help="The project's folder here; default: this folder, for a run of this machine the run's.",
)
@click.option(
    "--tls",
    type=click.Choice([mode.value for mode in TlsMode]),
    default=TlsMode.AUTO.value,
    show_default=True,
    help="With --token-file: whether the controller's address wants TLS; auto: unless it is loopback.",
)
@click.option(
    "--persist",
    is_flag=True,
    help="Serve one run after another, with the token that fdl join-config made for this host.",
)
def command(
    target: str | None,
    token_file: Path | None,
    login: str | None,
    identity: str | None,
    devices: str | None,
    host: str | None,
    path: str | None,
    tls: str,
    persist: bool,
) -> int:
    """Offer this machine's devices to a run that waits for hosts or trains, until it ends or this command is stopped.

    With --token-file, HOST:PORT is the controller's address. Without, RUN is a run of this machine: its id, its
    beginning, or its name; default: the only live one. This machine needs the same flodl and its own copy of the
    project. Ctrl-C leaves in order.
    """
    if login is None and identity is not None:
        raise click.UsageError("-i needs --ssh")
    if login is not None and token_file is None:
        raise click.UsageError("--ssh needs --token-file")
    ssh = None if login is None else ssh_spec(login, identity, reopens=persist)
    target = target if login is None else target or SSH_TARGET
    if persist:
        return _keep(target, token_file, devices, host, path, TlsMode(tls), ssh)
    words, name = device_words("all" if devices is None else devices), host_name(host)
    if token_file is None:
        return join(_local(target, words, name, path))
    request = _direct(target, token_file, words, name, path)
    return join(dataclasses.replace(request, tls=TlsMode(tls), ssh=ssh))


def _keep(
    target: str | None,
    token_file: Path | None,
    devices: str | None,
    host: str | None,
    path: str | None,
    tls: TlsMode,
    ssh: SshSpec | None,
) -> int:
    if target is None or token_file is None:
        raise click.UsageError("--persist needs the controller's HOST:PORT and --token-file")
    request = keeper_request(target, token_file, Service(), devices, host, path)
    return keep(dataclasses.replace(request, tls=tls, ssh=ssh), Service())


def _direct(target: str | None, token_file: Path, devices: tuple[str, ...], host: str, path: str | None) -> JoinRequest:
    if target is None:
        raise click.UsageError("--token-file needs the controller's HOST:PORT")
    address, port = split_address(target, DEFAULT_PORT)
    token = rundir.read_token_file(token_file)
    folder = rundir.state_home() / "joins"
    return JoinRequest(
        address, port, "", token, host, devices, os.path.abspath(path or "."), lambda run: folder / f"{run}-{host}.log"
    )


def _local(target: str | None, devices: tuple[str, ...], host: str, path: str | None) -> JoinRequest:
    try:
        run, info, _ = live_run(target)
    except ConfigError as error:
        hint = "\n  a controller elsewhere needs --token-file" if ":" in (target or "") else ""
        raise ConfigError(f"{error}{hint}") from None
    asked = run.read_json("run.json") or {}
    project = os.path.abspath(path or str(asked.get("project") or asked.get("cwd") or "."))
    log = run.logs / f"daemon-{host}.log"
    token = run.read_token()
    return JoinRequest(info.address, info.port, run.run_id, token, host, devices, project, lambda _: log, info.tls)
