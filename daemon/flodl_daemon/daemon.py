"""The daemon's shell around HostCore: sockets and processes become events, actions become work."""

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import platform
import select
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, assert_never

import psutil

import flodl
from flodl.averaging.shared import SharedPlane
from flodl.config.address import split_address
from flodl.core import actions as act
from flodl.core import events as ev
from flodl.core.host import HostCore, HostSettings, Measured
from flodl.errors import ConfigError, HostUnreachable, PeerLost, ProtocolError
from flodl.ids import RankId
from flodl.launch.bootstrap import Bootstrap
from flodl.launch.devices import offered
from flodl.messages import Beat, Device, HostHello, LogChunk, StopHost, ToDaemon
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.dial import Controller, Identity, connect_bulk, connect_control
from flodl.runtime.driver import Driver
from flodl.runtime.line import Line
from flodl.runtime.processes import OrphanReaper, become_subreaper, create_memfd
from flodl.runtime.spool import LogSpool
from flodl.runtime.streams import FramedStream
from flodl.wire.handshake import Role
from flodl_daemon import warden_end
from flodl_daemon.bulk import BulkLink
from flodl_daemon.held_port import HeldPort
from flodl_daemon.inbox import HostInbox
from flodl_daemon.rank_process import RankProcess

DIAL_S: Final = 60.0
"""How long a new daemon looks for its controller before it gives up."""

REDIAL_S: Final = 0.5
LOG_PIECE_BYTES: Final = 64 * 1024
LOG_WAITING_BYTES: Final = 256 * 1024
"""Log bytes that may wait on the control connection: a heartbeat behind them leaves within a fraction of a second."""

LOG_PAUSE_S: Final = 0.02
LAST_LOGS_S: Final = 10.0
"""How long the ranks' last output may take to leave before the daemon goes without."""

LAST_KILLS_S: Final = 3.0
"""How long the daemon waits for orphans that it has killed; only one stuck in the kernel takes longer."""

SWEEP_S: Final = 1.0

_log = logging.getLogger(__name__)


async def serve(given: Bootstrap, pulse_fd: int = -1) -> int:
    """Serve one run on this host; returns the daemon's exit code. ``pulse_fd``: where a byte goes for each beat.

    Raises:
        ConfigError: the devices that were asked for are not there.
        HostUnreachable: the controller cannot be reached.
        JoinRefused: the controller refused us.
        PeerLost: our warden ended before we were let in.
    """
    become_subreaper()
    devices = offered(given.devices, given.host)
    role = Role.WALK_IN if given.is_walk_in else Role.DAEMON
    identity = Identity(given.run_id, bytes.fromhex(given.secret), role, given.host)
    stream, bulk_line, address = await warden_end.before(_dial(given, identity))
    hello = _hello(given, devices, address)
    stream.send(hello)
    return await Daemon(given, stream, bulk_line, hello, pulse_fd).run()


async def _dial(given: Bootstrap, identity: Identity) -> tuple[FramedStream, Line, str]:
    """The first controller address that answers; all of them again until ``DIAL_S`` has passed."""
    if not given.controllers:
        raise ConfigError(f"host {given.host}: no address of the controller was given")
    deadline_s = time.monotonic() + DIAL_S
    while True:
        errors = []
        for candidate in given.controllers:
            controller = Controller(*split_address(candidate, 0), given.tls)
            try:
                return await _connect(controller, identity)
            except HostUnreachable as error:
                errors.append(error)
        if time.monotonic() > deadline_s:
            raise errors[0]
        await asyncio.sleep(REDIAL_S)


async def _connect(controller: Controller, identity: Identity) -> tuple[FramedStream, Line, str]:
    """Both connections or none."""
    stream, address = await connect_control(controller, identity, ToDaemon)
    try:
        bulk_line, _ = await connect_bulk(controller, identity)
    except BaseException:
        stream.abort()
        raise
    return stream, bulk_line, address


def _hello(given: Bootstrap, devices: tuple[Device, ...], address: str) -> HostHello:
    return HostHello(
        host=given.host,
        pid=os.getpid(),
        machine_id=_machine_id(),
        address=address,
        devices=devices,
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=_version("torch"),
        flodl=flodl.__version__,
        tunnelled=given.tunnelled,
    )


def _machine_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text("ascii").strip()
    return socket.gethostname()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class _Shipment:
    """One process's part of a rank's stream, from the offset ``start`` on; ``task`` ends when it has been sent."""

    start: int = 0
    spool: LogSpool | None = None
    task: "asyncio.Task[None] | None" = None

    @property
    def end(self) -> int:
        """The offset behind it; final once the process has ended."""
        return self.start + (0 if self.spool is None else self.spool.size_bytes)


