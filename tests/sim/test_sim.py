"""Whole runs in the simulated world: modes, cadence, losses, refusals, stops, scale and determinism."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flodl.core import actions as act
from flodl.core import events as ev
from flodl.core.disagreement import MAX_DISSENTS
from flodl.core.rank import Stage
from flodl.ids import RankId
from flodl.messages import CadenceSettings, EpochReport, EvalReport, FromHead, HeadError, Mode, RunEnded, StopRequest
from tests.sim.actor import wire
from tests.sim.world import HostSpec, Scenario, World

ROOT = Path(__file__).resolve().parents[2]
ONE_HOST = (HostSpec("a", (0.01, 0.01, 0.03)),)
TWO_HOSTS = (HostSpec("a", (0.01,)), HostSpec("b", (0.01, 0.03)))
EQUAL = (HostSpec("a", (0.01, 0.01, 0.01)),)
SOLO = (HostSpec("a", (0.01,)),)
COLLECTIVE = [Mode.NCCL_SYNC, Mode.NCCL_CADENCE]
CADENCE = [Mode.NCCL_CADENCE, Mode.CPU_CADENCE]
TRAINING_S = 4.0
"""By now every rank has come up and trains."""


def world_of(mode: Mode, hosts: tuple[HostSpec, ...] = ONE_HOST, **scenario: object) -> World:
    return World(replace(Scenario(1, hosts, CadenceSettings(mode=mode)), **scenario))  # type: ignore[arg-type]


def details(world: World, event: str) -> list[str]:
    return [record.detail for record in world.records if record.event == event]


def head_messages(world: World, kind: type) -> list[object]:
    return [message for message in world.controller.to_head if isinstance(message, kind)]


def commits(world: World) -> list[dict[RankId, int]]:
    """Steps per rank of each commit, the seed's left out."""
    return [dict(fields["counts"]) for fields in world.commits()][1:]  # type: ignore[call-overload]


# -------------------------------------------------------------------------------------------------------------- modes
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS, SOLO], ids=["one host", "two hosts", "solo"])
def test_every_sample_of_every_epoch_is_absorbed_once(mode: Mode, hosts: tuple[HostSpec, ...]) -> None:
    world = world_of(mode, hosts)
    outcome = world.run()
    assert (outcome.status, outcome.exit_code, outcome.losses) == ("completed", 0, ())
    world.assert_exact_coverage()
    assert all(rank.has_finished for rank in world.ranks())


def test_async_ranks_train_while_a_round_is_open() -> None:
    world = world_of(Mode.CPU_ASYNC, TWO_HOSTS, dataset_size=800)
    seen: Counter[RankId] = Counter()

    def look() -> None:
        seen.update(rank.rank for rank in world.ranks() if rank.core.stage is not Stage.NONE and rank.is_stepping)
        world.after(0.001, look)

    world.after(TRAINING_S, look)
    world.run()
    assert set(seen) == {0, 1, 2}
    world.assert_exact_coverage()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("at_s", [TRAINING_S, TRAINING_S + 0.37, TRAINING_S + 0.71])
def test_orderly_stop_merges_everything_that_was_trained(mode: Mode, at_s: float) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=4000)
    world.after(at_s, lambda: world.controller.post(ev.StopAsked("test", abort=False, exit_code=130)))
    assert world.run().status == "stopped"
    assert world.final is not None
    assert world.final.samples.total() == 4 * sum(rank.core.steps_total for rank in world.ranks())
    world.assert_one_consensus()


@pytest.mark.parametrize("mode", list(Mode))
def test_pass_delivered_in_parts_is_absorbed_once(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS, epoch_splits=3)
    assert world.run().status == "completed"
    world.assert_exact_coverage()
    reports = head_messages(world, EpochReport)
    assert [report.epoch for report in reports] == list(range(6))  # type: ignore[attr-defined]
    assert sum(report.samples for report in reports) == 400  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("size", [3, 4, 13, 97])
def test_no_size_of_dataset_loses_a_sample(mode: Mode, size: int) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=size, merge_single_tail=True)
    assert world.run().status == "completed"
    world.assert_exact_coverage()


@pytest.mark.parametrize("mode", list(Mode))
def test_version_0_is_rank_0s_model(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS)
    world.run()
    assert {rank.model.origin for rank in world.ranks()} == {"init of rank 0"}


