"""Checkpoints: when one is due, whom it comes from, and what follows when it does not come."""

from dataclasses import replace

import pytest

from flodl.core.actions import DropSave, OpenSave, Record, SendHost
from flodl.core.events import HeadSaid, SaveSettled
from flodl.core.job import Phase
from flodl.core.position import Covered, SaveReason
from flodl.core.saving import SAVE_TIMEOUT_S
from flodl.core.slowness import SLOW_S
from flodl.ids import Span
from flodl.messages import CheckpointSettings, HeadReady, Mode, RankExited, SendState, StateSent, WindowDone, WindowPlan
from tests.unit.core.cohort import Cohort, step

EVERY = CheckpointSettings("ckpts/run", every=1)


def saves(cohort: Cohort) -> list[OpenSave]:
    return [action for action in cohort.actions if isinstance(action, OpenSave)]


def orders(cohort: Cohort) -> list[SendState]:
    return [order for order in cohort.sent(SendState) if order.whole]


def kill(cohort: Cohort, rank: int) -> None:
    cohort.say(RankExited(rank, 0, 9, by_us=False))


# ----------------------------------------------------------------------------------------------------------------- when
@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        (CheckpointSettings(), []),
        (CheckpointSettings("ckpts/run"), [6]),  # always the last one
        (CheckpointSettings("ckpts/run", every=2), [2, 4, 6]),
        (CheckpointSettings("ckpts/run", every=4), [4, 6]),
        (CheckpointSettings("ckpts/run", at_epochs=(1, 5)), [1, 5, 6]),
        (CheckpointSettings("ckpts/run", every=3, at_epochs=(3, 4)), [3, 4, 6]),
    ],
)
def test_checkpoints_are_taken_behind_the_epochs_that_are_named_and_at_the_end(
    settings: CheckpointSettings, epochs: list[int]
) -> None:
    cohort = Cohort(checkpoint=settings, num_epochs=6).get_ready()
    assert [save.point.position.epoch for save in saves(cohort)] == epochs
    assert {save.stem for save in saves(cohort)} <= {"ckpts/run"}
    assert {save.reason for save in saves(cohort)} <= {SaveReason.CHECKPOINT}
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (CheckpointSettings("run", every=4), []),
        (CheckpointSettings("run", every=5), ["; one is made at the end all the same"]),
        (CheckpointSettings(every=5), [""]),
    ],
)
def test_more_epochs_between_checkpoints_than_the_run_has_are_told(
    settings: CheckpointSettings, told: list[str]
) -> None:
    cohort = Cohort(checkpoint=settings, num_epochs=2, epoch_splits=2).get_ready()
    what = "checkpoint_every 5 asks for no checkpoint, for the run has 4 epochs"
    assert cohort.records("checkpoint_never_due") == [what + end for end in told]
    assert len(saves(cohort)) == bool(settings.save_path)


def test_word_of_the_head_counts() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("ranks/own", every=1)).join()
    head = replace(cohort.settings, checkpoint=CheckpointSettings("the/heads"))
    cohort.post(HeadSaid(HeadReady(head, {})))
    for member in cohort.core.membership.all():
        cohort.say(cohort.ready(member.rank))
    assert [save.stem for save in saves(cohort)] == ["the/heads"]


def test_rank_is_asked_between_the_commit_and_its_next_window() -> None:
    cohort = Cohort(checkpoint=EVERY).get_ready()
    words = [
        type(action.message).__name__
        for action in cohort.actions
        if isinstance(action, SendHost) and getattr(action.message, "rank", None) == 0
    ]
    first = words.index("SendState")
    assert (words[first - 1], words[first + 1]) == ("Commit", "WindowPlan")
    assert orders(cohort)[0] == SendState(0, 0, whole=True)
    assert cohort.records("checkpoint")[0] == "version 2 is saved: ckpts/run.fdl (Checkpoint)"


def test_position_is_that_of_the_version_that_is_saved() -> None:
    cohort = Cohort(checkpoint=EVERY, mode=Mode.CPU_CADENCE, dataset_size=400).train_until(WindowDone)
    while not saves(cohort):
        cohort.stop()
        cohort.release(WindowDone)
    (save,) = saves(cohort)
    position = save.point.position
    assert (position.version, position.epoch, position.world_size) == (1, 0, 3)
    # Ten batches of two samples each; two more were leased ahead, and are nobody's again.
    assert position.covered == (Covered(0, (Span(0, 20), Span(24, 20), Span(48, 20))),)
    assert position.global_step == 30
    assert save.reason is SaveReason.GRACEFUL_SHUTDOWN
    assert save.point.settings == cohort.settings
    assert save.point.cadence is not None


