"""The controller's port through an ssh login to its machine: for a machine that reaches nothing else there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import asyncssh

from flodl.config.address import format_address
from flodl.errors import HostUnreachable
from flodl.launch.plan import SshSpec
from flodl.launch.ssh_login import Login, log_in

LOOPBACK: Final = "127.0.0.1"
OPEN_TIMEOUT_S: Final = 15.0
"""For the far side to reach the controller."""


@dataclass(frozen=True, slots=True)
class Forward:
    """``port`` on this machine's loopback leads to the controller as long as ``login`` stands."""

    port: int
    login: Login

    @property
    def is_open(self) -> bool:
        """Whether the session still stands."""
        return not self.login.connection.is_closed()


@asynccontextmanager
async def forwarded(spec: SshSpec, address: str, port: int, warn: Callable[[str], None]) -> AsyncIterator[Forward]:
    """Log in and lead a port of this machine's loopback to ``address`` and ``port``, as seen from there.

    ``warn`` is told of what the user's own ssh options weaken.

    Raises:
        ConfigError: an ssh option that cannot be honoured.
        HostUnreachable: with the stage (resolve, connect, host key, auth, tunnel) and a remedy.
    """
    login = await log_in(spec, spec.target)
    try:
        for warning in login.warnings:
            warn(warning)
        await _try(login, spec.target, address, port)
        listener = await login.connection.forward_local_port(LOOPBACK, 0, address, port)
        yield Forward(listener.get_port(), login)
    finally:
        await login.close()


async def _try(login: Login, host: str, address: str, port: int) -> None:
    """One connection, because one that a listener takes can only be closed again, without a word."""
    where = format_address(address, port)
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            _, writer = await login.connection.open_connection(address, port)
    except TimeoutError:
        raise HostUnreachable(host, "tunnel", f"no way to {where} there within {OPEN_TIMEOUT_S:g} s") from None
    except asyncssh.ChannelOpenError as error:
        raise HostUnreachable(
            host, "tunnel", f"no way to {where} there: {error.reason}", _remedy(error, where)
        ) from None
    except (OSError, asyncssh.Error) as error:
        raise HostUnreachable(host, "tunnel", f"the session was lost: {error}") from None
    writer.close()


def _remedy(error: asyncssh.ChannelOpenError, where: str) -> str:
    if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
        return (
            f'forbidden: in authorized_keys there this key needs permitopen="{where}", and its sshd_config '
            "AllowTcpForwarding"
        )
    return (
        "check that a run listens there: `controller.host` and `port` of its cluster file; another address than "
        "127.0.0.1:1337 is named before --ssh: fdl join ADDRESS:PORT --ssh …"
    )
