"""RankCore: the rank's half of every conversation.

Purpose: turn the controller's and the daemon's words into steps, reduces and adoptions of one rank.
States: *joining* until admitted; *waiting* for a plan or a go; *training* a window; *accounting* its end; *packing*,
*reducing* and *holding* an unpublished sum; *ended*.
Invariants: parameters change only by a step in *training* or by an adoption after Commit of the very key that is held;
a sum whose key was aborted is never adopted; a window never exceeds its plan's ``max_steps`` nor the leased batches.
It does not touch tensors, sockets or clocks: the shell (flodl.rank) does.
"""

from collections import deque
from enum import StrEnum
from typing import assert_never

from flodl.core.actions import (
    AbandonReduce,
    AccountWindow,
    Adopt,
    DigestTensors,
    EndRank,
    Evaluate,
    FormCollective,
    LoadAhead,
    Pack,
    RankAction,
    ReduceCollective,
    SendUp,
    SumSlice,
    TakeResult,
    WriteState,
)
from flodl.core.events import (
    DaemonDropped,
    DaemonSaid,
    Evaluated,
    GroupSettled,
    Packed,
    RankEvent,
    SliceSummed,
    StateWritten,
    StepDone,
    SumReady,
    TensorsDigested,
    Ticked,
    WindowAccounted,
)
from flodl.errors import InvariantViolation
from flodl.ids import RankId, RoundKey, Version, batches_of
from flodl.messages import (
    AbortRound,
    Admitted,
    CloseWindow,
    Commit,
    ContributionWritten,
    DaemonToRank,
    DescribeSum,
    EvalDone,
    Evict,
    FinishRank,
    FormGroup,
    GroupFormed,
    MinReached,
    RankFinished,
    Reduced,
    ReduceSlice,
    ResultReady,
    RunEval,
    SendState,
    Settings,
    SliceReduced,
    StartRound,
    StateSent,
    StoreReply,
    SumDescribed,
    WindowDone,
    WindowPlan,
)


class RankState(StrEnum):
    """What the rank is doing."""

    JOINING = "joining"
    WAITING = "waiting"
    TRAINING = "training"
    ACCOUNTING = "accounting"
    PACKING = "packing"
    REDUCING = "reducing"
    HOLDING = "holding"
    ENDED = "ended"