def test_head_hears_of_every_epoch_evaluation_and_the_end_once() -> None:
    world = world_of(Mode.NCCL_CADENCE, TWO_HOSTS, eval_samples=5)
    world.run()
    epochs = head_messages(world, EpochReport)
    assert [(report.epoch, report.samples, report.avg_loss) for report in epochs] == [(0, 200, 1.0), (1, 200, 1.0)]  # type: ignore[attr-defined]
    assert head_messages(world, EvalReport) == [EvalReport(0, 1.0), EvalReport(1, 1.0)]
    assert head_messages(world, RunEnded) == [RunEnded("completed", "", "/state", 2)]


def test_run_without_a_head_streams_no_state() -> None:
    world = world_of(Mode.CPU_SYNC, has_head=False)
    assert world.run().status == "completed"
    assert world.final is None
    world.assert_one_consensus()


# ------------------------------------------------------------------------------------------------------------ cadence
@pytest.mark.parametrize("mode", CADENCE)
def test_rank_of_a_third_of_the_speed_does_a_third_of_the_batches(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=4000, num_epochs=3)
    world.run()
    shares = [report.per_rank_batch_share for report in head_messages(world, EpochReport)][1:]  # type: ignore[attr-defined]
    for share in shares:
        assert share["2"] / share["0"] == pytest.approx(1 / 3, rel=0.1)
        assert share["1"] / share["0"] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("mode", CADENCE)
def test_share_of_a_rank_that_turns_three_times_slower_follows_within_three_windows(mode: Mode) -> None:
    world = world_of(mode, EQUAL, dataset_size=8000)
    seen: list[int] = []

    def slow_down() -> None:
        seen.append(len(commits(world)))
        world.slow_rank(2, 3.0)

    world.after(20.0, slow_down)
    world.run()
    before, after = commits(world)[seen[0] - 1], commits(world)[seen[0] + 3]
    assert before[2] / before[0] == pytest.approx(1, rel=0.15)
    assert after[2] == pytest.approx(after[0] / 3, abs=1)


def test_control_plane_costs_windows_not_steps() -> None:
    def messages_per_window(anchor: int) -> dict[str, float]:
        cadence = CadenceSettings(Mode.NCCL_CADENCE, anchor=anchor, min_anchor=anchor, max_anchor=anchor)
        world = World(Scenario(1, EQUAL, cadence, dataset_size=anchor * 3 * 4 * 20, num_epochs=1))
        world.run()
        windows = len(commits(world))
        return {
            kind: count / windows
            for kind, count in world.messages.items()
            if kind not in ("Beat", "Heard") and count > windows
        }

    few, many = messages_per_window(anchor=10), messages_per_window(anchor=200)
    assert few.keys() == many.keys() == {"WindowPlan", "WindowDone", "StartRound", "Reduced", "Commit"}
    assert all(count <= 3.5 for count in (*few.values(), *many.values()))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [Mode.CPU_CADENCE, pytest.param(Mode.NCCL_CADENCE, marks=pytest.mark.long)])
def test_thousand_ranks_on_250_hosts_train_an_epoch(mode: Mode) -> None:
    hosts = tuple(HostSpec(f"h{number}", (0.01, 0.01, 0.02, 0.03)) for number in range(250))
    world = world_of(mode, hosts, dataset_size=30_000, batch_size=2, num_epochs=1)
    assert world.run().status == "completed"
    world.assert_exact_coverage()


