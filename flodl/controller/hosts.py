"""Brings up the roster's daemons and keeps hold of them: ssh logins live as long as the run."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl.core.actions import Record, Severity
from flodl.core.events import HostFailed, JobEvent
from flodl.core.startup import STAGE_PREFLIGHT
from flodl.errors import FlodlError, HostUnreachable
from flodl.ids import HostName
from flodl.launch.local import start_local
from flodl.launch.plan import HostKind, HostPlan, RunSpec, SyncMode, bootstrap_for
from flodl.launch.probe.doors import Doors
from flodl.launch.probe.finding import Level, sentence
from flodl.launch.probe.survey import Survey, survey
from flodl.launch.rundir import RunDir
from flodl.launch.running import RunningDaemon
from flodl.wire.handshake import derive_host_secret

if TYPE_CHECKING:
    from flodl.launch.ssh_login import Login

JOIN_S: Final = 90.0
"""From a daemon's start to its hello: it looks for us for 60 s."""

CLOSE_S: Final = 10.0

FIRST_PAUSE_S: Final = 5.0
"""Before a lost host is looked for: what ended its daemon, a reboot or a cable, is rarely over at once."""

LONGEST_PAUSE_S: Final = 60.0
"""The pause doubles up to this."""

MAX_SEARCHES: Final = 30
"""Tries for each loss: half an hour, in which a machine is repaired or will not be today."""

_log = logging.getLogger(__name__)


