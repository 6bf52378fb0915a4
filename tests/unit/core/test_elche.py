"""ElChe: counts follow speeds, the anchor follows the overhead, and nothing else does."""

import math
from collections.abc import Mapping

import pytest

from flodl.core.elche import SYNC_LEAD_BATCHES, ElChe, ElCheState, Phase, Proposal, WindowTiming
from flodl.errors import InvariantViolation
from flodl.messages import CadenceSettings, Mode

CHEAP_MS = 0.375  # of averaging: between half the overhead target and the target, for a window of 10 ms


def timing(ms: float, steps: int = 10) -> WindowTiming:
    return WindowTiming(steps=steps, delivered_ms=ms, compute_ms=ms, window_ms=ms * steps)


def timings(ms: Mapping[int, float], counts: Mapping[int, int]) -> dict[int, WindowTiming]:
    return {rank: timing(cost, counts[rank]) for rank, cost in ms.items()}


def observe(elche: ElChe, window: Mapping[int, WindowTiming], reduce_ms: float) -> Proposal | None:
    """One window, with what it proposes committed."""
    proposal = elche.observe(window, reduce_ms)
    if proposal is not None:
        elche.commit(proposal)
    return proposal


def run_windows(elche: ElChe, ms: Mapping[int, float], windows: int, overhead: float) -> list[dict[int, int]]:
    """Windows of devices that cost ``ms`` per batch, with averaging at ``overhead`` of the longest rank's window."""
    trace = []
    for _ in range(windows):
        counts = elche.plan(100_000)
        trace.append(counts)
        observe(elche, timings(ms, counts), overhead * max(ms[rank] * counts[rank] for rank in ms))
        elche.check()
    return trace


def calibrated(ms: Mapping[int, float], windows: int = 5, **settings: object) -> ElChe:
    elche = ElChe(CadenceSettings(**settings), list(ms))  # type: ignore[arg-type]
    run_windows(elche, ms, windows, overhead=0.04)
    return elche


# ----------------------------------------------------------------------------------------------------------- phases
def test_phases_are_ordered() -> None:
    assert Phase.PROBE < Phase.WARMUP < Phase.STABLE < Phase.MATURE


@pytest.mark.parametrize(
    ("windows", "phase"),
    [
        (0, Phase.PROBE),
        (1, Phase.WARMUP),
        (4, Phase.WARMUP),
        (5, Phase.STABLE),
        (19, Phase.STABLE),
        (20, Phase.MATURE),
        (30, Phase.MATURE),
    ],
)
def test_phase_counts_calibrations(windows: int, phase: Phase) -> None:
    assert calibrated({0: 1.0}, windows).phase is phase


def test_window_without_a_sample_is_no_calibration() -> None:
    elche = ElChe(CadenceSettings(), [0, 1])
    assert observe(elche, {}, 1.0) is None
    assert observe(elche, {0: WindowTiming(0, None, None, 0.0), 1: WindowTiming(5, None, math.nan, 1.0)}, 1.0) is None
    assert elche.phase is Phase.PROBE
    assert elche.slow_rank is None
    elche.check()


# ------------------------------------------------------------------------------------------------------------ probe
def test_probe_gives_everyone_the_anchor() -> None:
    elche = ElChe(CadenceSettings(), [2, 0, 1])
    assert elche.plan(1000) == {0: 10, 1: 10, 2: 10}
    assert list(elche.plan(1000)) == [0, 1, 2]
    assert elche.batch_counts == {0: 10, 1: 10, 2: 10}


@pytest.mark.parametrize(("epoch_batches", "count"), [(100, 10), (99, 9), (30, 3), (29, 2), (5, 2), (0, 2)])
def test_probe_takes_a_tenth_of_the_epoch_per_rank_but_at_least_two(epoch_batches: int, count: int) -> None:
    assert ElChe(CadenceSettings(), [0, 1]).plan(epoch_batches) == {0: count, 1: count}


def test_probe_takes_two_batches_under_an_anchor_of_one() -> None:
    assert ElChe(CadenceSettings(anchor=1), [0]).plan(1000) == {0: 2}


def test_bound_of_the_epoch_ends_with_probe() -> None:
    assert calibrated({0: 1.0}, 1).plan(20) == {0: 10}