class Daemon:
    """One host of one run; see the module docstring."""

    def __init__(
        self, given: Bootstrap, stream: FramedStream, bulk_line: Line, hello: HostHello, pulse_fd: int = -1
    ) -> None:
        """``hello`` has been said on ``stream`` and is said on the bulk connection by ``run``."""
        self._given = given
        self._pulse_fd = pulse_fd
        self._stream = stream
        self._hello = hello
        self._clock = MonotonicClock()
        settings = HostSettings(
            given.host, given.liveness.heartbeat_s, given.on_disconnect_s, given.stop_timeout_s, given.is_walk_in
        )
        self._core = HostCore(settings, self._clock.now_s())
        self._driver: Driver[ev.HostEvent, act.HostAction] = Driver(
            self._core, self._execute, self._clock, ev.Ticked, ev.Stalled
        )
        self._bulk = BulkLink(bulk_line.sock, self._driver.post_threadsafe, bulk_line.tls)
        self._plane_fd = -1
        self._inbox = HostInbox(psutil.virtual_memory().total)
        self._ranks: dict[RankId, RankProcess] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._shipping: set[asyncio.Task[None]] = set()
        self._shipments: dict[tuple[RankId, str], _Shipment] = {}
        self._held_port = HeldPort()
        self._exit_code = 0

    async def run(self) -> int:
        """Serve until the core leaves."""
        self._watch_signals()
        if self._pulse_fd >= 0:
            os.set_inheritable(self._pulse_fd, False)
            os.set_blocking(self._pulse_fd, False)
        self._plane_fd = create_memfd("flodl-plane")
        self._inbox.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                services = [
                    tasks.create_task(self._greet_and_hear(), name="controller"),
                    tasks.create_task(self._sweep(), name="sweep"),
                ]
                await self._driver.run()
                await self._stream.close()
                for task in (*services, *self._shipping):
                    task.cancel()
        finally:
            _end_descendants()
            self._bulk.close()
            self._held_port.close()
            for process in self._ranks.values():
                process.close()
            os.close(self._plane_fd)
            self._inbox.close()
        return self._exit_code

    # ------------------------------------------------------------------------------------------------------- events
    async def _greet_and_hear(self) -> None:
        try:
            self._bulk.greet(self._hello)
            while True:
                message = await self._stream.receive()
                await self._driver.put(ev.ControllerSaid(message))  # type: ignore[arg-type]  # ToDaemon is all it allows
        except (PeerLost, ProtocolError) as error:
            self._driver.post(ev.ControllerDropped(str(error)))

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop_host, number.name, self._given.stop_timeout_s)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(number, self._on_signal, number)
        warden_end.watch(lambda: self._stop_host("the end of its warden", 3.0))

    def _on_signal(self, number: signal.Signals) -> None:
        """The warden sends SIGTERM when nobody is left who started us; else it is a scheduler's word to the run."""
        if _is_orphaned():
            self._stop_host("the end of whoever started it", self._given.stop_timeout_s)
        else:
            self._driver.post(ev.Signalled(number))

    def _stop_host(self, source: str, grace_s: float) -> None:
        self._driver.post(ev.ControllerSaid(StopHost(f"the daemon was stopped by {source}", grace_s)))

    async def _sweep(self) -> None:
        """Once a second: reap adopted orphans, look at the ranks' processes."""
        reaper = OrphanReaper()
        while True:
            await asyncio.sleep(SWEEP_S)
            pids = {rank: process.pid for rank, process in self._ranks.items() if process.pid is not None}
            reaper.sweep(pids.values())
            self._core.update_processes({rank: found for rank, pid in pids.items() if (found := _measured(pid))})

    # ------------------------------------------------------------------------------------------------------ actions
    def _execute(self, action: act.HostAction) -> None:
        match action:
            case act.SendController(message):
                self._stream.send(message)
                if isinstance(message, Beat) and self._pulse_fd >= 0:
                    with contextlib.suppress(OSError):  # nobody listens any more, or nobody has for long
                        os.write(self._pulse_fd, bytes([min(len(message.ranks), 255)]))
            case act.SendRank(rank, message):
                self._ranks[rank].send(message)
            case act.SpawnRank():
                self._spawn(action)
            case act.TerminateRank(rank):
                self._ranks[rank].terminate()
            case act.KillRankTree(rank):
                self._ranks[rank].kill()
            case act.StreamSum(key, layout, bf16):
                self._bulk.stream_sum(key, layout, bf16)
            case act.CancelStream(key):
                self._bulk.cancel(key)
            case act.StreamState(rank, transfer, size_bytes):
                self._stream_state(self._ranks[rank], transfer, size_bytes)
            case act.EmptyInbox(transfer):
                self._inbox.empty(transfer)
            case act.HoldPort(start, peer):
                self._driver.post(self._held_port.renew(start, peer))
            case act.ShipLogs():
                self._task_group().create_task(self._ship_last(), name="last logs")
            case act.Leave(reason, exit_code):
                _log.info("leaving: %s", reason)
                self._exit_code = exit_code
                self._driver.stop()
            case act.Record(_, severity, detail):
                level = logging.ERROR if severity is act.Severity.CRITICAL else logging.WARNING
                _log.log(level, "%s", detail)
            case _:
                assert_never(action)

    def _spawn(self, order: act.SpawnRank) -> None:
        if not self._ranks:
            self._bulk.start(SharedPlane(self._plane_fd, order.local_world_size), self._inbox)
        process = RankProcess(order, self._given, self._plane_fd, self._inbox.fd, self._hello.address)
        self._ranks[process.rank] = process
        tasks = self._task_group()
        try:
            process.start()
        except (OSError, ValueError) as error:
            tasks.create_task(self._report_unstarted(process, str(error)), name=f"rank {process.rank}")
            return
        tasks.create_task(self._live(process), name=f"rank {process.rank}")

    async def _live(self, process: RankProcess) -> None:
        shipping = [self._begin_shipping(process.rank, name, spool) for name, spool in process.spools.items()]
        self._shipping.update(shipping)
        await process.live(self._driver.put)
        await asyncio.wait(shipping)
        self._shipping.difference_update(shipping)
        process.close()

    async def _report_unstarted(self, process: RankProcess, reason: str) -> None:
        """A rank that never ran says why where its other words would be."""
        await process.clean_up()
        _log.error("rank %d does not start: %s", process.rank, reason)
        text = f"flodl: rank {process.rank} does not start on host {self._given.host}: {reason}\n".encode(
            "utf-8", "backslashreplace"
        )
        before = self._shipments.get((process.rank, "stderr"), _Shipment())
        self._shipments[process.rank, "stderr"] = _Shipment(before.end + len(text), task=before.task)
        self._stream.send(LogChunk(process.rank, "stderr", before.end, text))
        await self._driver.put(ev.RankEnded(process.rank, 127, 0))
        process.close()

    def _stream_state(self, process: RankProcess, transfer: int, size_bytes: int) -> None:
        fd = process.outbox_fd
        if fd < 0 or not self._bulk.stream_state(process.rank, transfer, size_bytes, fd):
            _log.error("rank %d: its outbox does not hold %d bytes of state", process.rank, size_bytes)
            process.kill()

    def _task_group(self) -> asyncio.TaskGroup:
        assert self._tasks is not None
        return self._tasks

    # --------------------------------------------------------------------------------------------------------- logs
    def _begin_shipping(self, rank: RankId, name: str, spool: LogSpool) -> "asyncio.Task[None]":
        """In the stream of a rank that was started again, its output goes on where that of the process before ended."""
        before = self._shipments.get((rank, name), _Shipment())
        work = self._ship(rank, name, spool, before.end, before.task)
        task = self._task_group().create_task(work, name=f"{name} of {rank}")
        self._shipments[rank, name] = _Shipment(before.end, spool, task)
        return task

    async def _ship(
        self, rank: RankId, name: str, spool: LogSpool, start: int, before: "asyncio.Task[None] | None"
    ) -> None:
        """Send what is spooled, never more at once than leaves room for heartbeats. The spool's first byte has the
        offset ``start``; what is ``before`` it goes first.
        """
        offset = 0
        if before is not None:
            await asyncio.wait({before})
        try:
            while self._stream.is_open and await spool.wait_beyond(offset):
                if self._stream.waiting_bytes > LOG_WAITING_BYTES:
                    await asyncio.sleep(LOG_PAUSE_S)
                    continue
                data = spool.read_from(offset, LOG_PIECE_BYTES)
                self._stream.send(LogChunk(rank, name, start + offset, data))
                offset += len(data)
                spool.forget(offset)
                await asyncio.sleep(0)
        except OSError as error:
            _log.error("output is lost: rank=%d stream=%s offset=%d error=%s", rank, name, offset, error)

    async def _ship_last(self) -> None:
        if self._shipping:
            _, late = await asyncio.wait(self._shipping, timeout=LAST_LOGS_S)
            if late and self._stream.is_open:
                _log.warning("output is lost: streams=%d reason=not sent within %g s", len(late), LAST_LOGS_S)
        self._driver.post(ev.LogsShipped())


def _end_descendants() -> None:
    """Whatever shed its session, its environment and its parent is our child by now; our warden may be gone."""
    deadline_s = time.monotonic() + LAST_KILLS_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline_s:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)


def _is_orphaned() -> bool:
    """Whether the other end of our standard input is closed: whoever started us holds it open."""
    poller = select.poll()
    poller.register(0, select.POLLRDHUP)
    return any(events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, events in poller.poll(0))


def _measured(pid: int) -> Measured | None:
    """None where the process is gone."""
    try:
        process = psutil.Process(pid)
        is_frozen = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return Measured(pid, int(process.memory_info().rss), is_frozen)
    except psutil.Error:
        return None
