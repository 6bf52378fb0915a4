"""The rank's process from ``Trainer.run`` to its end. ``run_rank`` never returns: the process trains and ends here.

How it ends: by SystemExit with the core's code, so that the script's own atexit handlers run; by ``os._exit`` after a
flush where something is parked that would block the interpreter's end; after an exception of the script by exit code 1:
the traceback goes to stderr first and then the controller is told, for it may end a process whose failure it knows.
"""

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from flodl.averaging.collective import CollectivePlane
from flodl.averaging.flat import FlatModel
from flodl.averaging.outer import OuterAvg
from flodl.averaging.outer_step import OuterStep
from flodl.averaging.shared import SharedPlane
from flodl.core.actions import EndRank
from flodl.core.rank import RankCore
from flodl.errors import FlodlError, UsageError
from flodl.ids import RankId
from flodl.messages import DaemonToRank, RankError, RankReady, RankSignalled
from flodl.rank.agent import Agent
from flodl.rank.callbacks import ScriptCallbacks
from flodl.rank.inbox import Inbox
from flodl.rank.planes import AsyncRounds, CollectiveRounds, Plane, SharedRounds
from flodl.rank.preempted import tell_preemptions
from flodl.rank.resuming import take_whole_state
from flodl.rank.saving import WholeState
from flodl.rank.shell import RankShell
from flodl.rank.stepper import Stepper, build_stepper, merges_single_tail
from flodl.rank.words import MAX_CHARS, describe, encodable
from flodl.runtime.blocking import BlockingFrames
from flodl.spec.fingerprint import config_fingerprint, model_fingerprint
from flodl.spec.job import TrainingJob
from flodl.spec.state import StateInfo, write_state
from flodl.spec.words import printable


@dataclass(frozen=True, slots=True)
class RankTicket:
    """What the daemon hands to the process; see ``RankProcess`` there. File descriptors are inherited."""

    rank: RankId
    host: str
    device_kind: str
    device_index: int
    control_fd: int
    plane_fd: int
    outbox_fd: int
    inbox_fd: int
    slots: int
    slot: int
    address: str

    @classmethod
    def of(cls, ticket: Mapping[str, Any]) -> "RankTicket":
        """Take what this process needs out of the ticket's JSON."""
        device = ticket["device"]
        names = ("rank", "host", "control_fd", "plane_fd", "outbox_fd", "inbox_fd", "slots", "slot", "address")
        return cls(**{name: ticket[name] for name in names}, device_kind=device["kind"], device_index=device["index"])


def run_rank(ticket: Mapping[str, Any], job: TrainingJob) -> NoReturn:
    """Train as the rank of ``ticket``, then end the process.

    Raises:
        SystemExit: the rank has ended, or the script ended it.
    """
    mine = RankTicket.of(ticket)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the controller's to judge
    for fd in (mine.control_fd, mine.plane_fd, mine.outbox_fd, mine.inbox_fd):
        os.set_inheritable(fd, False)
    inbox = Inbox()
    frames = BlockingFrames(socket.socket(fileno=mine.control_fd), "the host's daemon", DaemonToRank)
    process = _RankProcess(mine, job, Agent(mine.rank, frames, inbox), inbox)
    try:
        end = process.train()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # whatever the script raised ends this rank
        with contextlib.suppress(SystemExit):  # a hook may say the exit code by raising it
            sys.excepthook(type(error), error, error.__traceback__)
        _flush()
        process.report(error)
        exit_code = error.exit_code if isinstance(error, FlodlError) else 1
    else:
        exit_code = end.exit_code
        if exit_code:
            sys.stderr.write(f"flodl: rank {mine.rank}: {printable(end.reason)}\n")
    if process.must_hard_exit:
        _flush()
        os._exit(exit_code)
    sys.exit(exit_code)


class _RankProcess:
    """The parts of one rank, in the order in which they come to life."""

    def __init__(self, ticket: RankTicket, job: TrainingJob, agent: Agent, inbox: Inbox) -> None:
        self._ticket, self._job, self._agent, self._inbox = ticket, job, agent, inbox
        self._plane: Plane | None = None

    @property
    def must_hard_exit(self) -> bool:
        """Whether the interpreter's ordinary end could hang."""
        return self._plane is not None and self._plane.must_hard_exit

    def train(self) -> EndRank:
        """Introduce the rank, build everything, and train to the end."""
        self._agent.start()
        job, ticket = self._job, self._ticket
        tell_preemptions(lambda number: self._agent.send(RankSignalled(ticket.rank, number)))
        stepper = build_stepper(job, _device(ticket), ticket.rank)
        try:
            return self._shell(stepper, FlatModel(stepper.model)).run()
        finally:
            stepper.close()

    def report(self, error: BaseException) -> None:
        """Tell the controller what the script raised."""
        text = encodable("".join(traceback.format_exception(error)))[-MAX_CHARS:]
        self._agent.send(RankError(self._ticket.rank, describe(error), text))

    def _shell(self, stepper: Stepper, flat: FlatModel) -> RankShell:
        config, ticket, agent = self._job.config, self._ticket, self._agent
        settings, merge_single_tail = config.settings(), merges_single_tail(stepper.model)
        core = RankCore(ticket.rank, settings, merge_single_tail)
        agent.report_steps(lambda: core.steps_total)
        is_plain = isinstance(config.outer_optimizer, OuterAvg)
        outer = None if is_plain else OuterStep(flat, config.outer_optimizer, stepper.optimizer)
        if settings.cadence.mode.is_collective:
            plane = CollectivePlane(agent.ask_store, stepper.device, ticket.address)
            backend = plane.backend
            self._plane = CollectiveRounds(flat, plane, ticket.rank, self._inbox, outer)
        else:
            backend = "shared memory"
            shared = SharedPlane(ticket.plane_fd, ticket.slots, ticket.slot)
            self._plane = (
                AsyncRounds(flat, shared, settings.cadence.easgd_alpha, outer)
                if settings.cadence.mode.is_async
                else SharedRounds(flat, shared, outer)
            )
        fingerprint = {
            **model_fingerprint(stepper.model, stepper.optimizer, stepper.scheduler),
            **flat.fingerprint(),
            **config_fingerprint(config),
        }
        agent.send(RankReady(ticket.rank, settings, fingerprint, flat.layout, merge_single_tail, backend))
        whole_state = WholeState(stepper, outer, settings.cadence.mode.is_async, ticket.outbox_fd)

        def hand_over(info: StateInfo, whole: bool) -> int:
            return whole_state.write(info) if whole else write_state(stepper.model, info, ticket.outbox_fd)

        def take_over() -> list[str]:
            told: list[str] = []
            take_whole_state(ticket.inbox_fd, stepper, outer, warn=told.append)
            if not ticket.rank:  # all have the same script and the same checkpoint
                sys.stderr.writelines(f"flodl: warning: {text}\n" for text in told)
            return told

        return RankShell(
            core,
            stepper,
            self._plane,
            self._inbox,
            agent.send,
            ScriptCallbacks(stepper, config),
            hand_over,
            take_over,
        )


def _device(ticket: RankTicket) -> torch.device:
    if ticket.device_kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"rank {ticket.rank} was given GPU {ticket.device_index} of host {ticket.host}, but torch "
            f"{torch.__version__} sees no GPU; install a CUDA build of torch there, or use [cpu] for CPU ranks"
        )
    # The daemon pins the one GPU by CUDA_VISIBLE_DEVICES, and then it is number 0.
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else ticket.device_index)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the script may have closed it
            stream.flush()
