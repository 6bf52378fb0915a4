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

from flodl.launch import rundir

VARIABLE: Final = "FDL_JOIN_TOKEN_FILE"
OWN_NAME: Final = "join.token"


def own_path() -> Path:
    """Where this user's join token is kept unless something else is said."""
    return rundir.state_home() / OWN_NAME


def own_if_there() -> str:
    """``own_path`` if the file is there, else empty."""
    return str(own_path()) if os.path.lexists(own_path()) else ""


def named(environ: Mapping[str, str]) -> str:
    """What the environment names, absolute; empty when it names none. The file need not exist: whoever reads it says
    so.
    """
    path = environ.get(VARIABLE, "")
    return os.path.abspath(os.path.expanduser(path)) if path else ""