# ----------------------------------------------------------------------------------------------------------------- whom
def test_rank_with_most_samples_in_the_round_is_asked() -> None:
    cohort = Cohort(checkpoint=EVERY, dataset_size=12, num_epochs=1).train_until(WindowDone)
    plans = cohort.sent(WindowPlan)
    cohort.waiting.clear()
    cohort.held.clear()
    for plan in plans:
        report = cohort.window(plan)
        cohort.say(replace(report, is_finite=False, nonfinite_step=1) if plan.rank == 1 else report)
    assert [order.rank for order in orders(cohort)] == [1]  # it did alone, in another round, what it had left undone


def test_one_save_at_a_time_and_what_was_due_meanwhile_follows() -> None:
    cohort = Cohort(checkpoint=EVERY, num_epochs=4).train_until(SaveSettled)
    assert [save.point.position.epoch for save in saves(cohort)] == [1]  # three more epochs have passed
    assert cohort.core.phase is Phase.FINISHING
    cohort.release(SaveSettled)
    assert [save.point.position.epoch for save in saves(cohort)] == [1, 4]
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


def test_rank_is_asked_for_the_final_state_when_it_has_handed_over_the_last_checkpoint() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("run")).train_until(SaveSettled)
    assert [order.whole for order in cohort.sent(SendState)] == [True]
    cohort.release(SaveSettled)
    assert [order.whole for order in cohort.sent(SendState)] == [True, False]


# ----------------------------------------------------------------------------------------------------------- and if not
def test_save_of_a_rank_that_dies_is_made_again_of_a_later_version_while_the_ranks_train() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("run", at_epochs=(1,)), dataset_size=60, num_epochs=9)
    cohort.train_until(SaveSettled, WindowDone)
    while not saves(cohort):
        step(cohort)
    (first,) = saves(cohort)
    kill(cohort, orders(cohort)[0].rank)
    assert DropSave(first.transfer) in cohort.actions
    assert len(saves(cohort)) == 1
    cohort.release(WindowDone)
    cohort.release(SaveSettled)
    second = saves(cohort)[1]
    assert second.point.position.version > first.point.position.version
    assert second.point.position.world_size == 2
    assert second.reason is SaveReason.CHECKPOINT


def test_last_save_of_a_rank_that_dies_comes_from_another_one() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("run")).train_until(SaveSettled)
    asked = orders(cohort)[0].rank
    kill(cohort, asked)
    assert [order.rank for order in orders(cohort)] == [asked, *[order.rank for order in orders(cohort)[1:]]]
    assert len({order.rank for order in orders(cohort)}) == 2
    versions = {save.point.position.version for save in saves(cohort)}
    assert len(versions) == 1
    cohort.release(SaveSettled)
    assert cohort.records("checkpoint") == [f"version {versions.pop()} is saved: run.fdl (Checkpoint)"]


def test_loss_of_another_rank_disturbs_no_save() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("run")).train_until(SaveSettled)
    kill(cohort, 2)
    assert len(saves(cohort)) == 1


def test_rank_that_cannot_write_its_state_is_passed_over_and_when_none_can_the_run_says_so() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("run")).train_until(StateSent, SaveSettled)
    for number in range(3):
        order = orders(cohort)[number]
        cohort.say(StateSent(order.rank, order.transfer, 0, "an optimizer of strings"))
    cohort.waiting.clear()
    assert [order.rank for order in orders(cohort)] == [0, 1, 2]
    assert sum(isinstance(action, DropSave) for action in cohort.actions) == 3
    failure = cohort.records("checkpoint_failed")
    assert failure[0].startswith("version 4 could not be saved: rank 0: an optimizer of strings; rank 1: an opt")
    (state,) = (order for order in cohort.sent(SendState) if not order.whole)
    cohort.say(StateSent(state.rank, state.transfer, 99, ""))
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code, cohort.outcome.message) == ("failed", 1, failure[0])


