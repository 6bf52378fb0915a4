"""``fdl daemon``: the managed daemon of this machine, which serves one run after another."""

import dataclasses
import getpass
import json
import os
import sys
from pathlib import Path

import click

from flodl.config.tls import TlsMode
from flodl.errors import ConfigError, PreflightError
from flodl.launch import units
from flodl.launch.install import ask_systemd, install, is_active, next_steps, places, status_line
from flodl.launch.keeper import keep
from flodl.launch.units import Scope
from flodl.runtime.service import Service
from flodl_cli.offer import keeper_request, loaded_key, ssh_spec


@click.group("daemon", short_help="serve one run after another, by itself or under systemd")
def command() -> None:
    """The managed daemon of this machine: it dials a controller by itself and serves one run after another."""


@command.command("run")
@click.argument("target", metavar="[HOST:PORT]", required=False, envvar=units.CONTROLLER)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar=units.TOKEN_FILE,
    help="This host's token, as fdl join-config made it; default: systemd's credential fdl-token.",
)
@click.option("--devices", envvar=units.DEVICES, help="0,1 for GPUs; cpu,cpu for two CPU ranks; all.")
@click.option("--host", envvar=units.HOST, metavar="NAME", help="The name in the roster; default: this machine's.")
@click.option("--path", envvar=units.PATH, help="This machine's copy of the project.")
@click.option(
    "--tls",
    type=click.Choice([mode.value for mode in TlsMode]),
    default=TlsMode.AUTO.value,
    show_default=True,
    envvar=units.TLS,
    help="Whether the controller's address wants TLS; auto: unless it is loopback.",
)
@click.option(
    "--ssh",
    "login",
    envvar=units.SSH,
    metavar="[USER@]HOST[:PORT]",
    help="Through an ssh login to the controller's machine; HOST:PORT is as seen there then.",
)
@click.option(
    "-i",
    "--identity",
    type=click.Path(dir_okay=False),
    envvar=units.SSH_KEY,
    help="With --ssh: the private key; default: systemd's credential fdl-ssh-key.",
)
def run_command(
    target: str | None,
    token_file: Path | None,
    devices: str | None,
    host: str | None,
    path: str | None,
    tls: str,
    login: str | None,
    identity: str | None,
) -> int:
    """Dial the controller at HOST:PORT, and serve one run after another until this command is stopped.

    What is not given is taken from FDL_CONTROLLER, FDL_TOKEN_FILE, FDL_DEVICES, FDL_HOST, FDL_PATH, FDL_TLS, FDL_SSH
    and FDL_SSH_KEY; without --devices and --path the run's cluster file decides. Ends with 2 on what no waiting cures.
    """
    service = Service.taken_from(os.environ, os.getpid())
    for name in (*units.SETTINGS, units.TOKEN_FILE):
        os.environ.pop(name, None)  # no rank's affair
    if not target:
        raise ConfigError(f"no controller is named: give HOST:PORT, or {units.CONTROLLER}, as in {units.CONFIG_NAME}")
    request = keeper_request(target, token_file, service, devices, host, path)
    ssh = None if not login else ssh_spec(login, identity or loaded_key(service), reopens=True)
    return keep(dataclasses.replace(request, tls=TlsMode(tls), ssh=ssh), service)


@command.command("install")
@click.option("--system", "scope", flag_value=Scope.SYSTEM.value, help="For the whole machine; needs root.")
@click.option("--user", "scope", flag_value=Scope.USER.value, help="For you alone.")
@click.option("--run-as", metavar="NAME", help="With --system: whose rights the ranks have; default: who called sudo.")
@click.option("--print", "is_printed", is_flag=True, help="Print the unit, and write nothing.")
def install_command(scope: str | None, run_as: str | None, is_printed: bool) -> int:
    """Write the systemd unit and an example of its settings, and say what to type next. Again changes nothing."""
    if scope is None:
        raise click.UsageError("--system or --user: for the whole machine, or for you alone?")
    chosen, caller = Scope(scope), os.environ.get("SUDO_USER") or getpass.getuser()
    text = units.unit(chosen, sys.executable, run_as or caller)
    if is_printed:
        click.echo(text, nl=False)
        return 0
    if chosen is Scope.SYSTEM and os.geteuid() != 0:
        fdl = os.path.abspath(sys.argv[0])
        raise ConfigError(f"only root may write it; type: sudo {fdl} daemon install --system, or use --user")
    where = places(chosen, os.environ, Path.home())
    for line in install(where, text, units.config({})):
        click.echo(line)
    for line in next_steps(chosen, where, caller):
        click.echo(line)
    return 0


@command.command("status")
@click.option("--json", "as_json", is_flag=True, help="One document.")
def status_command(as_json: bool) -> int:
    """Say what systemd knows of this machine's managed daemon; exit 0 when one is active, else 3."""
    found, faults = {}, []
    for scope in Scope:
        try:
            found[scope] = ask_systemd(scope)
        except PreflightError as error:
            faults.append(f"{scope}: {error}")
    if not found:  # a user without a login has no service manager, and need not have one
        raise PreflightError("\n".join(faults))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        for scope, properties in found.items():
            click.echo(status_line(scope, properties))
    return 0 if any(map(is_active, found.values())) else PreflightError.exit_code