@pytest.mark.parametrize(
    ("settings", "anchor"),
    [
        (CadenceSettings(), 10),
        (CadenceSettings(anchor=7), 7),
        (CadenceSettings(anchor=0), 1),
        (CadenceSettings(max_anchor=6), 6),
        (CadenceSettings(min_anchor=12), 12),
        (CadenceSettings(anchor=2000), 1000),
    ],
)
def test_first_anchor_is_within_its_bounds(settings: CadenceSettings, anchor: int) -> None:
    elche = ElChe(settings, [0])
    assert elche.anchor == anchor
    elche.check()


# ------------------------------------------------------------------------------------------------------------- sync
@pytest.mark.parametrize("mode", [Mode.NCCL_SYNC, Mode.CPU_SYNC])
def test_sync_modes_ignore_the_anchor_and_count_for_one_step_of_the_slow_rank(mode: Mode) -> None:
    elche = ElChe(CadenceSettings(mode=mode, anchor=8), [0, 1])
    assert elche.plan(1000) == {0: 1, 1: 1}
    run_windows(elche, {0: 1.0, 1: 3.0}, windows=8, overhead=2.0)
    assert elche.plan(1000) == {0: 3, 1: 1}
    assert elche.batch_counts == {0: 3, 1: 1}
    assert elche.anchor == 1
    assert elche.partition_ratios == pytest.approx({0: 0.75, 1: 0.25})
    assert observe(elche, {0: timing(1.0, 2), 1: timing(3.0, 1)}, 6.0) == Proposal(1, 1, pytest.approx(2.0))


@pytest.mark.parametrize(
    ("ms", "counts"),
    [
        ({0: 10.0, 1: 10.0}, {0: 1, 1: 1}),
        ({0: 10.0, 1: 14.0}, {0: 1, 1: 1}),
        ({0: 10.0, 1: 15.0}, {0: 2, 1: 1}),
        ({0: 1.0, 1: 16.0}, {0: SYNC_LEAD_BATCHES, 1: 1}),
        ({0: 1.0, 1: 50.0}, {0: SYNC_LEAD_BATCHES, 1: 1}),
    ],
)
def test_sync_count_is_the_nearest_number_of_steps_with_a_limit(ms: dict[int, float], counts: dict[int, int]) -> None:
    assert calibrated(ms, mode=Mode.CPU_SYNC).batch_counts == counts


# ----------------------------------------------------------------------------------------------------------- timing
def test_delivered_time_is_preferred() -> None:
    elche = ElChe(CadenceSettings(), [0, 1])
    observe(elche, {0: WindowTiming(10, 4.0, 2.0, 20.0), 1: WindowTiming(2, 8.0, 5.0, 50.0)}, CHEAP_MS)
    assert elche.ms_per_batch == {0: 4.0, 1: 8.0}


@pytest.mark.parametrize(
    "odd",
    [
        WindowTiming(1, None, 5.0, 5.0),
        WindowTiming(1, 8.0, 5.0, 5.0),
        WindowTiming(5, None, 5.0, 25.0),
        WindowTiming(5, math.nan, 5.0, 25.0),
        WindowTiming(5, math.inf, 5.0, 25.0),
        WindowTiming(5, 0.0, 5.0, 25.0),
        WindowTiming(5, -8.0, 5.0, 25.0),
    ],
)
def test_one_rank_without_a_delivered_time_makes_it_compute_only_for_all(odd: WindowTiming) -> None:
    elche = ElChe(CadenceSettings(), [0, 1])
    observe(elche, {0: WindowTiming(10, 4.0, 2.0, 20.0), 1: odd}, CHEAP_MS)
    assert elche.ms_per_batch == {0: 2.0, 1: 5.0}


