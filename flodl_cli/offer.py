"""What a machine offers to a controller, as it was typed: ``fdl join`` and ``fdl daemon run`` ask for the same."""

import dataclasses
import socket
from pathlib import Path
from typing import Final

import click

from flodl.config.address import split_address
from flodl.config.tls import TlsMode
from flodl.errors import ConfigError
from flodl.launch import units
from flodl.launch.bootstrap import Liveness
from flodl.launch.keeper import KeeperRequest
from flodl.launch.plan import SshSpec
from flodl.launch.rundir import read_token_file
from flodl.runtime.service import Service
from flodl.wire.handshake import is_host_name

DEFAULT_PORT: Final = 1337


def device_words(devices: str) -> tuple[str, ...]:
    """The words of ``--devices``.

    Raises:
        UsageError: an empty one.
    """
    words = tuple(word.strip() for word in devices.split(","))
    if not all(words):
        raise click.UsageError(f"--devices {devices!r}: expected all, GPU numbers or cpu, separated by commas")
    return words


def host_name(host: str | None) -> str:
    """The name in the run; this machine's, unless another one is given.

    Raises:
        UsageError: it cannot be one.
    """
    name = socket.gethostname() if host is None else host
    if not is_host_name(name):
        raise click.UsageError(f"--host {name!r}: expected a name without blanks and slashes")
    return name


def keeper_request(
    target: str, token_file: Path | None, service: Service, devices: str | None, host: str | None, path: str | None
) -> KeeperRequest:
    """A managed daemon's; what is None was left out.

    Raises:
        UsageError: a word that does not fit.
        ConfigError: an address that does not fit, or no token that can be used.
    """
    address, port = split_address(target, DEFAULT_PORT)
    secret = _read_secret(token_file, service)
    words = () if devices is None else device_words(devices)
    return KeeperRequest(address, port, host_name(host), secret, words, path or "", TlsMode.AUTO)


def ssh_spec(login: str, identity: str | None, *, reopens: bool) -> SshSpec:
    """The login that ``--ssh`` names, with the key of ``-i``; ``reopens`` as in ``SshSpec``.

    Raises:
        UsageError: it names no host.
    """
    from flodl.launch.ssh_config import jump_spec  # asyncssh takes 0.3 s to import

    spec = jump_spec(login)
    if not spec.target or spec.target.startswith("-"):
        raise click.UsageError(f"--ssh {login!r}: expected [USER@]HOST[:PORT]")
    return dataclasses.replace(
        spec, identity_file=identity, patience_s=Liveness().dead_s, reopens=reopens, is_typed=True
    )


def loaded_key(service: Service) -> str | None:
    """The ssh key that systemd has loaded; None where it has loaded none."""
    path = None if service.credentials is None else service.credentials / units.KEY_CREDENTIAL
    return str(path) if path is not None and path.is_file() and path.read_bytes().strip() else None


def _read_secret(token_file: Path | None, service: Service) -> bytes:
    """This host's join secret, from the file that is named, else from systemd's credential."""
    if token_file is not None:
        return read_token_file(token_file)
    if service.credentials is None:
        raise ConfigError(f"no token: give --token-file or {units.TOKEN_FILE}, or let systemd load {units.CREDENTIAL}")
    return read_token_file(service.credentials / units.CREDENTIAL, is_credential=True)
