"""The managed daemon on loopback, as ``fdl daemon run``: one run after another, and every way in which it stops."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flodl.checkpoint.reader import find
from flodl.config.tls import TlsMode
from flodl.core.position import SaveReason
from flodl.launch import rundir
from flodl.messages import Declined
from flodl.runtime.certificate import security_of
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.mux import Handlers, PortMux, Run
from flodl.runtime.ports import listen
from flodl.runtime.streams import FramedStream
from flodl.wire.handshake import Peer, derive_join_secret
from tests.runs import BIN, DDP, END_S, START_S, Fdl, Launched

pytestmark = pytest.mark.timeout(240)

JOIN_TOKEN = secrets.token_bytes(32)
MANAGED = "{host: node-m, daemon: managed, local_devices: [cpu]}"
LOCAL = "{host: localhost, local_devices: [cpu]}"
CLUSTER = """\
cluster:
  controller: {{host: 127.0.0.1, port: {port}}}
  workers: [{workers}]
  security: {{tls: on}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Managed:
    """One ``fdl daemon run`` as node-m, or ``fdl join --persist``."""

    def __init__(self, fdl: Fdl, command: tuple[str, ...], arguments: tuple[object, ...], secret: bytes) -> None:
        self._fdl = fdl
        self._err_path = fdl.folder / f"managed-{secrets.token_hex(4)}.err"
        token = fdl.folder / f"{self._err_path.stem}.token"
        rundir.write_token_file(token, secret)
        common = ["--host", "node-m", "--tls", "on", "--token-file", token]
        with self._err_path.open("wb") as err:
            self.process = subprocess.Popen(
                [str(BIN / "fdl"), *command, *map(str, (*common, *arguments))],
                env=fdl.env,
                cwd=fdl.folder,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
            )

    @property
    def said(self) -> str:
        return self._err_path.read_text(errors="replace")

    def wait_for_text(self, text: str, times: int = 1) -> None:
        self._fdl.wait_until(lambda: self.said.count(text) >= times, START_S, lambda: f"{text!r} in\n{self.said}")

    def wait(self) -> int:
        self._fdl.wait_until(lambda: self.process.poll() is not None, END_S, lambda: self.said)
        return int(self.process.returncode)

    def runs_daemon_pid(self) -> int:
        """Of the daemon under its warden that serves a run now."""
        (warden,) = psutil.Process(self.process.pid).children()
        return int(warden.children()[0].pid)

    def wait_until_alone(self) -> None:
        """Nothing runs below it."""
        me = psutil.Process(self.process.pid)
        self._fdl.wait_until(lambda: not me.children(recursive=True), END_S, lambda: self.said)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


class Lab:
    """A port, a join token of this user's, and what was started."""

    def __init__(self, fdl: Fdl) -> None:
        self.fdl, self.port = fdl, free_port()
        self._started: list[Managed] = []
        state = Path(fdl.env["FDL_STATE_HOME"])
        state.mkdir()
        rundir.write_token_file(state / "join.token", JOIN_TOKEN)

    def daemon(
        self, *arguments: object, command: tuple[str, ...] = ("daemon", "run"), secret: bytes | None = None
    ) -> Managed:
        own = secret or derive_join_secret(JOIN_TOKEN, "node-m")
        daemon = Managed(self.fdl, (*command, f"127.0.0.1:{self.port}"), arguments, own)
        self._started.append(daemon)
        return daemon

    def cluster(self, *workers: str) -> Path:
        path = self.fdl.folder / "fdl.cluster.yml"
        path.write_text(CLUSTER.format(port=self.port, workers=", ".join(workers)))
        return path

    def launch(self, *workers: str, **flags: object) -> Launched:
        path = self.cluster(*workers)
        given: dict[str, object] = {"mode": "cpu_cadence", "size": 403, "batch_size": 4, "epochs": 10_000}
        return self.fdl.job(options=("-c", path), **{**given, "step_ms": 10, **flags})

    def down(self) -> None:
        for daemon in self._started:
            daemon.end()


@pytest.fixture
def lab(fdl: Fdl) -> Iterator[Lab]:
    made = Lab(fdl)
    yield made
    made.down()


@pytest.mark.long
def test_one_daemon_serves_one_run_after_another_and_outlives_a_killed_controller(lab: Lab) -> None:
    daemon = lab.daemon()
    daemon.wait_for_text("waiting for a controller")

    lost = lab.launch(MANAGED)
    lost.wait_for_training()
    lost.kill("controller")
    lost.wait()
    daemon.wait_until_alone()
    daemon.wait_for_text("waiting for a controller", times=2)

    run = lab.launch(MANAGED, epochs=1)
    assert run.wait() == 0, run.story() + daemon.said
    daemon.wait_until_alone()
    assert daemon.process.poll() is None
    assert f"serving run {run.run_id}: 1 rank" in daemon.said
    assert JOIN_TOKEN.hex() not in daemon.said + run.story()

    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0


async def be_a_controller(port: int, join_token: bytes) -> None:
    """Listen like a run that takes walk-ins, until one has been turned down: told so, or refused for its token."""
    met = asyncio.Event()

    async def decline(_: Peer, stream: FramedStream) -> None:
        async with stream:
            await stream.receive()
            stream.send(Declined("not now", is_early=False))
            await stream.close()
        met.set()

    async def refuse(*_: Any) -> None:
        raise AssertionError("only a question comes here")

    handlers = Handlers(decline, refuse, refuse, refuse, lambda *_: met.set())
    sockets = listen("127.0.0.1", port)
    run = Run("run-1", secrets.token_bytes(32), join_token)
    security = security_of(TlsMode.ON, ["127.0.0.1"])
    serving = asyncio.create_task(PortMux(sockets, run, handlers, MonotonicClock(), security).serve())
    try:
        async with asyncio.timeout(START_S):
            await met.wait()
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        for sock in sockets:
            sock.close()


def test_daemon_that_was_let_in_once_waits_out_somebody_elses_controller(lab: Lab) -> None:
    daemon = lab.daemon()

    asyncio.run(be_a_controller(lab.port, JOIN_TOKEN))
    daemon.wait_for_text("not now")
    asyncio.run(be_a_controller(lab.port, secrets.token_bytes(32)))
    daemon.wait_for_text("or this is another user's run")
    asyncio.run(be_a_controller(lab.port, JOIN_TOKEN))
    daemon.wait_for_text("not now", times=2)

    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0, daemon.said


@pytest.mark.long
def test_host_that_is_stopped_leaves_its_run_in_order_and_the_run_goes_on(lab: Lab) -> None:
    daemon = lab.daemon(command=("join", "--persist"))
    run = lab.launch(LOCAL, MANAGED)
    run.wait_for_training(2)

    daemon.process.send_signal(signal.SIGTERM)

    assert daemon.wait() == 0, daemon.said
    run.wait_for_event("host_left")
    assert (run.events("rank_lost"), run.events("host_lost")) == ([], [])
    before = len(run.commits())
    lab.fdl.wait_until(lambda: len(run.commits()) > before, START_S, run.story)
    assert lab.fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)


