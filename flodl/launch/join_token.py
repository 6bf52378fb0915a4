"""The join token: the secret by which hosts walk in, run after run. It outlives runs, and never leaves the
controller's machine: a host's token file holds what is derived from it for that host
(``wire.handshake.derive_join_secret``), so that no host can pose as another one.

Which file holds it: the one that ``FDL_JOIN_TOKEN_FILE`` names, else ``controller.join.token_file`` of the cluster
file, else ``join.token`` in the state folder, if it is there (``fdl join-config`` makes it). Both kinds of files are
token files (``launch.rundir``): 64 hex digits, mode 0600.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flodl.errors import ConfigError
from flodl.launch import rundir

VARIABLE: Final = "FDL_JOIN_TOKEN_FILE"
OWN_NAME: Final = "join.token"
REMEDY: Final = "fdl join-config NAME --regen makes a new join token in the place of a damaged one"


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
        rundir.read_token_file(own_path())
    except ConfigError as error:
        return f"{error}\n  {REMEDY}"
    return ""


def named(environ: Mapping[str, str]) -> str:
    """What the environment names, absolute; empty when it names none. The file need not exist: whoever reads it says
    so.
    """
    path = environ.get(VARIABLE, "")
    return os.path.abspath(os.path.expanduser(path)) if path else ""
