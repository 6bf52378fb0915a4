"""The meta-controller: what nudges, how deep, and when a window has settled."""

import math

import pytest

from flodl.core.elche import Phase
from flodl.core.meta import WINDOW, MetaController, Nudge
from flodl.messages import GuardVerdict

STABLE, SUPPRESS, NUDGED = GuardVerdict.STABLE, GuardVerdict.SUPPRESS_GROWTH, GuardVerdict.NUDGE_DOWN


def run(
    verdicts: list[GuardVerdict],
    rates: list[float | None] | None = None,
    phase: Phase = Phase.STABLE,
    is_active: bool = True,
) -> list[float | None]:
    """The factor of each round's nudge."""
    meta = MetaController(is_active)
    found = []
    for place, verdict in enumerate(verdicts):
        nudge = meta.observe(phase, 40, None if rates is None else rates[place], verdict)
        found.append(None if nudge is None else nudge.factor)
    return found


# -------------------------------------------------------------------------------------------------------- learning rate
@pytest.mark.parametrize(
    ("rates", "factors"),
    [
        ([0.1, 0.05], [None, 0.5]),
        ([0.1, 0.051], [None, None]),
        ([0.1, 0.01], [None, 0.5]),
        ([0.1, 0.2, 0.1], [None, None, 0.5]),
        ([0.1, 0.08, 0.06, 0.045], [None] * 4),  # half in three rounds
        ([0.1, None, 0.05], [None, None, 0.5]),
        ([0.1, math.nan, 0.05], [None, None, 0.5]),
        ([0.1, 0.0, 0.0, 0.1], [None, 0.5, None, None]),
        ([0.1, 0.0, 0.1, 0.05], [None, 0.5, None, 0.5]),
        ([-0.1, -0.2], [None, None]),
        ([None, None], [None, None]),
    ],
)
def test_rate_that_drops_to_half_in_one_round_nudges(rates: list[float | None], factors: list[float | None]) -> None:
    assert run([STABLE] * len(rates), rates) == factors


@pytest.mark.parametrize(
    ("rates", "factors"),
    [
        ([1.0, 0.5, 0.5, 0.25, 0.25, 0.025], [None, 0.5, None, 0.5, None, 0.5]),  # a step schedule
        ([1.0, 0.5, 0.25, 0.125, 0.125, 0.0625], [None, 0.5, None, None, None, 0.5]),  # falls on and on: one drop
        ([1.0, 0.71, 0.35], [None, None, 0.5]),  # a step in a gentle decay
        ([1.0, 0.7, 0.35], [None] * 3),
        ([1.0, 0.7, None, 0.35], [None] * 4),
    ],
)
def test_drop_counts_once_and_only_if_the_rate_was_not_falling_already(
    rates: list[float | None], factors: list[float | None]
) -> None:
    assert run([STABLE] * len(rates), rates) == factors


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize("last", [1.0, 0.6, 0.1])
def test_schedule_that_runs_smoothly_to_zero_drops_nowhere(power: int, last: float) -> None:
    # a cosine ends as a square of what is left; the last window of a run may be a short one
    left = [(19 - place + last) / 20 for place in range(20)] + [0.0]
    assert run([STABLE] * len(left), [part**power for part in left]) == [None] * len(left)


@pytest.mark.parametrize(
    ("phase", "factor"), [(Phase.PROBE, None), (Phase.WARMUP, 0.3), (Phase.STABLE, 0.5), (Phase.MATURE, 0.7)]
)
def test_younger_phases_cut_deeper(phase: Phase, factor: float | None) -> None:
    assert run([STABLE, STABLE], [0.1, 0.01], phase) == [None, factor]


# ----------------------------------------------------------------------------------------------------------- objections
@pytest.mark.parametrize(
    ("phase", "needed", "factor"), [(Phase.WARMUP, 5, 0.3), (Phase.STABLE, 3, 0.5), (Phase.MATURE, 2, 0.7)]
)
def test_objections_in_a_row_nudge_and_start_a_new_row(phase: Phase, needed: int, factor: float) -> None:
    row = [None] * (needed - 1) + [factor]
    assert run([SUPPRESS] * (2 * needed), phase=phase) == row + row


def test_probe_is_never_nudged() -> None:
    assert run([SUPPRESS] * 9, phase=Phase.PROBE) == [None] * 9


def test_stable_verdict_ends_the_row() -> None:
    assert run([SUPPRESS, SUPPRESS, STABLE, SUPPRESS, SUPPRESS]) == [None] * 5


def test_guard_that_nudges_needs_no_second_nudge() -> None:
    assert run([SUPPRESS, SUPPRESS, NUDGED, SUPPRESS, SUPPRESS, SUPPRESS]) == [None] * 5 + [0.5]
    assert run([STABLE, NUDGED], [0.1, 0.01]) == [None, None]


def test_one_nudge_for_a_drop_and_a_full_row_at_once() -> None:
    meta = MetaController(is_active=True)
    for rate in (0.1, 0.1):
        meta.observe(Phase.STABLE, 40, rate, SUPPRESS)
    assert meta.observe(Phase.STABLE, 40, 0.05, SUPPRESS) == Nudge(0.5, "the learning rate dropped to 0.5 of itself")
    assert meta.observe(Phase.STABLE, 20, 0.05, SUPPRESS) == Nudge(0.5, "the guard objected 3 rounds in a row")


def test_switched_off_it_never_nudges_but_knows_whether_the_window_has_settled() -> None:
    assert run([SUPPRESS] * 9, [0.1 / 4**n for n in range(9)], is_active=False) == [None] * 9
    meta = MetaController(is_active=False)
    for _ in range(WINDOW):
        meta.observe(Phase.STABLE, 40, None, STABLE)
    assert meta.is_settled


# -------------------------------------------------------------------------------------------------------------- settled
@pytest.mark.parametrize(
    ("anchors", "is_settled"),
    [
        ([40] * 10, True),
        ([40] * 9, False),
        ([10, 30, 90] + [40] * 10, True),
        ([39] + [40] * 9, False),
        ([40] * 9 + [39], False),
        ([200] * 9 + [199], True),
        ([200] * 9 + [198], False),
        ([1] * 10, True),
    ],
)
def test_window_is_settled_when_the_anchor_moves_less_than_a_hundredth(anchors: list[int], is_settled: bool) -> None:
    meta = MetaController(is_active=True)
    for anchor in anchors:
        meta.observe(Phase.STABLE, anchor, None, STABLE)
    assert meta.is_settled is is_settled
