"""HostCore: the daemon's half of every conversation.

Purpose: one host of a run: its ranks' processes, the words that pass between them and the controller, the host's part
of a CPU-plane round, and the state that comes down for its ranks to load. States: *serving* → *stopping* (ranks get
SIGTERM, then the grace, then SIGKILL) → *shipping* the last logs → *left*. Invariants: nothing of a key that was closed
or replaced is streamed or announced; no rank is told to load a state that does not lie whole in the inbox, which is
emptied only when every running rank has loaded it; at most one such word waits for each running rank; a rank's end is
reported after everything it said; the daemon leaves only when no rank's process is left. It looks into no other message
that is meant for a rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from flodl.core.actions import (
    CancelStream,
    EmptyInbox,
    HoldPort,
    HostAction,
    KillRankTree,
    Leave,
    Record,
    SendController,
    SendRank,
    Severity,
    ShipLogs,
    SpawnRank,
    StreamState,
    StreamSum,
    TerminateRank,
)
from flodl.core.events import (
    ControllerDropped,
    ControllerSaid,
    HostEvent,
    LogsShipped,
    PortHeld,
    RankEnded,
    RankSaid,
    Signalled,
    Stalled,
    StateLanded,
    SumReturned,
    Ticked,
)
from flodl.core.preemption import DAEMON, signal_name
from flodl.errors import InvariantViolation
from flodl.ids import HostName, RankId, RoundKey
from flodl.messages import (
    Admitted,
    Beat,
    CloseRound,
    ContributionWritten,
    Heard,
    HostStopped,
    KillRank,
    LeaveWanted,
    LoadState,
    OpenRound,
    PickPort,
    PortPicked,
    RankAlive,
    RankBeat,
    RankError,
    RankExited,
    RankFinished,
    RankHello,
    RankSignalled,
    RankSpec,
    RankToDaemon,
    ReduceSlice,
    ResultReady,
    SliceReduced,
    SpawnRanks,
    StateLoaded,
    StateSent,
    StopHost,
    StopRanks,
    StopWanted,
    ToDaemon,
)


class HostState(StrEnum):
    """What the host is doing."""

    SERVING = "serving"
    STOPPING = "stopping"
    SHIPPING = "shipping"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class HostSettings:
    """All in seconds. ``stop_grace_s`` is used when the controller is gone and cannot say its own. ``is_walk_in``: the
    host came by itself, and one that must go asks to be let go.
    """

    host: HostName
    heartbeat_s: float = 1.0
    on_disconnect_s: float = 120.0
    stop_grace_s: float = 30.0
    is_walk_in: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """A rank's process, as the shell has found it; ``is_frozen``: a signal such as SIGSTOP has stopped it."""

    pid: int = 0
    rss_bytes: int = 0
    is_frozen: bool = False


@dataclass(slots=True)
class _LocalRank:
    """``load`` waits for its state to land; ``loaded`` is the transfer that the rank has answered last. ``is_member``
    from its admission on: only then may it write into the shared memory, and it has no state to load any more.
    """

    spec: RankSpec
    heard_s: float
    has_beaten: bool = False
    steps: int = 0
    measured: Measured = Measured()
    is_running: bool = True
    is_member: bool = False
    is_finished: bool = False
    is_failing: bool = False
    ended_by_us: bool = False
    load: LoadState | None = None
    loaded: int | None = None

    @property
    def is_leaving(self) -> bool:
        """It ends by itself, after its own error too, and writes no contribution any more: a signal of ours would hide
        its exit code.
        """
        return self.is_finished or self.is_failing


@dataclass(slots=True)
class _OpenRound:
    order: OpenRound
    written: dict[RankId, None] = field(default_factory=dict)
    reduced: dict[RankId, None] = field(default_factory=dict)
    is_reducing: bool = False


