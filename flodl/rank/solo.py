"""Solo: one device, no other process. The controller's and the rank's cores talk by function calls.

The training runs on a thread of its own, so that ``Trainer.run`` returns at once and ``join()`` waits, as in the head.
With one rank there is nothing to average: rounds only close windows, so the window is long, the mode is moot and an
outer optimizer has nothing to act on. Checkpoints are those of a cluster (``flodl.rank.solo_saves``).
"""

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

import torch

from flodl.averaging.outer import OuterAvg
from flodl.core.actions import (
    CloseReduction,
    DropHost,
    DropSave,
    EndRank,
    EndRun,
    JobAction,
    OpenReduction,
    OpenSave,
    Outcome,
    ReadBundle,
    ReceiveState,
    Record,
    ResetStore,
    RestoreHost,
    SendBundle,
    SendHead,
    SendHost,
    Severity,
    StopHead,
    TryPlace,
    WatchHead,
)
from flodl.core.ending import EXIT_INTERRUPTED
from flodl.core.events import (
    DaemonSaid,
    HeadExited,
    HeadSaid,
    HostSaid,
    JobEvent,
    StateStored,
    StopAsked,
    Ticked,
)
from flodl.core.job import JobCore, JobSettings
from flodl.core.liveness import LivenessSettings
from flodl.core.rank import RankCore
from flodl.core.window import JoinSettings
from flodl.errors import UsageError, run_failed
from flodl.messages import (
    CadenceSettings,
    CloseRound,
    Device,
    EpochReport,
    EvalReport,
    Evict,
    FromDaemon,
    GuardKind,
    GuardSettings,
    HeadReady,
    Heard,
    HostHello,
    HostStopped,
    JudgeRound,
    KillRank,
    Layout,
    Mode,
    OpenRound,
    PickPort,
    RankReady,
    RankToDaemon,
    RunEnded,
    Settings,
    SpawnRanks,
    StateSent,
    StopHost,
    StopRanks,
    ToDaemon,
    ToHead,
)
from flodl.rank.callbacks import ScriptCallbacks
from flodl.rank.inbox import Inbox
from flodl.rank.planes import SoloRounds
from flodl.rank.resuming import take_whole_state
from flodl.rank.saving import WholeState
from flodl.rank.shell import RankShell
from flodl.rank.solo_saves import SoloSaves
from flodl.rank.stepper import Stepper, build_stepper, merges_single_tail
from flodl.spec.handle import TrainHandle
from flodl.spec.interrupt import stop_on_interrupt
from flodl.spec.job import TrainingJob
from flodl.spec.metrics import EpochMetrics
from flodl.spec.preemption import exit_code_of, stop_when_preempted
from flodl.spec.state import StateInfo, TrainedState

log = logging.getLogger(__name__)

HOST: Final = "localhost"
WINDOW_BATCHES: Final = 100
"""Steps between two looks at the loss: rare enough to cost nothing, often enough to notice a NaN."""

EXIT_WAIT_S: Final = 10.0
"""How long the end of the interpreter waits for the step under way: torch must not run while it is torn down."""

SAID: Final = frozenset({"checkpoint_there", "resuming", "resume_differs", "nothing_left", "checkpoint"})
"""Events that whoever started the script wants to read, as under ``fdl launch``."""

_NEVER: Final = float("inf")
_LEVELS: Final = {Severity.INFO: logging.DEBUG, Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.ERROR}


def run_solo(job: TrainingJob, handle: TrainHandle) -> None:
    """Train ``job`` in this process and report to ``handle``; returns at once.

    The first Ctrl-C stops in order, and ``join()`` returns what is trained so far with the outcome ``stopped``; the
    second one raises KeyboardInterrupt in the main thread, as ever. SIGTERM and SIGUSR1 stop in order, too, and then
    ``join()`` ends the process.
    """
    solo = _Solo(job, handle, Path.cwd())
    thread = threading.Thread(target=solo.run, name="flodl-solo", daemon=True)
    stop_on_interrupt(lambda: solo.ask_stop("Ctrl-C"), handle.is_over)
    stop_when_preempted(solo.ask_stop_for, handle.is_over)
    atexit.register(_end_with_interpreter, solo, handle, thread)
    thread.start()