class RankCore:
    """See the module docstring. ``settings`` is what this rank reported in RankReady."""

    def __init__(self, rank: RankId, settings: Settings, merge_single_tail: bool) -> None:
        self.rank = rank
        self.state = RankState.JOINING
        self.version: Version = -1
        self.steps_total = 0
        self._settings = settings
        self._merge_single_tail = merge_single_tail
        self._batches: deque[int] = deque()
        self._plan: WindowPlan | None = None
        self._is_closing = False
        self._window = _Window()
        self._round: StartRound | None = None
        self._round_started_s = 0.0
        self._sent_finite = True
        self._formation: tuple[int, int] = (0, 0)

    # ------------------------------------------------------------------------------------------------- contract
    @property
    def wants_step(self) -> bool:
        """True while the shell should train the next batch, after it has handled every event that waits."""
        plan = self._plan
        return (
            self.state is RankState.TRAINING
            and plan is not None
            and not self._is_closing
            and self._window.steps < plan.max_steps
        )

    @property
    def has_ended(self) -> bool:
        """True once nothing more will happen in this rank."""
        return self.state is RankState.ENDED

    def handle(self, event: RankEvent, now_s: float) -> list[RankAction]:
        """Take one event; ``now_s`` is monotonic seconds."""
        if self.state is RankState.ENDED:
            return []
        match event:
            case DaemonSaid(message):
                return self._on_message(message, now_s)
            case DaemonDropped():
                return self._end("the host's daemon is gone", 1)
            case StepDone():
                return self._on_step(event)
            case WindowAccounted():
                return self._on_accounted(event)
            case GroupSettled():
                return self._on_group(event)
            case Packed():
                return self._on_packed(event, now_s)
            case SliceSummed(key):
                return [SendUp(SliceReduced(self.rank, key))] if self._is_current(key) else []
            case SumReady():
                return self._on_sum(event, now_s)
            case TensorsDigested(key, names, digests):
                return [SendUp(SumDescribed(self.rank, key, names, digests))]
            case Evaluated():
                return [SendUp(EvalDone(self.rank, event.epoch, event.value, event.error))]
            case StateWritten():
                return [SendUp(StateSent(self.rank, event.size_bytes, event.error))]
            case Ticked():
                return []
            case _:
                assert_never(event)

    def next_deadline_s(self) -> float | None:
        """The rank sets no deadlines: the controller watches every wait and ends it with a message."""
        return None

    def check(self) -> None:
        """Raise InvariantViolation when the state contradicts itself."""
        plan = self._plan
        if self.state is RankState.TRAINING and plan is None:
            raise InvariantViolation(f"rank {self.rank}: training without a plan")
        if plan is not None and self._window.steps > plan.max_steps:
            raise InvariantViolation(f"rank {self.rank}: {self._window.steps} steps in a window of {plan.max_steps}")
        if self.state in (RankState.PACKING, RankState.REDUCING, RankState.HOLDING) and self._round is None:
            raise InvariantViolation(f"rank {self.rank}: {self.state} without a round")

    def snapshot(self) -> dict[str, object]:
        """Plain values for logs and tests."""
        return {
            "rank": self.rank,
            "state": str(self.state),
            "version": self.version,
            "steps": self.steps_total,
            "held_batches": len(self._batches),
            "window_steps": self._window.steps,
        }

    # ------------------------------------------------------------------------------------------------- messages
    def _on_message(self, message: DaemonToRank, now_s: float) -> list[RankAction]:
        match message:
            case Admitted():
                if self.state is RankState.JOINING:
                    self.state = RankState.WAITING
                return []
            case FormGroup():
                self._formation = (message.incarnation, message.attempt)
                return [FormCollective(message.incarnation, message.attempt, message.ranks, message.timeout_s)]
            case WindowPlan():
                return self._on_plan(message)
            case CloseWindow(_, version):
                return self._on_close(version)
            case StartRound():
                return self._on_start_round(message, now_s)
            case DescribeSum(_, key):
                return [DigestTensors(key)] if self._is_current(key) else []
            case AbortRound(_, key, _):
                return self._on_abort(key)
            case Commit(_, key):
                return self._on_commit(key)
            case ReduceSlice(_, key, index, slices, slots):
                return [SumSlice(key, index, slices, slots)] if self._is_current(key) else []
            case ResultReady(_, key):
                return [TakeResult(key, self._takes_raw)] if self._is_current(key) else []
            case RunEval(_, epoch):
                return [Evaluate(epoch)]
            case SendState():
                return [WriteState()]
            case FinishRank(_, reason):
                return [SendUp(RankFinished(self.rank)), *self._end(reason, 0)]
            case Evict(_, reason):
                return self._end(f"removed from the run: {reason}", 1)
            case StoreReply():
                return []  # the shell answers the rendezvous thread before the core hears of it
            case _:
                assert_never(message)

    def _on_plan(self, plan: WindowPlan) -> list[RankAction]:
        if self.state is not RankState.WAITING or plan.version != self.version:
            return []
        actions: list[RankAction] = []
        for grant in plan.grants:
            self._batches.extend(batches_of(grant.samples, self._settings.batch_size, self._merge_single_tail))
            actions.append(LoadAhead(grant))
        if plan.max_steps > len(self._batches):
            raise InvariantViolation(
                f"rank {self.rank}: planned {plan.max_steps} steps with {len(self._batches)} batches leased"
            )
        self._plan, self._window, self._is_closing = plan, _Window(), False
        self.state = RankState.TRAINING
        return actions + (self._close_window() if plan.max_steps == 0 else [])

    def _on_close(self, version: Version) -> list[RankAction]:
        if self.state is not RankState.TRAINING or version != self.version:
            return []
        self._is_closing = True
        return self._close_window()

    def _on_start_round(self, go: StartRound, now_s: float) -> list[RankAction]:
        if self.state not in (RankState.WAITING, RankState.HOLDING) or go.key.version != self.version + 1:
            return []
        self._round, self._round_started_s = go, now_s
        self.state = RankState.PACKING
        owns_raw = go.raw_source == self.rank
        return [Pack(go.key, go.weight, go.buffer_weight, self._takes_raw, owns_raw)]

    def _on_abort(self, key: RoundKey) -> list[RankAction]:
        if not self._is_current(key):
            return []
        was_reducing = self.state is RankState.REDUCING and self._settings.cadence.mode.is_collective
        self._round = None
        self.state = RankState.WAITING
        return [AbandonReduce(key, group_too=was_reducing)]

    def _on_commit(self, key: RoundKey) -> list[RankAction]:
        if self.state is not RankState.HOLDING or self._round is None or self._round.key != key:
            return []
        take_raw = self._takes_raw
        self._round = None
        self.version = key.version
        self.state = RankState.WAITING
        return [Adopt(key, take_raw)]

    # -------------------------------------------------------------------------------------------- own progress
    def _on_step(self, step: StepDone) -> list[RankAction]:
        plan = self._plan
        if self.state is not RankState.TRAINING or plan is None:
            return []
        self._batches.popleft()
        self.steps_total += 1
        self._window.add(step)
        if self._window.steps == plan.max_steps:
            return self._close_window()
        if self._window.steps == plan.min_steps:
            return [SendUp(MinReached(self.rank, self.version))]
        return []

    def _close_window(self) -> list[RankAction]:
        self.state = RankState.ACCOUNTING
        return [AccountWindow()]

    def _on_accounted(self, accounts: WindowAccounted) -> list[RankAction]:
        if self.state is not RankState.ACCOUNTING:
            return []
        window = self._window
        self._plan = None
        self._window = _Window()
        self.state = RankState.WAITING
        report = WindowDone(
            rank=self.rank,
            version=self.version,
            samples=window.samples,
            steps=window.steps,
            loss_sum=accounts.loss_sum,
            is_finite=accounts.is_finite,
            delivered_ms=window.delivered_ms(self._settings.batch_size),
            compute_ms=window.compute_ms(self._settings.batch_size),
            window_ms=window.busy_s * 1e3,
            scalars=accounts.scalars,
            learning_rate=accounts.learning_rate,
        )
        return [SendUp(report)]

    def _on_group(self, event: GroupSettled) -> list[RankAction]:
        if (event.incarnation, event.attempt) != self._formation:
            return []
        return [SendUp(GroupFormed(self.rank, event.incarnation, event.attempt, event.error))]

    def _on_packed(self, event: Packed, now_s: float) -> list[RankAction]:
        if not self._is_current(event.key) or self.state is not RankState.PACKING:
            return []
        self._sent_finite = event.is_finite
        self.state = RankState.REDUCING
        if self._settings.cadence.mode.is_collective:
            return [ReduceCollective(event.key, self._takes_raw)]
        return [SendUp(ContributionWritten(self.rank, event.key))]

    def _on_sum(self, event: SumReady, now_s: float) -> list[RankAction]:
        if not self._is_current(event.key) or self.state is not RankState.REDUCING:
            return []
        if event.error:
            return [SendUp(self._reduced(event.key, now_s, error=event.error))]
        self.state = RankState.HOLDING
        return [SendUp(self._reduced(event.key, now_s, digest=event.digest, divergence=event.divergence))]

    # -------------------------------------------------------------------------------------------------- details
    @property
    def _takes_raw(self) -> bool:
        return self._round is not None and self._round.raw_source is not None

    def _is_current(self, key: RoundKey) -> bool:
        return self._round is not None and self._round.key == key

    def _reduced(
        self,
        key: RoundKey,
        now_s: float,
        digest: str = "",
        divergence: float = 0.0,
        error: str = "",
    ) -> Reduced:
        reduce_ms = (now_s - self._round_started_s) * 1e3
        return Reduced(self.rank, key, digest, self._sent_finite, divergence, reduce_ms, error)

    def _end(self, reason: str, exit_code: int) -> list[RankAction]:
        self.state = RankState.ENDED
        return [EndRank(reason, exit_code)]


class _Window:
    """The times of one window, in seconds of the rank's clock."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.busy_s = 0.0
        self._first_end_s = 0.0
        self._first_samples = 0
        self._last_end_s = 0.0

    def add(self, step: StepDone) -> None:
        if self.steps == 0:
            self._first_end_s, self._first_samples = step.ended_s, step.samples
        self.steps += 1
        self.samples += step.samples
        self.busy_s += step.ended_s - step.started_s
        self._last_end_s = step.ended_s

    def delivered_ms(self, batch_size: int) -> float | None:
        """From the end of the first batch to the end of the last, per full batch's worth of samples."""
        samples = self.samples - self._first_samples
        if samples <= 0:
            return None
        return (self._last_end_s - self._first_end_s) * 1e3 * batch_size / samples

    def compute_ms(self, batch_size: int) -> float | None:
        """Time inside steps per full batch's worth of samples."""
        return self.busy_s * 1e3 * batch_size / self.samples if self.samples else None