@pytest.mark.parametrize("compute_ms", [None, math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_rank_without_any_usable_time_keeps_its_estimate(compute_ms: float | None) -> None:
    elche = calibrated({0: 1.0, 1: 4.0})
    observe(elche, {0: WindowTiming(10, 1.0, 1.0, 10.0), 1: WindowTiming(10, None, compute_ms, 10.0)}, CHEAP_MS)
    assert elche.ms_per_batch == {0: 1.0, 1: 4.0}
    elche.check()


@pytest.mark.parametrize("steps", [0, -1])
def test_rank_without_steps_neither_counts_nor_spoils_the_others_samples(steps: int) -> None:
    elche = calibrated({0: 1.0, 1: 4.0})
    observe(elche, {0: WindowTiming(10, 1.0, 9.0, 90.0), 1: WindowTiming(steps, None, 3.0, 90.0)}, CHEAP_MS)
    assert elche.ms_per_batch == {0: 1.0, 1: 4.0}


def test_times_of_strangers_are_ignored() -> None:
    elche = calibrated({0: 1.0})
    proposal = observe(elche, {0: WindowTiming(10, 1.0, 9.0, 10.0), 5: WindowTiming(1, None, 3.0, 1000.0)}, CHEAP_MS)
    assert elche.ms_per_batch == {0: 1.0}
    assert proposal == Proposal(10, 10, CHEAP_MS / 10)


# -------------------------------------------------------------------------------------------------------- smoothing
@pytest.mark.parametrize(
    ("measured", "smoothed"),
    [(10.0, 10.0), (10.5, 10.05), (9.5, 9.95), (11.0, 10.1), (14.0, 11.6), (6.0, 8.4), (18.0, 16.4), (40.0, 34.0)],
)
def test_smoothing_weighs_a_sample_by_its_surprise(measured: float, smoothed: float) -> None:
    elche = calibrated({0: 10.0}, 1)
    observe(elche, {0: timing(measured)}, CHEAP_MS)
    assert elche.ms_per_batch == pytest.approx({0: smoothed})


# ----------------------------------------------------------------------------------------------------------- counts
@pytest.mark.parametrize(
    ("ms", "counts"),
    [
        ({0: 5.0, 1: 5.0, 2: 5.0}, {0: 10, 1: 10, 2: 10}),
        ({0: 1.0, 1: 1.0, 2: 3.0}, {0: 30, 1: 30, 2: 10}),
        ({0: 4.0, 1: 10.0}, {0: 25, 1: 10}),
        ({0: 8.0, 1: 10.0}, {0: 13, 1: 10}),  # 12.5: halves go up
        ({0: 9.0, 1: 10.0}, {0: 11, 1: 10}),
    ],
)
def test_counts_follow_the_speeds(ms: dict[int, float], counts: dict[int, int]) -> None:
    elche = calibrated(ms, 1)
    assert elche.plan(1000) == counts
    assert elche.batch_counts == counts


def test_partition_ratios_follow_the_speeds() -> None:
    assert calibrated({0: 1.0, 1: 1.0, 2: 3.0}, 1).partition_ratios == pytest.approx({0: 3 / 7, 1: 3 / 7, 2: 1 / 7})
    assert ElChe(CadenceSettings(), [3, 4]).partition_ratios == {3: 0.5, 4: 0.5}


def test_partition_ratios_of_the_settings_are_shared_by_those_who_are_left() -> None:
    fixed = CadenceSettings(Mode.NCCL_SYNC, partition_ratios=(0.5, 0.3, 0.2))
    elche = ElChe(fixed, [0, 1, 2])
    assert elche.partition_ratios == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2})
    elche.remove_rank(0)
    assert elche.partition_ratios == pytest.approx({1: 0.6, 2: 0.4})


@pytest.mark.parametrize(("diff", "counts"), [(0, {0: 10, 1: 10}), (3, {0: 13, 1: 10}), (99, {0: 25, 1: 10})])
def test_fast_rank_leads_by_no_more_than_max_batch_diff(diff: int, counts: dict[int, int]) -> None:
    assert calibrated({0: 4.0, 1: 10.0}, 1, max_batch_diff=diff).plan(1000) == counts


def test_absurdly_slow_rank_is_not_starved() -> None:
    elche = calibrated({0: 1.0, 1: 1.0}, 1)
    observe(elche, {0: timing(1.0), 1: timing(1e300)}, CHEAP_MS)
    assert elche.slow_rank == 0
    assert elche.plan(1000) == {0: 10, 1: 1}
    elche.check()


def test_absurdly_fast_measurement_gives_a_bounded_count() -> None:
    elche = calibrated({0: 1e300, 1: 1e-300}, 1)
    assert elche.plan(1000) == {0: 10, 1: 10_000_000}
    assert elche.partition_ratios == pytest.approx({0: 1e-6, 1: 1.0})
    elche.check()


# ----------------------------------------------------------------------------------------------- slow-rank election
def test_slow_rank_is_elected_at_the_first_calibration() -> None:
    assert calibrated({0: 1.0, 1: 3.0, 2: 2.0}, 1).slow_rank == 1


