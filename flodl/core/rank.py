"""RankCore: the rank's half of every conversation.

Purpose: turn the controller's and the daemon's words into steps, reduces and adoptions of one rank.
Two tracks. Work: *joining* until admitted; *idle* without a plan; *training* a window; *accounting* its end; *beyond*:
it has reported its window and trains on (asynchronous mode only); *ended*. Round: *none*; *packing*, *reducing* and
*holding* an unpublished sum. In lockstep modes one track stands still while the other moves.
Invariants: parameters change only by a step or by an adoption after Commit of the very key that is held; a sum whose
key was aborted is never adopted; a window never exceeds its plan's ``max_steps`` nor the leased batches; what a rank
gives to a round is what it had when it reported its window; the optimizer is put back exactly when a round is committed
that this rank's work was left out of, not being finite.
It does not touch tensors, sockets or clocks: the shell (flodl.rank) does.
"""

from collections import deque
from enum import StrEnum
from typing import assert_never

from flodl.core.actions import (
    AbandonReduce,
    AccountWindow,
    Adopt,
    BackUp,
    Blend,
    CallBack,
    DigestTensors,
    EndRank,
    Evaluate,
    FormCollective,
    LoadAhead,
    OpenWindow,
    Pack,
    RankAction,
    ReduceCollective,
    RollBack,
    SendUp,
    SumSlice,
    TakeResult,
    TakeSnapshot,
    TakeState,
    WriteState,
)
from flodl.core.events import (
    CalledBack,
    DaemonDropped,
    DaemonSaid,
    Evaluated,
    GroupSettled,
    Packed,
    RankEvent,
    SliceSummed,
    SnapshotTaken,
    StateTaken,
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
    CallbackDone,
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
    LoadState,
    MinReached,
    RankFinished,
    Reduced,
    ReduceSlice,
    ResultReady,
    RunCallback,
    RunEval,
    SendState,
    Settings,
    SliceReduced,
    StartRound,
    StateLoaded,
    StateSent,
    StoreReply,
    SumDescribed,
    WindowDone,
    WindowPlan,
)


class Work(StrEnum):
    """What the rank does with its batches."""

    JOINING = "joining"
    IDLE = "idle"
    TRAINING = "training"
    ACCOUNTING = "accounting"
    BEYOND = "beyond"
    ENDED = "ended"


class Stage(StrEnum):
    """How far the rank's part in an attempt at a round is."""

    NONE = "none"
    PACKING = "packing"
    REDUCING = "reducing"
    HOLDING = "holding"


