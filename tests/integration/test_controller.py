"""The controller as a real process, with daemons played by the test: who may say what, and every way to its end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flodl.errors import JoinRefused
from flodl.launch import rundir
from flodl.launch.bootstrap import Bootstrap, Liveness
from flodl.launch.control import ControllerClient
from flodl.launch.document import dump, load
from flodl.launch.plan import HostKind, HostPlan, JoinPlan, PlainPlan, RunSpec
from flodl.launch.rundir import RunDir
from flodl.messages import (
    AskBootstrap,
    Beat,
    BootstrapGiven,
    Device,
    Heard,
    HostHello,
    HostStopped,
    LeaveWanted,
    LogChunk,
    Message,
    PickPort,
    PortPicked,
    RankExited,
    SpawnRanks,
    StopHost,
    StopRanks,
    StoreReply,
    StoreRequest,
    ToClient,
    ToDaemon,
    ToHead,
)
from flodl.runtime.blocking import BlockingFrames
from flodl.runtime.dial import Controller, Identity, connect_bulk, connect_control
from flodl.runtime.streams import ConnectionLost, FramedStream
from flodl.wire.handshake import Role, derive_host_secret, derive_join_secret

LIMIT_S = 60.0 * float(os.environ.get("FLODL_TEST_TIME_FACTOR", "1"))
JOIN_TOKEN = bytes(range(1, 33))
FAKE_DAEMON = "#!/bin/sh\nprintf '\\nFDL1 ready run-1\\n'\nexec sleep 600\n"


class Site:
    """A controller for the hosts node-a and node-b, whose started daemons do nothing."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        fake = folder / "fake python"
        fake.write_text(FAKE_DAEMON)
        fake.chmod(0o755)
        self.run: RunDir = rundir.create("run-1")
        join_file = folder / "join.token"
        rundir.write_token_file(join_file, JOIN_TOKEN)
        hosts = tuple(
            HostPlan(name, HostKind.LOCAL, ("cpu",), str(fake), str(folder), ()) for name in ("node-a", "node-b")
        )
        spec = RunSpec(
            schema=1,
            run_id="run-1",
            name="test",
            created_s=0.0,
            bind_host="127.0.0.1",
            port=0,
            advertise="",
            python=sys.executable,
            cwd=str(folder),
            script=("nothing.py",),
            env={},
            hosts=hosts,
            liveness=changes.pop("liveness", Liveness()),
            on_disconnect_s=30.0,
            stop_timeout_s=0.2,
            join=JoinPlan(token_file=str(join_file), elastic=changes.pop("elastic", True)),
            spawns_head=False,
            plain=changes.pop("plain", None),
        )
        assert not changes
        self.run.write("run.json", dump(spec))
        log_path = self.run.logs / "controller.log"
        log_path.touch(0o600)
        with log_path.open("ab") as log:
            argv = [sys.executable, "-P", "-m", "flodl.controller", str(self.run.path)]
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def clear(self) -> None:
        """End it and the daemons it started, whatever they do."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (controller := psutil.Process(self.process.pid)).children():
                process.kill()
            controller.kill()
        self.process.wait(LIMIT_S)

    @property
    def log(self) -> str:
        return (self.run.logs / "controller.log").read_text()

    async def until(self, predicate: Callable[[], Any]) -> Any:
        """Its first truthy value."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not (value := predicate()):
                    await asyncio.sleep(0.01)
                return value
        except TimeoutError:
            raise AssertionError(self.log) from None

    async def client(self) -> ControllerClient:
        return ControllerClient.of(self.run, await self.until(self.run.controller))

    async def state(self) -> dict[str, Any]:
        return await asyncio.to_thread((await self.client()).state)

    async def stop(self, *, abort: bool = True) -> None:
        await asyncio.to_thread((await self.client()).stop, "a test", abort=abort, exit_code=130)

    async def outcome(self) -> dict[str, Any]:
        """The outcome, once the controller has ended."""
        await self.until(lambda: self.process.poll() is not None)
        return json.loads((self.run.path / "outcome.json").read_text())

    async def daemon(self, host: str, *, hello: bool = True, connect: bool = True) -> "FakeDaemon":
        info = await self.until(self.run.controller)
        made = FakeDaemon(host, Controller(info.address, info.port), self.run.read_token())
        if not connect:
            return made
        await made.connect()
        if hello:
            made.say(made.hello)
        return made

    async def walk_in(self, host: str, *, run_id: str = "run-1", name: str = "") -> "FakeDaemon":
        """One with the join secret of ``host``, which may call itself ``name``."""
        made = await self.daemon(host, connect=False)
        made.identity = Identity(run_id, derive_join_secret(JOIN_TOKEN, host), Role.WALK_IN, name or host)
        await made.connect()
        return made

    async def cohort(self) -> tuple["FakeDaemon", "FakeDaemon"]:
        """Both hosts have joined and been told to spawn: rank 0 on node-a, rank 1 on node-b."""
        a, b = await self.daemon("node-a"), await self.daemon("node-b")
        for host, rank in ((a, 0), (b, 1)):
            order = await host.hear(SpawnRanks)
            assert [spec.rank for spec in order.ranks] == [rank]
        return a, b


