"""Going on from a checkpoint: what is refused, who loads what, and where training starts."""

from dataclasses import replace
from typing import Any

import pytest

from flodl.core.actions import OpenSave, ReadBundle, Record, SendBundle, SendHost
from flodl.core.cadence import CadenceState
from flodl.core.elche import ElCheState
from flodl.core.elche import Phase as Calibration
from flodl.core.events import BundleRead
from flodl.core.job import Phase
from flodl.core.position import Covered, Position, ResumePoint, SaveReason
from flodl.core.resume import LOAD_TIMEOUT_S
from flodl.core.slowness import SLOW_S
from flodl.ids import Span
from flodl.messages import (
    Admitted,
    CadenceSettings,
    CheckpointSettings,
    Commit,
    LoadState,
    Mode,
    RankExited,
    Settings,
    StateLoaded,
    WindowPlan,
)
from tests.unit.core.cohort import Cohort

FROM = CheckpointSettings(resume_from="ckpts/run")
SPEEDS = {0: 10.0, 2: 30.0, 5: 20.0}
CADENCE = CadenceState(
    ElCheState(Calibration.STABLE, 7, 40, (0, 2, 5), 2, SPEEDS, {0: 120, 2: 40, 5: 60}, {0: 0.5, 2: 0.2, 5: 0.3}),
    (0.1, 0.2),
)


def saved(settings: Settings, position: Position, cadence: CadenceState | None = None) -> ResumePoint:
    return ResumePoint(position, cadence, replace(settings, checkpoint=CheckpointSettings("ckpts/run")))


def resumed(
    position: Position, cadence: CadenceState | None = None, mode: Mode = Mode.CPU_SYNC, **changes: Any
) -> Cohort:
    """A cohort of three whose checkpoint is read; what the run's settings have changed since is in ``changes``."""
    before = {
        name: changes.pop(f"saved_{name}")
        for name in ("dataset_size", "batch_size", "seed")
        if f"saved_{name}" in changes
    }
    cohort = Cohort(mode, **({"checkpoint": FROM} | changes))
    cohort.saved = saved(replace(cohort.settings, **before), position, cadence)
    return cohort


def merged(cohort: Cohort) -> list[tuple[int, int]]:
    """(pass, position) of every sample that the run has merged."""
    commits = [action.fields for action in cohort.actions if isinstance(action, Record) and action.event == "commit"]
    spans = [span for commit in commits for span in commit["spans"]]  # type: ignore[union-attr]
    return sorted((turn, p) for _, turn, start, count in spans for p in range(start, start + count))  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------------ the order
def test_checkpoint_is_read_loaded_by_every_rank_and_published_again_before_anybody_trains() -> None:
    position = Position(version=40, epoch=1, covered=(Covered(1, (Span(0, 4),)),), global_step=80, world_size=3)
    cohort = resumed(position).get_ready()
    kinds: list[object] = []
    for action in cohort.actions:
        what = action.message if isinstance(action, SendHost) else action
        if isinstance(what, ReadBundle | SendBundle | LoadState | Admitted | Commit | WindowPlan):
            kinds.append(type(what))
    assert list(dict.fromkeys(kinds)) == [ReadBundle, SendBundle, LoadState, Admitted, Commit, WindowPlan]
    assert SendBundle(0, ("a", "b")) in cohort.actions
    assert cohort.sent(LoadState) == [LoadState(rank, 0) for rank in range(3)]
    assert {word.version for word in cohort.sent(Admitted)} == {39}
    assert cohort.sent(Commit)[0].key.version == 40
    assert cohort.records("resuming") == ["resuming from ckpts/run.fdl: version 40, epoch 2 of 2"]


def test_samples_that_are_in_the_weights_are_not_trained_again_and_all_others_are() -> None:
    position = Position(version=9, epoch=0, covered=(Covered(0, (Span(0, 2), Span(6, 4))),), global_step=3)
    cohort = resumed(replace(position, world_size=3)).get_ready()
    rest = [(0, place) for place in (2, 3, 4, 5, 10, 11)]
    assert merged(cohort) == rest + [(1, place) for place in range(12)]
    plans = cohort.sent(WindowPlan)
    assert plans[0].progress_samples == 6
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


def test_async_run_goes_on_in_several_epochs() -> None:
    covered = (Covered(0, (Span(0, 10),)), Covered(1, (Span(2, 4),)))
    cohort = resumed(Position(version=9, covered=covered, world_size=3), mode=Mode.CPU_ASYNC).get_ready()
    assert merged(cohort) == [(0, 10), (0, 11), *((1, place) for place in (0, 1, 6, 7, 8, 9, 10, 11))]