def test_lowest_of_equally_slow_ranks_is_elected() -> None:
    assert calibrated({2: 3.0, 1: 3.0, 0: 1.0}, 1).slow_rank == 1


def test_slow_rank_is_held_through_warmup() -> None:
    elche = calibrated({0: 1.0, 1: 1.5}, 1)
    run_windows(elche, {0: 6.0, 1: 1.5}, windows=3, overhead=0.04)
    assert (elche.phase, elche.slow_rank) == (Phase.WARMUP, 1)
    run_windows(elche, {0: 6.0, 1: 1.5}, windows=1, overhead=0.04)
    assert (elche.phase, elche.slow_rank) == (Phase.STABLE, 0)


@pytest.mark.parametrize(("ms", "slow_rank"), [(1.05, 0), (1.1, 0), (1.11, 1)])
def test_slow_rank_changes_from_stable_on_with_hysteresis(ms: float, slow_rank: int) -> None:
    elche = ElChe(CadenceSettings(), [0, 1])
    state = calibrated({0: 1.0, 1: 0.5}).state()
    elche.restore(
        ElCheState(
            phase=state.phase,
            calibration_count=state.calibration_count,
            anchor=state.anchor,
            ranks=state.ranks,
            slow_rank=0,
            ms_per_batch={0: 4.0, 1: 4.0 * ms},
            batch_counts={},
            partition_ratios={},
        )
    )
    observe(elche, {0: timing(4.0), 1: timing(4.0 * ms)}, CHEAP_MS)
    assert elche.slow_rank == slow_rank


# ------------------------------------------------------------------------------------------------- anchor auto-tune
@pytest.mark.parametrize(
    ("overhead", "anchor"),
    [
        (0.15, 30),  # at most three times
        (0.10, 30),
        (0.08, 26),
        (0.0501, 21),
        (0.05, 10),
        (0.03, 10),
        (0.025, 10),
        (0.0249, 9),
        (0.0, 9),
        (math.inf, 30),
    ],
)
def test_anchor_follows_the_overhead_when_stable(overhead: float, anchor: int) -> None:
    elche = calibrated({0: 1.0}, 5)
    assert elche.propose(overhead) == Proposal(10, anchor, overhead)
    assert elche.anchor == 10
    elche.commit(elche.propose(overhead))
    assert elche.anchor == anchor


@pytest.mark.parametrize(("anchor", "shrunk"), [(1, 1), (2, 1), (39, 38), (40, 38), (59, 57), (60, 57), (1000, 950)])
def test_shrink_is_a_twentieth_but_at_least_one(anchor: int, shrunk: int) -> None:
    assert calibrated({0: 1.0}, 5, anchor=anchor).propose(0.01).proposed_anchor == shrunk


def test_anchor_stays_within_its_bounds() -> None:
    assert calibrated({0: 1.0}, 5, max_anchor=13).propose(1.0).proposed_anchor == 13
    assert calibrated({0: 1.0}, 5, anchor=40, min_anchor=39).propose(0.0).proposed_anchor == 39


@pytest.mark.parametrize(("anchor", "proposed"), [(950, 1000), (952, 1000), (953, 953), (999, 999), (1000, 1000)])
def test_growth_of_less_than_a_twentieth_is_no_change(anchor: int, proposed: int) -> None:
    assert calibrated({0: 1.0}, 5, anchor=anchor).propose(0.2).proposed_anchor == proposed


@pytest.mark.parametrize(
    ("windows", "overhead", "anchor"),
    [(1, 9.0, 10), (2, 0.15, 30), (2, 0.149, 10), (2, 0.0, 10), (4, 0.15, 30), (4, 0.149, 10), (4, 0.0, 10)],
)
def test_before_stable_only_a_heavy_overhead_counts_and_only_from_the_second_calibration(
    windows: int, overhead: float, anchor: int
) -> None:
    assert calibrated({0: 1.0}, windows).propose(overhead) == Proposal(10, anchor, overhead)


def test_growth_of_exactly_a_twentieth_is_a_change() -> None:
    assert calibrated({0: 1.0}, 5, anchor=20, max_anchor=21).propose(0.2).proposed_anchor == 21


def test_relaxing_adds_one_batch_where_nothing_is_proposed() -> None:
    elche = calibrated({0: 1.0}, 5, anchor=100, max_anchor=101)
    assert elche.relax(elche.propose(0.04)) == Proposal(100, 101, 0.04)
    assert elche.relax(elche.propose(0.0)) == Proposal(100, 95, 0.0)
    elche.commit(Proposal(100, 101, 0.04))
    assert elche.relax(elche.propose(0.04)) == Proposal(101, 101, 0.04)


