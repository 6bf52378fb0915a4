"""A controller and a daemon inside the test, around real rank processes: real cores, real sockets, real memory.

Everything that a process of its own would add (ports, ssh, logs, wardens) is left out, so that a test sees what a rank
says and how its process ends.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flodl.averaging.store_table import StoreTable
from flodl.core import actions as act
from flodl.core import events as ev
from flodl.core.host import HostCore, HostSettings
from flodl.core.job import JobCore, JobSettings
from flodl.core.liveness import LivenessSettings
from flodl.core.window import JoinSettings
from flodl.errors import PeerLost
from flodl.ids import RankId
from flodl.messages import (
    Device,
    HeadReady,
    HostHello,
    RankReady,
    RankSpec,
    RankToDaemon,
    RunEnded,
    StoreRequest,
    ToHead,
)
from flodl.runtime.blocking import BlockingFrames

ROOT = Path(__file__).parents[2]
HOST = "here"
LIMIT_S = 90.0
STOP_GRACE_S = 30.0


@dataclass
class RankProcess:
    """One rank as its host sees it. ``said`` is everything it sent, in order; ``code`` follows its end."""

    process: subprocess.Popen[bytes]
    frames: BlockingFrames
    outbox_fd: int
    errors: Path
    said: list[RankToDaemon] = field(default_factory=list)
    code: int | None = None

    def stderr(self) -> str:
        return self.errors.read_text()


class OneHost:
    """``run()`` plays one whole run of ``argv`` on ``ranks`` CPU ranks and returns its outcome."""

    def __init__(self, ranks: int, argv: list[str], folder: Path, factor: float = 1.0) -> None:
        now_s = time.monotonic()
        self._size, self._argv, self._folder, self._limit_s = ranks, argv, folder, LIMIT_S * factor
        join = JoinSettings((HOST,), ranks)
        self.job = JobCore(JobSettings(join, LivenessSettings(), has_head=True, stop_grace_s=STOP_GRACE_S), now_s)
        self.host = HostCore(HostSettings(HOST, stop_grace_s=STOP_GRACE_S), now_s)
        self.ranks: dict[RankId, RankProcess] = {}
        self.head: list[ToHead] = []
        self.records: list[act.Record] = []
        self.state = b""
        self.outcome: act.Outcome | None = None
        self.watch: Callable[[RankId, RankToDaemon], None] = lambda rank, message: None
        self._table = StoreTable()
        self._plane_fd, self._inbox_fd = os.memfd_create("plane"), os.memfd_create("inbox")
        self._queue: queue.Queue[ev.HostEvent | ev.JobEvent] = queue.Queue()

    def run(self) -> act.Outcome:
        """Drive both cores until the run has ended and every rank's process is reaped."""
        devices = tuple(Device("cpu", index) for index in range(self._size))
        self._tell_job(ev.HostSaid(HOST, HostHello(HOST, 1, HOST, "127.0.0.1", devices, 2, "3.11", "2.13", "0")))
        limit_s = time.monotonic() + self._limit_s
        try:
            while self.outcome is None:
                assert time.monotonic() < limit_s, f"no end: {self.job.phase}, {self.host.snapshot()}"
                self._turn()
        finally:
            self.close()
        return self.outcome

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.process.kill()
            rank.process.wait()
            rank.frames.close()
            os.close(rank.outbox_fd)
        os.close(self._plane_fd)
        os.close(self._inbox_fd)

    def post(self, event: ev.HostEvent | ev.JobEvent) -> None:
        self._queue.put(event)

    # -------------------------------------------------------------------------------------------------- the two cores
    def _turn(self) -> None:
        deadlines = [at_s for core in (self.job, self.host) if (at_s := core.next_deadline_s()) is not None]
        wait_s = max(0.0, min([*deadlines, time.monotonic() + 1.0]) - time.monotonic())
        try:
            event = self._queue.get(timeout=wait_s)
        except queue.Empty:
            self._tell_job(ev.Ticked())
            self._tell_host(ev.Ticked())
            return
        if isinstance(event, ev.RankSaid | ev.RankEnded | ev.LogsShipped):
            self._tell_host(event)
        else:
            self._tell_job(event)

    def _tell_job(self, event: ev.JobEvent) -> None:
        if isinstance(event, ev.HostSaid) and isinstance(event.message, RankReady) and event.message.rank == 0:
            self.post(ev.HeadSaid(HeadReady(event.message.settings, {})))
        actions = self.job.handle(event, time.monotonic())
        self.job.check()
        for action in actions:
            match action:
                case act.SendHost(_, message):
                    self._tell_host(ev.ControllerSaid(message))
                case act.SendHead(message):
                    self.head.append(message)
                    if isinstance(message, RunEnded):
                        self.post(ev.HeadExited(0, 0))
                case act.ReceiveState():
                    self.post(ev.StateStored("here", ""))
                case act.ResetStore():
                    for rank, reply in self._table.clear_prefix("group/"):
                        self._say(rank, reply)
                case act.StopHead():
                    self.post(ev.HeadExited(0, 15))
                case act.Record():
                    self.records.append(action)
                case act.EndRun(outcome):
                    self.outcome = outcome

    def _tell_host(self, event: ev.HostEvent) -> None:
        for action in self.host.handle(event, time.monotonic()):
            match action:
                case act.SendController(StoreRequest() as request):
                    for rank, reply in self._table.handle(request.rank, request, time.monotonic()):
                        self._say(rank, reply)
                case act.SendController(message):
                    self.post(ev.HostSaid(HOST, message))
                case act.SendRank(rank, message):
                    self._say(rank, message)
                case act.SpawnRank(spec, world_size, _):
                    self._spawn(spec, world_size)
                case act.TerminateRank(rank):
                    self.ranks[rank].process.send_signal(signal.SIGTERM)
                case act.KillRankTree(rank):
                    self.ranks[rank].process.kill()
                case act.StreamState(rank, _, size):
                    self.state = os.pread(self.ranks[rank].outbox_fd, size, 0)
                case act.ShipLogs():
                    self.post(ev.LogsShipped())
                case act.Record():
                    self.records.append(action)

    # --------------------------------------------------------------------------------------------------- the processes
    def _spawn(self, spec: RankSpec, world_size: int) -> None:
        mine, theirs = socket.socketpair()
        outbox_fd = os.memfd_create(f"outbox-{spec.rank}")
        ticket = {
            "run_id": "run-1",
            "rank": spec.rank,
            "local_rank": spec.local_rank,
            "world_size": world_size,
            "host": HOST,
            "device": {"kind": "cpu", "index": spec.device.index, "id": ""},
            "control_fd": theirs.fileno(),
            "plane_fd": self._plane_fd,
            "slots": self._size,
            "slot": spec.local_rank,
            "outbox_fd": outbox_fd,
            "inbox_fd": self._inbox_fd,
            "address": "127.0.0.1",
        }
        errors = self._folder / f"stderr-{spec.rank}"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RANK": str(spec.rank),
            "WORLD_SIZE": str(world_size),
            "FLODL_ROLE": "rank:" + json.dumps(ticket),
        }
        with errors.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                pass_fds=(theirs.fileno(), self._plane_fd, self._inbox_fd, outbox_fd),
            )
        theirs.close()
        frames = BlockingFrames(mine, f"rank {spec.rank}", RankToDaemon)
        rank = self.ranks[spec.rank] = RankProcess(process, frames, outbox_fd, errors)
        threading.Thread(target=self._listen, args=(spec.rank, rank), daemon=True).start()

    def _listen(self, number: RankId, rank: RankProcess) -> None:
        try:
            while True:
                message = rank.frames.receive(self._limit_s)
                rank.said.append(message)
                self.watch(number, message)
                self.post(ev.RankSaid(number, message))
        except PeerLost:
            code = rank.process.wait()
            rank.code = code
            self.post(ev.RankEnded(number, max(code, 0), max(-code, 0)))

    def _say(self, rank: RankId, message: object) -> None:
        with contextlib.suppress(PeerLost):  # its end is reported by the thread that listens
            self.ranks[rank].frames.send(message)
