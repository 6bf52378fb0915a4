"""The rank's half: windows, rounds, adoption, and nothing of a stale key."""

from dataclasses import replace

import pytest

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
from flodl.core.rank import RankCore, Stage, Work
from flodl.errors import InvariantViolation
from flodl.ids import Grant, RoundKey, Span
from flodl.messages import (
    AbortRound,
    Admitted,
    CadenceSettings,
    CallbackDone,
    CallbackKind,
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
    Mode,
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

SETTINGS = Settings(100, 4, 2, 0, CadenceSettings(Mode.NCCL_CADENCE))
SEED = RoundKey(1, 0, 1)
KEY = RoundKey(1, 1, 1)
STALE = RoundKey(1, 1, 2)
ACCOUNTS = WindowAccounted(6.0, True, {"acc": (3.0, 4)}, learning_rate=0.1)


class Subject:
    """Rank 2 under test; its invariants are checked after every event."""

    def __init__(self, mode: Mode = Mode.NCCL_CADENCE) -> None:
        self.core = RankCore(2, replace(SETTINGS, cadence=CadenceSettings(mode)), merge_single_tail=False)

    def post(self, event: RankEvent, now_s: float = 10.0) -> list[RankAction]:
        actions = self.core.handle(event, now_s)
        self.core.check()
        return actions

    def hear(self, message: DaemonToRank, now_s: float = 10.0) -> list[RankAction]:
        return self.post(DaemonSaid(message), now_s)

    def go(self, key: RoundKey, raw_source: int | None = None, now_s: float = 10.0) -> list[RankAction]:
        return self.hear(StartRound(2, key, 0.25, 0.5, raw_source), now_s)

    def plan(self, least: int, most: int, samples: int = 0, version: int = 0) -> list[RankAction]:
        grants = (Grant(0, (Span(0, samples),)),) if samples else ()
        return self.hear(WindowPlan(2, version, least, most, grants))

    def step(self, started_s: float, ended_s: float, samples: int = 4) -> list[RankAction]:
        return self.post(StepDone(samples, started_s, ended_s))


def admitted(mode: Mode = Mode.NCCL_CADENCE) -> Subject:
    rank = Subject(mode)
    rank.hear(Admitted(2, 3, (0, 1, 2)))
    return rank


def seeded(mode: Mode = Mode.NCCL_CADENCE) -> Subject:
    """Holds version 0."""
    rank = admitted(mode)
    rank.go(SEED)
    rank.post(Packed(SEED, True))
    rank.post(SumReady(SEED, "d", 0.0, ""))
    rank.hear(Commit(2, SEED))
    return rank


def holding(mode: Mode = Mode.NCCL_CADENCE) -> Subject:
    """Holds an unpublished sum of version 1."""
    rank = seeded(mode)
    rank.go(KEY)
    rank.post(Packed(KEY, True))
    rank.post(SumReady(KEY, "d", 0.1, ""))
    return rank


def average(rank: Subject, key: RoundKey = KEY, raw_source: int | None = None) -> list[RankAction]:
    """A round from its start to its commit; what the commit led to."""
    rank.go(key, raw_source)
    rank.post(Packed(key, True))
    rank.post(SumReady(key, "d", 0.1, ""))
    return rank.hear(Commit(2, key))


# -------------------------------------------------------------------------------------------------------------- windows
def test_rank_waits_until_it_is_admitted() -> None:
    rank = Subject()
    assert rank.core.work is Work.JOINING
    assert rank.plan(1, 1, samples=4, version=-1) == []
    assert rank.hear(Admitted(2, 3, (0, 1, 2))) == []
    assert rank.core.work is Work.IDLE
    rank.go(SEED)
    assert rank.hear(Admitted(2, 3, (0, 1, 2))) == []
    assert rank.core.stage is Stage.PACKING
    assert (rank.core.wants_step, rank.core.next_deadline_s()) == (False, None)
    assert rank.post(Ticked()) == []


def test_window_runs_to_its_most_and_is_accounted() -> None:
    rank = seeded()
    assert rank.plan(3, 3, samples=10) == [LoadAhead(Grant(0, (Span(0, 10),))), OpenWindow(0, 1.0, 0)]
    assert rank.core.wants_step
    assert rank.step(0.0, 1.0) == []
    assert rank.step(1.5, 2.0) == []
    assert rank.step(2.0, 2.5, samples=2) == [AccountWindow()]
    assert not rank.core.wants_step
    (said,) = rank.post(ACCOUNTS)
    assert said == SendUp(
        WindowDone(
            rank=2, version=0, samples=10, steps=3, loss_sum=6.0, is_finite=True,
            delivered_ms=1000.0, compute_ms=800.0, window_ms=2000.0, scalars={"acc": (3.0, 4)},
            learning_rate=0.1, total_steps=3,
        )
    )  # fmt: skip
    assert rank.core.snapshot() == {
        "rank": 2, "work": "idle", "stage": "none", "version": 0, "steps": 3, "held_batches": 0, "window_steps": 0,
    }  # fmt: skip


def test_rank_says_once_that_its_least_is_done_and_goes_on_until_it_is_closed() -> None:
    rank = seeded()
    rank.plan(1, 3, samples=12)
    assert rank.step(0.0, 1.0) == [SendUp(MinReached(2, 0))]
    assert rank.step(1.0, 2.0) == []
    assert rank.hear(CloseWindow(2, 7)) == []
    assert rank.hear(CloseWindow(2, 0)) == [AccountWindow()]
    assert rank.hear(CloseWindow(2, 0)) == []
    assert rank.post(ACCOUNTS) != []
    assert rank.core.snapshot()["held_batches"] == 1


def test_what_was_leased_ahead_is_trained_in_the_next_window() -> None:
    rank = seeded()
    rank.plan(1, 1, samples=8)
    rank.step(0.0, 1.0)
    rank.post(ACCOUNTS)
    average(rank)
    assert rank.plan(1, 1, version=1) == [OpenWindow(0, 1.0, 0)]
    assert rank.core.wants_step


def test_second_plan_before_the_round_is_not_taken() -> None:
    rank = seeded()
    rank.plan(1, 1, samples=8)
    rank.step(0.0, 1.0)
    rank.post(ACCOUNTS)
    assert rank.plan(1, 1, samples=4) == []
    assert not rank.core.wants_step


def test_window_without_steps_is_done_at_once_and_has_no_timing() -> None:
    rank = seeded()
    assert rank.plan(0, 0) == [OpenWindow(0, 1.0, 0), AccountWindow()]
    (said,) = rank.post(WindowAccounted(0.0, True, {}))
    assert said == SendUp(WindowDone(2, 0, 0, 0, 0.0, True, None, None, 0.0, {}))


def test_single_step_has_no_delivered_time() -> None:
    rank = seeded()
    rank.plan(1, 1, samples=4)
    rank.step(0.0, 0.5)
    (said,) = rank.post(ACCOUNTS)
    assert isinstance(said, SendUp)
    assert isinstance(said.message, WindowDone)
    assert (said.message.delivered_ms, said.message.compute_ms) == (None, 500.0)


def test_plan_of_another_version_or_in_a_window_is_not_taken() -> None:
    rank = seeded()
    assert rank.plan(1, 1, samples=4, version=3) == []
    rank.plan(1, 2, samples=8)
    assert rank.plan(1, 1, samples=4) == []


def test_plan_beyond_the_leases_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="rank 2: planned 3 steps with 2 batches leased"):
        seeded().plan(3, 3, samples=8)