# -------------------------------------------------------------------------------------------------------- determinism
def test_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    def trace(seed: int) -> list[str]:
        world = World(Scenario(seed, TWO_HOSTS, CadenceSettings(mode=Mode.CPU_CADENCE)))
        world.after(TRAINING_S, lambda: world.kill_rank(2))
        world.run()
        return world.trace

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_interpreters_hash_seed_changes_nothing() -> None:
    def trace(hash_seed: str) -> str:
        command = [sys.executable, "-m", "tests.sim.replay", "--seed", "8", "--trace", "-1"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    assert trace("1") == trace("2")


# ------------------------------------------------------------------------------------------------------------- losses
@pytest.mark.parametrize("mode", list(Mode))
def test_survivors_of_a_killed_rank_train_all_its_samples(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS, min_rank_start=1)
    world.after(TRAINING_S, lambda: world.kill_rank(2))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("completed", 0)
    assert [(loss.kind, loss.rank, loss.signal) for loss in outcome.losses] == [("signal", 2, 9)]
    world.assert_exact_coverage()


@pytest.mark.parametrize("mode", list(Mode))
def test_survivors_of_a_killed_daemon_go_on(mode: Mode) -> None:
    hosts = (HostSpec("a", (0.01, 0.02)), HostSpec("b", (0.01, 0.03)))
    world = world_of(mode, hosts, dataset_size=1000)
    world.after(TRAINING_S, lambda: world.kill_daemon("b"))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("completed", 0)
    assert [(loss.kind, loss.host) for loss in outcome.losses] == [("host lost", "b")]
    assert details(world, "rank_lost") == ["rank 2, 3 on b lost: connection lost: connection reset"]
    world.assert_exact_coverage()


def test_cpu_plane_goes_on_alone_and_the_collective_plane_stops() -> None:
    for mode, status, code in ((Mode.CPU_SYNC, "completed", 0), (Mode.NCCL_SYNC, "stopped", 5)):
        world = world_of(mode, (HostSpec("a", (0.02, 0.02)),))
        world.after(TRAINING_S, lambda world=world: world.kill_rank(1))  # type: ignore[misc]
        outcome = world.run()
        assert (outcome.status, outcome.exit_code) == (status, code)
        world.assert_one_consensus()


@pytest.mark.parametrize("mode", list(Mode))
def test_host_behind_a_cut_cable_is_dead_after_30_s_and_ends_when_it_hears(mode: Mode) -> None:
    hosts = (HostSpec("a", (0.01, 0.02)), HostSpec("b", (0.01, 0.03)))
    world = world_of(mode, hosts, dataset_size=2000)
    world.after(TRAINING_S, lambda: world.partition("b", 45))
    outcome = world.run()
    assert (outcome.status, [loss.host for loss in outcome.losses]) == ("completed", ["b"])
    world.assert_exact_coverage()
    assert not any(rank.has_finished for rank in world.daemons["b"].ranks.values())


def test_run_whose_only_host_is_cut_off_ends() -> None:
    world = world_of(Mode.CPU_SYNC, SOLO, dataset_size=4000)
    world.after(TRAINING_S, lambda: world.partition("a", 150))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    assert world.now_s < TRAINING_S + 32


STOPPED_S = 45.0
FOR_GOOD_S = 1e6
MOMENTS = [None, 0.004, *(pytest.param(moment, marks=pytest.mark.long) for moment in (0.0, 0.002, 0.009, 0.02))]
"""When a peer is stopped: in a window, or so long after the begin of an attempt at a round."""
APART = (HostSpec("a", (0.01, 0.02)), HostSpec("b", (0.01,)))


def strike(world: World, moment: float | None, call: Callable[[], None]) -> World:
    """Run with a fault."""
    if moment is None:
        world.after(TRAINING_S, call)
    else:
        world.at_round(3, moment, call)
    world.run()
    return world


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("moment", MOMENTS)
def test_host_that_was_stopped_for_45_s_changes_nothing_any_more(mode: Mode, moment: float | None) -> None:
    def run(for_s: float) -> World:
        world = world_of(mode, APART, dataset_size=3000)
        return strike(world, moment, lambda: world.freeze_host("b", for_s))

    returned, gone = run(STOPPED_S), run(FOR_GOOD_S)
    (lost,) = (record for record in returned.records if record.event == "rank_lost")
    assert lost.detail.startswith("rank 2 on b lost: silent for 30")
    assert not returned.daemons["b"].is_alive, "it has not come back before the end"
    assert returned.now_s == gone.now_s
    assert returned.final == gone.final
    assert returned.commits() == gone.commits()
    returned.assert_exact_coverage()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("moment", MOMENTS)
def test_rank_that_was_stopped_and_cannot_be_killed_is_refused_and_changes_nothing(
    mode: Mode, moment: float | None
) -> None:
    def run(for_s: float) -> World:
        world = world_of(mode, APART, dataset_size=3000)

        def stop() -> None:
            world.rank(2).is_unkillable = True
            world.rank(2).pause(for_s)

        return strike(world, moment, stop)

    returned, gone = run(STOPPED_S), run(FOR_GOOD_S)
    (lost,) = (record for record in returned.records if record.event == "rank_lost")
    assert "silent for 30" in lost.detail
    if details(returned, "zombie"):  # on the CPU plane its next word may be to its daemon alone
        assert returned.rank(2).end_reason.startswith("removed from the run")
    assert returned.final == gone.final
    assert returned.commits() == gone.commits()
    returned.assert_exact_coverage()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("moment", MOMENTS)
def test_stalled_controller_kills_nobody(mode: Mode, moment: float | None) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=2000)
    outcome = strike(world, moment, lambda: world.stall_controller(60)).outcome
    assert outcome is not None
    assert (outcome.status, outcome.losses) == ("completed", ())
    assert details(world, "stalled") == ["the controller did not run for 60.0 s"]
    world.assert_exact_coverage()


