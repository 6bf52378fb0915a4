"""What a walk-in is given, so that it may come: its token, an ssh key that opens nothing but the way to the
controller's port, the settings and the unit of its managed daemon; and what has to be copied where. Pure.

Everything stands in the host's folder on the controller's machine (``flodl.launch.kit_files``).
"""

import re
import shlex
from dataclasses import dataclass
from typing import Final

from flodl.config.address import is_loopback, split_address
from flodl.errors import ConfigError
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

_PERMITTED: Final = re.compile('permitopen="([^"]*)"')
_SETTING: Final = re.compile("([A-Z_]+)=(.*)")


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

    @property
    def is_only_ssh(self) -> bool:
        """Whether no other machine reaches the controller's address but through ssh."""
        return is_loopback(split_address(self.address, 0)[0])


def texts(request: KitRequest, public_key: str) -> dict[str, str]:
    """The files without a secret. ``public_key`` is one line, without a comment.

    Raises:
        ConfigError: a word that no file can hold.
    """
    settings = {units.CONTROLLER: request.address, units.HOST: request.host}
    if request.is_only_ssh:
        settings |= {units.CONTROLLER: request.gate, units.SSH: request.login}
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


def made_for(name: str, text: str, host: str, public_key: str) -> str:
    """The controller's address for which ``text`` was made as the file ``name`` of this host and key, with the login on
    the way there; empty where it was not made so, or a person has edited it, or it names none.
    """
    found = _PERMITTED.search(text)
    settings = {line[1]: line[2] for line in map(_SETTING.fullmatch, text.splitlines()) if line is not None}
    try:
        controller, login = (" ".join(shlex.split(settings.get(each, ""))) for each in (units.CONTROLLER, units.SSH))
        gate = found[1] if found is not None else controller
        former = KitRequest(host, NOWHERE if login else controller or gate, gate, login)
        if texts(former, public_key).get(name) != text:
            return ""
    except (ConfigError, ValueError):
        return ""
    return f"{gate} through {login}" if login else gate


def instructions(request: KitRequest, folder: str, public_key: str) -> list[str]:
    """What is copied where, and what is run there, as lines for a person."""
    host, there, is_only_ssh = request.host, request.address, request.is_only_ssh
    names = f"{units.TOKEN_NAME} {units.CONFIG_NAME}" + (f" {KEY_NAME}" if is_only_ssh else "")
    private = "token and key stay" if is_only_ssh else "the token stays"
    token_and_name = f"--token-file {units.TOKEN_NAME} --host {shlex.quote(host)} --path PROJECT"
    login = shlex.quote(request.login)
    through = f"  fdl join {request.gate} --persist --ssh {login} -i {KEY_NAME} {token_and_name}"
    install = "  sudo fdl daemon install --system      (or: fdl daemon install --user)"
    line = f"  {authorized_line(request, public_key)}"
    lines = [
        f"On {host}, which needs the same flodl and its own copy of the project, copy from {folder}",
        f"  {names}  → /etc/fdl/, or ~/.config/fdl/ of a user; {private} 0600",
        f"and name the project's folder there: {units.PATH} in {units.CONFIG_NAME}, PROJECT below",
    ]
    if is_only_ssh:
        lines += [
            f"Directly: not from another machine, for the controller's address is {there}",
            "Through ssh: append here, to ~/.ssh/authorized_keys",
            line,
            "and there, for good:",
            install,
            "or while a terminal is open, beside these files:",
            through,
        ]
    else:
        lines += [
            "Directly, for good:",
            install,
            "Directly, while a terminal is open, beside these files:",
            f"  fdl join {there} --persist {token_and_name}",
            f"Through ssh, when {host} reaches nothing else of this machine: append here, to ~/.ssh/authorized_keys",
            line,
            f"and there, with {KEY_NAME} beside the token (0600), for good as above, but in {units.CONFIG_NAME}",
            f"  {units.CONTROLLER}={request.gate}",
            f"  {units.SSH}={request.login}",
            "or while a terminal is open:",
            through,
        ]
    return [
        *lines,
        "A run that shall wait for it at its start has it among the workers of its cluster file:",
        f"  {_worker(host)}",
    ]


def _worker(host: str) -> str:
    return f"- {{host: {host}, daemon: managed}}"
