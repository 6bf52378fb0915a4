"""Hosts that come while the others train: who is taken in, when, with what, and who is not."""

from dataclasses import replace
from typing import Any

import pytest

from flodl.core.actions import OpenSave, ReadBundle, Record, RestoreHost, SendBundle
from flodl.core.events import BundleRead, HostDropped, SaveSettled
from flodl.core.growth import LOAD_PATIENCE_S, MAX_TRIES
from flodl.core.membership import RankStatus
from flodl.core.position import SaveReason
from flodl.core.slowness import SLOW_S
from flodl.messages import (
    Admitted,
    Beat,
    CadenceSettings,
    CheckpointSettings,
    CloseWindow,
    Device,
    FormGroup,
    HostStopped,
    KillRank,
    LoadState,
    Mode,
    RankBeat,
    RankError,
    RankExited,
    SendState,
    SpawnRanks,
    StartRound,
    StateLoaded,
    StateSent,
    StopHost,
    WindowDone,
    WindowPlan,
)
from tests.unit.core.cohort import Cohort, hello, step, training


def arrive(cohort: Cohort, host: str = "c", devices: int = 1) -> list[int]:
    """The host comes and its ranks are ready; returns them."""
    before = len(cohort.core.membership)
    cohort.say(hello(host, devices), host)
    new = list(range(before, len(cohort.core.membership)))
    for rank in new:
        cohort.say(cohort.ready(rank), host)
    return new


def live(cohort: Cohort) -> tuple[int, ...]:
    return cohort.core.membership.live


# ----------------------------------------------------------------------------------------------------- the ordinary way
def test_newcomer_gets_the_version_that_is_published_next_and_takes_part_in_the_round_behind_it() -> None:
    cohort = training()
    assert arrive(cohort) == [3]
    assert cohort.records("newcomer_ready") == ["rank 3 on c is ready: it takes part from the next commit on"]
    assert cohort.sent(SpawnRanks)[-1].world_size == 4
    assert not any(isinstance(action, OpenSave) for action in cohort.actions)
    step(cohort)
    (save,) = [action for action in cohort.actions if isinstance(action, OpenSave)]
    assert (save.stem, save.reason, save.point.position.version) == ("", SaveReason.HANDOVER, 1)
    assert ReadBundle("") in cohort.actions
    assert [action for action in cohort.actions if isinstance(action, SendBundle)] == [SendBundle(1, ("c",))]
    assert cohort.sent(LoadState) == [LoadState(3, 1)]
    assert live(cohort) == (0, 1, 2, 3)
    assert cohort.sent(Admitted)[-1] == Admitted(3, 4, (0, 1, 2, 3), 1)
    assert cohort.records("rank_joined") == ["rank 3 joined at version 1; 4 ranks train now"]
    assert 3 not in {plan.rank for plan in cohort.sent(WindowPlan)}
    step(cohort)
    last = {go.rank: go.weight for go in cohort.sent(StartRound)[-4:]}
    assert (last[3], sum(last.values())) == (0.0, pytest.approx(1.0))
    assert {plan.rank for plan in cohort.sent(WindowPlan)[-4:]} == {0, 1, 2, 3}


@pytest.mark.parametrize("mode", list(Mode))
def test_run_that_grew_merges_every_sample_once(mode: Mode) -> None:
    cohort = training(mode, dataset_size=300)
    arrive(cohort, devices=2)
    for _ in range(3):
        step(cohort)
    assert live(cohort) == (0, 1, 2, 3, 4)
    cohort.release(WindowDone)
    commits = [action.fields for action in cohort.actions if isinstance(action, Record) and action.event == "commit"]
    spans = [span for commit in commits for span in commit["spans"]]  # type: ignore[union-attr]
    merged = sorted((turn, p) for _, turn, start, count in spans for p in range(start, start + count))  # type: ignore[misc]
    assert merged == [(turn, place) for turn in range(2) for place in range(300)]
    assert {rank for rank, *_ in spans} == {0, 1, 2, 3, 4}  # type: ignore[misc]
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