# ------------------------------------------------------------------------------------------------------ bad averaging
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("kind", ["loss", "weights"])
def test_contribution_that_is_not_finite_is_left_out_and_trained_again(mode: Mode, kind: str) -> None:
    world = world_of(mode, TWO_HOSTS)
    poison = world.poison_loss if kind == "loss" else world.poison_weights
    world.after(TRAINING_S, lambda: poison(1, 2))
    assert world.run().status == "completed"
    assert len(details(world, "nonfinite")) == 2
    assert "left out: rank 1" in details(world, "nonfinite")[0]
    world.assert_exact_coverage()
    assert {report.avg_loss for report in head_messages(world, EpochReport)} == {1.0}  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", list(Mode))
def test_three_rounds_in_a_row_that_are_not_finite_stop_the_run(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS)
    world.after(TRAINING_S, lambda: world.poison_loss(1, 100))
    outcome = world.run()
    assert outcome.status == "failed"
    assert outcome.message.startswith("not finite in 3 rounds in a row (max_nonfinite); at last version ")
    assert ": not finite and left out: rank 1 (the loss of its step " in outcome.message


def test_run_that_is_nowhere_finite_stops() -> None:
    world = world_of(Mode.CPU_SYNC, SOLO)
    world.after(TRAINING_S, lambda: world.poison_loss(0, 1))
    assert world.run().message.startswith("loss or parameters are not finite on every rank: rank 0 (")


def test_version_0_comes_from_the_first_rank_whose_weights_are_finite() -> None:
    world = world_of(Mode.CPU_SYNC, ONE_HOST)
    world.after(0.4, lambda: world.poison_weights(0, 1))
    assert world.run().status == "completed"
    assert {rank.model.origin for rank in world.ranks()} == {"init of rank 1"}


@pytest.mark.parametrize("mode", list(Mode))
def test_round_without_one_digest_is_not_committed_but_redone(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS)
    world.after(TRAINING_S, lambda: world.flip_bits(2, 1))
    assert world.run().status == "completed"
    assert len(details(world, "digest_mismatch")) == 1
    assert "rank 2 holds another consensus" in details(world, "digest_mismatch")[0]
    (difference,) = details(world, "digest_difference")
    assert difference.endswith("rank 2 differs from rank 0 in samples (1 tensors compared)")
    world.assert_exact_coverage()


@pytest.mark.parametrize("mode", list(Mode))
def test_rank_that_keeps_differing_is_lost_and_its_samples_return(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS)
    world.after(TRAINING_S, lambda: world.flip_bits(2, 1000))
    outcome = world.run()
    assert (outcome.status, [loss.rank for loss in outcome.losses]) == ("completed", [2])
    assert len(details(world, "digest_mismatch")) == MAX_DISSENTS
    world.assert_exact_coverage()


def test_round_in_which_everyone_differs_stops_the_run() -> None:
    world = world_of(Mode.CPU_CADENCE, TWO_HOSTS)
    for rank in range(3):
        world.after(TRAINING_S, lambda rank=rank: world.flip_bits(rank, 1000))  # type: ignore[misc]
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    assert "failed 10 times" in outcome.message


