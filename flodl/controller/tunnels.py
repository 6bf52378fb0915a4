"""Where the ssh sessions of tunnelled hosts come out: a port of its own on loopback, open only where there are any.

The same handshake and limits as at the run's port. But no HTTP: there a loopback address needs no token, and everybody
who has an account on the far host can dial the tunnel's other end.
"""

import dataclasses
import socket

from flodl.errors import RemoteProtocolError
from flodl.launch.plan import RunSpec
from flodl.runtime.line import Line
from flodl.runtime.mux import Handlers
from flodl.runtime.ports import listen

LOOPBACK = "127.0.0.1"


def open_port(spec: RunSpec) -> list[socket.socket]:
    """The listening socket, none when no host of the roster has a tunnel.

    Raises:
        PreflightError: there is no port to be had.
    """
    return listen(LOOPBACK, 0) if any(host.tunnel for host in spec.hosts) else []


def without_http(handlers: Handlers) -> Handlers:
    """The same handlers for those who come through a tunnel."""
    return dataclasses.replace(handlers, on_http=_refuse, on_plain_http=_refuse)


async def _refuse(line: Line) -> None:
    line.sock.close()
    raise RemoteProtocolError("HTTP through a tunnel is not served")