def test_order_says_how_many_checkpoints_stay_and_what_was_not_kept_is_told() -> None:
    cohort = Cohort(checkpoint=replace(EVERY, keep_last=3)).train_until(SaveSettled)
    (save,) = saves(cohort)
    assert save.keep_last == 3
    cohort.waiting.clear()
    cohort.held.clear()
    cohort.post(SaveSettled(save.transfer, "ckpts/run.fdl", "", "run-e0001 is another checkpoint"))
    assert cohort.records("checkpoint")[0] == "version 2 is saved: ckpts/run.fdl (Checkpoint)"
    assert cohort.records("checkpoint_not_kept") == ["run-e0001 is another checkpoint"]
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


def test_disk_that_is_full_is_told_and_the_next_checkpoint_is_tried() -> None:
    cohort = Cohort(checkpoint=EVERY).train_until(SaveSettled)
    cohort.waiting.clear()
    cohort.held.clear()
    cohort.post(SaveSettled(saves(cohort)[0].transfer, "", "no space left"))
    assert cohort.records("checkpoint_failed") == ["version 2 could not be saved: no space left"]
    assert cohort.records("checkpoint") == ["version 4 is saved: ckpts/run.fdl (Checkpoint)"]
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


def test_save_that_does_not_come_is_given_up_for_another_ranks() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("run")).train_until(SaveSettled)
    cohort.trust()
    (first,) = orders(cohort)
    at_s = cohort.core.next_deadline_s()
    assert at_s is not None
    assert at_s <= cohort.now_s + SAVE_TIMEOUT_S
    cohort.tick(cohort.now_s + SAVE_TIMEOUT_S - 1)
    assert len(orders(cohort)) == 1
    cohort.tick(cohort.now_s + 1)
    assert orders(cohort)[1].rank != first.rank


def test_save_that_hangs_is_told_soon_and_then_rarely() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("ckpts/run")).train_until(SaveSettled)
    cohort.trust()
    began_s = cohort.now_s
    assert cohort.core.next_deadline_s() == began_s + SLOW_S
    for after_s in (29, 30, 31, 119, 120, 121, 479, 480, 599):
        cohort.tick(began_s + after_s)
    why = "rank 0 has given its state, and the disk, or the network on the way to it, is slow or hangs"
    told = [f"version 4 is not saved to ckpts/run after {after_s} s: {why}" for after_s in (30, 120, 480)]
    assert cohort.records("checkpoint_slow") == told


def test_slow_save_whose_state_has_not_come_names_the_rank() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("ckpts/run")).train_until(StateSent, SaveSettled)
    cohort.trust()
    cohort.tick(cohort.now_s + SLOW_S)
    assert cohort.records("checkpoint_slow") == [
        "version 4 is not saved to ckpts/run after 30 s: rank 0 has not given its state yet"
    ]


def test_news_of_another_transfer_change_nothing() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("run")).train_until(SaveSettled)
    order = orders(cohort)[0]
    cohort.post(SaveSettled(99, "elsewhere", ""))
    cohort.say(StateSent(order.rank, 99, 0, "late"))
    assert cohort.records("checkpoint") == []
    assert len(orders(cohort)) == 1
    cohort.release(SaveSettled)
    seen = len(cohort.actions)
    cohort.post(SaveSettled(order.transfer, "again", ""))
    assert not any(isinstance(action, Record) for action in cohort.actions[seen:])


# -------------------------------------------------------------------------------------------------------------- reasons
def test_lone_survivor_of_a_collective_mode_saves_and_says_why() -> None:
    cohort = Cohort(Mode.NCCL_CADENCE, {"a": 2}, checkpoint=CheckpointSettings("run"), dataset_size=400)
    cohort.train_until(WindowDone)
    cohort.waiting = cohort.waiting[1:]
    kill(cohort, 0)
    cohort.release(WindowDone)
    (save,) = saves(cohort)
    assert save.reason is SaveReason.SINGLE_SURVIVOR
    assert save.point.position.world_size == 1


def test_run_that_was_too_often_not_finite_saves_what_was_published() -> None:
    cohort = Cohort(checkpoint=CheckpointSettings("run"), max_nonfinite=1, dataset_size=90).train_until(WindowDone)
    plans = cohort.sent(WindowPlan)
    cohort.waiting.clear()
    for plan in plans:
        report = cohort.window(plan)
        cohort.say(replace(report, is_finite=False, nonfinite_step=1) if plan.rank == 2 else report)
    (save,) = saves(cohort)
    assert save.reason is SaveReason.REDUCE_STALL
    assert orders(cohort)[0].rank != 2