@pytest.mark.parametrize("mode", COLLECTIVE)
def test_reduce_that_breaks_with_everybody_alive_is_redone_over_a_new_group(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS)
    world.after(TRAINING_S, lambda: world.break_reduces(1))
    outcome = world.run()
    assert (outcome.status, outcome.losses) == ("completed", ())
    assert "connection reset by peer" in details(world, "round_failed")[0]
    world.assert_exact_coverage()


@pytest.mark.parametrize("mode", COLLECTIVE)
def test_broken_reduces_of_a_long_run_do_not_add_up(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=8000)
    for number in range(8):
        world.after(TRAINING_S + 5 * number, lambda: world.break_reduces(1))
    assert world.run().status == "completed"
    assert len(details(world, "round_failed")) == 8


@pytest.mark.parametrize("mode", COLLECTIVE)
def test_formation_is_tried_three_times(mode: Mode) -> None:
    for failures, status in ((2, "completed"), (3, "failed")):
        world = world_of(mode, TWO_HOSTS)
        world.break_formations(failures)
        outcome = world.run()
        assert outcome.status == status
    assert "does not form: rank 2: connection refused" in outcome.message
    assert outcome.exit_code == 5


def test_group_member_that_never_answers_ends_the_formation_by_its_deadline() -> None:
    world = world_of(Mode.NCCL_SYNC, TWO_HOSTS)

    def mute() -> None:
        world.rank(2).execute = lambda action: None  # type: ignore[method-assign]

    world.after(0.4, mute)
    outcome = world.run()
    assert "does not form: no answer in time" in outcome.message
    assert world.now_s == pytest.approx(3 * 60, abs=30)


def test_round_that_does_not_end_with_everybody_alive_stops_the_run() -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS)

    def mute() -> None:
        world.rank(2).execute = lambda action: None  # type: ignore[method-assign]

    world.after(0.4, mute)
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    assert outcome.message == "round 0 did not finish within 300 s; waiting for 0, 1, 2"


# ------------------------------------------------------------------------------------------------------ stops and ends
@pytest.mark.parametrize("mode", list(Mode))
def test_orderly_stop_merges_what_was_trained(mode: Mode) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=4000)
    world.after(TRAINING_S, lambda: world.controller.post(ev.StopAsked("ctrl-c", abort=False, exit_code=130)))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code, outcome.message) == ("stopped", 130, "stopped by ctrl-c")
    assert all(rank.has_finished and not rank.delta for rank in world.ranks())
    world.assert_one_consensus()
    assert world.final is not None
    assert 0 < world.final.samples.total() < 8000
    assert head_messages(world, RunEnded) == [RunEnded("stopped", "stopped by ctrl-c", "/state", 0, 130)]


def test_stop_that_a_stuck_rank_holds_up_ends_after_the_grace() -> None:
    world = world_of(Mode.CPU_CADENCE, TWO_HOSTS, dataset_size=4000)
    world.after(TRAINING_S, lambda: world.pause_rank(2, 1e6))
    world.after(TRAINING_S + 0.1, lambda: world.controller.post(ev.StopAsked("ctrl-c", abort=False, exit_code=130)))
    assert world.run().status == "stopped"
    assert world.now_s < TRAINING_S + 20


@pytest.mark.parametrize("at_s", [0.02, 1.0, 3.1, TRAINING_S])
def test_abort_ends_everything_at_once_in_any_phase(at_s: float) -> None:
    world = world_of(Mode.NCCL_CADENCE, TWO_HOSTS, dataset_size=4000)
    world.after(at_s, lambda: world.controller.post(ev.HeadSaid(StopRequest("fdl stop -x", abort=True, exit_code=143))))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("stopped", 143)
    assert world.now_s < at_s + 5
    assert not any(rank.is_alive for rank in world.ranks())


def test_second_stop_changes_nothing() -> None:
    world = world_of(Mode.NCCL_CADENCE, TWO_HOSTS, dataset_size=4000)
    for at_s, code in ((TRAINING_S, 130), (TRAINING_S + 0.01, 143)):
        world.after(at_s, lambda code=code: world.controller.post(ev.StopAsked("user", abort=False, exit_code=code)))  # type: ignore[misc]
    assert world.run().exit_code == 130