class Roster:
    """Starts every host's daemon and tells the core of those that fail."""

    def __init__(
        self,
        spec: RunSpec,
        token: bytes,
        controllers: tuple[str, ...],
        here: str,
        logs: Path,
        post: Callable[[JobEvent], None],
        note: Callable[[Record], None],
        tunnel_port: int = 0,
    ) -> None:
        """``token`` is the run's, from which each host's secret is derived; ``controllers`` are addresses that hosts
        dial, where they are known beforehand; ``here`` reaches us on this machine; ``logs`` is the folder of the hosts'
        logs; ``note`` keeps what people shall see; ``tunnel_port`` on loopback is where tunnels lead, 0 where there is
        none.
        """
        self._spec, self._token, self._controllers, self._logs, self._post = spec, token, controllers, logs, post
        self._here, self._tunnel_port, self._note = here, tunnel_port, note
        self._daemons: dict[HostName, RunningDaemon] = {}
        self._joined: dict[HostName, asyncio.Event] = {host.name: asyncio.Event() for host in spec.hosts}
        self._doors = Doors(controllers, here, spec.port)
        self.is_clear = asyncio.Event()
        """Set once preflight keeps no host out."""
        self._searching: set[HostName] = set()

    def joined(self, host: HostName) -> None:
        """The daemon has said hello."""
        self._joined.setdefault(host, asyncio.Event()).set()

    def left(self, host: HostName) -> None:
        """The daemon's connection is gone; another one of the host may come."""
        self._joined[host] = asyncio.Event()

    async def until_joined(self, host: HostName) -> None:
        """Wait for the daemon's hello."""
        await self._joined.setdefault(host, asyncio.Event()).wait()

    async def bring_up_all(self) -> None:
        """Look at all hosts, then start the daemons of those that can take part and see them join; a failure is an
        event, never an exception.
        """
        barred = await self._preflight() if self._spec.preflight else {}
        if not barred:
            self.is_clear.set()
        async with asyncio.TaskGroup() as tasks:
            for host in self._spec.hosts:
                if host.name in barred:
                    self._post(barred[host.name])
                else:
                    tasks.create_task(self.bring_up(host))

    async def _preflight(self) -> dict[HostName, HostFailed]:
        """Which hosts cannot take part, and why. ssh sessions stay open for the daemons."""
        try:
            found = await survey(self._spec, self._doors.open)
        except Exception:  # noqa: BLE001  # a look at the hosts must not be what ends a run
            _log.exception("preflight failed; the run goes on without it")
            return {}
        for finding in found.findings:
            if finding.level is Level.WARN:
                detail = f"host {finding.host}: {sentence(finding)}" + (f"; {finding.remedy}" if finding.remedy else "")
                about = {"host": finding.host, "check": finding.check}
                self._note(Record("preflight", Severity.WARNING, detail, about))
        _log.info("preflight took %.2f s", found.duration_s)
        return {host.name: failed for host in self._spec.hosts if (failed := exclusion(found, host.name))}

    async def bring_up(self, host: HostPlan) -> None:
        """Start one host's daemon and see it join; a failure is an event, never an exception. A managed one comes by
        itself, and the join window says how long it may take.
        """
        if host.kind is HostKind.MANAGED:
            detail = f"{host.name} is waited for: its managed daemon dials in by itself"
            self._note(Record("host_awaited", Severity.INFO, detail, {"host": host.name}))
            return
        failed = await self._try(host)
        if failed is not None:
            self._post(failed)

    async def restore(
        self, host: HostName, is_wanted: Callable[[], bool], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Look for a host that was lost, again and again with longer pauses, until its daemon has joined, ``is_wanted``
        says no, or ``MAX_SEARCHES`` have failed. Each kind of failure is noted once. A managed one dials by itself.
        """
        plan = next(plan for plan in self._spec.hosts if plan.name == host)
        if host in self._searching or plan.kind is HostKind.MANAGED:
            return
        self._searching.add(host)
        try:
            await self._search(plan, is_wanted, sleep)
        finally:
            self._searching.discard(host)

    async def _search(
        self, host: HostPlan, is_wanted: Callable[[], bool], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        pause_s, noted = FIRST_PAUSE_S, set[str]()
        detail = f"{host.name} is looked for, first in {pause_s:g} s, {MAX_SEARCHES} times at most"
        self._note(Record("host_sought", Severity.INFO, detail, {"host": host.name}))
        for _ in range(MAX_SEARCHES):
            await sleep(pause_s)
            if not is_wanted():
                return
            await self._let_go(host.name)
            failed = await self._try(host)
            if failed is None or not is_wanted():
                return
            if failed.stage not in noted:
                noted.add(failed.stage)
                detail = f"{host.name} is not back: {failed.stage}: {failed.reason}"
                self._note(Record("host_not_back", Severity.INFO, detail, {"host": host.name, "stage": failed.stage}))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        detail = f"{host.name} is not looked for any more, after {MAX_SEARCHES} tries"
        self._note(Record("host_given_up", Severity.WARNING, detail, {"host": host.name}))

    async def _try(self, host: HostPlan) -> HostFailed | None:
        """Start the daemon and see it join; what went wrong, if anything."""
        try:
            daemon = await self._start(host)
        except HostUnreachable as error:
            return HostFailed(host.name, error.stage, error.reason, error.remedy)
        except Exception as error:  # noqa: BLE001  # of whatever library: one host's trouble is not the run's end
            if not isinstance(error, (FlodlError, OSError)):
                _log.exception("host %s does not start", host.name)
            return HostFailed(host.name, "start", str(error) or type(error).__name__, "")
        self._daemons[host.name] = daemon
        return await self._see_join(host.name, daemon)

    async def _let_go(self, host: HostName) -> None:
        """Of the daemon that is lost, which may still be there, and of the ssh session that started it."""
        daemon = self._daemons.pop(host, None)
        if daemon is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await daemon.close()
        except Exception as error:  # noqa: BLE001  # of whatever library: it is lost already
            _log.info("host %s: its lost daemon cannot be closed: %s", host, error)

    async def close(self) -> None:
        """Let go of every daemon; those that still run are asked to end."""
        closing = [asyncio.create_task(daemon.close()) for daemon in self._daemons.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        self._daemons.clear()
        await self._doors.close()

    async def _start(self, host: HostPlan) -> RunningDaemon:
        is_local = host.kind is HostKind.LOCAL
        controllers = self._controllers or ((self._here,) if is_local else ())
        secret = derive_host_secret(self._token, host.name).hex()
        bootstrap = bootstrap_for(self._spec, host, secret, controllers)
        log_path = self._logs / f"daemon-{host.name}.log"
        if is_local:
            return await start_local(host, bootstrap, log_path)
        from flodl.launch.ssh import start_host  # asyncssh takes 0.3 s to import, and only remote hosts need it

        logins, warn = self._doors.logins, partial(self._warn, host.name)
        prepare = None if self._spec.sync.mode is SyncMode.OFF else partial(self._bring_project, host)
        port = self._tunnel_port if host.tunnel else self._spec.port
        login = logins.take(host.name)
        return await start_host(host, bootstrap, log_path, logins.slots, port, warn, prepare, login)

    async def _bring_project(self, host: HostPlan, login: "Login") -> None:
        """The launch has done it where the host was there; one that comes late, or again, may need it."""
        from flodl.launch.sync.host import bring
        from flodl.launch.sync.project import Telling, project_of

        project = await asyncio.to_thread(project_of, RunDir(self._logs.parent), self._spec)

        def say(text: str) -> None:
            self._note(Record("sync", Severity.INFO, f"{host.name}: {text}", {"host": host.name}))

        await bring(login, host, project, Telling(say, lambda _done, _whole: None))

    def _warn(self, host: HostName, warning: str) -> None:
        self._note(Record("ssh_warning", Severity.WARNING, warning, {"host": host}))

    async def _see_join(self, host: HostName, daemon: RunningDaemon) -> HostFailed | None:
        joined = asyncio.create_task(self._joined[host].wait())
        ended = asyncio.create_task(daemon.wait())
        try:
            await asyncio.wait({joined, ended}, timeout=JOIN_S, return_when=asyncio.FIRST_COMPLETED)
            if joined.done():
                return None
            if ended.done():
                reason = f"its daemon {ended.result().reason} before it joined"
            else:
                reason = f"its daemon has not reached the controller within {JOIN_S:g} s"
            remedy = (
                f"its log is {self._logs / f'daemon-{host}.log'}; check that the host can reach the controller at "
                f"{' or '.join(self._controllers) or 'the address of this machine'}"
            )
            return HostFailed(host, "join", reason, remedy)
        finally:
            for task in (joined, ended):
                task.cancel()


def exclusion(found: Survey, host: HostName) -> HostFailed | None:
    """Why preflight keeps ``host`` out, all its errors in one; None where it may come."""
    if host in found.unreachable and found.unreachable[host].stage != "join":
        error = found.unreachable[host]
        is_reached = any(finding.check != "ssh" for finding in found.of(host, Level.ERROR))
        return HostFailed(host, STAGE_PREFLIGHT if is_reached else error.stage, error.reason, error.remedy)
    errors = found.of(host, Level.ERROR)
    if not errors:
        return None
    remedies = [finding.remedy for finding in errors if finding.remedy]
    return HostFailed(host, STAGE_PREFLIGHT, "; ".join(map(sentence, errors)), "\n  ".join(remedies))