def test_window_ends_early_for_a_newcomer_that_is_ready_and_again_when_it_has_come_in() -> None:
    cohort = training()
    arrive(cohort)
    assert [close.version for close in cohort.sent(CloseWindow)] == [0, 0, 0]
    step(cohort)
    assert live(cohort) == (0, 1, 2, 3)
    assert [(close.rank, close.version) for close in cohort.sent(CloseWindow)[3:]] == [(0, 1), (1, 1), (2, 1)]
    step(cohort)
    step(cohort)
    assert len(cohort.sent(CloseWindow)) == 6


def test_newcomer_that_waits_for_a_checkpoint_under_way_shortens_one_window_only() -> None:
    cohort = training(Mode.CPU_SYNC, checkpoint=CheckpointSettings("run", every=1), dataset_size=12, num_epochs=99)
    cohort.held.add(SaveSettled)
    step(cohort)
    closed = len(cohort.sent(CloseWindow))
    arrive(cohort)
    assert {close.rank for close in cohort.sent(CloseWindow)[closed:]} == {0, 1, 2}
    closed = len(cohort.sent(CloseWindow))
    step(cohort)
    step(cohort)
    assert live(cohort) == (0, 1, 2)
    assert len(cohort.sent(CloseWindow)) == closed


def test_group_is_formed_anew_with_the_newcomer_while_the_others_train() -> None:
    cohort = training(Mode.NCCL_CADENCE)
    arrive(cohort)
    formed = len(cohort.sent(FormGroup))
    step(cohort)
    groups = cohort.sent(FormGroup)[formed:]
    assert {group.ranks for group in groups} == {(0, 1, 2, 3)}
    assert {group.rank for group in groups} == {0, 1, 2, 3}
    assert {group.incarnation for group in groups} == {2}


def test_newcomers_costs_are_its_own_to_learn_and_the_others_calibration_stands() -> None:
    cohort = training()
    step(cohort)
    step(cohort)
    assert cohort.core.training is not None
    before = cohort.core.training.elche.state()
    arrive(cohort)
    cohort.held.add(StateLoaded)
    step(cohort)
    cohort.release(StateLoaded)
    after = cohort.core.training.elche.state()
    assert after.ms_per_batch.keys() == before.ms_per_batch.keys()
    assert (after.phase, after.ranks) == (before.phase, (0, 1, 2, 3))
    assert after.batch_counts[3] == after.batch_counts[0]


def test_host_that_was_lost_comes_back_under_new_numbers() -> None:
    cohort = training()
    for rank in (1, 2):
        cohort.say(RankExited(rank, 0, 9, by_us=False))
    cohort.post(HostDropped("b", "reset"))
    assert arrive(cohort, "b", 2) == [3, 4]
    step(cohort)
    assert live(cohort) == (0, 3, 4)


# ------------------------------------------------------------------------------------------------------ the round waits
def test_round_waits_for_a_newcomer_that_loads_but_not_for_ever() -> None:
    cohort = training()
    arrive(cohort)
    cohort.held.add(StateLoaded)
    step(cohort)
    rounds = len(cohort.sent(StartRound))
    step(cohort)
    assert len(cohort.sent(StartRound)) == rounds
    assert cohort.core.next_deadline_s() is not None
    cohort.trust()
    cohort.tick(cohort.now_s + LOAD_PATIENCE_S)
    assert len(cohort.sent(StartRound)) == rounds + 3
    assert live(cohort) == (0, 1, 2)
    assert (
        len([action for action in cohort.actions if isinstance(action, OpenSave)]) == 2
    )  # and the next version for it


def test_handing_over_that_takes_long_is_told() -> None:
    cohort = training()
    arrive(cohort)
    cohort.held.add(SaveSettled)
    step(cohort)
    cohort.trust()
    cohort.tick(cohort.now_s + SLOW_S)
    (told,) = cohort.records("handover_slow")
    assert told.startswith("version 1 is not handed over to newcomers after 30 s: rank 0 has given its state, and the")