class FakeDaemon:
    def __init__(self, host: str, controller: Controller, token: bytes) -> None:
        self.host, self._controller = host, controller
        self.identity = Identity("run-1", derive_host_secret(token, host), Role.DAEMON, host)
        self.hello = HostHello(
            host, os.getpid() + id(self) % 1000, host, "127.0.0.1", (Device("cpu", 0),), 1, "", "", ""
        )
        self.stream: FramedStream | None = None

    async def connect(self) -> None:
        self.stream, _ = await connect_control(self._controller, self.identity, ToDaemon | ToClient)

    async def bulk(self, hello: HostHello | None = None) -> socket.socket:
        line, _ = await connect_bulk(self._controller, self.identity)
        BlockingFrames(line.sock, "controller", ToDaemon, line.tls).send(hello or self.hello)
        return line.sock

    def say(self, message: Message) -> None:
        assert self.stream is not None
        self.stream.send(message)

    async def hear(self, kind: type[Any]) -> Any:
        """The next message of a kind."""
        assert self.stream is not None
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(message := await self.stream.receive(), kind):
                pass
            return message

    async def is_heard(self) -> bool:
        """Whether the controller still listens to it."""
        self.say(Beat(self.host, ()))
        try:
            await self.hear(Heard)
        except ConnectionLost:
            return False
        return True


async def is_cut(sock: socket.socket) -> bool:
    sock.setblocking(False)
    async with asyncio.timeout(LIMIT_S):
        try:
            return not await asyncio.get_running_loop().sock_recv(sock, 1)
        except ConnectionResetError:
            return True
        finally:
            sock.close()


At = Callable[..., Any]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> At:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))

    def run(scenario: Callable[[Site], Awaitable[Any]], **changes: Any) -> Any:
        site = Site(tmp_path, **changes)

        async def bounded() -> Any:
            async with asyncio.timeout(2 * LIMIT_S):
                return await scenario(site)

        try:
            return asyncio.run(bounded())
        finally:
            site.clear()

    return run


# ----------------------------------------------------------------------------------------------------------- walk-ins
def test_a_walk_in_asks_comes_and_is_a_host_like_any_other(at: At) -> None:
    async def scenario(site: Site) -> None:
        asking = await site.walk_in("node-a", run_id="")
        asking.say(AskBootstrap("node-a"))
        given = load(Bootstrap, (await asking.hear(BootstrapGiven)).document)
        assert (given.run_id, given.secret, given.is_walk_in) == ("run-1", "", True)
        a = await site.walk_in("node-a")
        a.say(a.hello)
        assert await a.is_heard()
        (await a.bulk()).close()
        assert [host["host"] for host in (await site.state())["hosts"]] == ["node-a"]

    at(scenario)


def test_a_walk_in_speaks_for_its_own_host_and_in_its_turn(at: At) -> None:
    async def scenario(site: Site) -> None:
        for words in [
            (AskBootstrap("node-b"),),
            (Beat("node-a", ()),),
            ((await site.daemon("node-b", connect=False)).hello,),
        ]:
            liar = await site.walk_in("node-a")
            for word in words:
                liar.say(word)
            assert not await liar.is_heard(), words
        for late in (AskBootstrap("node-a"), LeaveWanted("node-b", "nobody")):
            a = await site.walk_in("node-a")
            a.say(a.hello)
            assert await a.is_heard()
            a.say(late)
            assert not await a.is_heard(), late
        assert site.process.poll() is None

    at(scenario)


