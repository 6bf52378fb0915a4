"""What a machine offers to a controller, as it was typed: ``fdl join`` and ``fdl daemon run`` ask for the same."""

import socket
from pathlib import Path
from typing import Final

import click

from flodl.config.address import split_address
from flodl.config.tls import TlsMode
from flodl.errors import ConfigError
from flodl.launch import units
from flodl.launch.keeper import KeeperRequest
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


def _read_secret(token_file: Path | None, service: Service) -> bytes:
    """This host's join secret, from the file that is named, else from systemd's credential."""
    if token_file is not None:
        return read_token_file(token_file)
    if service.credentials is None:
        raise ConfigError(f"no token: give --token-file or {units.TOKEN_FILE}, or let systemd load {units.CREDENTIAL}")
    return read_token_file(service.credentials / units.CREDENTIAL, is_credential=True)
