"""What a walk-in is given, so that it may come: its token, an ssh key that opens nothing but the way to the
controller's port, the settings and the unit of its managed daemon; and what has to be copied where. Pure.

Everything stands in the host's folder on the controller's machine (``flodl.launch.kit_files``).
"""

import shlex
from dataclasses import dataclass
from typing import Final

from flodl.config.address import is_loopback, split_address
from flodl.launch import units
from flodl.launch.units import Scope

KEY_NAME: Final = "id_ed25519"
PUBLIC_NAME: Final = f"{KEY_NAME}.pub"
AUTHORIZED_NAME: Final = "authorized_keys.line"
WORKER_NAME: Final = "worker.yml"
USUAL_PYTHON: Final = "/usr/bin/python3"
USUAL_USER: Final = "fdl"

NOWHERE: Final = "localhost:1"
"""The one address at which a guarded key may have this machine listen: port 1, which is of no use to anybody."""


@dataclass(frozen=True, slots=True)
class KitRequest:
    """``host`` is the walk-in's name. ``address`` is the controller's, ``HOST:PORT``, as that machine reaches
    it; ``gate`` is it as this machine does, for those who come through ssh. ``login`` is what follows ``--ssh`` there:
    this user at this machine.
    """

    host: str
    address: str
    gate: str
    login: str


def texts(request: KitRequest, public_key: str) -> dict[str, str]:
    """The files without a secret. ``public_key`` is one line, without a comment.

    Raises:
        ConfigError: a word that no file can hold.
    """
    settings = {units.CONTROLLER: request.address, units.HOST: request.host}
    return {
        PUBLIC_NAME: f"{public_key} fdl walk-in {request.host}\n",
        AUTHORIZED_NAME: authorized_line(request, public_key) + "\n",
        WORKER_NAME: _worker(request.host) + "\n",
        units.CONFIG_NAME: units.config(settings),
        units.UNIT_NAME: units.unit(Scope.SYSTEM, USUAL_PYTHON, USUAL_USER),
    }


def authorized_line(request: KitRequest, public_key: str) -> str:
    """The line for ``authorized_keys``: no command, no terminal, no agent, nothing listens, and of all addresses only
    the controller's can be reached.
    """
    guards = f'restrict,port-forwarding,permitopen="{request.gate}",permitlisten="{NOWHERE}",command="exit 1"'
    return f"{guards} {public_key} fdl walk-in {request.host}"


def instructions(request: KitRequest, folder: str, public_key: str) -> list[str]:
    """What is copied where, and what is run there, as lines for a person."""
    host, there = request.host, request.address
    token_and_name = f"--token-file {units.TOKEN_NAME} --host {shlex.quote(host)}"
    lines = [
        f"On {host}, which needs the same flodl and its own copy of the project, copy from {folder}",
        f"  {units.TOKEN_NAME} {units.CONFIG_NAME}  → /etc/fdl/, or ~/.config/fdl/ of a user; the token stays 0600",
    ]
    if is_loopback(split_address(there, 0)[0]):
        lines.append(f"Directly: not from another machine, for the controller's address is {there}")
    else:
        lines += [
            "Directly, for good:",
            "  sudo fdl daemon install --system      (or: fdl daemon install --user)",
            "Directly, while a terminal is open, in the project's folder:",
            f"  fdl join {there} --persist {token_and_name}",
        ]
    login = f"--ssh {shlex.quote(request.login)} -i {KEY_NAME}"
    return [
        *lines,
        f"Through ssh, when {host} reaches nothing else of this machine: append here, to ~/.ssh/authorized_keys",
        f"  {authorized_line(request, public_key)}",
        f"and there, with {KEY_NAME} beside the token (0600):",
        f"  fdl join {request.gate} --persist {login} {token_and_name}",
        "A run that shall wait for it at its start has it among the workers of its cluster file:",
        f"  {_worker(host)}",
    ]


def _worker(host: str) -> str:
    return f"- {{host: {host}, daemon: managed}}"
