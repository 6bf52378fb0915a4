"""The controller's shell around JobCore: sockets, daemons, the head and the disk become events, actions become work.

No user code, no torch: it is up in a fraction of a second and nothing a script does can touch its scheduling.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, assert_never

from flodl.averaging.store_table import StoreTable
from flodl.config.address import format_address
from flodl.controller import tunnels
from flodl.controller.bulk import BulkHub
from flodl.controller.clients import ClientDesk
from flodl.controller.cores import core_of
from flodl.controller.final_state import FinalState
from flodl.controller.head import HeadProcess, PromotedHead
from flodl.controller.hosts import Roster
from flodl.controller.http import HttpServer, View
from flodl.controller.saves import Saves
from flodl.core import actions as act
from flodl.core import events as ev
from flodl.core.ending import process_exit_code
from flodl.core.job import JobCore, Phase
from flodl.core.plain import PlainCore
from flodl.core.view import snapshot
from flodl.errors import FlodlError, PeerLost, ProtocolError, RemoteProtocolError
from flodl.ids import HostName, RankId
from flodl.launch import listening
from flodl.launch.document import dump, load
from flodl.launch.plan import RunSpec
from flodl.launch.rundir import ControllerInfo, RunDir, process_started, read_token_file
from flodl.messages import (
    AskBootstrap,
    Beat,
    FromWalkIn,
    HostHello,
    HostStopped,
    LeaveWanted,
    LogChunk,
    Message,
    PortPicked,
    SendState,
    StopHost,
    StopWanted,
    StoreRequest,
    ToDaemon,
    ToHead,
)
from flodl.monitor.event_log import EventLog, strict
from flodl.monitor.log_store import LogStore
from flodl.runtime.certificate import Security, security_of, security_warning
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.driver import Driver
from flodl.runtime.line import Line
from flodl.runtime.mux import Handlers, PortMux, Run
from flodl.runtime.ports import listen, port_of
from flodl.runtime.streams import FramedStream
from flodl.wire.handshake import Peer, Role, derive_read_token

LAST_READERS_S: Final = 5.0
"""After the run's end: how long followers may take to read the rest."""

FIRST_WORD_S: Final = 10.0
"""How long a peer that was let in may take to say what it wants."""

FAREWELL_S: Final = 3.0
"""How long a host that was told to leave may take to read it; one that fell silent is cut off at once."""

START_LOOK_S: Final = 0.1
"""Between two looks whether the run starts without the hosts that preflight keeps out."""

EXPIRE_S: Final = 0.5
STATE_EVERY_S: Final = 1.0

_log = logging.getLogger(__name__)


async def serve(run: RunDir) -> None:
    """Serve the run in ``run`` to its end.

    Raises:
        ConfigError: the run's directory or token cannot be read.
        PreflightError: the port cannot be had.
    """
    spec = load(RunSpec, run.run_json.read_bytes())
    token = run.read_token()
    sockets = listening.inherited(os.environ) or listen(spec.bind_host, spec.port)
    security = security_of(spec.tls, _addresses(sockets))
    await Controller(run, spec, token, sockets, security, tunnels.open_port(spec)).run()


