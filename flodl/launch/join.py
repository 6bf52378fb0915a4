"""``join``: this machine's devices for a run whose controller runs elsewhere, as long as this command lives. It may
come while the join window is open, or when the run trains.

A daemon is started here as the controller would have started it, with a bootstrap that the controller gives. The
daemon does the rest; this process watches the run's snapshots and says what becomes of the host. The first Ctrl-C lets
the host leave at the next commit, the second one ends it at once. When this process dies, its daemon ends, too.
"""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flodl.config.address import format_address
from flodl.config.tls import TlsMode
from flodl.errors import (
    ConfigError,
    DeadlineExceeded,
    FlodlError,
    HostUnreachable,
    JoinRefused,
    PeerLost,
    PreflightError,
)
from flodl.ids import HostName, RankId
from flodl.launch.bootstrap import Bootstrap
from flodl.launch.control import ControllerClient
from flodl.launch.devices import offered
from flodl.launch.interruption import wanted
from flodl.launch.local import LocalDaemon, start_local
from flodl.launch.plan import HostKind, HostPlan, SshSpec
from flodl.launch.presence import Presence
from flodl.launch.progress import is_shown
from flodl.launch.running import DaemonEnded
from flodl.launch.terminal import Terminal
from flodl.messages import Declined
from flodl.spec.words import printable
from flodl.wire.handshake import derive_host_secret

LOOK_S: Final = 0.25
"""Between two looks at the run's state."""

ASK_AGAIN_S: Final = 1.0
EARLY_S: Final = 3600.0
"""How long a run that does not train yet is waited for: its join window and a slow start."""

BOUND_GRACE_S: Final = 15.0
"""On top of the ranks' stop grace: the last logs, the farewell."""

LAST_LINES: Final = 200
SHOWN_LINES: Final = 20
"""Of a rank that cannot take part: so many lines are asked for, and of those that are shown so many are left."""

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """``address`` and ``port`` are the controller's, seen from here. ``run_id`` is empty where it is not known.
    ``devices`` are words as in the cluster file. ``project`` is the folder of this machine's copy of the project.
    ``log_path`` says where the daemon's own words go, from the run's id. ``tls`` says whether the controller's address
    wants TLS. With ``ssh`` that address is one of the machine to which it logs in, and only it gets there.
    """

    address: str
    port: int
    run_id: str
    token: bytes = field(repr=False)
    host: HostName
    devices: tuple[str, ...]
    project: str
    log_path: Callable[[str], Path]
    tls: TlsMode = TlsMode.AUTO
    ssh: SshSpec | None = None


def join(request: JoinRequest) -> int:
    """Serve the run with this machine's devices until it has ended, or this host has left it.

    Returns:
        0 when the host left in order or with a run that ended well, 1 when the run failed, 128 + N when signal N ended
        the host before that.

    Raises:
        PreflightError: the devices, the folder or the script are not there.
        HostUnreachable: the controller cannot be reached, or the daemon does not start.
        JoinRefused: the run does not take this host in.
        DeadlineExceeded: the run did not train within ``EARLY_S``.
        FlodlError: the daemon was killed, or lost the controller.
    """
    try:
        offered(request.devices, request.host)
    except ConfigError as error:
        raise PreflightError(str(error)) from None
    return asyncio.run(_stay(request, Terminal()))


async def _stay(request: JoinRequest, terminal: Terminal) -> int:
    if request.ssh is None:
        return await _Guest(request, terminal, format_address(request.address, request.port)).stay()
    from flodl.launch.forward import LOOPBACK, forwarded  # asyncssh takes 0.3 s to import

    where = f"{format_address(request.address, request.port)} through {request.ssh.target}"
    async with forwarded(request.ssh, request.address, request.port, lambda text: terminal.say(f"fdl: {text}")) as way:
        near = dataclasses.replace(request, address=LOOPBACK, port=way.port, tls=request.tls.through(request.address))
        try:
            return await _Guest(near, terminal, where).stay()
        except FlodlError:
            if not way.is_open:
                terminal.say(f"fdl: the ssh session with {request.ssh.target} was lost")
            raise