def test_relaxing_starts_with_stable_and_not_in_sync_modes() -> None:
    warm, stable, sync = calibrated({0: 1.0}, 4), calibrated({0: 1.0}, 5), calibrated({0: 1.0}, 5, mode=Mode.CPU_SYNC)
    assert warm.relax(warm.propose(0.04)).proposed_anchor == 10
    assert stable.relax(stable.propose(0.04)).proposed_anchor == 11
    assert sync.relax(sync.propose(0.04)).proposed_anchor == 1


@pytest.mark.parametrize(
    ("anchor", "factor", "nudged"),
    [(10, 0.5, 5), (11, 0.5, 5), (100, 0.29, 29), (30, 0.7, 21), (10, 0.01, 2), (3, 0.999, 2), (2, 0.5, 2)],
)
def test_nudge_cuts_the_anchor_down_to_the_least(anchor: int, factor: float, nudged: int) -> None:
    elche = calibrated({0: 1.0}, 1, anchor=anchor, min_anchor=2)
    elche.nudge(factor)
    assert elche.anchor == nudged
    elche.check()


def test_observing_proposes_and_changes_no_anchor() -> None:
    elche = calibrated({0: 1.0})
    assert elche.observe({0: timing(1.0)}, 1.0) == Proposal(10, 30, 0.1)
    assert elche.anchor == 10


def test_no_overhead_is_no_proposal_to_change() -> None:
    assert calibrated({0: 1.0}, 5).propose(None) == Proposal(10, 10, None)


def test_target_of_the_settings_is_the_target() -> None:
    assert calibrated({0: 1.0}, 5, overhead_target=0.06).propose(0.06).proposed_anchor == 10


def test_overhead_is_averaging_per_longest_compute() -> None:
    elche = calibrated({0: 1.0, 1: 1.0})
    window = {0: WindowTiming(10, 1.0, 1.0, 10.0), 1: WindowTiming(10, 1.0, 1.0, 20.0)}
    assert observe(elche, window, 2.0) == Proposal(10, 30, 0.1)
    assert elche.anchor == 30


def test_short_window_of_a_tail_does_not_look_like_overhead() -> None:
    elche = calibrated({0: 1.0})
    assert observe(elche, {0: timing(1.0, steps=2)}, 0.4) == Proposal(10, 10, 0.04)


def test_overhead_is_known_from_one_step() -> None:
    elche = calibrated({0: 1.0})
    assert observe(elche, {0: WindowTiming(1, None, 1.0, 1.0)}, 0.4) == Proposal(10, 10, 0.04)


def test_overhead_counts_the_window_as_it_was_planned() -> None:
    elche = calibrated({0: 1.0, 1: 1.0})
    assert observe(elche, {0: timing(1.0, 10), 1: timing(2.0, 5)}, 0.9) == Proposal(10, 10, 0.045)


@pytest.mark.parametrize("reduce_ms", [math.nan, math.inf, -math.inf, -1.0])
def test_unusable_averaging_time_is_no_overhead(reduce_ms: float) -> None:
    assert observe(calibrated({0: 1.0}), {0: timing(1.0)}, reduce_ms) == Proposal(10, 10, None)


def test_free_averaging_shrinks_the_anchor() -> None:
    assert observe(calibrated({0: 1.0}), {0: timing(1.0)}, 0.0) == Proposal(10, 9, 0.0)


@pytest.mark.parametrize("window_ms", [math.nan, math.inf, 0.0, -1.0, 5e-324])
def test_unusable_compute_time_is_no_overhead(window_ms: float) -> None:
    elche = calibrated({0: 1.0}, anchor=1)
    assert observe(elche, {0: WindowTiming(10, 1.0, 1.0, window_ms)}, 1.0) == Proposal(1, 1, None)


def test_first_calibration_does_not_tune() -> None:
    elche = ElChe(CadenceSettings(), [0])
    assert observe(elche, {0: timing(1.0)}, 100.0) == Proposal(10, 10, 10.0)
    assert observe(elche, {0: timing(1.0)}, 100.0) == Proposal(10, 30, 10.0)


