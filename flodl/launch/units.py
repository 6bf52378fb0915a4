"""The managed daemon's systemd units and its settings, from the files in ``flodl/launch/systemd``. Pure but for reading
those.

What is shipped is valid as it stands; here the lines that depend on a machine are replaced. Paths of the system unit:
``/etc/systemd/system/fdl-daemon.service``; ``daemon.env``, ``daemon.token`` and ``id_ed25519`` in ``/etc/fdl``; of a
user's the same names under ``~/.config/systemd/user`` and ``~/.config/fdl``.
"""

from collections.abc import Mapping
from enum import StrEnum
from importlib import resources
from typing import Final

from flodl.errors import ConfigError

UNIT_NAME: Final = "fdl-daemon.service"
CONFIG_NAME: Final = "daemon.env"
TOKEN_NAME: Final = "daemon.token"
CREDENTIAL: Final = "fdl-token"
"""The name under which systemd hands the token over (``LoadCredential=``)."""
KEY_CREDENTIAL: Final = "fdl-ssh-key"
"""And the ssh key: an empty line where there is none beside the token."""

CONTROLLER: Final = "FDL_CONTROLLER"
HOST: Final = "FDL_HOST"
DEVICES: Final = "FDL_DEVICES"
PATH: Final = "FDL_PATH"
TLS: Final = "FDL_TLS"
SSH: Final = "FDL_SSH"
SSH_KEY: Final = "FDL_SSH_KEY"
TOKEN_FILE: Final = "FDL_TOKEN_FILE"
SETTINGS: Final = (CONTROLLER, HOST, DEVICES, PATH, TLS, SSH, SSH_KEY)
"""The variables of ``daemon.env``; ``TOKEN_FILE`` is the unit's own affair."""

_FILES: Final = resources.files("flodl.launch") / "systemd"
_START: Final = "ExecStart=/usr/bin/python3 -P -m flodl_cli daemon run"
_USER: Final = "User=fdl"


class Scope(StrEnum):
    """Whose service manager runs the daemon."""

    SYSTEM = "system"
    USER = "user"


def unit(scope: Scope, python: str, user: str = "") -> str:
    """The unit's text. ``python`` is the absolute path of an interpreter with flodl; a system unit runs as ``user``.

    Raises:
        ConfigError: a path that no unit can hold.
    """
    name = UNIT_NAME if scope is Scope.SYSTEM else "fdl-daemon-user.service"
    text = _replaced(_shipped(name), _START, _START.replace("/usr/bin/python3", _quoted(python)))
    return text if scope is Scope.USER else _replaced(text, _USER, f"User={_plain(user)}")


def config(values: Mapping[str, str]) -> str:
    """The text of ``daemon.env`` with ``values``, which are some of ``SETTINGS``.

    Raises:
        ConfigError: a value that the file cannot hold.
    """
    text = _shipped(CONFIG_NAME)
    for name, value in values.items():
        known = f"\n{name}=\n" if name == CONTROLLER else f"\n#{name}=\n"
        text = _replaced(text, known, f"\n{name}={_assigned(value)}\n")
    return text


def _shipped(name: str) -> str:
    return (_FILES / name).read_text("utf-8")


def _replaced(text: str, known: str, wanted: str) -> str:
    assert text.count(known) == 1, f"{known!r} stands once in what is shipped"
    return text.replace(known, wanted)


def _plain(word: str) -> str:
    if not word or not word.isprintable() or any(character in " \"'\\%$" for character in word):
        raise ConfigError(f"{word!r} cannot stand in a unit as the name of a user")
    return word


def _quoted(path: str) -> str:
    """As one word of a command line: systemd expands ``%`` and ``$``, and splits at blanks."""
    if not path.startswith("/") or not path.isprintable():
        raise ConfigError(f"{path!r} cannot stand in a unit: expected an absolute path without control characters")
    doubled = path.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{doubled}"' if doubled != path or " " in path or "'" in path else path


def _assigned(value: str) -> str:
    """As the value of an ``EnvironmentFile``, which expands nothing."""
    if not value.isprintable():
        raise ConfigError(f"{value!r} cannot stand in {CONFIG_NAME}: it holds a control character")
    is_bare = all(character.isalnum() or character in "_-.,:/@+[]" for character in value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return value if is_bare else f'"{escaped}"'
