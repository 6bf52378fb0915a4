"""Starts the daemon of a host over ssh and holds the session for the run's life.

The secret and all settings go through standard input, framed; what the login shell prints before the daemon's ready
line is the host's log and nothing else. The streams are binary: no byte on them can end the connection.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import asyncssh

from flodl.config.address import format_address, is_loopback
from flodl.errors import HostUnreachable
from flodl.launch.bootstrap import Bootstrap, ReadyScanner, encode
from flodl.launch.commands import remote_command
from flodl.launch.plan import HostPlan
from flodl.launch.running import START_TIMEOUT_S, DaemonEnded, HostLog, pump, start_failure
from flodl.launch.ssh_login import Login, log_in

CLOSE_TIMEOUT_S: Final = 5.0
TUNNEL_TIMEOUT_S: Final = 10.0
"""For the other side to listen."""

LOOPBACK: Final = "127.0.0.1"


class SshDaemon:
    """A daemon on another host, with the session that started it. ``start_host`` makes it."""

    def __init__(
        self,
        host: str,
        login: Login,
        process: "asyncssh.SSHClientProcess[bytes]",
        pumps: list[asyncio.Task[None]],
    ) -> None:
        self.host = host
        self._login = login
        self._process = process
        self._pumps = pumps

    async def wait(self) -> DaemonEnded:
        """Wait for its end, or for the loss of the session (noticed by keep-alives)."""
        await self._process.wait_closed()
        code = _exit_code(self._process)
        if code is None:
            return DaemonEnded(None, "the ssh session was lost")
        return DaemonEnded(code, f"ended with code {code}")

    async def close(self) -> None:
        """Ask a daemon that still runs to end, then close the session. What cannot be asked any more (the network is
        gone) ends by the loss of its controller.
        """
        if not self._process.is_closing():
            with contextlib.suppress(OSError, asyncssh.Error):
                self._process.send_signal("TERM")
            with contextlib.suppress(TimeoutError, OSError, asyncssh.Error):
                await asyncio.wait_for(self._process.wait_closed(), CLOSE_TIMEOUT_S)
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._login.close()


async def start_host(
    host: HostPlan,
    bootstrap: Bootstrap,
    log_path: Path,
    logins: asyncio.Semaphore,
    port: int,
    warn: Callable[[str], None],
    prepare: Callable[[Login], Awaitable[None]] | None = None,
    login: Login | None = None,
) -> SshDaemon:
    """Log in to ``host``, start its daemon and hand it its bootstrap; returns once it has read it.

    Args:
        host: of kind ``ssh``.
        bootstrap: with the host's secret; its ``controllers`` may be empty or hold what the cluster file says. This
            machine's address on the way to the host is added to them.
        log_path: where everything that the host prints goes.
        logins: shared by all hosts of a run, bounds the logins under way (``ssh_login.MAX_PARALLEL_LOGINS``).
        port: the controller's; for a host with a tunnel, the one on loopback here to which its session leads.
        warn: told of what the user's own options weaken, as soon as the login stands.
        prepare: done once the login stands, before anything starts there; None where there is nothing to do.
        login: a session that is open already; it is this function's from now on.

    Raises:
        ConfigError: an ssh option that cannot be honoured.
        HostUnreachable: with the stage (resolve, connect, host key, auth, tunnel, start) and a remedy.
    """
    assert host.ssh is not None
    log = HostLog(log_path)
    if login is None:
        async with logins:
            login = await log_in(host.ssh, host.name)
    for warning in login.warnings:
        warn(warning)
    try:
        if prepare is not None:
            await prepare(login)
        if host.tunnel:
            controllers: tuple[str, ...] = (await _open_tunnel(host.name, login, port),)
        else:
            controllers = dial_candidates(host, bootstrap.controllers, login, port)
        return await _start(host, dataclasses.replace(bootstrap, controllers=controllers), login, log)
    except BaseException:
        await login.close()
        raise


async def _open_tunnel(host: str, login: Login, port: int) -> str:
    """Have the host listen on its loopback and lead what comes there to ``port`` on ours; returns the address there."""
    try:
        async with asyncio.timeout(TUNNEL_TIMEOUT_S):
            listener = await login.connection.forward_remote_port(LOOPBACK, 0, LOOPBACK, port)
    except TimeoutError:
        raise HostUnreachable(host, "tunnel", f"no answer within {TUNNEL_TIMEOUT_S:g} s") from None
    except (OSError, asyncssh.Error, asyncssh.ChannelListenError) as error:
        remedy = "let its sshd forward: AllowTcpForwarding yes (or remote) in sshd_config there, and no PermitListen"
        raise HostUnreachable(host, "tunnel", f"its sshd does not forward a port: {error}", remedy) from None
    return format_address(LOOPBACK, listener.get_port())


async def _start(host: HostPlan, bootstrap: Bootstrap, login: Login, log: HostLog) -> SshDaemon:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            process = await login.connection.create_process(remote_command(host), encoding=None)
    except TimeoutError:
        raise start_failure(host, None, log) from None
    except (OSError, asyncssh.Error) as error:
        raise HostUnreachable(host.name, "start", f"no session: {error}", "see sshd's log there") from None
    ready = asyncio.Event()
    scanner = ReadyScanner(bootstrap.run_id)
    pumps = [
        asyncio.create_task(_pumped(process.stdout, log, scanner, ready)),
        asyncio.create_task(_pumped(process.stderr, log, None, ready)),
    ]
    daemon = SshDaemon(host.name, login, process, pumps)
    try:
        process.stdin.write(encode(bootstrap))
        await _until_ready(host, process, ready, log, pumps)
    except BaseException:
        await daemon.close()
        raise
    return daemon


async def _until_ready(
    host: HostPlan,
    process: "asyncssh.SSHClientProcess[bytes]",
    ready: asyncio.Event,
    log: HostLog,
    pumps: list[asyncio.Task[None]],
) -> None:
    is_ready, has_ended = asyncio.create_task(ready.wait()), asyncio.create_task(process.wait_closed())
    try:
        await asyncio.wait({is_ready, has_ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            return
        if not has_ended.done():
            raise start_failure(host, None, log)
        await asyncio.wait(pumps, timeout=1.0)
        code = _exit_code(process)
        if code is None:
            raise HostUnreachable(host.name, "start", "the ssh session was lost before the daemon was ready")
        raise start_failure(host, code, log)
    finally:
        is_ready.cancel()
        has_ended.cancel()


async def _pumped(
    reader: "asyncssh.SSHReader[bytes]", log: HostLog, scanner: ReadyScanner | None, ready: asyncio.Event
) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        await pump(reader.read, log, scanner, ready)


def _exit_code(process: "asyncssh.SSHClientProcess[bytes]") -> int | None:
    code = process.returncode
    return None if code is None else code if code >= 0 else 128 - code


def dial_candidates(host: HostPlan, configured: tuple[str, ...], login: Login, port: int) -> tuple[str, ...]:
    """Where the host's daemon dials the controller: the configured addresses verbatim, then the address by which this
    machine reached the host; never a loopback one for a host that is elsewhere.

    Raises:
        HostUnreachable: stage join: nothing is left.
    """
    found = (format_address(login.local_address, port),) if login.local_address else ()
    candidates = tuple(dict.fromkeys((*configured, *found)))
    if login.peer_address and not ipaddress.ip_address(login.peer_address.partition("%")[0]).is_loopback:
        usable = tuple(address for address in candidates if not is_loopback(address.rpartition(":")[0].strip("[]")))
        if not any(address in usable for address in configured) and configured:
            raise HostUnreachable(
                host.name,
                "join",
                f"the controller listens on {', '.join(configured)}, which only this machine can dial",
                "set controller.host to an address of this machine that the host reaches",
            )
        return usable
    return candidates