def test_step_and_accounts_out_of_turn_change_nothing() -> None:
    rank = seeded()
    assert rank.step(0.0, 1.0) == []
    assert rank.post(ACCOUNTS) == []
    assert rank.core.steps_total == 0


# --------------------------------------------------------------------------------------------------------------- rounds
def test_collective_round_packs_reduces_reports_and_adopts_on_commit() -> None:
    rank = seeded()
    assert rank.go(KEY, now_s=20.0) == [Pack(KEY, 0.25, 0.5, include_raw=False, owns_raw=False)]
    assert rank.post(Packed(KEY, True)) == [ReduceCollective(KEY, include_raw=False)]
    assert rank.post(SumReady(KEY, "d", 0.1, ""), 20.5) == [SendUp(Reduced(2, KEY, "d", True, 0.1, 500.0, ""))]
    assert rank.core.stage is Stage.HOLDING
    assert rank.hear(Commit(2, KEY)) == [Adopt(KEY, take_raw=False), BackUp()]
    assert (rank.core.version, rank.core.stage) == (1, Stage.NONE)
    assert rank.hear(Commit(2, KEY)) == []


def test_cpu_round_goes_through_the_hosts_memory() -> None:
    rank = seeded(Mode.CPU_CADENCE)
    rank.go(KEY, raw_source=0)
    assert rank.post(Packed(KEY, False)) == [SendUp(ContributionWritten(2, KEY))]
    assert rank.hear(ReduceSlice(2, KEY, 1, 3, (0, 1, 2))) == [SumSlice(KEY, 1, 3, (0, 1, 2))]
    assert rank.post(SliceSummed(KEY)) == [SendUp(SliceReduced(2, KEY))]
    assert rank.hear(ResultReady(2, KEY)) == [TakeResult(KEY, include_raw=True)]
    (said,) = rank.post(SumReady(KEY, "d", 0.1, ""))
    assert said == SendUp(Reduced(2, KEY, "d", False, 0.1, 0.0, ""))


