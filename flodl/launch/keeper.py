"""The managed daemon: dials a controller by itself and serves one run after another. ``fdl daemon run`` is it, and
``fdl join --persist``.

It asks the controller what a run needs, proving its host's join secret, starts a daemon for that run as a controller
would have started it, and asks again when it has ended. Nobody there, nobody who takes hosts in, a controller that
dies: it waits and tries again. What no waiting cures, a device that is not there or another token, ends it by
``ConfigError``. But the controller proves the token first, so whoever answers at its address looks like another token:
once a controller has let us in, ours is right, and we wait until it is there again.

The first signal lets the host leave its run in order, the second ends it at once. When this process dies, so does the
run's daemon. The service manager is told what goes on; it hears pings only while this loop turns and the daemon's beats
come.
"""

import asyncio
import dataclasses
import faulthandler
import os
import random
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from flodl.config.address import format_address
from flodl.config.tls import TlsMode
from flodl.core.counted import counted
from flodl.errors import ConfigError, FlodlError, HostUnreachable, JoinRefused
from flodl.ids import HostName
from flodl.launch.bootstrap import Bootstrap
from flodl.launch.control import read_bootstrap
from flodl.launch.devices import offered
from flodl.launch.interruption import wanted
from flodl.launch.join import BOUND_GRACE_S, SIGNALS, own_folder
from flodl.launch.local import LocalDaemon, start_local
from flodl.launch.plan import HostKind, HostPlan, SshSpec
from flodl.launch.running import DaemonEnded
from flodl.launch.stay import Pulse, pause_s
from flodl.launch.terminal import Terminal
from flodl.messages import AskBootstrap, BootstrapGiven, Declined, ToClient
from flodl.runtime.dial import Controller, Identity, connect_control
from flodl.runtime.service import Service
from flodl.spec.words import printable
from flodl.wire.handshake import Role

if TYPE_CHECKING:
    from flodl.launch.forward import Way

ANSWER_S: Final = 10.0
"""How long a controller that let us in may take to answer."""

PINGS: Final = 4
"""Within the service manager's patience."""

UNWATCHED_S: Final = 30.0
"""As if it had so much where nobody watches."""


@dataclass(frozen=True, slots=True)
class KeeperRequest:
    """``address`` and ``port`` are the controller's, seen from here; ``secret`` is the host's join secret. ``devices``
    are words as in the cluster file and ``project`` this machine's copy of the project; empty takes what the run's
    roster says, else every GPU, else one CPU rank, and the folder in which this was started. With ``ssh`` the address
    is one of the machine to which it logs in.
    """

    address: str
    port: int
    host: HostName
    secret: bytes = field(repr=False)
    devices: tuple[str, ...] = ()
    project: str = ""
    tls: TlsMode = TlsMode.AUTO
    ssh: SshSpec | None = None


def keep(request: KeeperRequest, service: Service) -> int:
    """Serve one run after another until a signal comes.

    Returns:
        0 when the host has left in order, 128 + N when a second signal N ended it at once.

    Raises:
        ConfigError: what no waiting cures: a device that is not there, another token than that of the
            first controller it meets.
    """
    faulthandler.enable(2)  # a watchdog's SIGABRT shows where it stood
    return asyncio.run(_live(request, service))


async def _live(request: KeeperRequest, service: Service) -> int:
    if request.ssh is None:
        return await _Keeper(request, service).live()
    from flodl.launch.forward import LOOPBACK, kept_open  # asyncssh takes 0.3 s to import

    near_tls = request.tls.through(request.address)
    async with kept_open(request.ssh, request.address, request.port, Terminal().say) as way:
        near = dataclasses.replace(request, address=LOOPBACK, port=way.port, tls=near_tls)
        return await _Keeper(near, service, way).live()