class HostCore:
    """See the module docstring."""

    def __init__(self, settings: HostSettings, started_s: float) -> None:
        self.state = HostState.SERVING
        self._settings = settings
        self._ranks: dict[RankId, _LocalRank] = {}
        self._round: _OpenRound | None = None
        self._landed: StateLanded | None = None
        self._beat_s = started_s
        self._controller_heard_s = started_s
        self._has_controller = True
        self._reason = ""
        self._exit_code = 0
        self._kill_s: float | None = None

    # ----------------------------------------------------------------------------------------------------- contract
    def handle(self, event: HostEvent, now_s: float) -> list[HostAction]:
        """Take one event; ``now_s`` is monotonic seconds."""
        if self.state is HostState.LEFT:
            return []
        match event:
            case ControllerSaid(message):
                self._controller_heard_s = now_s
                actions = self._on_controller(message, now_s)
            case ControllerDropped(reason):
                actions = self._on_controller_gone(f"the controller is gone ({reason})", now_s)
            case RankSaid(rank, message):
                actions = self._on_rank(rank, message, now_s)
            case RankEnded():
                actions = self._on_ended(event)
            case SumReturned(key):
                actions = self._announce(key)
            case StateLanded():
                self._landed = event
                actions = self._give_states()
            case Signalled(number):
                actions = self._on_signal(DAEMON, number)
            case PortHeld(start, port, address, was_taken, error):
                picked = PortPicked(self._settings.host, start, port, address, was_taken, error)
                actions = [SendController(picked)]
            case LogsShipped():
                actions = self._on_shipped()
            case Stalled(gap_s):
                self._controller_heard_s += gap_s
                actions = []
            case Ticked():
                actions = []
            case _:
                assert_never(event)
        return actions + self._due(now_s)

    def next_deadline_s(self) -> float | None:
        """The next beat, the end of the grace, or the controller's silence."""
        if self.state is HostState.LEFT:
            return None
        candidates = [self._beat_s, self._kill_s]
        if self._has_controller and self.state is HostState.SERVING:
            candidates.append(self._controller_heard_s + self._settings.on_disconnect_s)
        return min(at for at in candidates if at is not None)

    def check(self) -> None:
        """Raise InvariantViolation when the state contradicts itself."""
        gone = tuple(rank for rank, local in self._ranks.items() if local.load is not None and not local.is_running)
        if gone:
            raise InvariantViolation(f"host {self._settings.host}: a state waits for ranks {gone}, which have ended")
        if self.state in (HostState.SHIPPING, HostState.LEFT) and self._running():
            raise InvariantViolation(f"host {self._settings.host} is {self.state} with ranks {self._running()} running")

    def snapshot(self) -> dict[str, object]:
        """Plain values for logs and tests."""
        return {
            "host": self._settings.host,
            "state": str(self.state),
            "ranks": {rank: local.steps for rank, local in self._ranks.items()},
            "running": self._running(),
        }

    # --------------------------------------------------------------------------------------------------- controller
    def _on_controller(self, message: ToDaemon, now_s: float) -> list[HostAction]:
        match message:
            case SpawnRanks(world_size, specs, plain):
                if self.state is not HostState.SERVING:
                    return []
                self._ranks.update({spec.rank: _LocalRank(spec, now_s) for spec in specs})
                self._kill_s = None  # it was for those who have ended before
                return [SpawnRank(spec, world_size, len(self._ranks), plain) for spec in specs]
            case PickPort(start, peer):
                return [HoldPort(start, peer)]
            case StopRanks(_, grace_s):
                return self._stop_ranks(now_s + grace_s)
            case OpenRound():
                actions: list[HostAction] = [] if self._round is None else [CancelStream(self._round.order.key)]
                self._round = _OpenRound(message)
                return actions
            case CloseRound(key):
                return self._close_round(key)
            case KillRank(rank, _):
                if rank in self._ranks and self._ranks[rank].is_running:
                    self._ranks[rank].ended_by_us = True
                    return [KillRankTree(rank)]
                return []
            case LoadState(rank):
                if rank in self._ranks and self._ranks[rank].is_running:
                    self._ranks[rank].load = message
                return self._give_states()
            case Admitted(rank):
                if rank in self._ranks:
                    self._ranks[rank].is_member = True
                return [SendRank(rank, message)] if rank in self._ranks else []
            case StopHost(reason, grace_s):
                return self._stop(reason, grace_s, 0, now_s)
            case Heard():
                return []
            case _:
                return [SendRank(message.rank, message)] if message.rank in self._ranks else []

    def _on_controller_gone(self, reason: str, now_s: float) -> list[HostAction]:
        if not self._has_controller:
            return []
        self._has_controller = False
        note = Record("controller_lost", Severity.CRITICAL, f"{reason}: stopping this host's ranks", {})
        return [note, *self._stop(reason, self._settings.stop_grace_s, 1, now_s)]

    def _stop(self, reason: str, grace_s: float, exit_code: int, now_s: float) -> list[HostAction]:
        kill_s = now_s + grace_s if self._kill_s is None else min(self._kill_s, now_s + grace_s)
        if self.state is not HostState.SERVING:
            self._kill_s = None if self._kill_s is None else kill_s
            return []
        self.state, self._reason, self._exit_code, self._kill_s = HostState.STOPPING, reason, exit_code, kill_s
        actions: list[HostAction] = []
        if self._round is not None:
            actions += self._close_round(self._round.order.key)
        return actions + self._terminate()

    def _stop_ranks(self, kill_s: float) -> list[HostAction]:
        """The ranks of a plain run, which will be started again or not; the host stays."""
        if self.state is not HostState.SERVING:
            return []
        self._kill_s = kill_s
        return self._terminate()

    def _terminate(self) -> list[HostAction]:
        """SIGTERM, once, to every rank that does not end by itself."""
        waited_for = [rank for rank in self._running() if not self._ranks[rank].is_leaving]
        told = [rank for rank in waited_for if not self._ranks[rank].ended_by_us]
        for rank in told:
            self._ranks[rank].ended_by_us = True
        return [TerminateRank(rank) for rank in told]

    def _on_signal(self, rank: RankId, number: int) -> list[HostAction]:
        """Somebody else's signal: the run is to stop in order, or to let a walk-in go; the controller knows how."""
        if rank == DAEMON and self._settings.is_walk_in:
            return [SendController(LeaveWanted(self._settings.host, f"{signal_name(number)} to its daemon"))]
        return [SendController(StopWanted(self._settings.host, rank, number))]

    # -------------------------------------------------------------------------------------------------------- ranks
    def _on_rank(self, rank: RankId, message: RankToDaemon, now_s: float) -> list[HostAction]:
        local = self._ranks.get(rank)
        if local is None or message.rank != rank:
            detail = f"a process speaks for rank {message.rank} on the connection of rank {rank}"
            return [Record("stray", Severity.WARNING, detail, {})]
        local.heard_s, local.has_beaten = now_s, True
        match message:
            case RankHello():
                return []
            case RankAlive(_, steps):
                local.steps = steps
                return []
            case RankSignalled(_, number):
                return [KillRankTree(rank)] if local.ended_by_us else self._on_signal(rank, number)
            case ContributionWritten(_, key):
                return self._on_written(rank, key)
            case SliceReduced(_, key):
                return self._on_reduced(rank, key)
            case StateSent(_, transfer, size_bytes, error):
                stream: list[HostAction] = [] if error else [StreamState(rank, transfer, size_bytes)]
                return [SendController(message), *stream]
            case StateLoaded(_, transfer):
                local.loaded = transfer
                return [SendController(message), *self._empty_inbox()]
            case RankFinished():
                local.is_finished = True
                return [SendController(message)]
            case RankError():
                local.is_failing = True
                return [SendController(message)]
            case _:
                return [SendController(message)]

    def _on_ended(self, event: RankEnded) -> list[HostAction]:
        local = self._ranks.get(event.rank)
        if local is None or not local.is_running:
            return []
        local.is_running, local.load = False, None
        by_us = local.ended_by_us or local.is_finished
        exited = SendController(RankExited(event.rank, event.code, event.signal, by_us))
        return [exited, *self._reduce_slices(), *self._empty_inbox()]

    def update_processes(self, measured: Mapping[RankId, Measured]) -> None:
        """What the shell has found of the ranks' processes, for the next beat."""
        for rank, found in measured.items():
            if rank in self._ranks:
                self._ranks[rank].measured = found

    # ------------------------------------------------------------------------------------------------------- states
    def _give_states(self) -> list[HostAction]:
        """Of the word and the state, whichever comes first waits for the other."""
        landed = self._landed
        actions: list[HostAction] = []
        for rank, local in self._ranks.items():
            load = local.load
            if landed is None or load is None or load.transfer != landed.transfer:
                continue
            local.load = None
            if landed.error:
                actions.append(SendController(StateLoaded(rank, load.transfer, landed.error)))
            else:
                actions.append(SendRank(rank, load))
        return actions

    def _empty_inbox(self) -> list[HostAction]:
        """Once nobody is left here who could ask for what lies in it."""
        landed = self._landed
        joining = (self._ranks[rank] for rank in self._running() if not self._ranks[rank].is_member)
        if landed is None or any(each.loaded != landed.transfer for each in joining):
            return []
        self._landed = None
        return [EmptyInbox(landed.transfer)]

    # ---------------------------------------------------------------------------------------------------- CPU plane
    def _on_written(self, rank: RankId, key: RoundKey) -> list[HostAction]:
        current = self._current(rank, key)
        if current is None:
            return []
        current.written[rank] = None
        return self._reduce_slices()

    def _reduce_slices(self) -> list[HostAction]:
        """Once all is written, and nobody who is out of the round can still write into the shared memory."""
        current = self._round
        if current is None or current.is_reducing or len(current.written) < len(current.order.ranks):
            return []
        strangers = (self._ranks[rank] for rank in self._running() if rank not in current.order.ranks)
        outsiders = [each.spec.rank for each in strangers if each.is_member and not each.is_leaving]
        if outsiders:
            for rank in outsiders:
                self._ranks[rank].ended_by_us = True
            return [KillRankTree(rank) for rank in outsiders]
        current.is_reducing = True
        key, ranks = current.order.key, current.order.ranks
        slots = tuple(self._ranks[each].spec.local_rank for each in ranks)
        return [SendRank(each, ReduceSlice(each, key, index, len(ranks), slots)) for index, each in enumerate(ranks)]

    def _on_reduced(self, rank: RankId, key: RoundKey) -> list[HostAction]:
        current = self._current(rank, key)
        if current is None:
            return []
        current.reduced[rank] = None
        if len(current.reduced) < len(current.order.ranks):
            return []
        order = current.order
        return [StreamSum(key, order.layout, order.bf16)] if order.hosts > 1 else self._announce(key)

    def _announce(self, key: RoundKey) -> list[HostAction]:
        if self._round is None or self._round.order.key != key:
            return []
        return [SendRank(rank, ResultReady(rank, key)) for rank in self._round.order.ranks]

    def _current(self, rank: RankId, key: RoundKey) -> _OpenRound | None:
        current = self._round
        if current is None or current.order.key != key or rank not in current.order.ranks:
            return None
        return current

    def _close_round(self, key: RoundKey) -> list[HostAction]:
        if self._round is None or self._round.order.key != key:
            return []
        self._round = None
        return [CancelStream(key)]

    # ---------------------------------------------------------------------------------------------------- deadlines
    def _due(self, now_s: float) -> list[HostAction]:
        actions: list[HostAction] = []
        if now_s >= self._beat_s:
            self._beat_s = now_s + self._settings.heartbeat_s
            actions.append(SendController(self._beat(now_s)))
        silence_s = now_s - self._controller_heard_s
        silent_at_s = self._controller_heard_s + self._settings.on_disconnect_s
        if self.state is HostState.SERVING and self._has_controller and now_s >= silent_at_s:
            actions += self._on_controller_gone(f"the controller has been silent for {silence_s:.0f} s", now_s)
        if self._kill_s is not None and now_s >= self._kill_s:
            self._kill_s = None
            for rank in self._running():
                self._ranks[rank].ended_by_us = True
                actions.append(KillRankTree(rank))
        if self.state is HostState.STOPPING and not self._running():
            self.state, self._kill_s = HostState.SHIPPING, None
            actions.append(ShipLogs())
        return actions

    def _on_shipped(self) -> list[HostAction]:
        if self.state is not HostState.SHIPPING:
            return []
        self.state = HostState.LEFT
        return [
            SendController(HostStopped(self._settings.host, self._reason)),
            Leave(self._reason, self._exit_code),
        ]

    def _beat(self, now_s: float) -> Beat:
        return Beat(self._settings.host, tuple(self._rank_beat(rank, now_s) for rank in self._running()))

    def _rank_beat(self, rank: RankId, now_s: float) -> RankBeat:
        local = self._ranks[rank]
        age_ms, found = int((now_s - local.heard_s) * 1e3), local.measured
        return RankBeat(rank, local.has_beaten, age_ms, local.steps, found.rss_bytes, found.pid, found.is_frozen)

    def _running(self) -> tuple[RankId, ...]:
        return tuple(rank for rank, local in self._ranks.items() if local.is_running)