def test_those_that_have_loaded_enter_without_the_one_that_has_not() -> None:
    cohort = training()
    first, second = arrive(cohort, devices=2)
    cohort.held.add(StateLoaded)
    step(cohort)
    cohort.say(StateLoaded(first, 1, ""), "c")
    assert live(cohort) == (0, 1, 2)
    cohort.trust()
    cohort.tick(cohort.now_s + LOAD_PATIENCE_S)
    assert live(cohort) == (0, 1, 2, first)
    assert cohort.core.membership[second].status is RankStatus.READY


def test_newcomer_that_never_loads_in_time_is_sent_away() -> None:
    cohort = training()
    (rank,) = arrive(cohort)
    cohort.held.add(StateLoaded)
    cohort.trust()
    for _ in range(MAX_TRIES):
        step(cohort)
        cohort.tick(cohort.now_s + LOAD_PATIENCE_S)
    assert cohort.records("join_refused") == [f"rank {rank} on c does not take part: did not load 3 versions in time"]
    assert KillRank(rank, "did not load 3 versions in time") in cohort.sent(KillRank)
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


# -------------------------------------------------------------------------------------------------------- it goes wrong
def test_loss_of_the_rank_that_hands_over_costs_the_newcomer_one_version() -> None:
    cohort = training()
    arrive(cohort)
    cohort.held.add(SaveSettled)
    step(cohort)
    (order,) = [order for order in cohort.sent(SendState) if order.whole]
    cohort.say(RankExited(order.rank, 0, 9, by_us=False))
    step(cohort)
    cohort.release(SaveSettled)
    step(cohort)
    assert len([order for order in cohort.sent(SendState) if order.whole]) == 2
    assert 3 in live(cohort)


def test_handover_that_finds_no_space_is_told_and_tried_again() -> None:
    cohort = training()
    arrive(cohort)
    cohort.held.add(SaveSettled)
    step(cohort)
    (save,) = [action for action in cohort.actions if isinstance(action, OpenSave)]
    cohort.waiting = [(kind, answer) for kind, answer in cohort.waiting if kind is not SaveSettled]
    cohort.held.discard(SaveSettled)
    cohort.post(SaveSettled(save.transfer, "", "no space left"))
    assert cohort.records("handover_failed") == ["version 1 could not be handed over to newcomers: no space left"]
    step(cohort)
    assert 3 in live(cohort)
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 0


def test_version_that_cannot_be_read_again_is_tried_again() -> None:
    cohort = training()
    arrive(cohort)
    cohort.held.add(BundleRead)
    step(cohort)
    cohort.waiting = [(kind, answer) for kind, answer in cohort.waiting if kind is not BundleRead]
    cohort.held.discard(BundleRead)
    cohort.post(BundleRead("", None, "damaged"))
    step(cohort)
    assert 3 in live(cohort)


def test_host_of_newcomers_may_go_as_it_came() -> None:
    cohort = training()
    arrive(cohort, devices=2)
    cohort.say(cohort.ready(3), "c")  # a second time
    cohort.post(HostDropped("c", "reset"))
    assert [cohort.core.membership[rank].status for rank in (3, 4)] == [RankStatus.DEAD] * 2
    step(cohort)
    assert cohort.sent(LoadState) == []
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.losses) == ("completed", ())


def test_newcomer_that_dies_while_it_loads_holds_nobody_up() -> None:
    cohort = training()
    (rank,) = arrive(cohort)
    cohort.held.add(StateLoaded)
    step(cohort)
    cohort.say(RankExited(rank, 0, 9, by_us=False))
    rounds = len(cohort.sent(StartRound))
    step(cohort)
    assert len(cohort.sent(StartRound)) == rounds + 3
    assert cohort.records("rank_lost") == []


@pytest.mark.parametrize("word", ["error", "exit"])
def test_script_that_fails_on_a_new_host_stops_nobody_else(word: str) -> None:
    cohort = training()
    cohort.say(hello("c"), "c")
    failure = RankError(3, "FileNotFoundError: data", "") if word == "error" else RankExited(3, 1, 0, by_us=False)
    cohort.say(failure, "c")
    reason = "FileNotFoundError: data" if word == "error" else "exited with code 1"
    assert cohort.records("join_refused") == [f"rank 3 on c does not take part: {reason}"]
    cohort.release(WindowDone)
    assert cohort.outcome is not None
    assert (cohort.outcome.status, cohort.outcome.losses) == ("completed", ())


