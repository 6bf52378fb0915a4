"""ssh sessions with the hosts of a run, each opened once: preflight asks through it, the daemon starts through it."""

import asyncio
import contextlib

import asyncssh

from flodl.ids import HostName
from flodl.launch.commands import remote_question
from flodl.launch.plan import HostPlan
from flodl.launch.probe import collect
from flodl.launch.probe.talk import CLOSE_TIMEOUT_S, Channel
from flodl.launch.ssh import dial_candidates
from flodl.launch.ssh_login import MAX_PARALLEL_LOGINS, Login, log_in


class Logins:
    """Holds them until they are taken or closed; ``slots`` bounds the logins under way."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_PARALLEL_LOGINS)
        self._open: dict[HostName, Login] = {}

    async def open(self, host: HostPlan) -> Login:
        """Log in to ``host``, of kind ssh, and keep the session.

        Raises:
            ConfigError: an ssh option that cannot be honoured.
            HostUnreachable: with the stage that failed and a remedy.
        """
        assert host.ssh is not None
        if host.name not in self._open:
            async with self.slots:
                self._open[host.name] = await log_in(host.ssh, host.name)
        return self._open[host.name]

    def take(self, host: HostName) -> Login | None:
        """The session with ``host``, which is the caller's from now on; None where none is kept."""
        return self._open.pop(host, None)

    async def close(self) -> None:
        """Close all that were not taken."""
        logins, self._open = list(self._open.values()), {}
        await asyncio.gather(*(login.close() for login in logins))


async def open_over_ssh(host: HostPlan, nonce: str, login: Login, configured: tuple[str, ...], port: int) -> Channel:
    """Start preflight's program on ``host``.

    Args:
        host: of kind ssh.
        nonce: marks its answers.
        login: the session.
        configured: where the host is told to dial the controller, as ``dial_candidates`` takes it.
        port: the controller's.

    Raises:
        HostUnreachable: stage join: the controller has no address for it.
        OSError, asyncssh.Error: no channel.
    """
    controllers = () if host.tunnel else dial_candidates(host, configured, login, port)
    process = await login.connection.create_process(
        remote_question(host, collect.RUN, nonce), encoding=None, stderr=asyncssh.STDOUT
    )

    async def read(count: int) -> bytes:
        try:
            return bytes(await process.stdout.read(count))
        except asyncssh.Error:
            return b""

    async def exit_code() -> int | None:
        await process.wait_closed()
        code = process.returncode
        return None if code is None else code if code >= 0 else 128 - code

    async def close() -> None:
        with contextlib.suppress(OSError, asyncssh.Error, TimeoutError):
            process.stdin.write_eof()
            await asyncio.wait_for(process.wait_closed(), CLOSE_TIMEOUT_S)
        process.close()

    return Channel(read, process.stdin.write, exit_code, close, controllers)