# ------------------------------------------------------------------------------------------------------- membership
def test_newcomer_counts_as_the_slow_rank_until_it_is_measured() -> None:
    elche = calibrated({0: 1.0, 1: 4.0})
    elche.add_rank(7)
    elche.check()
    assert elche.plan(1000) == {0: 40, 1: 10, 7: 10}
    assert elche.partition_ratios == pytest.approx({0: 4 / 6, 1: 1 / 6, 7: 1 / 6})
    assert elche.ms_per_batch == {0: 1.0, 1: 4.0}
    observe(elche, timings({0: 1.0, 1: 4.0, 7: 2.0}, elche.plan(1000)), 1.6)
    assert elche.plan(1000) == {0: 40, 1: 10, 7: 20}


def test_newcomers_keep_the_order_of_ranks() -> None:
    elche = ElChe(CadenceSettings(), [5])
    elche.add_rank(2)
    assert list(elche.plan(1000)) == [2, 5]


def test_rank_is_added_once() -> None:
    with pytest.raises(InvariantViolation, match="rank 1 is in the cadence already"):
        ElChe(CadenceSettings(), [0, 1]).add_rank(1)


def test_lost_rank_has_no_count() -> None:
    elche = calibrated({0: 1.0, 1: 4.0, 2: 2.0})
    elche.remove_rank(2)
    elche.check()
    assert elche.plan(1000) == {0: 40, 1: 10}
    assert elche.ms_per_batch == {0: 1.0, 1: 4.0}
    assert elche.slow_rank == 1


def test_slow_rank_that_is_lost_is_replaced_by_the_slowest_left() -> None:
    elche = calibrated({0: 1.0, 1: 4.0, 2: 2.0})
    elche.remove_rank(1)
    elche.check()
    assert elche.slow_rank == 2
    assert elche.plan(1000) == {0: 20, 2: 10}


def test_losing_every_measured_rank_leaves_equal_counts() -> None:
    elche = calibrated({0: 1.0})
    elche.add_rank(1)
    elche.add_rank(2)
    elche.remove_rank(0)
    elche.check()
    assert elche.slow_rank is None
    assert elche.plan(1000) == {1: 10, 2: 10}
    observe(elche, {1: timing(3.0), 2: timing(1.0)}, 1.2)
    assert elche.slow_rank == 1


def test_losing_an_unmeasured_rank_keeps_the_rest() -> None:
    elche = ElChe(CadenceSettings(), [0, 1])
    elche.remove_rank(0)
    assert elche.plan(1000) == {1: 10}


def test_stranger_cannot_be_lost() -> None:
    with pytest.raises(InvariantViolation, match="rank 9 is not in the cadence"):
        ElChe(CadenceSettings(), [0, 1]).remove_rank(9)


def test_nobody_left_is_an_empty_plan() -> None:
    elche = calibrated({0: 1.0}, max_batch_diff=2)
    elche.remove_rank(0)
    elche.check()
    assert elche.plan(1000) == {}
    assert elche.partition_ratios == {}


# ------------------------------------------------------------------------------------------------------------ state
def test_state_tells_everything() -> None:
    elche = calibrated({1: 2.0, 0: 1.0}, 6)
    elche.add_rank(2)
    assert elche.state() == ElCheState(
        phase=Phase.STABLE,
        calibration_count=6,
        anchor=10,
        ranks=(0, 1, 2),
        slow_rank=1,
        ms_per_batch={0: 1.0, 1: 2.0},
        batch_counts={0: 20, 1: 10, 2: 10},
        partition_ratios={0: 0.5, 1: 0.25, 2: 0.25},
    )


def test_restored_cadence_goes_on_where_it_was() -> None:
    elche = calibrated({0: 1.0, 1: 4.0}, 6)
    other = ElChe(CadenceSettings(), [8])
    other.restore(elche.state())
    assert other.state() == elche.state()
    assert run_windows(other, {0: 2.0, 1: 3.0}, 5, 0.2) == run_windows(elche, {0: 2.0, 1: 3.0}, 5, 0.2)


