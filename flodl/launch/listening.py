"""How the launcher's listening sockets reach the controller: by inheritance, so that nobody can take the port between.

Of two launches at once exactly one gets the port; the other starts nothing.
"""

import os
import socket
from collections.abc import MutableMapping, Sequence
from typing import Final

from flodl.config.address import format_address, is_unspecified
from flodl.errors import PreflightError

LISTEN_FDS_VARIABLE: Final = "FDL_LISTEN_FDS"
"""Descriptor numbers, separated by commas, that the controller inherits."""


def hand_down(sockets: Sequence[socket.socket], environ: MutableMapping[str, str]) -> tuple[int, ...]:
    """Name the sockets in ``environ`` for a child; returns the descriptors to pass to it."""
    descriptors = tuple(sock.fileno() for sock in sockets)
    environ[LISTEN_FDS_VARIABLE] = ",".join(map(str, descriptors))
    return descriptors


def inherited(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The sockets that the launcher handed down, taken out of ``environ`` so that no child of ours sees them.

    Raises:
        PreflightError: the variable names something that is no socket.
    """
    sockets = []
    for number in environ.pop(LISTEN_FDS_VARIABLE, "").split(","):
        if not number:
            continue
        try:
            os.set_inheritable(int(number), False)
            sockets.append(socket.socket(fileno=int(number)))
        except (OSError, ValueError) as error:
            raise PreflightError(f"{LISTEN_FDS_VARIABLE}={number}: not a listening socket: {error}") from None
    return sockets


def dial_address(sock: socket.socket) -> tuple[str, int]:
    """How this machine reaches the listening ``sock``: the loopback address where it is bound to all."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if sock.family == socket.AF_INET else "::1"
    return str(host), int(port)


def announced(advertise: str, sock: socket.socket) -> tuple[str, ...]:
    """What hosts are told to dial: the configured address verbatim, else that of ``sock`` where it is bound to one."""
    bound, port = sock.getsockname()[:2]
    if advertise:
        return (format_address(advertise, int(port)),)
    return () if is_unspecified(bound) else (format_address(bound, int(port)),)
