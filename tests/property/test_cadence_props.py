"""Proposals, verdicts and commits under any feed: no growth against a verdict, bounds hold, time has no unit."""

import json
import math
from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flodl.core.actions import SendHead
from flodl.core.cadence import VERDICT_DUE_S, Cadence
from flodl.core.elche import ElCheState
from flodl.core.position import CadenceState
from flodl.messages import (
    CadenceSettings,
    GuardKind,
    GuardSettings,
    GuardVerdict,
    JudgeRound,
    Mode,
    RoundJudged,
    WindowDone,
)

RANKS = [0, 1, 2, 3]
SANE_MS = st.floats(0.01, 1e4)
ANY_DIVERGENCE = st.none() | st.floats(0, 1e300) | st.sampled_from([0.0, 0.01, 0.06, 0.1, 0.2, 0.5])
RATES = st.none() | st.floats() | st.sampled_from([0.1, 0.05, 0.01])
Feed = list[tuple[dict[int, tuple[int, float]], float, float | None, float | None]]


@st.composite
def cadences(draw: st.DrawFn, kinds: st.SearchStrategy[GuardKind]) -> CadenceSettings:
    min_anchor = draw(st.integers(1, 20))
    guard = GuardSettings(
        draw(kinds),
        threshold=draw(st.floats(1e-3, 1.0)),
        suppress_rounds=draw(st.integers(1, 4)),
        nudge_rounds=draw(st.integers(1, 4)),
        nudge_factor=draw(st.floats(0.01, 0.99)),
    )
    return CadenceSettings(
        mode=draw(st.sampled_from(Mode)),
        anchor=draw(st.none() | st.integers(1, 100)),
        min_anchor=min_anchor,
        max_anchor=draw(st.integers(min_anchor, 1000)),
        overhead_target=draw(st.floats(0.001, 0.9)),
        max_batch_diff=draw(st.none() | st.integers(0, 20)),
        guard=guard,
        meta_controller=draw(st.booleans()),
        relax_up=draw(st.booleans()),
    )


def feeds(max_size: int = 40) -> st.SearchStrategy[Feed]:
    windows = st.dictionaries(st.sampled_from(RANKS), st.tuples(st.integers(0, 40), SANE_MS), max_size=4)
    return st.lists(st.tuples(windows, SANE_MS, ANY_DIVERGENCE, RATES), max_size=max_size)


OURS = st.sampled_from([GuardKind.NONE, GuardKind.TREND, GuardKind.MSF])


def observe(cadence: Cadence, version: int, round_: Any, scale: float = 1.0, now_s: float = 0.0) -> list[Any]:
    window, reduce_ms, divergence, rate = round_
    reports = {
        rank: WindowDone(
            rank, version - 1, steps, steps, 1.0, True,
            ms * scale if steps > 1 else None, ms * scale, steps * ms * scale, {}, rate,
        )
        for rank, (steps, ms) in window.items()
    }  # fmt: skip
    return cadence.observe(version, reports, reduce_ms * scale, divergence, now_s)


def run(cadence: Cadence, feed: Feed, scale: float = 1.0) -> list[object]:
    trace: list[object] = []
    for version, round_ in enumerate(feed, 1):
        observe(cadence, version, round_, scale)
        cadence.elche.check()
        trace.append((cadence.elche.plan(500), cadence.elche.anchor, cadence.verdict, cadence.is_settled))
    return trace


@given(cadences(OURS), feeds())
def test_no_growth_is_committed_against_a_verdict(settings: CadenceSettings, feed: Feed) -> None:
    cadence = Cadence(settings, RANKS)
    for version, round_ in enumerate(feed, 1):
        before = cadence.elche.anchor
        observe(cadence, version, round_)
        cadence.elche.check()
        assert cadence.elche.anchor <= 3 * before
        assert cadence.verdict is GuardVerdict.STABLE or cadence.elche.anchor <= before
        assert settings.mode.is_sync or settings.min_anchor <= cadence.elche.anchor <= settings.max_anchor
        assert min(cadence.elche.plan(500).values()) >= 1


@given(cadences(OURS), feeds(), st.sampled_from([1e-3, 0.1, 7.0, 1e3]))
def test_unit_of_time_changes_nothing(settings: CadenceSettings, feed: Feed, scale: float) -> None:
    assert run(Cadence(settings, RANKS), feed, scale) == run(Cadence(settings, RANKS), feed)


@given(cadences(OURS), feeds())
def test_same_feed_gives_the_same_trace_whatever_the_order_of_ranks(settings: CadenceSettings, feed: Feed) -> None:
    backwards = [(dict(reversed(list(window.items()))), *rest) for window, *rest in feed]
    assert run(Cadence(settings, [3, 1, 0, 2]), backwards) == run(Cadence(settings, RANKS), feed)  # type: ignore[arg-type]


@given(cadences(st.sampled_from([GuardKind.NONE, GuardKind.TREND])), feeds(15), feeds(15))
def test_state_round_trips_through_json_and_the_guard_goes_on_alike(
    settings: CadenceSettings, first: Feed, then: Feed
) -> None:
    cadence = Cadence(settings, RANKS)
    run(cadence, first)
    plain = json.loads(json.dumps(asdict(cadence.state())))
    plain["elche"]["ms_per_batch"] = {int(rank): ms for rank, ms in plain["elche"]["ms_per_batch"].items()}
    restored = Cadence(settings, [])
    restored.restore(CadenceState(ElCheState(**plain["elche"]), plain["trend_history"]))
    assert restored.state() == cadence.state()
    for version, round_ in enumerate(then, 100):
        for each in (cadence, restored):
            observe(each, version, round_)
        assert restored.verdict == cadence.verdict
        assert restored.state().trend_history == cadence.state().trend_history


ANSWERS = st.tuples(
    st.sampled_from(GuardVerdict), st.floats(), st.sampled_from(["", "", "", "KeyError"]), st.integers(-2, 0)
)
MOMENTS = st.lists(
    st.one_of(feeds(1), ANSWERS, st.floats(0, 0.2)), max_size=40
)  # rounds, answers (to one of the last rounds) and the passing of time


@given(cadences(st.just(GuardKind.USER)), MOMENTS)
def test_users_guard_is_asked_about_every_round_and_waited_for_by_none(
    settings: CadenceSettings, moments: list[Any]
) -> None:
    cadence, version, now_s = Cadence(settings, RANKS), 0, 0.0
    for moment in moments:
        before, was_pending = cadence.elche.anchor, cadence.next_deadline_s() is not None
        if isinstance(moment, list):
            for round_ in moment:
                version += 1
                asked = [
                    action for action in observe(cadence, version, round_, 1.0, now_s) if isinstance(action, SendHead)
                ]
                is_judged = round_[2] is not None
                assert [type(action.message) for action in asked] == [JudgeRound] * is_judged
                assert cadence.next_deadline_s() == (now_s + VERDICT_DUE_S if is_judged else None)
        elif isinstance(moment, tuple):
            verdict, factor, error, back = moment
            cadence.on_judged(RoundJudged(version + back, verdict, factor, error))
            is_valid = not error and (verdict is not GuardVerdict.NUDGE_DOWN or 0 < factor < 1)
            assert was_pending or cadence.elche.anchor == before
            assert back or cadence.next_deadline_s() is None
            if is_valid and verdict is not GuardVerdict.STABLE:
                assert cadence.elche.anchor <= before
        else:
            now_s += moment
            cadence.tick(now_s)
            assert (cadence.next_deadline_s() or math.inf) > now_s
        cadence.elche.check()
        assert cadence.elche.anchor <= 9 * before