def test_restored_anchor_obeys_the_settings_of_this_run() -> None:
    elche = ElChe(CadenceSettings(max_anchor=4), [0])
    elche.restore(calibrated({0: 1.0}).state())
    assert elche.anchor == 4


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"ranks": (0, 1, 1)}, "a rank is listed once"),
        ({"ranks": (0,)}, "only live ranks have a cost"),
        ({"ms_per_batch": {0: 1.0, 1: 0.0}}, "costs are positive and finite"),
        ({"ms_per_batch": {0: 1.0, 1: math.nan}}, "costs are positive and finite"),
        ({"slow_rank": None}, "the slow rank is measured"),
        ({"slow_rank": 2}, "the slow rank is measured"),
        ({"ms_per_batch": {}}, "the slow rank is measured"),
        ({"calibration_count": -1}, "calibrations are counted up from 0"),
    ],
)
def test_state_that_contradicts_itself_is_refused(broken: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {
        "phase": Phase.STABLE,
        "calibration_count": 5,
        "anchor": 10,
        "ranks": (0, 1),
        "slow_rank": 1,
        "ms_per_batch": {0: 1.0, 1: 2.0},
        "batch_counts": {},
        "partition_ratios": {},
    }
    with pytest.raises(InvariantViolation, match=rf"^ElChe: not so: {message} \(ranks \[.*calibrations -?\d+\)$"):
        ElChe(CadenceSettings(), [0]).restore(ElCheState(**(fields | broken)))  # type: ignore[arg-type]


def test_check_finds_an_anchor_out_of_bounds() -> None:
    elche = ElChe(CadenceSettings(), [0])
    elche.commit(Proposal(10, 1001, 1.0))
    with pytest.raises(InvariantViolation, match=r"not so: the anchor is within its bounds \("):
        elche.check()


def test_check_finds_a_starved_rank() -> None:
    elche = ElChe(CadenceSettings(anchor=1, max_batch_diff=-1), [0])
    with pytest.raises(InvariantViolation, match=r"not so: no live rank is starved \("):
        elche.check()


# ---------------------------------------------------------------------------------------------------- golden traces
def test_golden_equal_ranks_on_a_cheap_network() -> None:
    trace = run_windows(ElChe(CadenceSettings(), [0, 1, 2]), {0: 5.0, 1: 5.0, 2: 5.0}, 8, overhead=0.04)
    assert trace == [{0: 10, 1: 10, 2: 10}] * 8


def test_golden_one_rank_three_times_slower() -> None:
    trace = run_windows(ElChe(CadenceSettings(), [0, 1, 2]), {0: 1.0, 1: 1.0, 2: 3.0}, 8, overhead=0.04)
    assert trace == [{0: 10, 1: 10, 2: 10}] + [{0: 30, 1: 30, 2: 10}] * 7


def test_golden_rank_that_turns_three_times_slower() -> None:
    elche = calibrated({0: 1.0, 1: 1.0, 2: 1.0}, 6)
    trace = run_windows(elche, {0: 1.0, 1: 1.0, 2: 3.0}, 4, overhead=0.04)
    assert trace == [
        {0: 10, 1: 10, 2: 10},
        {0: 26, 1: 26, 2: 10},
        {0: 27, 1: 27, 2: 10},
        {0: 27, 1: 27, 2: 10},
    ]
    assert elche.partition_ratios[2] == pytest.approx(1 / 7, rel=0.1)


def test_golden_rank_that_turns_slower_in_warmup() -> None:
    elche = calibrated({0: 1.0, 1: 1.0, 2: 1.0}, 1)
    trace = run_windows(elche, {0: 1.0, 1: 1.0, 2: 3.0}, 4, overhead=0.04)
    assert trace == [{0: 10, 1: 10, 2: 10}, {0: 10, 1: 10, 2: 4}, {0: 10, 1: 10, 2: 4}, {0: 10, 1: 10, 2: 4}]


def test_golden_slow_link() -> None:
    """Averaging costs 10 ms whatever the window; a batch costs 1 ms: 5 % needs 200 batches."""
    elche = ElChe(CadenceSettings(), [0, 1])
    anchors = []
    for _ in range(8):
        counts = elche.plan(100_000)
        observe(elche, timings({0: 1.0, 1: 1.0}, counts), 10.0)
        anchors.append(elche.anchor)
    assert anchors == [10, 30, 90, 90, 270, 270, 270, 270]


def test_golden_network_that_turns_fast() -> None:
    elche = calibrated({0: 1.0}, 5, anchor=100)
    anchors = []
    for _ in range(6):
        observe(elche, timings({0: 1.0}, elche.plan(100_000)), 0.01)
        anchors.append(elche.anchor)
    assert anchors == [95, 91, 87, 83, 79, 76]
