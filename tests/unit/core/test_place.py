"""The place of the checkpoints is tried before anybody trains."""

from dataclasses import replace

from flodl.core.actions import OpenSave, ReadBundle, TryPlace
from flodl.core.events import BundleRead, HeadSaid, PlaceTried
from flodl.core.job import Phase
from flodl.core.place import PLACE_TIMEOUT_S
from flodl.messages import Admitted, CheckpointSettings, HeadReady
from tests.unit.core.cohort import Cohort

SAVING = CheckpointSettings("ckpts/run")


def test_place_is_tried_once_before_anybody_is_admitted() -> None:
    cohort = Cohort(checkpoint=SAVING).train_until(PlaceTried)
    cohort.tick(2.0)
    assert [action for action in cohort.actions if isinstance(action, TryPlace)] == [TryPlace("ckpts/run")]
    assert cohort.core.phase is Phase.STAGING
    assert cohort.sent(Admitted) == []
    cohort.release(PlaceTried)
    assert len(cohort.sent(Admitted)) == 3
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


def test_head_says_which_place_it_is() -> None:
    cohort = Cohort(checkpoint=SAVING).join()
    for member in cohort.core.membership.all():
        cohort.say(cohort.ready(member.rank))
    settings = replace(cohort.settings, checkpoint=CheckpointSettings("elsewhere/run"))
    cohort.post(HeadSaid(HeadReady(settings, {})))
    assert TryPlace("elsewhere/run") in cohort.actions


def test_run_that_saves_nothing_tries_nothing() -> None:
    cohort = Cohort().get_ready()
    assert not [action for action in cohort.actions if isinstance(action, TryPlace)]
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


def test_place_that_takes_nothing_ends_the_run_before_a_checkpoint_is_read_or_anybody_trains() -> None:
    cohort = Cohort(checkpoint=replace(SAVING, resume_from="ckpts/old")).train_until(PlaceTried)
    cohort.waiting.clear()
    cohort.post(PlaceTried("save_path ckpts/run cannot be used: it is mounted read-only"))
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("failed", 6)
    assert cohort.outcome.message == "save_path ckpts/run cannot be used: it is mounted read-only"
    assert cohort.sent(Admitted) == []
    assert not [action for action in cohort.actions if isinstance(action, ReadBundle | OpenSave)]


def test_checkpoint_that_will_be_replaced_is_told_before_anybody_trains() -> None:
    cohort = Cohort(checkpoint=SAVING).train_until(PlaceTried)
    cohort.waiting.clear()
    cohort.post(PlaceTried("", "a checkpoint of 2026-11-29 21:30 UTC, 6 of 6 epochs"))
    assert cohort.records("checkpoint_there") == [
        "ckpts/run holds a checkpoint of 2026-11-29 21:30 UTC, 6 of 6 epochs; the first save replaces it"
    ]
    assert len(cohort.sent(Admitted)) == 3


def test_shell_is_told_what_the_run_goes_on_from() -> None:
    cohort = Cohort(checkpoint=replace(SAVING, resume_from="ckpts/old")).train_until(PlaceTried)
    assert TryPlace("ckpts/run", "ckpts/old") in cohort.actions


def test_disk_that_does_not_answer_is_given_up() -> None:
    cohort = Cohort(checkpoint=SAVING).train_until(PlaceTried)
    cohort.trust()
    assert cohort.core.next_deadline_s() == cohort.now_s + PLACE_TIMEOUT_S
    cohort.tick(cohort.now_s + PLACE_TIMEOUT_S)
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 6
    assert cohort.outcome.message == (
        "save_path ckpts/run cannot be used: its disk has not taken a small file within 60 s; see to the disk, or save "
        "elsewhere"
    )


def test_checkpoint_is_read_behind_it() -> None:
    cohort = Cohort(checkpoint=replace(SAVING, resume_from="ckpts/old")).train_until(PlaceTried)
    assert ReadBundle("ckpts/old") not in cohort.actions
    cohort.held.add(BundleRead)
    cohort.release(PlaceTried)
    assert ReadBundle("ckpts/old") in cohort.actions
    assert cohort.core.phase is Phase.LOADING
