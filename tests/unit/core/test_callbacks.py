"""The script's functions behind an epoch: who is asked, when, and what follows from the answers."""

import pytest

from flodl.core.actions import OpenSave, Record
from flodl.core.job import Phase
from flodl.messages import (
    CallbackDone,
    CallbackKind,
    CheckpointSettings,
    EvalReport,
    Mode,
    RankExited,
    RunCallback,
    RunEval,
    WindowDone,
)
from tests.unit.core.cohort import Cohort, step

EPOCH, CHECKPOINT = CallbackKind.EPOCH, CallbackKind.CHECKPOINT


def calls(cohort: Cohort) -> list[tuple[str, int]]:
    return [(str(call.kind), call.epoch) for call in cohort.sent(RunCallback)]


def test_epoch_fn_runs_behind_every_epoch_on_the_owner() -> None:
    cohort = Cohort(has_epoch_fn=True, num_epochs=3).get_ready()
    assert cohort.sent(RunCallback) == [RunCallback(0, EPOCH, epoch) for epoch in range(3)]
    assert cohort.records("called_back") == [f"epoch {number}: epoch_fn has run on rank 0" for number in (1, 2, 3)]
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        (CheckpointSettings(every=2), [1, 3]),
        (CheckpointSettings(at_epochs=(1, 5)), [0, 4]),
        (CheckpointSettings("run", every=3), [2]),
        (CheckpointSettings("run"), []),
    ],
)
def test_checkpoint_fn_runs_where_the_settings_ask_for_a_checkpoint(
    settings: CheckpointSettings, epochs: list[int]
) -> None:
    cohort = Cohort(has_checkpoint_fn=True, checkpoint=settings, num_epochs=5).get_ready()
    assert calls(cohort) == [("checkpoint_fn", epoch) for epoch in epochs]
    assert any(isinstance(action, OpenSave) for action in cohort.actions) is bool(settings.save_path)


def test_order_is_evaluation_then_epoch_fn_then_checkpoint_fn() -> None:
    cohort = Cohort(
        has_epoch_fn=True,
        has_checkpoint_fn=True,
        eval_samples=4,
        checkpoint=CheckpointSettings(every=1),
        num_epochs=1,
    ).get_ready()
    told = [action.event for action in cohort.actions if isinstance(action, Record)]
    assert [event for event in told if event in ("eval", "called_back")] == ["eval", "called_back", "called_back"]
    assert calls(cohort) == [("epoch_fn", 0), ("checkpoint_fn", 0)]
    assert cohort.sent(EvalReport) == [EvalReport(0, 0.5)]


def test_call_that_fails_is_told_and_training_goes_on() -> None:
    cohort = Cohort(has_epoch_fn=True).train_until(CallbackDone)
    assert cohort.core.phase is Phase.FINISHING
    cohort.say(CallbackDone(0, EPOCH, 0, "KeyError: 'x'"))
    assert cohort.records("callback_failed") == ["epoch_fn failed on rank 0 after epoch 1: KeyError: 'x'"]
    assert cohort.say(CallbackDone(0, EPOCH, 0, "")) == []
    cohort.say(CallbackDone(0, EPOCH, 1, ""))
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


def test_call_of_a_lost_owner_is_asked_of_the_next_once() -> None:
    cohort = Cohort(has_epoch_fn=True, eval_samples=4).train_until(CallbackDone)
    assert len(cohort.sent(RunEval)) == 2
    cohort.say(RankExited(0, 0, 9, by_us=False))
    assert cohort.sent(RunCallback)[2:] == [RunCallback(1, EPOCH, 0), RunCallback(1, EPOCH, 1)]
    assert len(cohort.sent(RunEval)) == 2
    cohort.say(RankExited(2, 0, 9, by_us=False))
    assert len(cohort.sent(RunCallback)) == 4


@pytest.mark.parametrize(("mode", "is_at_once"), [(Mode.NCCL_SYNC, False), (Mode.CPU_ASYNC, True)])
def test_call_of_an_owner_that_is_lost_in_a_window_waits_for_a_consensus(mode: Mode, is_at_once: bool) -> None:
    cohort = Cohort(mode, has_epoch_fn=True, num_epochs=9, dataset_size=60).train_until(WindowDone, CallbackDone)
    while not cohort.sent(RunCallback):
        step(cohort)
    asked = cohort.sent(RunCallback)
    cohort.waiting = [(kind, answer) for kind, answer in cohort.waiting if kind is not CallbackDone]
    cohort.say(RankExited(asked[0].rank, 0, 9, by_us=False))
    again = cohort.sent(RunCallback)[len(asked) :]
    assert bool(again) is is_at_once
    while not again:
        step(cohort)
        again = cohort.sent(RunCallback)[len(asked) :]
    assert again[0].epoch == asked[0].epoch
    assert again[0].rank != asked[0].rank


def test_nobody_is_asked_when_nobody_is_left() -> None:
    cohort = Cohort(has_epoch_fn=True).train_until(CallbackDone)
    for rank in range(3):
        cohort.say(RankExited(rank, 0, 9, by_us=False))
    assert cohort.core.training is not None
    callbacks = cohort.core.training.callbacks
    assert (callbacks.owner, callbacks.are_pending, callbacks.ask()) == (None, True, [])