def test_save_after_a_resume_counts_on() -> None:
    settings = CheckpointSettings("ckpts/run", resume_from="ckpts/run")
    cohort = resumed(Position(version=9, epoch=1, global_step=7, world_size=3), checkpoint=settings).get_ready()
    (save,) = [action for action in cohort.actions if isinstance(action, OpenSave)]
    assert (save.point.position.global_step, save.point.position.version) == (7 + 6, 11)


def test_run_that_has_nothing_left_to_do_hands_its_state_over_and_ends_well() -> None:
    settings = CheckpointSettings("ckpts/run", resume_from="ckpts/run")
    cohort = resumed(Position(version=9, epoch=2, world_size=3), checkpoint=settings).get_ready()
    assert cohort.sent(WindowPlan) == []
    assert [action for action in cohort.actions if isinstance(action, OpenSave)] == []
    assert cohort.records("resuming") == ["resuming from ckpts/run.fdl: version 9, all 2 epochs complete"]
    assert cohort.records("nothing_left") == ["nothing left to do: all 2 epochs are in ckpts/run already"]
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("completed", 0)


# ---------------------------------------------------------------------------------------------------------- the cadence
def test_cadence_goes_on_without_a_second_warmup_under_the_new_ranks_numbers() -> None:
    cohort = resumed(Position(version=9, world_size=3), CADENCE, Mode.CPU_CADENCE, dataset_size=4000)
    cohort.held.add(WindowPlan)
    cohort.train_until(StateLoaded)
    cohort.release(StateLoaded)
    training = cohort.core.training
    assert training is not None
    plans = {plan.rank: plan for plan in cohort.sent(WindowPlan)[:3]}
    assert {rank: plan.min_steps for rank, plan in plans.items()} == {0: 120, 1: 40, 2: 60}


@pytest.mark.parametrize("change", [{"batch_size": 4}, {"cadence": CadenceSettings(Mode.CPU_SYNC)}])
def test_reshape_starts_the_cadence_afresh_where_it_does_not_fit(change: dict[str, Any]) -> None:
    reshape = replace(FROM, reshape=True)
    cohort = Cohort(Mode.CPU_CADENCE, dataset_size=4000, checkpoint=reshape, **change)
    before = replace(cohort.settings, batch_size=2, cadence=CadenceSettings(Mode.CPU_CADENCE))
    cohort.saved = saved(before, Position(version=9, world_size=3), CADENCE)
    cohort.train_until(StateLoaded)
    assert cohort.core.resume is not None
    assert cohort.core.resume.point is not None
    assert cohort.core.resume.point.cadence is None


