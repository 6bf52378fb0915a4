"""ElChe under any feed: nobody starves, bounds hold, the unit of time does not matter, nothing is random."""

import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from flodl.core.elche import ElChe, ElCheState, Phase, WindowTiming
from flodl.messages import CadenceSettings, Mode

ANY_MS = st.none() | st.floats() | st.floats(0.01, 1e4)
SANE_MS = st.floats(0.01, 1e4)


def timing_of(
    ms: st.SearchStrategy[float | None], window_ms: st.SearchStrategy[float]
) -> st.SearchStrategy[WindowTiming]:
    return st.builds(WindowTiming, steps=st.integers(-1, 40), delivered_ms=ms, compute_ms=ms, window_ms=window_ms)


def feeds(timing: st.SearchStrategy[WindowTiming], reduce_ms: st.SearchStrategy[float]) -> st.SearchStrategy[list]:
    window = st.tuples(st.dictionaries(st.integers(0, 5), timing, max_size=6), reduce_ms)
    return st.lists(window, max_size=30)


@st.composite
def cadences(draw: st.DrawFn) -> CadenceSettings:
    min_anchor = draw(st.integers(1, 20))
    return CadenceSettings(
        mode=draw(st.sampled_from(Mode)),
        anchor=draw(st.none() | st.integers(1, 100)),
        min_anchor=min_anchor,
        max_anchor=draw(st.integers(min_anchor, 1000)),
        overhead_target=draw(st.floats(0.001, 0.9)),
        max_batch_diff=draw(st.none() | st.integers(0, 20)),
    )


def observe(elche: ElChe, timings: dict[int, WindowTiming], reduce_ms: float) -> None:
    """One window, with what it proposes committed."""
    proposal = elche.observe(timings, reduce_ms)
    if proposal is not None:
        elche.commit(proposal)


def run(elche: ElChe, feed: list[tuple[dict[int, WindowTiming], float]], scale: float = 1.0) -> list[object]:
    trace: list[object] = []
    for timings, reduce_ms in feed:
        scaled = {
            rank: WindowTiming(
                timing.steps,
                None if timing.delivered_ms is None else timing.delivered_ms * scale,
                None if timing.compute_ms is None else timing.compute_ms * scale,
                timing.window_ms * scale,
            )
            for rank, timing in timings.items()
        }
        observe(elche, scaled, reduce_ms * scale)
        elche.check()
        trace.append((elche.plan(500), elche.anchor, elche.phase, elche.slow_rank))
    return trace


@given(cadences(), feeds(timing_of(ANY_MS, st.floats()), st.floats()))
def test_nobody_starves_and_bounds_hold_whatever_is_measured(cadence: CadenceSettings, feed: list) -> None:
    elche = ElChe(cadence, [0, 1, 2, 3])
    before = Phase.PROBE
    for timings, reduce_ms in feed:
        anchor = elche.anchor
        observe(elche, timings, reduce_ms)
        elche.check()
        counts = elche.plan(500)
        assert list(counts) == [0, 1, 2, 3]
        assert min(counts.values()) >= 1
        assert cadence.mode.is_sync or cadence.min_anchor <= elche.anchor <= cadence.max_anchor
        assert elche.anchor <= 3 * anchor
        assert before <= elche.phase
        before = elche.phase
        if cadence.max_batch_diff is not None:
            assert max(counts.values()) - min(counts.values()) <= cadence.max_batch_diff
        assert abs(sum(elche.partition_ratios.values()) - 1) < 1e-9


@given(cadences(), feeds(timing_of(SANE_MS, SANE_MS), SANE_MS), st.sampled_from([1e-3, 0.1, 3.0, 7.0, 1e3]))
def test_unit_of_time_changes_no_count(cadence: CadenceSettings, feed: list, scale: float) -> None:
    ranks = [0, 1, 2, 3]
    assert run(ElChe(cadence, ranks), feed, scale) == run(ElChe(cadence, ranks), feed)


@given(cadences(), feeds(timing_of(ANY_MS, st.floats()), st.floats()))
def test_same_feed_gives_the_same_trace_whatever_the_order_of_ranks(cadence: CadenceSettings, feed: list) -> None:
    backwards = [(dict(reversed(list(timings.items()))), reduce_ms) for timings, reduce_ms in feed]
    assert run(ElChe(cadence, [3, 1, 0, 2]), backwards) == run(ElChe(cadence, [0, 1, 2, 3]), feed)


@given(cadences(), feeds(timing_of(SANE_MS, SANE_MS), SANE_MS), feeds(timing_of(SANE_MS, SANE_MS), SANE_MS))
def test_state_round_trips_through_json_and_goes_on_alike(cadence: CadenceSettings, first: list, then: list) -> None:
    elche = ElChe(cadence, [0, 1, 2])
    run(elche, first)
    plain = json.loads(json.dumps(asdict(elche.state())))
    plain["ms_per_batch"] = {int(rank): ms for rank, ms in plain["ms_per_batch"].items()}
    restored = ElChe(cadence, [])
    restored.restore(ElCheState(**plain))
    assert restored.state() == elche.state()
    assert run(restored, then) == run(elche, then)


@given(cadences(), st.lists(st.tuples(st.sampled_from(["add", "remove", "observe"]), st.integers(0, 5), SANE_MS)))
def test_membership_may_change_at_any_time(cadence: CadenceSettings, changes: list[tuple[str, int, float]]) -> None:
    elche, live = ElChe(cadence, [0, 1]), {0, 1}
    for change, rank, ms in changes:
        if change == "add" and rank not in live:
            elche.add_rank(rank)
            live.add(rank)
        elif change == "remove" and rank in live:
            elche.remove_rank(rank)
            live.remove(rank)
        else:
            observe(elche, {r: WindowTiming(5, ms + r, ms + r, 5 * ms) for r in live}, ms)
        elche.check()
        assert list(elche.plan(500)) == sorted(live)
        assert set(elche.ms_per_batch) <= live


@given(
    st.dictionaries(st.integers(0, 7), st.floats(1.0, 50.0), min_size=2, max_size=8),
    st.integers(6, 30),
    st.data(),
)
def test_share_of_a_rank_that_turns_three_times_slower_follows_within_three_windows(
    ms: dict[int, float], settled_windows: int, data: st.DataObject
) -> None:
    elche = ElChe(CadenceSettings(), list(ms))
    slowed = data.draw(st.sampled_from(sorted(ms)))
    for window in range(settled_windows + 3):
        now = {rank: cost * (3 if rank == slowed and window >= settled_windows else 1) for rank, cost in ms.items()}
        counts = elche.plan(100_000)
        timings = {rank: WindowTiming(counts[rank], now[rank], now[rank], counts[rank] * now[rank]) for rank in ms}
        observe(elche, timings, 0.04 * max(counts[rank] * now[rank] for rank in ms))
    speeds = {rank: 1 / cost for rank, cost in now.items()}
    fair_share = speeds[slowed] / sum(speeds.values())
    assert abs(elche.partition_ratios[slowed] / fair_share - 1) < 0.15