class _Keeper:
    """See the module docstring."""

    def __init__(self, request: KeeperRequest, service: Service, way: "Way | None" = None) -> None:
        """``way`` leads to the controller where ``request`` names its near end."""
        self._request, self._service, self._way, self._terminal = request, service, way, Terminal()
        self._address = format_address(request.address, request.port)
        self._where = self._address if way is None else way.where
        self._controller = Controller(request.address, request.port, request.tls, self._where)
        self._identity = Identity("", request.secret, Role.WALK_IN, request.host)
        self._watchdog_s = service.watchdog_s or UNWATCHED_S
        self._signals: list[int] = []
        self._woken = asyncio.Event()
        self._daemon: LocalDaemon | None = None
        self._pulse: Pulse | None = None
        self._left = ""
        self._said = ""
        self._was_let_in = False

    async def live(self) -> int:
        """Until a signal."""
        await self._check_devices()
        with self._signals_caught():
            self._service.tell(READY=1)
            pinging = asyncio.create_task(self._ping())
            try:
                await self._serve_runs()
            finally:
                self._service.tell(STOPPING=1)
                pinging.cancel()
        return 128 + self._signals[-1] if len(self._signals) > 1 else 0

    async def _serve_runs(self) -> None:
        failures = 0
        while not self._signals:
            given = await self._unless_woken(self._find_run())
            is_served = given is not None and await self._serve(given)
            failures = 0 if is_served else failures + 1
            if not self._signals:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), pause_s(max(failures, 1), random.random()))

    async def _unless_woken(self, work: Coroutine[None, None, Bootstrap | None]) -> Bootstrap | None:
        """The result of ``work``; None when a signal came first."""
        done, woken = asyncio.create_task(work), asyncio.create_task(self._woken.wait())
        try:
            await asyncio.wait({done, woken}, return_when=asyncio.FIRST_COMPLETED)
            return done.result() if done.done() else None
        finally:
            done.cancel()
            woken.cancel()

    # ------------------------------------------------------------------------------------------------------- looking
    async def _find_run(self) -> Bootstrap | None:
        """A run that takes this host in; None when there is none now, which has been said."""
        try:
            reply = await self._ask()
            if not isinstance(reply, BootstrapGiven):
                why = reply.reason if isinstance(reply, Declined) else f"it answered {type(reply).__name__}"
                self._say(f"waiting for a run on {self._where}: {why}")
                return None
            given = read_bootstrap(reply.document)
        except (FlodlError, TimeoutError) as error:
            if isinstance(error, JoinRefused) and error.is_wrong_token and not self._was_let_in:
                remedy = f"let fdl join-config {self._request.host} make a new token file, and copy it here"
                raise ConfigError(f"{error}\n  {remedy}") from None
            fault = None if self._way is None else self._way.fault
            self._say(f"waiting for a controller at {self._where}: {_why(error) if fault is None else _in_full(fault)}")
            return None
        if given.run_id == self._left:
            self._say(f"has left run {self._left}; waiting for the next one on {self._where}")
            return None
        return given

    async def _ask(self) -> object:
        stream, _ = await connect_control(self._controller, self._identity, ToClient)
        self._was_let_in = True
        async with stream, asyncio.timeout(ANSWER_S):
            stream.send(AskBootstrap(self._request.host))
            return await stream.receive()

    async def _check_devices(self) -> None:
        """Raises ConfigError when a device that this machine was told to offer is not there."""
        if self._request.devices:
            await asyncio.to_thread(offered, self._request.devices, self._request.host)  # nvidia-smi may take its time

    # ------------------------------------------------------------------------------------------------------- serving
    async def _serve(self, given: Bootstrap) -> bool:
        """One stay in one run. Returns whether ranks have run here."""
        await self._check_devices()
        reader, writer = os.pipe()
        pulse = Pulse(time.monotonic(), given.liveness.heartbeat_s, self._watchdog_s)
        loop = asyncio.get_running_loop()
        loop.add_reader(reader, self._on_beat, reader, pulse, given.run_id)
        self._pulse = pulse
        try:
            ended = await self._stay(given, writer)
        except (FlodlError, OSError) as error:  # PreflightError, HostUnreachable, ConfigError of the cluster file
            self._say(f"cannot serve run {given.run_id}: {error}")
            return False
        finally:
            self._pulse = None
            loop.remove_reader(reader)
            os.close(reader)
        self._tell_end(ended, given.run_id, pulse)
        return pulse.has_served

    async def _stay(self, given: Bootstrap, pulse_fd: int) -> DaemonEnded:
        """Start the daemon of ``given`` and see it end. Takes over ``pulse_fd``."""
        try:
            host, bootstrap = await asyncio.to_thread(self._prepared, given)
            self._say(f"joining run {given.run_id} on {self._where}")
            grace_s = given.stop_timeout_s + BOUND_GRACE_S
            daemon = await start_local(host, bootstrap, None, grace_s, pulse_fd)
        finally:
            os.close(pulse_fd)
        self._daemon = daemon
        try:
            if self._signals:
                daemon.terminate()
            return await daemon.wait()
        finally:
            self._daemon = None
            await daemon.close()

    def _prepared(self, given: Bootstrap) -> tuple[HostPlan, Bootstrap]:
        request = self._request
        project = os.path.abspath(os.path.expanduser(request.project or given.project or "."))
        devices = request.devices or given.devices or ("all",)
        python, folder = os.path.expanduser(given.python) or sys.executable, own_folder(project, given)
        offered(devices, request.host)
        bootstrap = dataclasses.replace(
            given,
            secret=request.secret.hex(),
            controllers=(self._address,),
            host=request.host,
            devices=devices,
            cwd=folder,
            python=python,
            tls=request.tls,
            tunnelled=request.ssh is not None,
        )
        return HostPlan(request.host, HostKind.LOCAL, devices, python, folder, given.script), bootstrap

    def _on_beat(self, reader: int, pulse: Pulse, run_id: str) -> None:
        beats = os.read(reader, 4096)
        if not beats:
            asyncio.get_running_loop().remove_reader(reader)
        elif pulse.beat(beats[-1], time.monotonic()) and not self._signals:
            self._say(
                f"serving run {run_id}: " + (counted(pulse.ranks, "rank") if pulse.ranks else "waiting for its start")
            )

    def _tell_end(self, ended: DaemonEnded, run_id: str, pulse: Pulse) -> None:
        if ended.code == 0 and pulse.has_served:
            self._left = run_id  # told to go, or the run is over: either way it has nothing for us
        how = "has ended in order" if ended.code == 0 else ended.reason
        self._say(f"the daemon of run {run_id} {how}")

    # ------------------------------------------------------------------------------------------------------- leaving
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
        self._woken.set()
        daemon = self._daemon
        if daemon is None:
            return
        if len(self._signals) == 1:
            self._say("leaving in order: at the next commit, or with the run; a second signal leaves at once")
            daemon.terminate()
        else:
            daemon.end_now()

    # ------------------------------------------------------------------------------------------------------- telling
    def _say(self, text: str) -> None:
        """Each thing once, however often it is so."""
        if text != self._said:
            self._said = text
            self._terminal.say(f"fdl: {self._request.host}: {printable(text)}")
            self._service.tell(STATUS=printable(_first_line(text)))

    async def _ping(self) -> None:
        while True:
            if self._pulse is None or self._pulse.is_moving(time.monotonic()):
                self._service.tell(WATCHDOG=1)
            await asyncio.sleep(self._watchdog_s / PINGS)


def _why(error: Exception) -> str:
    if isinstance(error, HostUnreachable):
        return f"{error.stage}: {error.reason}"
    return _first_line(error) or "no answer"


def _in_full(fault: HostUnreachable) -> str:
    return f"{fault.stage}: {fault.reason}" + (f"\n  {fault.remedy}" if fault.remedy else "")


def _first_line(text: object) -> str:
    return str(text).partition("\n")[0]