def test_head_that_dies_stops_the_run_after_a_last_round() -> None:
    world = world_of(Mode.CPU_CADENCE, TWO_HOSTS, dataset_size=4000)
    world.after(TRAINING_S, lambda: world.controller.post(ev.HeadExited(0, 9)))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 137)
    assert outcome.failure is not None
    assert outcome.failure.kind == "head"
    assert all(rank.has_finished for rank in world.ranks())


def test_heads_own_error_is_the_headline() -> None:
    world = world_of(Mode.CPU_CADENCE, TWO_HOSTS, dataset_size=4000)
    error = wire(HeadError("ValueError: no such metric", "Traceback"), FromHead)
    world.after(TRAINING_S, lambda: world.controller.post(ev.HeadSaid(error)))
    world.after(TRAINING_S + 0.01, lambda: world.controller.post(ev.HeadExited(1, 0)))
    outcome = world.run()
    assert (outcome.message, outcome.exit_code) == ("the head failed: ValueError: no such metric", 1)


def test_head_that_never_comes_up_ends_the_run_by_its_deadline() -> None:
    world = world_of(Mode.CPU_CADENCE, TWO_HOSTS, is_head_silent=True)
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert "did not reach Trainer.run within 300 s" in outcome.message
    assert world.now_s < 320


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("at_s", [1.5, TRAINING_S])
def test_exception_in_one_rank_is_the_headline_and_stops_the_run(mode: Mode, at_s: float) -> None:
    world = world_of(mode, TWO_HOSTS, dataset_size=4000)
    world.after(at_s, lambda: world.raise_in_rank(1, "KeyError: 'label'"))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.host, outcome.failure.error) == (1, "b", "KeyError: 'label'")
    world.assert_one_consensus()


def test_script_that_ends_early_in_a_rank_fails_the_run_as_usage() -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS, dataset_size=4000)
    world.after(TRAINING_S, lambda: world.rank(1).die(0, 0))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 2)
    assert "without finishing" in outcome.message


# -------------------------------------------------------------------------------------------------------------- start
def test_cohort_whose_settings_differ_is_refused_by_name() -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS, settings_of=lambda rank, settings: replace(settings, seed=rank // 2))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 2)
    assert "rank 0 on a and rank 2 on b do not agree on: seed (0 against 1)" in outcome.message


def test_cohort_whose_models_differ_is_refused_by_name() -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS, fingerprint_of=lambda rank: {"layers": str(3 + rank // 2)})
    outcome = world.run()
    assert outcome.exit_code == 2
    assert "rank 0 on a and rank 2 on b do not agree on: layers (3 against 5)" not in outcome.message
    assert "rank 0 on a and rank 2 on b do not agree on: layers (3 against 4)" in outcome.message


def test_host_that_cannot_be_brought_up_fails_the_start_with_its_stage_and_remedy() -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS, absent=("b",))
    failed = ev.HostFailed("b", "auth", "permission denied", "add your key")
    world.after(1.0, lambda: world.controller.post(failed))
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 4)
    assert "host b: auth: permission denied\n  add your key" in outcome.message


def test_run_starts_without_a_failed_host_if_enough_ranks_are_there() -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS, absent=("a",), min_rank_start=2)
    world.after(1.0, lambda: world.controller.post(ev.HostFailed("a", "resolve", "no such host", "")))
    assert world.run().status == "completed"
    world.assert_exact_coverage()


@pytest.mark.parametrize(("least", "status", "at_s"), [(2, "completed", 300), (0, "failed", 600)])
def test_join_window_closes_by_itself(least: int, status: str, at_s: float) -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS, absent=("a",), min_rank_start=least)
    outcome = world.run()
    assert outcome.status == status
    assert at_s <= world.now_s < at_s + 30


def test_join_window_closes_though_nobody_ever_comes() -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS, absent=("a", "b"), has_head=False)
    outcome = world.run()
    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    assert world.now_s == pytest.approx(600, abs=1)
    assert "host a: join: has not joined" in outcome.message


def test_no_end_leaves_a_process_or_waits_long() -> None:
    world = world_of(Mode.CPU_SYNC, TWO_HOSTS)
    world.run()
    counts: Counter[bool] = Counter(actor.is_alive for actor in (*world.ranks(), *world.daemons.values()))
    assert counts == {False: 5}
    assert isinstance(world.outcome, act.Outcome)
