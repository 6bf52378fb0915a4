"""A port that nobody is given by accident, until a process asks for it by its number.

Our socket is bound to the port and does not listen. The kernel hands a bound port to nobody who asks for any port or
connects from any; but a server that sets SO_REUSEADDR, as torch's store does, may listen there. So the port is free for
rank 0 from its choice to the end of the ranks, however long they take to start.
"""

import errno
import socket

from flodl.core.events import PortHeld
from flodl_daemon.routes import address_towards


class HeldPort:
    """At most one port at a time."""

    def __init__(self) -> None:
        self._sock: socket.socket | None = None

    def renew(self, start: int, peer: str) -> PortHeld:
        """Hold another port; nobody of ours uses the last one any more. ``peer`` as in ``HoldPort``."""
        was_taken = self._is_taken()
        self.close()
        try:
            address = address_towards(peer) if peer else ""
            self._sock = _bound()
        except OSError as error:
            return PortHeld(start, 0, "", was_taken, str(error))
        return PortHeld(start, self._sock.getsockname()[1], address, was_taken, "")

    def close(self) -> None:
        """Let go of it; again does nothing."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _is_taken(self) -> bool:
        """Of two sockets bound to a port only one may listen: whether somebody else does."""
        if self._sock is None:
            return False
        try:
            self._sock.listen()
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def _bound() -> socket.socket:
    """For IPv6 and IPv4 at once, as torch's store listens; for IPv4 where there is no IPv6."""
    try:
        sock = _bind(socket.AF_INET6, "::")
    except OSError:
        sock = _bind(socket.AF_INET, "0.0.0.0")
    return sock


def _bind(family: socket.AddressFamily, address: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, 0))
    except BaseException:
        sock.close()
        raise
    return sock