def test_sum_that_is_in_dispute_is_described_tensor_by_tensor() -> None:
    rank = seeded(Mode.CPU_CADENCE)
    rank.go(KEY)
    rank.post(Packed(KEY, True))
    rank.post(SumReady(KEY, "d", 0.1, ""))
    assert rank.hear(DescribeSum(2, STALE)) == []
    assert rank.hear(DescribeSum(2, KEY)) == [DigestTensors(KEY)]
    assert rank.hear(AbortRound(2, KEY, "digests differ")) == [AbandonReduce(KEY, group_too=False)]
    assert rank.post(TensorsDigested(KEY, ("w",), b"8 bytes.")) == [SendUp(SumDescribed(2, KEY, ("w",), b"8 bytes."))]


@pytest.mark.parametrize(("source", "owns"), [(2, True), (0, False)])
def test_raw_buffers_come_from_one_rank_and_all_take_them(source: int, owns: bool) -> None:
    rank = seeded()
    assert rank.go(KEY, raw_source=source) == [Pack(KEY, 0.25, 0.5, include_raw=True, owns_raw=owns)]
    assert rank.post(Packed(KEY, True)) == [ReduceCollective(KEY, include_raw=True)]
    rank.post(SumReady(KEY, "d", 0.1, ""))
    assert rank.hear(Commit(2, KEY)) == [Adopt(KEY, take_raw=True), BackUp()]


def commit_after(rank: Subject, *attempts: bool) -> list[RankAction]:
    """One attempt after the other, each with its finding; the last one is committed."""
    for number, is_finite in enumerate(attempts, 1):
        key = RoundKey(1, rank.core.version + 1, number)
        rank.go(key)
        rank.post(Packed(key, is_finite))
        rank.post(SumReady(key, "d", 0.1, ""))
        if number < len(attempts):
            rank.hear(AbortRound(2, key, "a contribution is not finite"))
    return rank.hear(Commit(2, key))


def test_rank_whose_loss_was_not_finite_is_put_back_by_the_commit_without_it() -> None:
    rank = seeded()
    rank.plan(3, 3, samples=12)
    for _ in range(3):
        rank.step(0.0, 1.0)
    (said,) = rank.post(replace(ACCOUNTS, is_finite=False, nonfinite_step=2))
    assert isinstance(said, SendUp)
    assert isinstance(said.message, WindowDone)
    assert (said.message.total_steps, said.message.nonfinite_step) == (3, 2)
    assert commit_after(rank, True)[:-1] == [RollBack()]
    rank.plan(2, 2, samples=8, version=1)
    for _ in range(2):
        rank.step(0.0, 1.0)
    (said,) = rank.post(replace(ACCOUNTS, is_finite=False, nonfinite_step=2))
    assert isinstance(said, SendUp)
    assert isinstance(said.message, WindowDone)
    assert (said.message.total_steps, said.message.nonfinite_step) == (5, 5)


