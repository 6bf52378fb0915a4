"""The handle: waiting, polling, callbacks in order on one thread, ends of both kinds."""

import threading
from typing import Any

import pytest
from torch import nn

from flodl.errors import DeadlineExceeded, RankFailed
from flodl.messages import EpochReport
from flodl.spec import context, handle
from flodl.spec.handle import TrainHandle
from flodl.spec.metrics import EpochMetrics, RankEpoch
from flodl.spec.state import StateInfo, TrainedState

TIMEOUT_S = 20.0
STATE = TrainedState.from_model(nn.Linear(1, 1), StateInfo(epochs=1, version=1), "complete")


def metrics(epoch: int) -> EpochMetrics:
    report = EpochReport(
        epoch=epoch,
        avg_loss=0.5,
        epoch_ms=10.0,
        samples=30,
        version=epoch + 1,
        scalars={"accuracy": 0.9},
        per_rank_loss={"0": 0.5},
        per_rank_samples={"0": 30, "11": 0},
        per_rank_throughput={"0": 3.0},
        per_rank_batch_share={"0": 1.0},
        device_indices={"0": 0, "11": 1},
    )
    return EpochMetrics.from_report(report)


def test_a_report_is_keyed_by_rank_numbers_for_the_user() -> None:
    assert metrics(0).per_rank == {0: RankEpoch(0.5, 30), 11: RankEpoch(None, 0)}
    assert metrics(0).device_indices == {0: 0, 11: 1}


def test_join_returns_the_same_state_every_time() -> None:
    running = TrainHandle()
    threading.Timer(0.01, running.finish, [STATE]).start()
    assert running.join(TIMEOUT_S) is STATE
    assert running.join(TIMEOUT_S) is STATE


def test_join_raises_what_the_run_failed_with() -> None:
    running = TrainHandle()
    running.fail(RankFailed("rank 2: ValueError"))
    with pytest.raises(RankFailed, match="rank 2"):
        running.join(TIMEOUT_S)


def test_the_first_end_counts() -> None:
    running = TrainHandle()
    running.finish(STATE)
    running.fail(RankFailed("too late"))
    assert running.join(TIMEOUT_S) is STATE


def test_join_gives_up_at_its_deadline_and_can_be_called_again() -> None:
    running = TrainHandle()
    with pytest.raises(DeadlineExceeded):
        running.join(0.01)
    assert not running.is_over()
    running.finish(STATE)
    assert running.join(TIMEOUT_S) is STATE


def test_next_metrics_gives_every_epoch_then_none() -> None:
    running = TrainHandle()
    running.publish_metrics(metrics(0))
    running.publish_metrics(metrics(1))
    running.finish(STATE)
    assert [running.next_metrics(TIMEOUT_S) for _ in range(3)] == [metrics(0), metrics(1), None]


def test_next_metrics_waits_for_the_next_epoch() -> None:
    running = TrainHandle()
    with pytest.raises(DeadlineExceeded):
        running.next_metrics(0.01)
    threading.Timer(0.01, running.publish_metrics, [metrics(0)]).start()
    assert running.next_metrics(TIMEOUT_S) == metrics(0)


def test_poll_metrics_takes_what_is_there_without_waiting() -> None:
    running = TrainHandle()
    assert running.poll_metrics() == []
    running.publish_metrics(metrics(0))
    running.publish_metrics(metrics(1))
    assert running.poll_metrics() == [metrics(0), metrics(1)]
    assert running.poll_metrics() == []


def test_unread_metrics_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "MAX_PENDING", 3)
    running = TrainHandle()
    for epoch in range(5):
        running.publish_metrics(metrics(epoch))
    assert [taken.epoch for taken in running.poll_metrics()] == [2, 3, 4]


def test_callbacks_run_in_order_on_one_other_thread_and_before_join_returns() -> None:
    calls: list[tuple[Any, ...]] = []
    threads: set[str] = set()

    def on_metrics(taken: EpochMetrics) -> None:
        threads.add(threading.current_thread().name)
        calls.append(("metrics", taken.epoch))

    def on_eval(epoch: int, value: float) -> None:
        threads.add(threading.current_thread().name)
        calls.append(("eval", epoch, value))

    running = TrainHandle(on_metrics, on_eval)
    for epoch in range(3):
        running.publish_metrics(metrics(epoch))
        running.publish_eval(epoch, 0.5)
    running.finish(STATE)
    running.join(TIMEOUT_S)
    assert calls == [call for epoch in range(3) for call in (("metrics", epoch), ("eval", epoch, 0.5))]
    assert threads == {"flodl-callbacks"}


def test_a_callback_that_raises_is_logged_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def picky(taken: EpochMetrics) -> None:
        if taken.epoch == 0:
            raise ZeroDivisionError("in the callback")
        seen.append(taken.epoch)

    running = TrainHandle(picky)
    running.publish_metrics(metrics(0))
    running.publish_metrics(metrics(1))
    running.finish(STATE)
    assert running.join(TIMEOUT_S) is STATE
    assert seen == [1]
    assert "in the callback" in caplog.text


def test_a_callback_that_hangs_does_not_hold_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handle, "CALLBACK_DRAIN_S", 0.01)
    release = threading.Event()
    running = TrainHandle(lambda taken: release.wait(TIMEOUT_S) and None)
    running.publish_metrics(metrics(0))
    running.finish(STATE)
    assert running.join(TIMEOUT_S) is STATE
    release.set()
    assert "callback still running" in caplog.text


def test_callbacks_slower_than_the_epochs_lose_the_oldest_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handle, "MAX_PENDING", 2)
    started, release = threading.Event(), threading.Event()
    seen: list[int] = []

    def slow(taken: EpochMetrics) -> None:
        seen.append(taken.epoch)
        started.set()
        release.wait(TIMEOUT_S)

    running = TrainHandle(slow)
    running.publish_metrics(metrics(0))
    started.wait(TIMEOUT_S)
    for epoch in (1, 2, 3):
        running.publish_metrics(metrics(epoch))
    release.set()
    running.finish(STATE)
    running.join(TIMEOUT_S)
    assert seen == [0, 2, 3]
    assert "callback dropped" in caplog.text


def test_a_callback_may_join_its_own_run() -> None:
    running: TrainHandle

    def joining(taken: EpochMetrics) -> None:
        states.append(running.join(TIMEOUT_S))

    states: list[TrainedState] = []
    running = TrainHandle(joining)
    running.publish_metrics(metrics(0))
    running.finish(STATE)
    running.join(TIMEOUT_S)
    assert states == [STATE]


def test_the_end_of_the_run_frees_the_process_for_another() -> None:
    context.enter(context.Role.SOLO)
    TrainHandle().finish(STATE)
    context.refuse_running()