@pytest.mark.long
def test_run_that_cannot_spare_a_host_which_is_stopped_saves_and_stops(lab: Lab, tmp_path: Path) -> None:
    daemon = lab.daemon()
    run = lab.launch(MANAGED, save=tmp_path / "run")
    run.wait_for_training(2)

    os.kill(daemon.runs_daemon_pid(), signal.SIGTERM)  # as to the command itself

    assert run.wait(END_S) == 143, run.story()
    meta = find(tmp_path / "run").meta
    assert (meta.reason, meta.point.position.version) == (SaveReason.GRACEFUL_SHUTDOWN, run.commits()[-1]["version"])
    assert "SIGTERM to its daemon on node-m" in (run.read("outcome.json") or {})["message"]
    daemon.wait_for_text(f"the daemon of run {run.run_id} has ended in order")
    assert daemon.process.poll() is None


@pytest.mark.long
def test_managed_host_serves_scripts_of_torchrun_and_one_that_is_stopped_stops_all(lab: Lab) -> None:
    daemon = lab.daemon()
    options = ("--stop-timeout", 5, "-c", lab.cluster(LOCAL, MANAGED), "--plain", DDP)
    run = lab.fdl.launch(*options)
    assert run.wait() == 0, run.story() + daemon.said
    assert run.stdout.count("of 2 is done: all alike True") == 2

    run = lab.fdl.launch(*options, "--steps", 100_000, "--step-ms", 20)
    for rank in range(2):
        run.wait_for_log(f"rank{rank}.stdout.log", "takes its first step")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0, daemon.said
    assert run.wait(END_S) == 143, run.story()
    run.wait_until_clean()


@pytest.mark.long
def test_host_that_was_drained_stays_away_from_that_run_and_serves_the_next(lab: Lab) -> None:
    daemon = lab.daemon()
    run = lab.launch(LOCAL, MANAGED)
    run.wait_for_training(2)

    assert lab.fdl.call("drain", "node-m", timeout_s=END_S).returncode == 0

    daemon.wait_for_text(f"has left run {run.run_id}; waiting for the next one")
    assert lab.fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)
    following = lab.launch(MANAGED, epochs=1)
    assert following.wait() == 0, following.story() + daemon.said


@pytest.mark.long
def test_second_signal_ends_a_host_at_once_and_nothing_is_left(lab: Lab) -> None:
    daemon = lab.daemon()
    run = lab.launch(LOCAL, MANAGED, step_ms=20_000)
    run.wait_for_training(0)
    below = psutil.Process(daemon.process.pid).children(recursive=True)

    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for_text("leaving in order")
    daemon.process.send_signal(signal.SIGTERM)

    assert daemon.wait() == 143, daemon.said
    assert not any(process.is_running() for process in below)
    assert lab.fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)


@pytest.mark.long
def test_what_no_waiting_cures_ends_the_daemon_with_2(lab: Lab) -> None:
    run = lab.launch(MANAGED)  # it waits for its host
    run.wait_for_event("host_awaited")
    stranger = derive_join_secret(JOIN_TOKEN, "node-x")

    for arguments, secret, words in [
        ((), stranger, "it holds another token"),
        ((), JOIN_TOKEN, "it holds another token"),
        (("--devices", "7"), None, "no GPU 7"),
        (("--token-file", lab.fdl.folder / "gone"), None, "gone: No such file"),
    ]:
        daemon = lab.daemon(*arguments, secret=secret)
        assert (daemon.wait(), words in daemon.said) == (2, True), (arguments, daemon.said)
    log = run.log("controller.log")
    assert "says it is walk-in node-m, was refused" in log
    assert not any(each.hex() in log for each in (stranger, JOIN_TOKEN))
    assert run.is_live
    os.kill(run.pid_of("controller"), signal.SIGTERM)
    run.wait(END_S)
