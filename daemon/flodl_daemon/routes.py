"""Which of this machine's addresses and interfaces reach another one."""

import contextlib
import socket
from typing import Final

import psutil

ANY_PORT: Final = 9
"""A route is looked up for an address; no packet goes to the port."""


def address_towards(peer: str) -> str:
    """The local address from which packets to ``peer``, an IP literal, leave.

    Raises:
        OSError: there is no way there.
    """
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((peer, ANY_PORT))
        return str(sock.getsockname()[0])


def interface_towards(peer: str) -> str:
    """The name of the interface that has this address; empty where that cannot be told."""
    with contextlib.suppress(OSError):
        address = address_towards(peer)
        for name, found in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == address for each in found):
                return name
    return ""
