"""The one port: listening sockets on every address of the configured host, and who holds the port when it is taken."""

import errno
import socket
from collections.abc import Iterable, Sequence
from typing import Final

from flodl.config.address import format_address
from flodl.errors import PreflightError

BACKLOG: Final = 1024
"""Connections that the kernel keeps for us while the process is busy; it cuts this to ``net.core.somaxconn``."""

PORT_TRIES: Final = 20
"""With port 0: how often to look for a number that is free on every address family."""

MAX_COMMAND_CHARS: Final = 120

PORT_REMEDY: Final = "stop that process, or choose another port with `controller.port` in the cluster file"

_UNAVAILABLE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)


def listen(host: str, port: int, remedy: str = PORT_REMEDY) -> list[socket.socket]:
    """Listen on every address that ``host`` resolves to, IPv4 and IPv6; one of them at least must work.

    Args:
        host: a name or IP literal of this machine; empty for every address of it.
        port: 0 takes one that is free, the same for all addresses.
        remedy: what to do when the port is taken, for the error's text.

    Returns:
        Non-blocking listening sockets; they belong to the caller.

    Raises:
        PreflightError: the host does not resolve or is not this machine's, the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise PreflightError(f"cannot listen on {host!r}: the name does not resolve ({error})") from error
    addresses = list(dict.fromkeys((int(family), sockaddr) for family, _, _, _, sockaddr in found))
    for attempt in range(PORT_TRIES):
        try:
            return _listen_all(host, port, addresses)
        except OSError as error:
            is_hopeless = port != 0 or error.errno != errno.EADDRINUSE or attempt == PORT_TRIES - 1
            if is_hopeless:
                raise PreflightError(_explain(host, port, error, remedy)) from error
    raise AssertionError("unreachable: the last try returns or raises")


def port_of(sockets: Iterable[socket.socket]) -> int:
    """The port that the sockets of ``listen`` share."""
    port: int = next(iter(sockets)).getsockname()[1]
    return port


def _listen_all(host: str, port: int, addresses: Sequence[tuple[int, tuple[object, ...]]]) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    unavailable: OSError | None = None
    try:
        for family, sockaddr in addresses:
            chosen = port_of(sockets) if sockets else port
            try:
                sockets.append(_listen_one(family, (sockaddr[0], chosen, *sockaddr[2:])))
            except OSError as error:
                if error.errno not in _UNAVAILABLE:
                    raise
                unavailable = error  # one family may be switched off
        if not sockets:
            raise unavailable or OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen_one(family: int, sockaddr: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT after a crash is no obstacle
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(sockaddr)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _explain(host: str, port: int, error: OSError, remedy: str) -> str:
    where = format_address(host or "*", port)
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {where}: port {port} is taken{_owner(port)}\n  {remedy}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"cannot listen on {where}: this user may not use port {port}\n  choose a port from 1024 on"
    if error.errno in _UNAVAILABLE:
        return f"cannot listen on {where}: {host!r} is not an address of this machine\n  check `controller.host`"
    return f"cannot listen on {where}: {error.strerror}"


def _owner(port: int) -> str:
    """`` by pid N (command)`` where /proc permits."""
    import psutil  # 30 ms, and only this error needs it

    try:
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port
            if is_it and connection.pid is not None:
                return f" by pid {connection.pid} ({_one_line(psutil.Process(connection.pid).cmdline())})"
    except (psutil.Error, OSError):
        return ""
    return ""


def _one_line(command: Sequence[str]) -> str:
    """Somebody else's command, which may hold a whole script, as one short line."""
    words = " ".join("".join(each if each.isprintable() else " " for each in " ".join(command)).split())
    return words if len(words) <= MAX_COMMAND_CHARS else f"{words[: MAX_COMMAND_CHARS - 1]}…"