class _Guest:
    """One host's stay. ``stay`` returns the exit code."""

    def __init__(self, request: JoinRequest, terminal: Terminal, where: str) -> None:
        """``where`` names the controller's address for people."""
        self._request, self._terminal, self._where = request, terminal, where
        self._client = ControllerClient(request.run_id, request.token, request.address, request.port, tls=request.tls)
        self._signals: list[int] = []
        self._forced = asyncio.Event()
        self._presence: Presence | None = None
        self._asking: set[asyncio.Task[None]] = set()

    async def stay(self) -> int:
        """From the first question to the daemon's end."""
        with self._signals_caught():
            given = await self._ask_bootstrap()
            if given is None:
                return 128 + self._signals[0]
            presence = Presence(self._request.host, given.run_id)
            await self._look(presence)
            daemon = await self._start(given)
            self._presence = presence
            try:
                ended = await self._watch(daemon, presence)
            finally:
                await (daemon.kill() if self._forced.is_set() else daemon.close())
        with suppress(FlodlError):
            await self._look(presence)
        # In a thread, because it asks the controller, and the way there may be this loop's.
        return await asyncio.to_thread(self._verdict, ended, presence, self._request.log_path(given.run_id))

    # -------------------------------------------------------------------------------------------------------- coming
    async def _ask_bootstrap(self) -> Bootstrap | None:
        """What the daemon needs; None when a signal came before the run trained."""
        deadline_s, said = time.monotonic() + EARLY_S, ""
        while not self._signals:
            try:
                reply = await asyncio.to_thread(self._client.ask_bootstrap, self._request.host)
            except PeerLost as error:
                remedy = "check address and port: fdl status on the controller's machine knows them"
                raise HostUnreachable(self._where, "connect", str(error), remedy) from None
            except JoinRefused as error:
                if not error.is_wrong_token:
                    raise
                hint = "a walk-in's token, daemon.token of fdl join-config, goes with --persist"
                raise JoinRefused(f"{error}\n  {hint}", is_wrong_token=True) from None
            if not isinstance(reply, Declined):
                return reply
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"the run does not train after {EARLY_S:g} s: {reply.reason}")
            if reply.reason != said:
                said = reply.reason
                self._terminal.say(f"fdl: waiting until the run trains: {said}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._forced.wait(), ASK_AGAIN_S)
        return None

    async def _start(self, given: Bootstrap) -> LocalDaemon:
        request = self._request
        folder = own_folder(request.project, given)
        bootstrap = dataclasses.replace(
            given,
            secret=derive_host_secret(request.token, request.host).hex(),
            controllers=(format_address(request.address, request.port),),
            host=request.host,
            devices=request.devices,
            cwd=folder,
            tls=request.tls,
            tunnelled=request.ssh is not None,
        )
        host = HostPlan(request.host, HostKind.LOCAL, request.devices, sys.executable, folder, given.script)
        log_path = request.log_path(given.run_id)
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._terminal.say(f"fdl: run {given.run_id} on {self._where}; Ctrl-C leaves it in order")
        return await start_local(host, bootstrap, log_path, given.stop_timeout_s + BOUND_GRACE_S)

    # -------------------------------------------------------------------------------------------------------- staying
    async def _watch(self, daemon: LocalDaemon, presence: Presence) -> DaemonEnded | None:
        """The daemon's end; None when a second signal came before it."""
        ended = asyncio.create_task(daemon.wait())
        forced = asyncio.create_task(self._forced.wait())
        looking = asyncio.create_task(self._look_on(presence))
        try:
            await asyncio.wait({ended, forced}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            for task in (ended, forced, looking, *self._asking):
                task.cancel()

    async def _look_on(self, presence: Presence) -> None:
        while True:
            with suppress(FlodlError):  # the daemon notices when the controller is gone
                await self._look(presence)
            await asyncio.sleep(LOOK_S)

    async def _look(self, presence: Presence) -> None:
        state: Mapping[str, Any] = await asyncio.to_thread(self._client.state)
        for line in presence.look(state):
            self._terminal.result(line)

    # -------------------------------------------------------------------------------------------------------- leaving
    @contextmanager
    def _signals_caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = wanted(SIGNALS)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1 or self._presence is None:
            self._forced.set()
            return
        work = self._ask_to_leave(signal.Signals(number).name, self._presence)
        task = asyncio.get_running_loop().create_task(work)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask_to_leave(self, source: str, presence: Presence) -> None:
        if presence.has_come and not presence.has_joined:
            self._terminal.say("fdl: leaving; the run has not started")
            self._forced.set()
            return
        self._terminal.say("fdl: leaving in order at the next commit; Ctrl-C again leaves at once")
        try:
            await asyncio.to_thread(self._client.drain, self._request.host, f"{source} at its fdl join")
        except FlodlError as error:
            if not presence.took_part:
                self._forced.set()  # nothing is trained here that could be lost
                return
            self._terminal.say(f"fdl: {error}\nfdl: Ctrl-C again leaves at once")

    def _verdict(self, ended: DaemonEnded | None, presence: Presence, log_path: Path) -> int:
        host = self._request.host
        if ended is None:
            self._terminal.result(f"host {host} has left at once")
            return 128 + self._signals[-1]
        if presence.refusals and not presence.took_part and not self._signals:
            said = f"host {host} cannot take part: " + "; ".join(presence.refusals)
            raise JoinRefused(said + self._last_words(presence.refused))
        if ended.code:
            goes_on = f"its daemon {ended.reason}; the run goes on without it; its log is {log_path}"
            raise (FlodlError if presence.has_joined else JoinRefused)(f"host {host}: {goes_on}")
        if not (presence.has_joined or presence.has_come):
            raise JoinRefused(f"host {host} was sent away before it joined; see {log_path}")
        if presence.lost and not self._signals:
            raise FlodlError(f"host {host} has left, every rank of it is lost; the run goes on: {presence.lost}")
        self._terminal.result(presence.farewell())
        return 1 if presence.has_failed else 0

    def _last_words(self, rank: RankId) -> str:
        """What ``rank`` said last on stderr, from the controller, which keeps the logs; empty where it has none."""
        query: dict[str, str | int] = {"ranks": str(rank), "stream": "stderr", "tail": LAST_LINES}
        try:
            texts = [str(line.get("text", "")).rstrip("\n") for line in self._client.follow("/logs", query)]
        except FlodlError:
            return ""
        lines = [f"\n  | {printable(text)}" for text in texts if is_shown(text)][-SHOWN_LINES:]
        return f"\nlast lines of rank {rank}'s stderr:{''.join(lines)}" if lines else ""


def own_folder(project: str, given: Bootstrap) -> str:
    """Where the ranks run: in this machine's copy of the project, which has to hold the script.

    Raises:
        PreflightError: the folder or the script is not there.
    """
    remedy = "this machine needs its own copy of the project; --path names its folder (FDL_PATH in daemon.env)"
    folder = os.path.normpath(os.path.join(project, given.cwd))
    if not os.path.isdir(folder):
        raise PreflightError(f"folder {folder} not found: {remedy}")
    path = os.path.join(folder, given.script[0]) if given.script else folder
    if given.script[:1] != ("-m",) and not os.path.exists(path):
        raise PreflightError(f"script {path} not found: {remedy}")
    return folder