def test_reshape_takes_another_number_of_ranks() -> None:
    position = Position(version=9, epoch=1, world_size=5)
    cohort = resumed(position, CADENCE, checkpoint=replace(FROM, reshape=True), hosts={"a": 2}).get_ready()
    assert merged(cohort) == [(1, place) for place in range(12)]
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("saved_with", "words"),
    [
        (
            {"saved_dataset_size": 13},
            r"dataset_size \(13 at the save, 12 now\): which samples .* set them as they were",
        ),
        ({"saved_seed": 5}, r"seed \(5 at the save, 0 now\)"),
        (
            {"saved_batch_size": 3},
            r"batch_size \(3 at the save, 2 now\): to go on all the same, resume with reshape=True",
        ),
        ({"hosts": {"a": 2}}, r"ranks \(3 at the save, 2 now\): to go on all the same, resume with reshape=True"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_with_what_differs(saved_with: dict[str, Any], words: str) -> None:
    cohort = resumed(Position(version=9, world_size=3), **saved_with).get_ready()
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.exit_code) == ("failed", 6)
    assert cohort.outcome.message.startswith("ckpts/run.fdl does not fit this run: ")
    assert pytest.importorskip("re").search(words, cohort.outcome.message)
    assert cohort.sent(LoadState) == []


@pytest.mark.parametrize("reshape", [False, True])
def test_checkpoint_in_an_epoch_that_the_run_does_not_have_is_refused(reshape: bool) -> None:
    position = Position(version=9, epoch=2, covered=(Covered(2, (Span(0, 4),)),), world_size=3)
    cohort = resumed(position, checkpoint=replace(FROM, reshape=reshape)).get_ready()
    assert cohort.outcome is not None
    assert "it is in epoch 3, and the run has 2 now: raise num_epochs" in cohort.outcome.message


@pytest.mark.parametrize("name", ["dataset_size", "seed"])
def test_reshape_does_not_make_the_coverage_meaningless(name: str) -> None:
    changes = {f"saved_{name}": 99, "checkpoint": replace(FROM, reshape=True)}
    cohort = resumed(Position(version=9, world_size=3), **changes).get_ready()
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 6


def test_checkpoint_that_cannot_be_read_ends_the_run_in_its_words() -> None:
    cohort = Cohort(checkpoint=FROM).train_until(BundleRead)
    cohort.waiting.clear()
    cohort.post(BundleRead("", None, "there is no checkpoint ckpts/run"))
    assert cohort.outcome is not None
    assert (cohort.outcome.exit_code, cohort.outcome.message) == (6, "there is no checkpoint ckpts/run")


def test_rank_whose_model_does_not_fit_ends_the_run() -> None:
    cohort = resumed(Position(version=9, world_size=3)).train_until(StateLoaded)
    cohort.say(StateLoaded(0, 7, "another transfer"))
    cohort.say(StateLoaded(0, 0, ""))
    cohort.say(StateLoaded(1, 0, "fc.weight is 3 × 4 there and 5 × 4 here"))
    assert cohort.outcome is not None
    assert cohort.outcome.message == "rank 1 cannot load ckpts/run: fc.weight is 3 × 4 there and 5 × 4 here"


def test_what_the_scripts_ask_for_by_now_is_an_event_of_the_run_once() -> None:
    cohort = resumed(Position(version=9, world_size=3)).train_until(StateLoaded)
    cohort.say(StateLoaded(0, 0, "", ("the lr stays", "the schedule moves")))
    cohort.say(StateLoaded(0, 0, "", ("said by who has loaded already",)))
    cohort.say(StateLoaded(1, 0, "", ("the lr stays", "this one has another script")))
    assert cohort.records("resume_differs") == ["the lr stays", "the schedule moves", "this one has another script"]
    cohort.release(StateLoaded)
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


def test_loading_that_takes_for_ever_is_given_up() -> None:
    for held, who in ((BundleRead, "the controller has"), (StateLoaded, "rank 0, 1, 2 has")):
        cohort = resumed(Position(version=9, world_size=3)).train_until(held)
        cohort.trust()
        assert cohort.core.next_deadline_s() == cohort.now_s + SLOW_S
        began_s = cohort.now_s
        for after_s in (SLOW_S - 1, SLOW_S, SLOW_S + 1, LOAD_TIMEOUT_S):
            cohort.tick(began_s + after_s)
        assert cohort.records("loading_slow") == [
            f"{who} not loaded ckpts/run after 30 s: the disk, or the network, is slow or hangs"
        ]
        assert cohort.outcome is not None
        assert cohort.outcome.message == f"{who} not loaded ckpts/run within 600 s"


# --------------------------------------------------------------------------------------------------------------- losses
def test_rank_that_dies_while_it_loads_fails_the_start() -> None:
    cohort = resumed(Position(version=9, world_size=3)).train_until(StateLoaded)
    cohort.say(RankExited(2, 0, 9, by_us=False))
    assert cohort.outcome is not None
    assert cohort.outcome.message.startswith("too few ranks to go on: 2 of 3 ranks are left")


def test_rank_that_dies_while_it_loads_is_done_without_where_fewer_may_start() -> None:
    cohort = resumed(Position(version=9, world_size=3), min_rank_start=1).train_until(StateLoaded)
    cohort.say(RankExited(2, 0, 9, by_us=False))
    assert cohort.core.phase is Phase.LOADING
    cohort.release(StateLoaded)
    assert cohort.outcome is not None
    assert cohort.outcome.status == "completed"


def test_stop_while_loading_ends_the_run() -> None:
    cohort = resumed(Position(version=9, world_size=3)).train_until(StateLoaded)
    cohort.stop()
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 130
    assert [action for action in cohort.actions if isinstance(action, OpenSave)] == []


def test_word_of_a_load_that_nobody_asked_for_says_nothing() -> None:
    cohort = Cohort().get_ready()
    seen = len(cohort.actions)
    cohort.core.handle(BundleRead("x", None, "error"), cohort.now_s)
    assert len(cohort.actions) == seen
    assert SaveReason("Checkpoint") is SaveReason.CHECKPOINT
