"""A controller's desk without a core: it listens, keeps what a daemon says, and says what a test tells it to."""

import asyncio
import contextlib
import dataclasses
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from flodl.launch.bootstrap import Bootstrap, Liveness
from flodl.launch.local import LocalDaemon, start_local
from flodl.launch.plan import HostKind, HostPlan
from flodl.messages import Beat, Device, Heard, HostHello, LogChunk, Message, PlainGroup, RankSpec, SpawnRanks
from flodl.runtime.certificate import Security
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.line import Line
from flodl.runtime.mux import Handlers, PortMux, Run
from flodl.runtime.ports import listen, port_of
from flodl.runtime.streams import ConnectionLost, FramedStream
from flodl.wire.handshake import Peer, derive_host_secret

T = TypeVar("T", bound=Message)
TOKEN = bytes(range(32))
LIMIT_S = 60.0 * float(os.environ.get("FLODL_TEST_TIME_FACTOR", "1"))


class Desk:
    """Made by ``desk``; ``start`` starts a real daemon under its warden."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[Message] = []
        self.heard_s: list[float] = []
        """When each beat came."""
        self.answers_beats = True
        self.stream: FramedStream | None = None
        self.bulk: socket.socket | None = None
        self.output: dict[tuple[int, str], bytearray] = {}
        self.sockets = listen("127.0.0.1", 0)
        self.daemon: LocalDaemon | None = None
        self._news = asyncio.Event()

    async def start(self, script: str, devices: tuple[str, ...] = ("cpu",), **changes: Any) -> HostHello:
        """Start a daemon whose ranks run ``script``; returns its hello. ``changes`` are fields of the bootstrap."""
        path = self.folder / "script.py"
        path.write_text(script)
        given = Bootstrap(
            run_id="run-1",
            secret=derive_host_secret(TOKEN, "node-a").hex(),
            controllers=(f"127.0.0.1:{port_of(self.sockets)}",),
            host="node-a",
            devices=devices,
            script=(str(path),),
            cwd=str(self.folder),
            env={},
            python=sys.executable,
            liveness=Liveness(heartbeat_s=0.2),
            on_disconnect_s=30.0,
            stop_timeout_s=1.0,
        )
        host = HostPlan("node-a", HostKind.LOCAL, devices, sys.executable, str(self.folder), ())
        self.daemon = await start_local(host, dataclasses.replace(given, **changes), self.folder / "daemon.log")
        hello = await self.until_said(HostHello)
        await self.until(lambda: self.bulk is not None)
        return hello

    def send(self, message: Message) -> None:
        assert self.stream is not None
        self.stream.send(message)

    def spawn(self, count: int = 1, restart: int | None = None) -> None:
        """``restart``: ranks of a plain run, started for so many times before."""
        specs = tuple(RankSpec(rank, rank, Device("cpu", rank)) for rank in range(count))
        plain = None if restart is None else PlainGroup("127.0.0.1", 29400, 0, 1, restart, 3, ())
        self.send(SpawnRanks(count, specs, plain))

    async def until(self, predicate: Callable[[], Any]) -> None:
        """Return when something has come after which ``predicate`` holds."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not predicate():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            log = (self.folder / "daemon.log").read_text() if (self.folder / "daemon.log").exists() else ""
            said = [word for word in self.said if not isinstance(word, Beat)]
            raise AssertionError(f"said: {said}\noutput: {str(self.output)[:2000]}\n{log}") from None

    async def until_said(self, kind: type[T], count: int = 1) -> T:
        """The ``count``-th message of a kind."""
        await self.until(lambda: len(self.all_said(kind)) >= count)
        return self.all_said(kind)[count - 1]

    def all_said(self, kind: type[T]) -> list[T]:
        return [word for word in self.said if isinstance(word, kind)]

    def text(self, rank: int = 0, stream: str = "stdout") -> str:
        return self.output.get((rank, stream), bytearray()).decode()

    async def until_text(self, text: str, rank: int = 0, stream: str = "stdout") -> str:
        await self.until(lambda: text in self.text(rank, stream))
        return self.text(rank, stream)

    async def end(self) -> int:
        """The daemon's exit code, once it has ended."""
        assert self.daemon is not None
        async with asyncio.timeout(LIMIT_S):
            code = (await self.daemon.wait()).code
        assert code is not None
        return code

    def pids(self) -> tuple[int, int]:
        """Of the warden and the daemon."""
        assert self.daemon is not None
        warden = psutil.Process(self.daemon._process.pid)
        return warden.pid, warden.children()[0].pid

    async def on_control(self, peer: Peer, stream: FramedStream) -> None:
        self.stream = stream
        async with stream:
            while True:
                try:
                    self._keep(await stream.receive())
                except ConnectionLost:
                    self._news.set()
                    return

    async def on_bulk(self, peer: Peer, line: Line) -> None:
        self.bulk = line.sock
        self._news.set()

    async def on_http(self, line: Line) -> None:
        line.sock.close()

    def _keep(self, message: Message) -> None:
        if isinstance(message, LogChunk):
            key = (message.rank, message.stream)
            output = self.output.setdefault(key, bytearray())
            assert message.offset == len(output)
            output += message.data
        else:
            self.said.append(message)
        if isinstance(message, Beat):
            self.heard_s.append(time.monotonic())
            if self.answers_beats:
                self.send(Heard())
        self._news.set()


@contextlib.asynccontextmanager
async def desk(folder: Path) -> AsyncIterator[Desk]:
    made = Desk(folder)
    handlers = Handlers(made.on_control, made.on_bulk, made.on_http, made.on_http)
    mux = PortMux(made.sockets, Run("run-1", TOKEN), handlers, MonotonicClock(), Security())
    serving = asyncio.create_task(mux.serve())
    try:
        yield made
    finally:
        if made.daemon is not None:
            await made.daemon.close()
        serving.cancel()
        await asyncio.wait([serving])
        for sock in (*made.sockets, *((made.bulk,) if made.bulk else ())):
            sock.close()