class Controller:
    """One run's controller; see the module docstring."""

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        token: bytes,
        sockets: list[socket.socket],
        security: Security,
        tunnel_sockets: list[socket.socket],
    ) -> None:
        self._run, self._spec, self._token, self._sockets, self._security = run, spec, token, sockets, security
        self._tunnel_sockets = tunnel_sockets
        join_file = spec.join.token_file
        self._join_token = read_token_file(Path(join_file)) if join_file else None
        self._clock = MonotonicClock()
        host, self._port = listening.dial_address(sockets[0])
        self._address = spec.advertise or host
        self._core = core_of(spec, self._clock.now_s())
        self._driver: Driver[ev.JobEvent, act.JobAction] = Driver(
            self._core, self._execute, self._clock, ev.Ticked, ev.Stalled
        )
        self._events = EventLog(run.path / "events.jsonl")
        self._logs = LogStore(run.logs)
        self._store = StoreTable()
        self._bulk = BulkHub()
        self._saves = Saves(self._bulk, spec.cwd, run.path, self._driver.post_threadsafe)
        self._final = FinalState(self._bulk, run.path, self._driver.post, self._events.add)
        self._streams: dict[HostName, FramedStream] = {}
        self._hellos: dict[HostName, HostHello] = {}
        self._told_to_leave: set[HostName] = set()
        self._head_stream: FramedStream | None = None
        self._is_state_written = True
        self._outcome: act.Outcome | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._searches: set[asyncio.Task[None]] = set()
        where = format_address(self._address, self._port)
        self._roster = Roster(
            spec,
            token,
            listening.announced(spec.advertise, sockets[0]),
            format_address(host, self._port),
            run.logs,
            self._driver.post,
            self._events.add,
            port_of(tunnel_sockets) if tunnel_sockets else 0,
        )
        self._head = self._new_head(self._core, format_address(host, self._port))
        self._desk = ClientDesk(self._core, spec)
        self._http = HttpServer(self._view())
        _log.info("controller of run %s listens on %s", spec.run_id, where)

    async def run(self) -> None:
        """Serve until the core ends the run.

        Raises:
            FlodlError: the controller itself failed; the outcome says so too.
        """
        try:
            await self._serve()
        except Exception as error:
            _log.exception("the controller failed")
            message = f"the controller failed: {error}; its log is {self._run.logs / 'controller.log'}"
            if self._outcome is None:
                self._outcome = act.Outcome("failed", 1, message, None, (), 0)
                self._run.release_reserve()
                self._save_outcome(self._outcome)
            raise FlodlError(message) from error

    async def _serve(self) -> None:
        self._watch_signals()
        handlers = Handlers(self._on_control, self._on_bulk, self._http.serve, self._http.redirect, self._note_refused)
        run = Run(self._spec.run_id, self._token, self._join_token)
        mux = PortMux(self._sockets, run, handlers, self._clock, self._security)
        inner = tunnels.without_http(handlers)
        tunnel_mux = PortMux(self._tunnel_sockets, run, inner, self._clock, self._security)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                services = [
                    tasks.create_task(mux.serve(), name="port"),
                    tasks.create_task(tunnel_mux.serve(), name="tunnels"),
                    tasks.create_task(self._expire_rendezvous(), name="rendezvous"),
                    tasks.create_task(self._write_state(), name="state"),
                ]
                self._announce()
                services.append(tasks.create_task(self._roster.bring_up_all(), name="roster"))
                if self._head is not None:
                    services.append(tasks.create_task(self._live_head(self._head), name="head"))
                await self._driver.run()
                await self._finish()
                for service in (*services, *self._searches):
                    service.cancel()
        finally:
            if self._head is not None:
                await self._head.kill()
            await self._roster.close()
            self._bulk.close()
            await asyncio.to_thread(self._saves.close)
            self._events.end()
            self._logs.close()
            self._final.close()
            for sock in (*self._sockets, *self._tunnel_sockets):
                sock.close()

    # ------------------------------------------------------------------------------------------------------ start
    async def _live_head(self, head: HeadProcess | PromotedHead) -> None:
        """A script that we start may do anything before ``Trainer.run``: it waits for preflight, and where that keeps a
        host out, for the run's start without it. It is not started for a run that ends before.
        """
        while self._spec.spawns_head and self._core.phase is Phase.WAITING and not self._roster.is_clear.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._roster.is_clear.wait(), START_LOOK_S)
        if self._spec.spawns_head and self._core.ending.is_decided:
            self._driver.post(ev.HeadExited(0, 0))
        else:
            await head.live(self._driver.post)

    def _announce(self) -> None:
        started = process_started(os.getpid())
        assert started is not None
        host, port = listening.dial_address(self._sockets[0])
        certificate = self._security.certificate
        shown = "" if certificate is None else certificate.sha256.hex()
        info = ControllerInfo(os.getpid(), started, host, port, self._spec.tls, shown)
        self._run.write("controller.json", dump(info))
        self._tell_security(shown)
        terms = self._core.startup.window.terms()
        if terms:
            self._events.add(act.Record("window_open", act.Severity.INFO, f"the join window is open: {terms}", {}))

    def _tell_security(self, certificate: str) -> None:
        if certificate:
            _log.info("tls: certificate sha256=%s", certificate)
        warning = security_warning(self._spec.tls, _addresses(self._sockets))
        if warning:
            self._events.add(act.Record("tls_off", act.Severity.WARNING, warning, {}))

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            asked = ev.StopAsked(number.name, False, process_exit_code(0, number))
            loop.add_signal_handler(number, self._driver.post, asked)
        loop.add_signal_handler(signal.SIGHUP, _log.info, "SIGHUP: the run goes on")

    def _new_head(self, core: JobCore | PlainCore, address: str) -> HeadProcess | PromotedHead | None:
        """``address`` reaches us on this machine. A plain run has no head."""
        if isinstance(core, PlainCore):
            return None
        if self._spec.spawns_head:
            return HeadProcess(self._spec, address, self._run.token_path, self._logs)
        return PromotedHead(os.getppid(), lambda: core.is_head_told)

    def _view(self) -> View:
        names = {"localhost", "127.0.0.1", "::1", socket.gethostname().lower(), self._address.lower()}
        names |= {*_addresses(self._sockets), self._spec.bind_host.lower()}
        return View(
            self.state, self._events, self._logs, self._host_of, derive_read_token(self._token), frozenset(names)
        )

    def _host_of(self, rank: RankId) -> HostName:
        return self._core.membership[rank].host if rank in self._core.membership else ""

    # ------------------------------------------------------------------------------------------------ connections
    async def _on_control(self, peer: Peer, stream: FramedStream) -> None:
        async with stream:
            match peer.role:
                case Role.DAEMON:
                    await self._serve_daemon(peer.host, stream, await self._first_word(stream))
                case Role.HEAD:
                    await self._serve_head(stream)
                case Role.CLIENT:
                    await self._serve_client(stream)
                case Role.WALK_IN:
                    await self._serve_walk_in(peer.host, stream)
                case _:
                    assert_never(peer.role)

    async def _serve_walk_in(self, host: HostName, stream: FramedStream) -> None:
        """It asks what its daemon needs, and hangs up; then that daemon comes."""
        message = await self._first_word(stream)
        if message == AskBootstrap(host):
            stream.send(self._desk.introduce_walk_in(host))
        else:
            await self._serve_daemon(host, stream, message)

    @staticmethod
    async def _first_word(stream: FramedStream) -> Message:
        async with asyncio.timeout(FIRST_WORD_S):
            return await stream.receive()

    async def _serve_daemon(self, host: HostName, stream: FramedStream, hello: Message) -> None:
        if not isinstance(hello, HostHello) or hello.host != host:
            raise RemoteProtocolError(f"host {host}: expected its hello, got {type(hello).__name__}")
        if host in self._streams:
            reason = f"host {host} has already joined this run; another machine needs another name"
            stream.send(StopHost(reason, 0.0))
            detail = f"{host} refused, at {hello.address}: {reason}"
            self._events.add(act.Record("join_refused", act.Severity.WARNING, detail, {"host": host}))
            return
        self._streams[host], self._hellos[host] = stream, hello
        self._told_to_leave.discard(host)
        for rank in self._core.membership.on_host(host):
            self._logs.rebase(rank)
        reason = "closed"
        try:
            await self._driver.put(ev.HostSaid(host, hello))
            self._roster.joined(host)
            while True:
                message = await stream.receive()
                if self._streams.get(host) is not stream:
                    return  # it was dropped; what it said before that is of no interest any more
                await self._take(host, message)  # type: ignore[arg-type]  # FromWalkIn, by vocabulary
        except (PeerLost, ProtocolError) as error:
            reason = str(error)
            _log.info("host %s: %s", host, error)
        finally:
            if self._streams.get(host) is stream:
                self._forget(host)
                self._driver.post(ev.HostDropped(host, reason))

    async def _take(self, host: HostName, message: FromWalkIn) -> None:
        match message:
            case HostHello() | AskBootstrap():
                raise RemoteProtocolError(f"host {host} said {type(message).__name__} in the middle of its talk")
            case (
                Beat(speaker) | HostStopped(speaker) | StopWanted(speaker) | LeaveWanted(speaker) | PortPicked(speaker)
            ) if speaker != host:
                raise RemoteProtocolError(f"host {host} spoke for host {speaker}")
            case LogChunk(rank, name, offset, data):
                if self._host_of(rank) == host:
                    self._logs.append(rank, name, offset, data)
            case StoreRequest(rank):
                if self._host_of(rank) == host and rank in self._core.membership.live:
                    self._reply(self._store.handle(rank, message, self._clock.now_s()))
            case _:
                await self._driver.put(ev.HostSaid(host, message))

    def _forget(self, host: HostName) -> None:
        del self._streams[host], self._hellos[host]
        self._roster.left(host)
        self._bulk.drop(host)

    async def _serve_head(self, stream: FramedStream) -> None:
        head = self._head
        if head is None or self._head_stream is not None:
            raise RemoteProtocolError("a second head: this run has one already" if head else "a head of a plain run")
        self._head_stream = stream
        try:
            while True:
                await self._driver.put(ev.HeadSaid(await stream.receive()))  # type: ignore[arg-type]  # FromHead
        except (PeerLost, ProtocolError) as error:
            _log.info("%s", error)
            head.disconnected()
        finally:
            self._head_stream = None

    async def _serve_client(self, stream: FramedStream) -> None:
        message = await self._first_word(stream)
        reply, event = self._desk.answer(message)  # type: ignore[arg-type]  # FromClient, by vocabulary
        if event is not None:
            await self._driver.put(event)
        stream.send(reply)

    async def _on_bulk(self, peer: Peer, line: Line) -> None:
        """A bulk connection takes part once it has said the very hello of a host that has joined."""
        if peer.role not in (Role.DAEMON, Role.WALK_IN):
            line.sock.close()
            raise RemoteProtocolError(f"a bulk connection of role {peer.role}")
        link = self._bulk.link(peer.host, line.sock, line.tls)
        try:
            hello = await asyncio.to_thread(link.greeting, FIRST_WORD_S)
            async with asyncio.timeout(FIRST_WORD_S):
                await self._roster.until_joined(peer.host)
            if hello != self._hellos.get(peer.host) or not self._bulk.attach(link):
                raise RemoteProtocolError(f"host {peer.host}: a bulk connection that is not its daemon's")
        except BaseException:
            link.close()
            raise

    def _note_refused(self, where: str, reason: str) -> None:
        self._events.add(act.Record("peer_refused", act.Severity.WARNING, f"{where} {reason}", {}))

    # ----------------------------------------------------------------------------------------------------- actions
    def _execute(self, action: act.JobAction) -> None:
        match action:
            case act.SendHost(host, message):
                self._send_host(host, message)
            case act.SendHead(message):
                self._send_head(message)
            case act.DropHost(host):
                self._drop_host(host)
            case act.RestoreHost(host):
                self._restore(host)
            case act.OpenReduction(key, hosts, layout, bf16):
                self._bulk.open_sum(key, hosts, layout, bf16)
            case act.CloseReduction(key):
                self._bulk.close_sum(key)
            case act.ResetStore():
                self._reply(self._store.clear_prefix(""))
            case act.ReceiveState():
                self._final.want(action)
            case act.TryPlace(stem, resume_from):
                self._saves.try_place(stem, resume_from)
            case act.OpenSave(_, host):
                self._saves.open(action, self._versions(host))
            case act.DropSave(transfer):
                self._saves.drop(transfer)
            case act.ReadBundle(stem):
                self._saves.read(stem)
            case act.SendBundle(transfer, hosts):
                self._saves.send(transfer, hosts)
            case act.StopHead(grace_s):
                if self._head is not None:
                    self._spawn(self._head.stop(grace_s, is_told=self._head_stream is not None))
            case act.WatchHead(grace_s):
                if self._head is not None:
                    self._spawn(self._head.watch(grace_s, self._note_frozen_head))
            case act.Record():
                self._events.add(action)
            case act.EndRun(outcome):
                self._outcome = outcome
                self._driver.stop()
            case _:
                assert_never(action)

    def _send_host(self, host: HostName, message: ToDaemon) -> None:
        if isinstance(message, SendState) and not message.whole:  # the final state; a save expects its own
            self._final.expect(host, message.transfer)
        if host in self._streams:
            self._streams[host].send(message)
        if isinstance(message, StopHost):
            self._told_to_leave.add(host)

    def _drop_host(self, host: HostName) -> None:
        stream = self._streams.get(host)
        if stream is None:
            return
        self._forget(host)
        if host in self._told_to_leave:
            self._spawn(stream.close(FAREWELL_S))
        else:
            stream.abort()

    def _restore(self, host: HostName) -> None:
        assert self._tasks is not None
        search = self._tasks.create_task(self._roster.restore(host, lambda: not self._core.refusal(host)))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)

    def _send_head(self, message: ToHead) -> None:
        if self._head_stream is not None:
            self._head_stream.send(message)

    def _note_frozen_head(self, detail: str) -> None:
        self._events.add(act.Record("head_frozen", act.Severity.WARNING, detail, {}))

    def _versions(self, host: HostName) -> dict[str, str]:
        """What a checkpoint is made with there, for its meta file."""
        hello = self._hellos.get(host)
        return {} if hello is None else {"flodl": hello.flodl, "python": hello.python, "torch": hello.torch}

    def _reply(self, replies: list[tuple[RankId, Any]]) -> None:
        for rank, reply in replies:
            stream = self._streams.get(self._host_of(rank))
            if stream is not None:
                stream.send(reply)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    # ------------------------------------------------------------------------------------------------------- state
    def state(self) -> dict[str, Any]:
        """state.json."""
        view = snapshot(self._core, self._clock.now_s())
        outcome = None if self._outcome is None else dataclasses.asdict(self._outcome)
        if outcome is not None:
            view["phase"] = {"completed": "done"}.get(outcome["status"], outcome["status"])
        named = {"run_id": self._spec.run_id, "name": self._spec.name, **view, "head": self._view_of_head()}
        return dict(strict({**named, "outcome": outcome}))

    def _view_of_head(self) -> dict[str, Any] | None:
        script = None if self._head is None else self._head.script
        if script is None:
            return None
        state = "frozen" if script.is_frozen else "alive" if script.is_alive else "gone"
        return {"pid": script.pid, "state": state}

    async def _expire_rendezvous(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            self._reply(self._store.expire(self._clock.now_s()))

    async def _write_state(self) -> None:
        """Keep state.json on disk, for whoever looks when we are gone."""
        while True:
            self._save_state()
            await asyncio.sleep(STATE_EVERY_S)

    def _save_state(self) -> None:
        try:
            self._run.write("state.json", json.dumps(self.state(), allow_nan=False))
            self._is_state_written = True
        except OSError as error:
            level = logging.WARNING if self._is_state_written else logging.DEBUG
            self._is_state_written = False
            _log.log(level, "state.json cannot be written: %s", error)

    def _save_outcome(self, outcome: act.Outcome) -> None:
        try:
            self._run.write("outcome.json", json.dumps(strict(dataclasses.asdict(outcome)), indent=1))
        except OSError as error:
            _log.error("outcome.json cannot be written: %s", error)

    async def _finish(self) -> None:
        """The outcome to disk, the last lines to whoever follows."""
        assert self._outcome is not None
        self._events.end()
        self._logs.end()
        self._run.release_reserve()
        self._save_outcome(self._outcome)
        self._save_state()
        _log.info("run %s: exit code %d %s", self._outcome.status, self._outcome.exit_code, self._outcome.message)
        if self._head_stream is not None:
            await self._head_stream.close(FAREWELL_S)  # a head that is not ours to end has its result to read
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._http.until_read(), LAST_READERS_S)


def _addresses(sockets: list[socket.socket]) -> list[str]:
    return [str(sock.getsockname()[0]) for sock in sockets]