def test_rank_whose_parameters_were_not_finite_is_put_back_once() -> None:
    rank = seeded()
    assert commit_after(rank, False, True)[:-1] == [RollBack()]
    assert commit_after(rank, True)[1:] == [BackUp()]


def test_rank_without_peers_has_nothing_to_be_put_back_to() -> None:
    rank = Subject()
    rank.hear(Admitted(2, 1, (2,)))
    assert commit_after(rank, True) == [Adopt(RoundKey(1, 0, 1), take_raw=False)]


def test_nothing_of_a_stale_key_is_done() -> None:
    rank = seeded(Mode.CPU_CADENCE)
    for event in (Packed(STALE, True), SliceSummed(STALE), SumReady(STALE, "d", 0.0, "")):
        assert rank.post(event) == []
    rank.go(KEY)
    for message in (
        ReduceSlice(2, STALE, 0, 1, (0,)), ResultReady(2, STALE), AbortRound(2, STALE, "late"), Commit(2, STALE),
    ):  # fmt: skip
        assert rank.hear(message) == []
    for event in (Packed(STALE, True), SliceSummed(STALE), SumReady(STALE, "d", 0.0, "")):
        assert rank.post(event) == []
    assert rank.core.stage is Stage.PACKING


def test_results_out_of_turn_change_nothing() -> None:
    rank = seeded()
    rank.go(KEY)
    assert rank.post(SumReady(KEY, "d", 0.0, "")) == []
    rank.post(Packed(KEY, True))
    assert rank.post(Packed(KEY, True)) == []
    assert rank.hear(Commit(2, KEY)) == []
    rank.post(SumReady(KEY, "d", 0.0, ""))
    assert rank.hear(Commit(2, STALE)) == []
    assert rank.core.stage is Stage.HOLDING


@pytest.mark.parametrize("key", [RoundKey(1, 0, 2), RoundKey(1, 2, 1)])
def test_round_of_another_version_is_not_begun(key: RoundKey) -> None:
    assert seeded().go(key) == []


def test_round_is_not_begun_inside_a_window() -> None:
    rank = seeded()
    rank.plan(1, 1, samples=4)
    assert rank.go(KEY) == []


@pytest.mark.parametrize(
    ("mode", "is_stuck"), [(Mode.NCCL_CADENCE, True), (Mode.NCCL_SYNC, True), (Mode.CPU_SYNC, False)]
)
def test_abort_inside_a_reduce_leaves_a_collective_group_behind(mode: Mode, is_stuck: bool) -> None:
    rank = seeded(mode)
    rank.go(KEY)
    rank.post(Packed(KEY, True))
    assert rank.hear(AbortRound(2, KEY, "rank 1 is lost")) == [AbandonReduce(KEY, group_too=is_stuck)]
    assert rank.post(SumReady(KEY, "d", 0.0, "")) == []
    assert rank.hear(Commit(2, KEY)) == []
    assert rank.core.version == 0


def test_held_sum_of_an_aborted_round_is_never_adopted() -> None:
    rank = holding()
    assert rank.hear(AbortRound(2, KEY, "rank 1 is lost")) == [AbandonReduce(KEY, group_too=False)]
    assert rank.hear(Commit(2, KEY)) == []
    assert rank.go(RoundKey(2, 1, 2)) != []


def test_next_attempt_replaces_a_held_sum() -> None:
    rank = holding()
    assert rank.go(STALE) == [Pack(STALE, 0.25, 0.5, include_raw=False, owns_raw=False)]
    assert rank.hear(Commit(2, KEY)) == []