@pytest.mark.parametrize(
    ("mode", "device", "torch", "refused", "noted"),
    [
        (Mode.NCCL_SYNC, "cpu", "2.9.1", "torch (2.13 against 2.9.1). ", ""),
        (Mode.NCCL_SYNC, "cuda", "2.13", "kind of device (CPU against NVIDIA GPU). ", ""),
        (Mode.CPU_SYNC, "cuda", "2.9.1", "", "torch differs: a has 2.13; c has 2.9.1"),
    ],
)
def test_newcomer_that_a_collective_group_cannot_bear_is_refused_there_and_noted_elsewhere(
    mode: Mode, device: str, torch: str, refused: str, noted: str
) -> None:
    cohort = training(mode=mode)
    cohort.say(replace(hello("c"), torch=torch, devices=(Device(device, 0),)), "c")
    cohort.say(cohort.ready(3), "c")
    assert refused in " ".join(cohort.records("join_refused"))
    assert bool(cohort.records("join_refused")) is bool(refused)
    assert cohort.records("torch_skew") == ([noted] if noted else [])


def test_newcomer_whose_model_differs_or_does_not_fit_is_sent_away() -> None:
    cohort = training()
    cohort.say(hello("c", 2), "c")
    other = cohort.ready(3)
    cohort.say(type(other)(3, other.settings, {"model": "another"}, other.layout, False, "gloo"), "c")
    cohort.say(cohort.ready(4), "c")
    cohort.held.add(StateLoaded)
    step(cohort)
    cohort.say(StateLoaded(4, 9, "of another transfer"), "c")
    cohort.say(StateLoaded(4, 1, "fc.weight is missing"), "c")
    refused = cohort.records("join_refused")
    assert refused[0].startswith(
        "rank 3 on c does not take part: rank 0 on a and rank 3 on c do not agree on: model (m "
    )
    assert refused[1:] == ["rank 4 on c does not take part: cannot load the training's state: fc.weight is missing"]


def test_loss_of_the_whole_cohort_ends_the_run_with_newcomers_waiting() -> None:
    cohort = training()
    arrive(cohort)
    for rank in range(3):
        cohort.say(RankExited(rank, 0, 9, by_us=False))
    assert cohort.outcome is not None
    assert cohort.outcome.message.startswith("too few ranks to go on: no rank is left")


def test_late_word_of_a_newcomer_changes_nothing() -> None:
    cohort = training()
    arrive(cohort)
    step(cohort)
    assert live(cohort) == (0, 1, 2, 3)
    cohort.say(StateLoaded(3, 1, ""), "c")
    cohort.say(cohort.ready(3), "c")
    cohort.post(BundleRead(".fdl", cohort.handed, ""))
    assert live(cohort) == (0, 1, 2, 3)


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("changes", "host", "devices", "reason"),
    [
        ({"is_elastic": False}, "c", 1, "the run has started without it, and join.elastic is false"),
        ({}, "b", 2, "host b has already joined this run; another machine needs another name"),
        ({}, "c", 0, "host c offers no device"),
        (
            {"mode": Mode.CPU_SYNC, "cadence": CadenceSettings(Mode.CPU_SYNC, partition_ratios=(0.5, 0.3, 0.2))},
            "c",
            1,
            "partition_ratios name the share of each rank there was at the start; leave them out to let hosts join",
        ),
    ],
)
def test_host_that_may_not_join_is_told_why(changes: dict[str, Any], host: str, devices: int, reason: str) -> None:
    cohort = training(**changes)
    cohort.say(hello(host, devices), host)
    assert cohort.sent(StopHost) == [StopHost(reason, 0.0)]
    assert len(cohort.core.membership) == 3


@pytest.mark.parametrize(("mode", "joins"), [(Mode.NCCL_CADENCE, False), (Mode.CPU_CADENCE, True)])
def test_guest_that_comes_through_a_tunnel_joins_cpu_modes_only(mode: Mode, joins: bool) -> None:
    cohort = training(mode)
    cohort.say(replace(hello("c"), tunnelled=True), "c")
    assert ("c" in cohort.core.hosts) is joins
    assert ["the tunnel of c leads to" in refusal.reason for refusal in cohort.sent(StopHost)] == [True] * (not joins)


