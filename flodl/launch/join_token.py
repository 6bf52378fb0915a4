"""The join token: the secret by which hosts walk in, run after run. It outlives runs, and never leaves the
controller's machine: a host's token file holds what is derived from it for that host
(``wire.handshake.derive_join_secret``), so that no host can pose as another one.

Which file holds it: the one that ``FDL_JOIN_TOKEN_FILE`` names, else ``controller.join.token_file`` of the cluster
file, else ``join.token`` in the state folder, if it is there (``fdl join-config`` makes it). Both kinds of files are
token files (``launch.rundir``): 64 hex digits, mode 0600.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flodl.errors import ConfigError
from flodl.launch import rundir

VARIABLE: Final = "FDL_JOIN_TOKEN_FILE"
OWN_NAME: Final = "join.token"
TOKEN_OR_PIECE: Final = re.compile(rb"[0-9A-Fa-f]{0,%d}(\r?\n)?|\0+" % (2 * rundir.TOKEN_BYTES))
"""What a token file holds, whole or as a full disk or a crash left it: ``--regen`` replaces nothing else."""

_MAKES: Final = "fdl join-config NAME makes one"
_REGEN: Final = "fdl join-config NAME --regen makes a new join token in the place of a damaged one"
_AWAY: Final = "what is there is not replaced: move it away, then fdl join-config NAME makes a join token"


def own_path() -> Path:
    """Where this user's join token is kept unless something else is said."""
    return rundir.state_home() / OWN_NAME


def own_if_there() -> str:
    """``own_path`` if the file is there, else empty."""
    return str(own_path()) if os.path.lexists(own_path()) else ""


def own_fault() -> str:
    """Why this user's own file cannot be used, with the remedy; empty where it can, or is not there."""
    if not own_if_there():
        return ""
    try:
        read(own_path())
    except ConfigError as error:
        return str(error)
    return ""


def read(path: Path) -> bytes:
    """The join token in ``path``.

    Raises:
        ConfigError: it cannot be used; with the remedy that fits.
    """
    try:
        return rundir.read_token_file(path)
    except ConfigError as error:
        remedy = _remedy(path)
        raise ConfigError(f"{error}\n  {remedy}" if remedy else str(error)) from None


def _remedy(path: Path) -> str:
    """Empty where the token is whole: then its mode is wrong, and the fault says so."""
    if not os.path.lexists(path):
        return _MAKES
    try:
        content = rundir.read_document(path)
    except OSError:
        return _AWAY
    if TOKEN_OR_PIECE.fullmatch(content) is None:
        return _AWAY
    return "" if rundir.TOKEN_TEXT.fullmatch(content) else _REGEN


def named(environ: Mapping[str, str]) -> str:
    """What the environment names, absolute; empty when it names none. The file need not exist: whoever reads it says
    so.
    """
    path = environ.get(VARIABLE, "")
    return os.path.abspath(os.path.expanduser(path)) if path else ""