def test_broken_reduce_is_reported_and_waits_for_the_abort() -> None:
    rank = seeded()
    rank.go(KEY)
    rank.post(Packed(KEY, True))
    assert rank.post(SumReady(KEY, "", 0.0, "reset")) == [SendUp(Reduced(2, KEY, "", True, 0.0, 0.0, "reset"))]
    assert rank.hear(AbortRound(2, KEY, "reset")) == [AbandonReduce(KEY, group_too=True)]


# --------------------------------------------------------------------------------------------------- asynchronous mode
def beyond(least: int = 1, most: int = 3, samples: int = 16) -> Subject:
    """Has reported its window, one step by default, and may train on."""
    rank = seeded(Mode.CPU_ASYNC)
    rank.plan(least, most, samples)
    for number in range(least):
        rank.step(number, number + 1.0)
    rank.post(SnapshotTaken(True))
    rank.post(ACCOUNTS)
    return rank


def test_version_0_is_given_from_a_snapshot_of_the_untouched_model() -> None:
    rank = admitted(Mode.CPU_ASYNC)
    assert rank.go(SEED, raw_source=2) == [
        TakeSnapshot(is_untouched=True), Pack(SEED, 0.25, 0.5, include_raw=True, owns_raw=True),
    ]  # fmt: skip
    rank.post(SnapshotTaken(True))
    rank.post(Packed(SEED, True))
    rank.post(SumReady(SEED, "d", 0.0, ""))
    assert rank.hear(Commit(2, SEED)) == [Adopt(SEED, take_raw=True), BackUp()]


def test_asynchronous_newcomer_adopts_the_first_consensus_and_blends_the_next() -> None:
    rank = Subject(Mode.CPU_ASYNC)
    rank.hear(Admitted(2, 4, (0, 1, 2), 39))
    first, second = RoundKey(3, 40, 1), RoundKey(3, 41, 1)
    assert rank.go(first)[:1] == [TakeSnapshot(is_untouched=True)]
    assert average(rank, first) == [Adopt(first, False), BackUp()]
    rank.plan(1, 1, samples=4, version=40)
    rank.step(0.0, 0.1)
    rank.post(SnapshotTaken(True))
    rank.post(ACCOUNTS)
    assert average(rank, second) == [Blend(second)]


def test_async_window_ends_at_its_count_with_a_snapshot() -> None:
    rank = seeded(Mode.CPU_ASYNC)
    rank.plan(2, 4, samples=16)
    assert rank.step(0.0, 1.0) == []
    assert rank.step(1.0, 2.0) == [TakeSnapshot(is_untouched=False), AccountWindow()]
    rank.post(SnapshotTaken(True))
    kept, said = rank.post(ACCOUNTS)
    assert kept == BackUp()  # with the snapshot: at the commit the optimizer has gone on
    assert isinstance(said, SendUp)
    assert isinstance(said.message, WindowDone)
    assert (said.message.samples, said.message.steps, said.message.is_finite) == (8, 2, True)


def test_rank_trains_on_while_the_round_goes_on_and_then_blends() -> None:
    rank = beyond()
    assert rank.core.wants_step
    assert rank.go(KEY) == [Pack(KEY, 0.25, 0.5, include_raw=False, owns_raw=False)]
    assert rank.step(1.0, 2.0) == []
    rank.post(Packed(KEY, True))
    assert rank.core.wants_step
    rank.post(SumReady(KEY, "d", 0.1, ""))
    assert rank.hear(Commit(2, KEY)) == [Blend(KEY)]
    assert (rank.core.version, rank.core.steps_total) == (1, 2)


def test_steps_inside_a_round_are_no_cost_of_averaging() -> None:
    rank = beyond()
    rank.go(KEY, now_s=20.0)
    rank.step(20.0, 23.0)
    rank.post(Packed(KEY, True))
    assert rank.post(SumReady(KEY, "d", 0.1, ""), 24.0) == [SendUp(Reduced(2, KEY, "d", True, 0.1, 1000.0, ""))]