def test_a_walk_in_with_another_hosts_secret_or_of_another_run_is_turned_away(at: At) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(JoinRefused) as refused:
            await site.walk_in("node-a", name="node-b")
        assert refused.value.is_wrong_token
        with pytest.raises(JoinRefused, match="run-0 is not served here") as refused:
            await site.walk_in("node-a", run_id="run-0")
        assert not refused.value.is_wrong_token
        await site.until(lambda: "says it is walk-in node-b, was refused" in site.log)
        assert derive_join_secret(JOIN_TOKEN, "node-a").hex() not in site.log

    at(scenario)


# ---------------------------------------------------------------------------------------------------- who says what
def test_the_first_word_must_be_the_hosts_own_hello(at: At) -> None:
    async def scenario(site: Site) -> None:
        a = await site.daemon("node-a", hello=False)
        a.say(Beat("node-a", ()))
        assert not await a.is_heard()
        a = await site.daemon("node-a", hello=False)
        a.say((await site.daemon("node-b", hello=False)).hello)
        assert not await a.is_heard()
        assert (await site.state())["hosts"] == []

    at(scenario)


def test_a_second_daemon_of_a_host_is_sent_away_and_takes_nothing(at: At) -> None:
    async def scenario(site: Site) -> None:
        first = await site.daemon("node-a")
        assert await first.is_heard()
        mine = await first.bulk()
        second = await site.daemon("node-a")
        assert "already joined" in (await second.hear(StopHost)).reason
        assert await is_cut(await second.bulk())
        assert await first.is_heard()
        assert await is_cut(await first.bulk())  # a second one of its own neither
        mine.setblocking(False)
        with pytest.raises(BlockingIOError):
            mine.recv(1)
        mine.close()

    at(scenario)


def test_a_bulk_connection_that_comes_before_its_hello_waits_for_it(at: At) -> None:
    async def scenario(site: Site) -> None:
        a = await site.daemon("node-a", hello=False)
        mine, strange = await a.bulk(), await a.bulk((await site.daemon("node-b", hello=False)).hello)
        a.say(a.hello)
        assert await is_cut(strange)
        assert await a.is_heard()
        mine.setblocking(False)
        with pytest.raises(BlockingIOError):
            mine.recv(1)
        mine.close()

    at(scenario)


@pytest.mark.parametrize("word", ["beat", "stopped", "port", "hello"])
def test_a_host_cannot_speak_for_another(at: At, word: str) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.daemon("node-a"), await site.daemon("node-b", hello=False)
        assert await a.is_heard()
        words = {
            "beat": Beat("node-b", ()),
            "stopped": HostStopped("node-b", ""),
            "port": PortPicked("node-b", 1, 1, "", False, ""),
            "hello": b.hello,
        }
        a.say(words[word])
        assert not await a.is_heard()
        b.say(b.hello)
        assert await b.is_heard()

    at(scenario)


def test_a_host_speaks_only_for_its_own_ranks(at: At) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.cohort()
        b.say(LogChunk(0, "stdout", 0, b"forged\n"))
        b.say(LogChunk(-1, "stdout", 0, b"forged\n"))
        b.say(LogChunk(1, "../../stdout", 0, b"forged\n"))
        b.say(StoreRequest(0, 1, "set", ("k",), (b"v",), 0))
        b.say(LogChunk(1, "stdout", 0, b"mine\n"))
        assert await b.is_heard()
        assert sorted(path.name for path in site.run.logs.glob("*.std*")) == ["rank1.stdout.log"]
        a.say(StoreRequest(0, 2, "get", ("k",), (), 0))
        assert await a.is_heard()  # and no StoreReply: nobody is live yet
        assert not await _hears(b, StoreReply)

    at(scenario)


async def _hears(host: FakeDaemon, kind: type[Any]) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await host.hear(kind)
            return True
    return False


