"""The controller's port through an ssh login to its machine: for a machine that reaches nothing else there."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import asyncssh

from flodl.config.address import format_address
from flodl.errors import HostUnreachable
from flodl.launch.plan import SshSpec
from flodl.launch.ssh_login import Login, log_in
from flodl.runtime.reason import reason_of

LOOPBACK: Final = "127.0.0.1"
OPEN_TIMEOUT_S: Final = 15.0
"""For the far side to reach the controller."""

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""Between two tries to open a broken session anew; doubled each time."""

PIECE_BYTES: Final = 1 << 16


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


@asynccontextmanager
async def kept_open(spec: SshSpec, address: str, port: int, say: Callable[[str], None]) -> AsyncIterator["Way"]:
    """As ``forwarded``, for good: the port here stays the same, and the session is opened anew whenever it breaks.
    While it is broken, or nobody listens there, whoever dials the port is hung up on, and ``Way.fault`` says why.
    ``say`` is told what becomes of the session.
    """
    way = Way(spec, address, port, say)
    server = await asyncio.start_server(way.lead, LOOPBACK, 0)
    way.port = int(server.sockets[0].getsockname()[1])
    say(f"fdl: {format_address(LOOPBACK, way.port)} leads to {way.where}")
    keeping = asyncio.create_task(way.keep())
    try:
        yield way
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        server.close()


class Way:
    """A session that is opened again and again, and what comes through it. ``port`` is the one on this machine's
    loopback, ``where`` says for people where it leads, and ``fault`` why who dialled it last was hung up on, None when
    the far side was reached.
    """

    def __init__(self, spec: SshSpec, address: str, port: int, say: Callable[[str], None]) -> None:
        self.port = 0
        self.where = f"{format_address(address, port)} through {spec.target}"
        self.fault: HostUnreachable | None = None
        self._spec, self._address, self._far_port, self._say = spec, address, port, say
        self._connection: asyncssh.SSHClientConnection | None = None
        self._broken = HostUnreachable(spec.target, "connect", f"the session with {spec.target} is not open yet")
        self._said = ""

    async def keep(self) -> None:
        """Until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                login = await log_in(self._spec, self._spec.target)
            except HostUnreachable as error:
                self._broken = HostUnreachable(error.host, error.stage, error.reason)  # the remedy has been said
                self._say_once(str(error))
            else:
                await self._hold(login)
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from here to the far side."""
        try:
            far = await self._far_side()
            if far is not None:
                await asyncio.gather(_copy(reader, far[1]), _copy(far[0], writer))
        except (OSError, asyncssh.Error):
            pass  # whoever dialled learns it by the end of the connection, and tries again
        finally:
            writer.close()

    async def _far_side(self) -> "tuple[asyncssh.SSHReader[bytes], asyncssh.SSHWriter[bytes]] | None":
        """A connection to the far side; None where there is none now, and ``fault`` says why."""
        self.fault = None  # that of an earlier one
        if self._connection is None:
            self.fault = self._broken
            return None
        try:
            far = await _open(self._connection, self._spec.target, self._address, self._far_port)
        except HostUnreachable as error:
            self.fault = error
            return None
        return far

    async def _hold(self, login: Login) -> None:
        """As long as the session stands."""
        self._say_once(f"the session with {self._spec.target} is open")
        for warning in login.warnings:
            self._say(f"fdl: {warning}")
        self._connection = login.connection
        try:
            await login.connection.wait_closed()
        finally:
            self._connection = None
            await login.close()
        lost = f"the session with {self._spec.target} was lost; it is opened anew"
        self._broken = HostUnreachable(self._spec.target, "connect", lost)
        self._say_once(lost)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(f"fdl: {text}")


async def _copy(
    reader: "asyncio.StreamReader | asyncssh.SSHReader[bytes]",
    writer: "asyncio.StreamWriter | asyncssh.SSHWriter[bytes]",
) -> None:
    try:
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        if writer.can_write_eof():
            writer.write_eof()


async def _try(login: Login, host: str, address: str, port: int) -> None:
    """One connection, because one that a listener takes can only be closed again, without a word."""
    _, writer = await _open(login.connection, host, address, port)
    writer.close()


async def _open(
    connection: asyncssh.SSHClientConnection, host: str, address: str, port: int
) -> "tuple[asyncssh.SSHReader[bytes], asyncssh.SSHWriter[bytes]]":
    """A connection from ``host`` to ``address`` and ``port``. Raises HostUnreachable, with stage tunnel."""
    where = format_address(address, port)
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            return await connection.open_connection(address, port)
    except TimeoutError:
        raise HostUnreachable(host, "tunnel", f"no way to {where} there within {OPEN_TIMEOUT_S:g} s") from None
    except asyncssh.ChannelOpenError as error:
        raise HostUnreachable(
            host, "tunnel", f"no way to {where} there: {error.reason}", _remedy(error, where)
        ) from None
    except (OSError, asyncssh.Error) as error:
        raise HostUnreachable(host, "tunnel", f"the session was lost: {reason_of(error)}") from None


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