@pytest.mark.parametrize(
    ("order", "done"),
    [
        (RunEval(2, 0), Evaluated(0, 0.5, "")),
        (RunCallback(2, CallbackKind.EPOCH, 0), CalledBack(CallbackKind.EPOCH, 0, "")),
        (SendState(2, 5, True), StateWritten(5, 99, "")),
    ],
)
@pytest.mark.parametrize(("started_s", "delivered_ms"), [(7.0, 1000.0), (8.0, 2000.0), (2.0, 1000.0)])
def test_what_the_run_wants_of_one_rank_is_no_cost_of_a_batch(
    order: DaemonToRank, done: RankEvent, started_s: float, delivered_ms: float
) -> None:
    rank = beyond(least=1, most=3)
    rank.step(1.0, 2.0)
    rank.hear(order, now_s=2.0)
    rank.post(done, now_s=7.0)
    rank.step(started_s, started_s + 1.0)
    average(rank)
    rank.plan(2, 3, samples=4, version=1)
    rank.post(SnapshotTaken(True))
    (_, said) = rank.post(ACCOUNTS)
    assert isinstance(said, SendUp)
    assert isinstance(said.message, WindowDone)
    assert said.message.delivered_ms == delivered_ms


def test_wait_at_the_end_of_the_overshoot_is_no_cost_of_a_batch() -> None:
    rank = beyond(least=1, most=3)
    rank.step(1.0, 2.0)
    rank.step(2.0, 3.0)
    average(rank)
    rank.plan(3, 3, samples=4, version=1)
    rank.step(13.0, 14.0)
    rank.post(SnapshotTaken(True))
    (_, said) = rank.post(ACCOUNTS)
    assert isinstance(said, SendUp)
    assert isinstance(said.message, WindowDone)
    assert said.message.delivered_ms == 1000.0


def test_rank_waits_at_the_end_of_its_overshoot() -> None:
    rank = beyond(least=1, most=3)
    rank.step(1.0, 2.0)
    assert rank.core.wants_step
    rank.step(2.0, 3.0)
    assert not rank.core.wants_step


def test_rank_without_leases_does_not_overshoot() -> None:
    rank = beyond(least=1, most=3, samples=12)
    rank.step(1.0, 2.0)
    rank.step(2.0, 3.0)
    average(rank)
    rank.plan(1, 2, version=1)
    rank.post(SnapshotTaken(True))
    rank.post(ACCOUNTS)
    assert rank.core.work is Work.BEYOND
    assert not rank.core.wants_step


def test_steps_beyond_the_count_are_the_first_of_the_next_window() -> None:
    rank = beyond()
    rank.step(1.0, 2.0)
    average(rank)
    assert rank.plan(2, 2, version=1) == [OpenWindow(0, 1.0, steps=1)]
    assert rank.step(2.0, 3.0) == [TakeSnapshot(is_untouched=False), AccountWindow()]
    rank.post(SnapshotTaken(True))
    _, said = rank.post(ACCOUNTS)
    assert isinstance(said, SendUp)
    assert isinstance(said.message, WindowDone)
    assert (said.message.version, said.message.samples, said.message.steps) == (1, 8, 2)


def test_window_that_is_over_before_its_plan_ends_at_once() -> None:
    rank = beyond()
    rank.step(1.0, 2.0)
    average(rank)
    assert rank.plan(0, 0, version=1) == [
        OpenWindow(0, 1.0, steps=1), TakeSnapshot(is_untouched=False), AccountWindow(),
    ]  # fmt: skip


def test_last_round_is_adopted_whole() -> None:
    assert average(beyond(least=1, most=1), raw_source=0) == [Adopt(KEY, take_raw=True)]


@pytest.mark.parametrize(("accounts", "snapshot"), [(replace(ACCOUNTS, is_finite=False), True), (ACCOUNTS, False)])
def test_rank_with_a_window_that_is_not_finite_waits_for_the_others_consensus(
    accounts: WindowAccounted, snapshot: bool
) -> None:
    rank = seeded(Mode.CPU_ASYNC)
    rank.plan(1, 3, samples=16)
    rank.step(0.0, 1.0)
    rank.post(SnapshotTaken(snapshot))
    (said,) = rank.post(accounts)
    assert isinstance(said, SendUp)
    assert isinstance(said.message, WindowDone)
    assert not said.message.is_finite
    assert not rank.core.wants_step
    assert average(rank) == [RollBack(), Adopt(KEY, take_raw=False)]