class RankCore:
    """See the module docstring. ``settings`` is what this rank reported in RankReady."""

    def __init__(self, rank: RankId, settings: Settings, merge_single_tail: bool) -> None:
        self.rank = rank
        self.work = Work.JOINING
        self.stage = Stage.NONE
        self.version: Version = -1
        self._first_version: Version = 0
        self.steps_total = 0
        self._settings = settings
        self._merge_single_tail = merge_single_tail
        self._mode = settings.cadence.mode
        self._batches: deque[int] = deque()
        self._plan: WindowPlan | None = None
        self._window = _Window()
        self._is_snapshot_finite = True
        self._given: bool | None = None
        self._round: StartRound | None = None
        self._round_started_s = 0.0
        self._other_work_s = 0.0
        self._was_held = False
        self._left_work_s = 0.0
        self._sent_finite = True
        self._has_peers = False
        self._formation: tuple[int, int] = (0, 0)

    # ------------------------------------------------------------------------------------------------- contract
    @property
    def wants_step(self) -> bool:
        """True while the shell should train the next batch, after it has handled every event that waits."""
        plan = self._plan
        if plan is None:
            return False
        if self.work is Work.BEYOND:
            return bool(self._batches) and self._window.steps < plan.max_steps - plan.min_steps
        return self.work is Work.TRAINING and self._window.steps < self._window_steps(plan)

    @property
    def has_ended(self) -> bool:
        """True once nothing more will happen in this rank."""
        return self.work is Work.ENDED

    def handle(self, event: RankEvent, now_s: float) -> list[RankAction]:
        """Take one event; ``now_s`` is monotonic seconds."""
        if self.work is Work.ENDED:
            return []
        match event:
            case DaemonSaid(message):
                return self._on_message(message, now_s)
            case DaemonDropped():
                return self._end("the host's daemon is gone", 1)
            case StepDone():
                return self._on_step(event)
            case SnapshotTaken(is_finite):
                self._is_snapshot_finite = is_finite
                return []
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
                self._return_to_work(now_s)
                return [SendUp(EvalDone(self.rank, event.epoch, event.value, event.error))]
            case CalledBack(kind, epoch, error):
                self._return_to_work(now_s)
                return [SendUp(CallbackDone(self.rank, kind, epoch, error))]
            case StateWritten(transfer, size_bytes, error):
                self._return_to_work(now_s)
                return [SendUp(StateSent(self.rank, transfer, size_bytes, error))]
            case StateTaken(transfer, error, warnings):
                return [SendUp(StateLoaded(self.rank, transfer, error, warnings))]
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
        if self.work in (Work.TRAINING, Work.BEYOND) and plan is None:
            raise InvariantViolation(f"rank {self.rank}: {self.work} without a plan")
        if plan is not None and not self._mode.is_async and self._window.steps > plan.max_steps:
            raise InvariantViolation(f"rank {self.rank}: {self._window.steps} steps in a window of {plan.max_steps}")
        if self.stage is not Stage.NONE and self._round is None:
            raise InvariantViolation(f"rank {self.rank}: {self.stage} without a round")
        if self.stage is not Stage.NONE and self.work is Work.TRAINING:
            raise InvariantViolation(f"rank {self.rank}: {self.stage} a round before its window is over")

    def snapshot(self) -> dict[str, object]:
        """Plain values for logs and tests."""
        return {
            "rank": self.rank,
            "work": str(self.work),
            "stage": str(self.stage),
            "version": self.version,
            "steps": self.steps_total,
            "held_batches": len(self._batches),
            "window_steps": self._window.steps,
        }

    # ------------------------------------------------------------------------------------------------- messages
    def _on_message(self, message: DaemonToRank, now_s: float) -> list[RankAction]:
        match message:
            case Admitted(_, _, ranks, version):
                if self.work is Work.JOINING:
                    self.work, self.version, self._first_version = Work.IDLE, version, version + 1
                self._has_peers = len(ranks) > 1
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
                self._left_work_s = now_s
                return [Evaluate(epoch)]
            case RunCallback(_, kind, epoch):
                self._left_work_s = now_s
                return [CallBack(kind, epoch)]
            case SendState(_, transfer, whole):
                self._left_work_s = now_s
                return [WriteState(transfer, whole)]
            case LoadState(_, transfer):
                return [TakeState(transfer)] if self.work is Work.JOINING else []
            case FinishRank(_, reason):
                return [SendUp(RankFinished(self.rank)), *self._end(reason, 0)]
            case Evict(_, reason):
                return self._end(f"removed from the run: {reason}", 1)
            case StoreReply():
                return []  # the shell answers the rendezvous thread before the core hears of it
            case _:
                assert_never(message)

    def _on_plan(self, plan: WindowPlan) -> list[RankAction]:
        is_expected = self.work in (Work.IDLE, Work.BEYOND) and self.stage is Stage.NONE and self._given is None
        if not is_expected or plan.version != self.version:
            return []
        actions: list[RankAction] = []
        for grant in plan.grants:
            self._batches.extend(batches_of(grant.samples, self._settings.batch_size, self._merge_single_tail))
            actions.append(LoadAhead(grant))
        # Steps beyond the last window are the first of this one.
        if plan.max_steps > len(self._batches) + self._window.steps:
            raise InvariantViolation(
                f"rank {self.rank}: planned {plan.max_steps} steps with {len(self._batches)} batches leased"
            )
        actions.append(OpenWindow(plan.progress_samples, plan.stride, self._window.steps))
        self._plan, self.work = plan, Work.TRAINING
        is_over = self._window.steps >= self._window_steps(plan)
        return actions + (self._close_window() if is_over else [])

    def _on_close(self, version: Version) -> list[RankAction]:
        if self.work is not Work.TRAINING or version != self.version:
            return []
        return self._close_window()

    def _on_start_round(self, go: StartRound, now_s: float) -> list[RankAction]:
        may_start = self.work in (Work.IDLE, Work.BEYOND) and self.stage in (Stage.NONE, Stage.HOLDING)
        if not may_start or go.key.version != self.version + 1:
            return []
        actions: list[RankAction] = []
        if self._given is None:  # version 0: nothing has been trained
            self._given = True
            actions += self._snapshot_of(is_untouched=True)
        self._round, self._round_started_s, self._other_work_s = go, now_s, 0.0
        self.stage = Stage.PACKING
        owns_raw = go.raw_source == self.rank
        return [*actions, Pack(go.key, go.weight, go.buffer_weight, self._takes_raw, owns_raw)]

    def _on_abort(self, key: RoundKey) -> list[RankAction]:
        if not self._is_current(key):
            return []
        was_reducing = self.stage is Stage.REDUCING and self._mode.is_collective
        self._round = None
        self.stage = Stage.NONE
        return [AbandonReduce(key, group_too=was_reducing)]

    def _on_commit(self, key: RoundKey) -> list[RankAction]:
        if self.stage is not Stage.HOLDING or self._round is None or self._round.key != key:
            return []
        take_raw = self._takes_raw
        was_finite = self._given is True
        is_blend = self._mode.is_async and not take_raw and was_finite and key.version != self._first_version
        self._round, self._given = None, None
        self.version = key.version
        self.stage = Stage.NONE
        adoption = Blend(key) if is_blend else Adopt(key, take_raw)
        return [*self._put_back(was_finite), adoption, *self._remember(was_finite)]

    def _put_back(self, was_finite: bool) -> list[RankAction]:
        """Before the adoption: an outer optimizer that lets the inner ones start afresh has the last word."""
        return [RollBack()] if self._has_peers and not was_finite else []  # without peers nobody would have committed

    def _remember(self, was_finite: bool) -> list[RankAction]:
        """The optimizer at a commit; an asynchronous rank has kept it with what it gave to the round."""
        keeps = was_finite and (self.version == self._first_version or not self._mode.is_async)
        return [BackUp()] if self._has_peers and keeps else []

    # -------------------------------------------------------------------------------------------- own progress
    def _on_step(self, step: StepDone) -> list[RankAction]:
        plan = self._plan
        if self.work not in (Work.TRAINING, Work.BEYOND) or plan is None:
            return []
        self._batches.popleft()
        self.steps_total += 1
        self._window.add(step, self._was_held)
        self._was_held = False
        self._other_work_s += step.ended_s - step.started_s
        if self.work is Work.BEYOND:
            self._was_held = not self.wants_step
            return []
        if self._window.steps == self._window_steps(plan):
            return self._close_window()
        if self._window.steps == plan.min_steps:
            return [SendUp(MinReached(self.rank, self.version))]
        return []

    def _window_steps(self, plan: WindowPlan) -> int:
        """After how many steps the window is over at the latest: an asynchronous one does not go on to its most."""
        return plan.min_steps if self._mode.is_async else plan.max_steps

    def _close_window(self) -> list[RankAction]:
        self.work = Work.ACCOUNTING
        return [*self._snapshot_of(is_untouched=self._window.steps == 0), AccountWindow()]

    def _snapshot_of(self, is_untouched: bool) -> list[RankAction]:
        return [TakeSnapshot(is_untouched)] if self._mode.is_async else []

    def _on_accounted(self, accounts: WindowAccounted) -> list[RankAction]:
        if self.work is not Work.ACCOUNTING:
            return []
        window = self._window
        self._window = _Window()
        # What follows a window that is not finite is worth nothing: it waits for the others' consensus.
        self._given = accounts.is_finite and self._is_snapshot_finite
        self.work = Work.BEYOND if self._mode.is_async and self._given else Work.IDLE
        report = WindowDone(
            rank=self.rank,
            version=self.version,
            samples=window.samples,
            steps=window.steps,
            loss_sum=accounts.loss_sum,
            is_finite=self._given,
            delivered_ms=window.delivered_ms(self._settings.batch_size),
            compute_ms=window.compute_ms(self._settings.batch_size),
            window_ms=window.busy_s * 1e3,
            scalars=accounts.scalars,
            learning_rate=accounts.learning_rate,
            total_steps=self.steps_total,
            nonfinite_step=self._in_run(accounts.nonfinite_step, window.steps),
        )
        keeps = self._mode.is_async and self._given and self._has_peers
        return [BackUp(), SendUp(report)] if keeps else [SendUp(report)]

    def _return_to_work(self, now_s: float) -> None:
        """What the run wanted of this rank alone is done: it is a cost neither of a batch nor of averaging."""
        away_s = now_s - self._left_work_s
        self._window.pause(away_s)
        self._other_work_s += away_s

    def _on_group(self, event: GroupSettled) -> list[RankAction]:
        if (event.incarnation, event.attempt) != self._formation:
            return []
        return [SendUp(GroupFormed(self.rank, event.incarnation, event.attempt, event.error))]

    def _on_packed(self, event: Packed, now_s: float) -> list[RankAction]:
        if not self._is_current(event.key) or self.stage is not Stage.PACKING:
            return []
        self._sent_finite = event.is_finite
        self._given = bool(self._given) and event.is_finite
        self.stage = Stage.REDUCING
        if self._mode.is_collective:
            return [ReduceCollective(event.key, self._takes_raw)]
        return [SendUp(ContributionWritten(self.rank, event.key))]

    def _on_sum(self, event: SumReady, now_s: float) -> list[RankAction]:
        if not self._is_current(event.key) or self.stage is not Stage.REDUCING:
            return []
        if event.error:
            return [SendUp(self._reduced(event.key, now_s, error=event.error))]
        self.stage = Stage.HOLDING
        return [SendUp(self._reduced(event.key, now_s, digest=event.digest, divergence=event.divergence))]

    # -------------------------------------------------------------------------------------------------- details
    @property
    def _takes_raw(self) -> bool:
        return self._round is not None and self._round.raw_source is not None

    def _in_run(self, step: int, window_steps: int) -> int:
        """A step of the window just done as one of the run's; 0 stays 0."""
        return self.steps_total - window_steps + step if step else 0

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
        # What was trained, evaluated or saved meanwhile is no cost of averaging.
        reduce_ms = max(0.0, now_s - self._round_started_s - self._other_work_s) * 1e3
        return Reduced(self.rank, key, digest, self._sent_finite, divergence, reduce_ms, error)

    def _end(self, reason: str, exit_code: int) -> list[RankAction]:
        self.work = Work.ENDED
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
        self._paused_s = 0.0
        self._idle_s = 0.0

    def pause(self, for_s: float) -> None:
        """The rank did something else between two steps."""
        self._paused_s += for_s

    def add(self, step: StepDone, was_held: bool) -> None:
        """``was_held``: the rank was not allowed this step at once; its wait says nothing about its speed."""
        if self.steps == 0:
            self._first_end_s, self._first_samples = step.ended_s, step.samples
        else:
            between_s = step.started_s - self._last_end_s
            self._idle_s += between_s if was_held else min(self._paused_s, between_s)
        self._paused_s = 0.0
        self.steps += 1
        self.samples += step.samples
        self.busy_s += step.ended_s - step.started_s
        self._last_end_s = step.ended_s

    def delivered_ms(self, batch_size: int) -> float | None:
        """From the end of the first batch to the end of the last without pauses, per full batch's worth of samples."""
        samples = self.samples - self._first_samples
        if samples <= 0:
            return None
        return (self._last_end_s - self._first_end_s - self._idle_s) * 1e3 * batch_size / samples

    def compute_ms(self, batch_size: int) -> float | None:
        """Time inside steps per full batch's worth of samples."""
        return self.busy_s * 1e3 * batch_size / self.samples if self.samples else None