@pytest.mark.parametrize(
    ("is_elastic", "reason"),
    [
        (True, "the run is staging and takes hosts in once it trains"),
        (False, "the run has started without it, and join.elastic is false"),
    ],
)
def test_host_that_comes_too_early_may_come_later_unless_the_world_only_shrinks(is_elastic: bool, reason: str) -> None:
    cohort = Cohort(is_elastic=is_elastic)
    assert bool(cohort.core.refusal("c")) is not is_elastic
    assert cohort.core.may_come_later("c") is is_elastic
    cohort.join()
    assert cohort.core.refusal("c") == reason
    assert cohort.core.may_come_later("c") is is_elastic
    assert not cohort.core.may_come_later("b")


def test_nobody_may_come_later_to_a_run_that_trains() -> None:
    assert not training().core.may_come_later("c")


def test_host_that_comes_while_the_run_stops_is_refused() -> None:
    cohort = training()
    cohort.stop()
    cohort.say(hello("c"), "c")
    assert cohort.sent(StopHost) == [StopHost("the run is ending", 0.0)]


def test_host_leaves_with_the_last_of_its_ranks_that_cannot_take_part() -> None:
    cohort = training()
    arrive(cohort, devices=2)
    cohort.say(RankExited(3, 1, 0, by_us=False), "c")
    assert cohort.sent(StopHost) == []
    cohort.say(RankExited(4, 1, 0, by_us=False), "c")
    assert cohort.sent(StopHost) == [StopHost("exited with code 1", 0.0)]


# ------------------------------------------------------------------------------------------------- hosts that come back
def sought(cohort: Cohort) -> list[str]:
    return [action.host for action in cohort.actions if isinstance(action, RestoreHost)]


def test_host_of_the_roster_that_is_lost_is_looked_for_and_may_come_back() -> None:
    cohort = training()
    cohort.post(HostDropped("b", "reset"))
    assert sought(cohort) == ["b"]
    assert arrive(cohort, "b", 2) == [3, 4]
    cohort.post(HostDropped("b", "reset"))
    assert sought(cohort) == ["b", "b"]


def test_silent_host_is_looked_for() -> None:
    cohort = training()
    cohort.say(Beat("a", (RankBeat(0, True, 0, 1, 0),)), "a")
    cohort.now_s = 20.0
    cohort.say(Beat("a", (RankBeat(0, True, 0, 1, 0),)), "a")
    cohort.tick(40.0)
    assert sought(cohort) == ["b"]


@pytest.mark.parametrize(
    "changes", [{"is_elastic": False}, {"cadence": CadenceSettings(Mode.CPU_CADENCE, partition_ratios=(0.5, 0.3, 0.2))}]
)
def test_host_that_could_not_join_again_is_not_looked_for(changes: dict[str, Any]) -> None:
    cohort = training(**changes)
    cohort.post(HostDropped("b", "reset"))
    assert sought(cohort) == []


def test_host_that_left_in_order_or_was_no_part_of_the_roster_is_not_looked_for() -> None:
    cohort = training()
    arrive(cohort)
    cohort.post(HostDropped("c", "reset"))
    cohort.say(HostStopped("b", "the daemon was stopped by SIGTERM"), "b")
    assert sought(cohort) == []


def test_nobody_is_looked_for_when_the_run_ends() -> None:
    cohort = training()
    cohort.stop()
    cohort.post(HostDropped("b", "reset"))
    assert sought(cohort) == []


def test_nobody_is_taken_in_behind_the_last_round() -> None:
    cohort = training(checkpoint=CheckpointSettings("run"), dataset_size=40, num_epochs=1)
    arrive(cohort)
    cohort.held.add(StateSent)
    cohort.stop()
    cohort.release(WindowDone)
    (save,) = [action for action in cohort.actions if isinstance(action, OpenSave)]
    assert save.stem == "run"
    cohort.release(StateSent)
    assert cohort.outcome is not None
    assert cohort.outcome.exit_code == 130