def test_window_is_not_closed_twice_by_a_late_order() -> None:
    rank = beyond()
    assert rank.hear(CloseWindow(2, 0)) == []


def test_next_attempt_gives_the_same_snapshot() -> None:
    rank = beyond()
    rank.go(KEY)
    rank.step(1.0, 2.0)
    rank.hear(AbortRound(2, KEY, "rank 1 is lost"))
    assert rank.go(STALE) == [Pack(STALE, 0.25, 0.5, include_raw=False, owns_raw=False)]


def test_round_inside_an_open_window_is_a_bug() -> None:
    rank = beyond()
    rank.go(KEY)
    rank.core.work = Work.TRAINING
    with pytest.raises(InvariantViolation, match="rank 2: packing a round before its window is over"):
        rank.core.check()


# ----------------------------------------------------------------------------------------------------------- evaluation
def evaluate(rank: Subject, began_s: float, ended_s: float) -> None:
    rank.hear(RunEval(2, 0), now_s=began_s)
    rank.post(Evaluated(0, 0.5, ""), now_s=ended_s)


def window_done(actions: list[RankAction]) -> WindowDone:
    (report,) = [a.message for a in actions if isinstance(a, SendUp) and isinstance(a.message, WindowDone)]
    return report


@pytest.mark.parametrize("mode", [Mode.CPU_CADENCE, Mode.CPU_ASYNC])
def test_evaluation_between_two_steps_is_no_cost_of_a_batch(mode: Mode) -> None:
    rank = seeded(mode)
    rank.plan(3, 3, samples=12)
    rank.step(0.0, 1.0)
    evaluate(rank, 1.0, 11.0)
    rank.step(11.5, 12.5)
    rank.step(12.5, 13.5)
    report = window_done(rank.post(ACCOUNTS))
    assert (report.delivered_ms, report.compute_ms) == (1250.0, 1000.0)


def test_evaluation_at_the_commit_of_an_asynchronous_round_is_no_cost_of_the_window_that_is_under_way() -> None:
    rank = seeded(Mode.CPU_ASYNC)
    rank.plan(1, 4, samples=16)
    rank.step(0.0, 1.0)
    rank.post(ACCOUNTS)
    rank.go(KEY)
    rank.step(1.0, 2.0)
    rank.post(Packed(KEY, True))
    rank.post(SumReady(KEY, "d", 0.1, ""))
    rank.hear(Commit(2, KEY), now_s=2.0)
    evaluate(rank, 2.0, 12.0)
    rank.plan(2, 2, version=1)
    rank.step(12.0, 13.0)
    assert window_done(rank.post(ACCOUNTS)).delivered_ms == 1000.0


@pytest.mark.parametrize(("began_s", "ended_s"), [(-10.0, 0.0), (2.0, 12.0)])
def test_evaluation_before_the_first_and_after_the_last_step_changes_no_cost(began_s: float, ended_s: float) -> None:
    rank = seeded()
    rank.plan(1, 4, samples=16)
    if began_s < 0:
        evaluate(rank, began_s, ended_s)
    rank.step(0.0, 1.0)
    rank.step(1.0, 2.0)
    if began_s > 0:
        evaluate(rank, began_s, ended_s)
    rank.hear(CloseWindow(2, 0))
    assert window_done(rank.post(ACCOUNTS)).delivered_ms == 1000.0


def test_no_more_is_taken_off_than_there_was_between_two_steps() -> None:
    rank = seeded(Mode.CPU_ASYNC)
    rank.plan(3, 3, samples=12)
    rank.step(0.0, 1.0)
    evaluate(rank, 0.0, 10.0)
    rank.step(1.5, 2.5)
    rank.step(3.0, 4.0)
    assert window_done(rank.post(ACCOUNTS)).delivered_ms == 1250.0