def test_a_plain_run_has_no_head_and_starts_its_ranks_again(at: At) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.daemon("node-a"), await site.daemon("node-b")
        for restart in range(2):
            asked = await a.hear(PickPort)
            a.say(PortPicked("node-a", asked.start, 29400 + restart, "", False, ""))
            for host in (a, b):
                order = await host.hear(SpawnRanks)
                assert (order.plain.restart, order.plain.master_port) == (restart, 29400 + restart)
            assert (await site.state())["phase"] == "running"
            if restart == 0:
                b.say(RankExited(1, 3, 0, False))
                await a.hear(StopRanks)
                a.say(RankExited(0, 0, 15, True))
        info = site.run.controller()
        assert info is not None
        head = Identity("run-1", site.run.read_token(), Role.HEAD, "here")
        stream, _ = await connect_control(Controller(info.address, info.port), head, ToHead)
        with pytest.raises(ConnectionLost):
            await stream.receive()
        await stream.close()
        for host, rank in ((a, 0), (b, 1)):
            host.say(RankExited(rank, 0, 0, False))
        for host in (a, b):
            await host.hear(StopHost)
            host.say(HostStopped(host.host, "told"))
        found = await site.outcome()
        assert (found["status"], found["exit_code"], len(found["losses"])) == ("completed", 0, 1)

    at(scenario, plain=PlainPlan(1))


def test_a_stranger_hears_why_it_may_not_join(at: At) -> None:
    async def scenario(site: Site) -> None:
        stranger = await site.daemon("node-x")
        assert "not in this run's roster" in (await stranger.hear(StopHost)).reason
        with pytest.raises(ConnectionLost):
            await stranger.hear(StopHost)

    at(scenario, elastic=False)


def test_a_silent_host_is_cut_off(at: At) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.cohort()
        beating = asyncio.create_task(_beat(b))
        with pytest.raises(ConnectionLost):
            await a.hear(StopHost)
        events = (site.run.path / "events.jsonl").read_text()
        assert "silent for" in events
        beating.cancel()

    at(scenario, liveness=Liveness(0.2, 0.5, 1.5, 300.0))


async def _beat(host: FakeDaemon) -> None:
    while True:
        host.say(Beat(host.host, ()))
        await asyncio.sleep(0.2)


# -------------------------------------------------------------------------------------------------------------- end
def test_an_abort_ends_with_followers_and_leaves_whole_files_and_a_free_port(at: At) -> None:
    async def scenario(site: Site) -> None:
        client = await site.client()
        info = site.run.controller()
        assert info is not None
        a, b = await site.cohort()
        b.say(LogChunk(1, "stdout", 0, b"a line\nlast words"))
        assert await b.is_heard()
        lines: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []
        following = asyncio.gather(
            asyncio.to_thread(lambda: lines.extend(client.follow("/logs", {"follow": 1}))),
            asyncio.to_thread(lambda: events.extend(client.follow("/events", {"follow": 1}))),
        )
        await site.until(lambda: lines and events)
        idle = socket.create_connection((info.address, info.port))
        await site.stop()
        for host in (a, b):
            await host.hear(StopHost)
            host.say(HostStopped(host.host, "done"))
        outcome = await site.outcome()
        assert (outcome["status"], outcome["exit_code"]) == ("stopped", 130)
        assert site.process.returncode == 0, site.log
        await following
        assert [line["text"] for line in lines] == ["a line", "last words"]
        assert "stop_requested" in [line["event"] for line in events]
        assert json.loads((site.run.path / "state.json").read_text())["phase"] == "stopped"
        assert {path.stat().st_mode & 0o077 for path in site.run.path.rglob("*")} == {0}
        assert not list(site.run.path.glob(".*"))
        idle.close()
        with socket.create_server((info.address, info.port)):
            pass

    at(scenario)


@pytest.mark.parametrize("phase", ["waiting", "staging"])
def test_sigterm_stops_in_order_in_every_phase(at: At, phase: str) -> None:
    async def scenario(site: Site) -> None:
        await site.client()
        hosts = await site.cohort() if phase == "staging" else ()
        assert (await site.state())["phase"] == phase
        site.process.send_signal(signal.SIGTERM)
        for host in hosts:
            await host.hear(StopHost)
            host.say(HostStopped(host.host, "done"))
        outcome = await site.outcome()
        assert (outcome["status"], outcome["exit_code"], site.process.returncode) == ("stopped", 143, 0)

    at(scenario)


def test_a_sighup_changes_nothing(at: At) -> None:
    async def scenario(site: Site) -> None:
        await site.client()
        site.process.send_signal(signal.SIGHUP)
        await site.until(lambda: "SIGHUP" in site.log)
        assert (await site.state())["phase"] == "waiting"

    at(scenario)


def test_hosts_that_do_not_answer_the_stop_do_not_hold_it_up_for_ever(at: At) -> None:
    async def scenario(site: Site) -> None:
        await site.cohort()
        await site.stop()
        outcome = await site.outcome()
        assert outcome["exit_code"] == 130

    at(scenario)