def _end_with_interpreter(solo: "_Solo", handle: TrainHandle, thread: threading.Thread) -> None:
    if not handle.is_over():
        sys.stderr.write("flodl: the script ends before its training: keep the handle and call join()\n")
        solo.ask_stop("the end of the script")
        thread.join(EXIT_WAIT_S)
        if not hasattr(sys, "last_value"):  # else an exception of the script's own says more, and has its own code
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(UsageError.exit_code)


class _Solo:
    """The controller's, the daemon's and the head's part for one rank, and the thread that trains."""

    def __init__(self, job: TrainingJob, handle: TrainHandle, cwd: Path) -> None:
        self._job, self._handle = job, handle
        self._saves = SoloSaves(job.config.settings(), cwd, self._post_later)
        self._settings = _settings(job.config.settings())
        self._inbox = Inbox(lambda: self._post(Ticked()))  # only a disk can be waited for: the core gives it up in time
        join = JoinSettings((HOST,), 1)
        liveness = LivenessSettings(_NEVER, _NEVER, _NEVER, _NEVER)
        self._core = JobCore(JobSettings(join, liveness, has_head=True, stop_grace_s=_NEVER), time.monotonic())
        self._events: deque[JobEvent] = deque()
        self._epochs = 0
        self._state: TrainedState | None = None
        self._outcome: Outcome | None = None
        self._preempted = 0

    def run(self) -> None:
        """Train to the end; whatever happens ends up in the handle."""
        try:
            self._train()
            self._finish()
        except BaseException as error:  # noqa: BLE001  # it is the script's: join() raises it where the script waits
            self._handle.fail(error)

    def ask_stop(self, source: str, exit_code: int = EXIT_INTERRUPTED) -> None:
        """Stop after the step under way."""
        self._post_later(StopAsked(source, abort=False, exit_code=exit_code))

    def ask_stop_for(self, number: signal.Signals) -> None:
        """The same, for a signal by which the process shall end then."""
        self._preempted = exit_code_of(number)
        self._handle.end_with(self._preempted)
        self.ask_stop(number.name, self._preempted)

    # ------------------------------------------------------------------------------------------------- the training
    def _train(self) -> None:
        device, outer = _device(), self._job.config.outer_optimizer
        if not isinstance(outer, OuterAvg):
            log.warning("%r is not used: it acts on averaged parameters, and one rank averages nothing", outer)
        stepper = build_stepper(self._job, device, 0)
        with self._saves, contextlib.closing(stepper):
            shell = self._shell(stepper)
            ready = RankReady(0, self._settings, {}, Layout(0, 0, 0), merges_single_tail(stepper.model), "solo")
            self._open(ready, device)
            end: EndRank = shell.run()
        self._post(HostSaid(HOST, HostStopped(HOST, end.reason)))

    def _shell(self, stepper: Stepper) -> RankShell:
        return RankShell(
            RankCore(0, self._settings, merges_single_tail(stepper.model)),
            stepper,
            SoloRounds(stepper.model),
            self._inbox,
            self._hear_rank,
            ScriptCallbacks(stepper, self._job.config),
            self._hand_over(stepper, WholeState(stepper, None, is_async=False, outbox_fd=self._saves.outbox_fd)),
            lambda: self._take_over(stepper),
        )

    def _take_over(self, stepper: Stepper) -> list[str]:
        told: list[str] = []
        self._saves.load(lambda fd: take_whole_state(fd, stepper, None, is_alone=True, warn=told.append))
        return told

    def _open(self, ready: RankReady, device: torch.device) -> None:
        offered = Device(device.type, device.index or 0)
        hello = HostHello(HOST, 0, HOST, "", (offered,), 1, sys.version.split()[0], torch.__version__, "")
        self._post(HeadSaid(HeadReady(ready.settings, {})))
        self._post(HostSaid(HOST, hello))
        self._post(HostSaid(HOST, ready))

    def _hand_over(self, stepper: Stepper, whole_state: WholeState) -> Callable[[StateInfo, bool], int]:
        def hand_over(info: StateInfo, whole: bool) -> int:
            if whole:
                return whole_state.write(info)
            self._state = TrainedState.from_model(stepper.model, info, "")
            return 0

        return hand_over

    def _finish(self) -> None:
        outcome, state = self._outcome, self._state
        if self._preempted and outcome is not None and outcome.status == "stopped" and state is None:
            raise SystemExit(self._preempted)  # before there was anything to return
        if outcome is None or outcome.status == "failed" or state is None:
            ended = (1, "the training ended without an outcome")
            raise run_failed(*(ended if outcome is None else (outcome.exit_code, outcome.message)))
        self._handle.finish(dataclasses.replace(state, epochs=self._epochs, outcome=outcome.status))

    # --------------------------------------------------------------------------------------------- the conversations
    def _post(self, event: JobEvent) -> None:
        """Hand ``event`` to the controller's core, and whatever follows from it."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # a call further up is handling them
        while self._events:
            for action in self._core.handle(self._events[0], time.monotonic()):
                self._execute(action)
            self._events.popleft()

    def _post_later(self, event: JobEvent) -> None:
        """The same from any thread: the cores belong to the training thread."""
        self._inbox.post(lambda: self._post(event))

    def _hear_rank(self, message: RankToDaemon) -> None:
        if isinstance(message, StateSent):
            self._saves.on_sent(message)
        if isinstance(message, FromDaemon):
            self._post(HostSaid(HOST, message))

    def _execute(self, action: JobAction) -> None:
        match action:
            case SendHost(_, message):
                self._hear_controller(message)
            case SendHead(message):
                self._hear_as_head(message)
            case ReceiveState():
                self._post(StateStored("in this process", ""))
            case TryPlace(stem, resume_from):
                self._saves.try_place(stem, resume_from)
            case OpenSave():
                self._saves.open(action)
            case DropSave(transfer):
                self._saves.drop(transfer)
            case ReadBundle(stem):
                self._saves.read(stem, self._settings)
            case Record(event, severity, detail):
                self._note(event, severity, detail)
            case EndRun(outcome):
                self._outcome = outcome
            case StopHead():
                self._post(HeadExited(0, 0))
            case WatchHead():
                pass  # it is this very process
            case DropHost() | RestoreHost() | OpenReduction() | CloseReduction() | ResetStore() | SendBundle():
                pass  # there is no connection, no other host and no rendezvous
            case _:
                assert_never(action)

    def _note(self, event: str, severity: Severity, detail: str) -> None:
        is_said = event in SAID
        if is_said:
            sys.stderr.write(f"flodl: {'warning: ' * (severity is Severity.WARNING)}{detail}\n")
        log.log(logging.DEBUG if is_said else _LEVELS[severity], "%s: %s", event, detail)

    def _hear_controller(self, message: ToDaemon) -> None:
        match message:
            case StopHost(reason):
                self._inbox.post(DaemonSaid(Evict(0, reason)))
            case SpawnRanks() | OpenRound() | CloseRound() | KillRank() | Heard() | PickPort() | StopRanks():
                pass  # the rank is this very thread, and its rounds are its own affair
            case _:
                self._inbox.post(DaemonSaid(message))

    def _hear_as_head(self, message: ToHead) -> None:
        match message:
            case EpochReport():
                self._handle.publish_metrics(EpochMetrics.from_report(message))
            case EvalReport(epoch, value):
                self._handle.publish_eval(epoch, value)
            case RunEnded():
                self._epochs = message.epochs
                self._post(HeadExited(0, 0))
            case JudgeRound():
                pass  # nobody to drift from: solo has no guard
            case _:
                assert_never(message)


def _settings(settings: Settings) -> Settings:
    """A window of fixed length: there is no averaging whose cost could be traded."""
    cadence = CadenceSettings(
        Mode.NCCL_CADENCE,
        anchor=WINDOW_BATCHES,
        min_anchor=WINDOW_BATCHES,
        max_anchor=WINDOW_BATCHES,
        guard=GuardSettings(GuardKind.NONE),
        meta_controller=False,
    )
    return dataclasses.replace(settings, cadence=cadence)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