def test_evaluation_within_a_round_is_no_cost_of_averaging() -> None:
    rank = seeded()
    rank.go(KEY, now_s=1.0)
    rank.post(Packed(KEY, True), now_s=2.0)
    evaluate(rank, 2.0, 12.0)
    (said,) = rank.post(SumReady(KEY, "d", 0.1, ""), now_s=13.0)
    assert isinstance(said, SendUp)
    assert isinstance(said.message, Reduced)
    assert said.message.reduce_ms == 2000.0


# ---------------------------------------------------------------------------------------------- groups and other orders
def test_group_is_formed_and_only_its_own_attempt_is_reported() -> None:
    rank = admitted()
    assert rank.hear(FormGroup(2, 1, 1, (0, 2), 60.0)) == [FormCollective(1, 1, (0, 2), 60.0)]
    rank.hear(FormGroup(2, 1, 2, (0, 2), 60.0))
    assert rank.post(GroupSettled(1, 1, "")) == []
    assert rank.post(GroupSettled(1, 2, "no route")) == [SendUp(GroupFormed(2, 1, 2, "no route"))]


def test_evaluation_state_and_store_replies_are_passed_on() -> None:
    rank = seeded()
    assert rank.hear(RunEval(2, 3)) == [Evaluate(3)]
    assert rank.post(Evaluated(3, 0.5, "")) == [SendUp(EvalDone(2, 3, 0.5, ""))]
    assert rank.hear(RunCallback(2, CallbackKind.EPOCH, 3)) == [CallBack(CallbackKind.EPOCH, 3)]
    assert rank.post(CalledBack(CallbackKind.EPOCH, 3, "no")) == [SendUp(CallbackDone(2, CallbackKind.EPOCH, 3, "no"))]
    assert rank.hear(SendState(2, 5, False)) == [WriteState(5, False)]
    assert rank.post(StateWritten(5, 99, "")) == [SendUp(StateSent(2, 5, 99, ""))]
    assert rank.hear(StoreReply(2, 1, True, (), 0)) == []


def test_state_is_loaded_before_the_rank_is_admitted_and_not_behind() -> None:
    rank = Subject()
    assert rank.hear(LoadState(2, 5)) == [TakeState(5)]
    assert rank.post(StateTaken(5, "", ("lr",))) == [SendUp(StateLoaded(2, 5, "", ("lr",)))]
    rank.hear(Admitted(2, 3, (0, 2), 39))
    assert rank.core.version == 39
    assert rank.hear(LoadState(2, 6)) == []


def test_finished_rank_says_so_and_ends_with_0() -> None:
    rank = seeded()
    assert rank.hear(FinishRank(2, "done")) == [SendUp(RankFinished(2)), EndRank("done", 0)]
    assert rank.core.has_ended
    assert rank.go(KEY) == []


def test_evicted_rank_ends_without_a_word() -> None:
    rank = seeded()
    assert rank.hear(Evict(2, "silent")) == [EndRank("removed from the run: silent", 1)]


def test_rank_ends_with_its_daemon() -> None:
    rank = Subject()
    assert rank.post(DaemonDropped()) == [EndRank("the host's daemon is gone", 1)]


# ----------------------------------------------------------------------------------------------------------- invariants
def test_training_without_a_plan_is_a_bug() -> None:
    rank = seeded()
    rank.core.work = Work.TRAINING
    with pytest.raises(InvariantViolation, match="rank 2: training without a plan"):
        rank.core.check()
    assert not rank.core.wants_step


def test_reducing_without_a_round_is_a_bug() -> None:
    rank = seeded()
    rank.core.stage = Stage.REDUCING
    with pytest.raises(InvariantViolation, match="rank 2: reducing without a round"):
        rank.core.check()


def test_more_steps_than_planned_are_a_bug() -> None:
    rank = seeded()
    rank.plan(2, 2, samples=16)
    rank.step(0.0, 1.0)
    rank.step(1.0, 2.0)
    rank.core.work = Work.TRAINING
    with pytest.raises(InvariantViolation, match="rank 2: 3 steps in a window of 2"):
        rank.step(2.0, 3.0)
