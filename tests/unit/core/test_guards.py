"""Convergence guards: what they object to, what they ignore, and what they refuse to be told."""

import math
from typing import Any

import pytest

from flodl.core.guards import (
    EASGD_THRESHOLD,
    ConvergenceAction,
    MsfGuard,
    NoGuard,
    TrendGuard,
    built_in,
    settings_of,
)
from flodl.errors import ConfigError
from flodl.messages import GuardKind, GuardSettings, GuardVerdict, RoundFigures

STABLE, SUPPRESS = ConvergenceAction.STABLE, ConvergenceAction.SUPPRESS_GROWTH
E = math.e
FAR = 1e-6  # from the level at which ranks are lost


def figures(divergence: float, k_max: int = 10) -> RoundFigures:
    return RoundFigures(7, divergence, k_max, 10, 30)


def judged(guard: TrendGuard | MsfGuard, divergences: list[float], k_max: int = 10) -> list[ConvergenceAction]:
    return [guard.judge(figures(value, k_max)) for value in divergences]


# ------------------------------------------------------------------------------------------------------------- actions
def test_actions_are_values() -> None:
    assert ConvergenceAction(GuardVerdict.STABLE) == ConvergenceAction.STABLE
    assert ConvergenceAction.nudge_down(0.25) == ConvergenceAction(GuardVerdict.NUDGE_DOWN, 0.25)


@pytest.mark.parametrize(("verdict", "factor"), [("stable", 1.0), (None, 1.0), (GuardVerdict.NUDGE_DOWN, "half")])
def test_action_of_other_values_is_refused_where_it_is_made(verdict: Any, factor: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"is no verdict; use ConvergenceAction\.STABLE, SUPPRESS_GROWTH or nudge_down\(0\.5\)$"
    ):
        ConvergenceAction(verdict, factor)
    assert len({STABLE, SUPPRESS, ConvergenceAction.nudge_down(0.5), ConvergenceAction.nudge_down(0.25)}) == 4


@pytest.mark.parametrize("factor", [0, 1, -0.5, 1.5, math.nan, math.inf, "half", None, True])
def test_factor_outside_0_and_1_is_refused(factor: Any) -> None:
    with pytest.raises(ConfigError, match="it must be above 0 and below 1"):
        ConvergenceAction.nudge_down(factor)


# --------------------------------------------------------------------------------------------------------------- words
def test_guards_print_as_they_are_written() -> None:
    msf = MsfGuard().with_suppress(0.25, n=2).with_nudge(0.5, n=4, factor=0.75)
    assert [repr(NoGuard()), repr(TrendGuard(0.1))] == ["NoGuard()", "TrendGuard(0.1)"]
    assert repr(msf) == "MsfGuard().with_suppress(threshold=0.25, n=2).with_nudge(threshold=0.5, n=4, factor=0.75)"


# ------------------------------------------------------------------------------------------------------------ no guard
@pytest.mark.parametrize("divergence", [0.0, 1e9, math.nan, math.inf])
def test_no_guard_never_objects(divergence: float) -> None:
    assert NoGuard().judge(figures(divergence)) == STABLE


# --------------------------------------------------------------------------------------------------------- trend guard
@pytest.mark.parametrize(
    ("divergences", "verdict"),
    [
        ([0.1, 0.2, 0.3], STABLE),  # two rises
        ([0.1, 0.2, 0.3, 0.4], SUPPRESS),
        ([0.10, 0.11, 0.12, 0.13], SUPPRESS),
        ([0.04, 0.06, 0.07, 0.08], SUPPRESS),  # from below the threshold
        ([0.03, 0.04, 0.06, 0.07], STABLE),  # the first rise is below it
        ([0.03, 0.04, 0.05, 0.06, 0.07], STABLE),  # and so is one to the threshold itself
        ([0.20, 0.10, 0.11, 0.12, 0.13], SUPPRESS),
        ([0.10, 0.11, 0.12, 0.13, 0.10, 0.10], SUPPRESS),  # the rises are still remembered
        ([0.10, 0.11, 0.12, 0.13, 0.10, 0.10, 0.10], STABLE),
        ([0.10, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16], SUPPRESS),
        ([0.10, 0.11, 0.11, 0.12, 0.13], STABLE),  # not in a row
        ([0.10, 0.12, 0.11, 0.13, 0.14], STABLE),
        ([0.4, 0.3, 0.2, 0.1], STABLE),
        ([0.0, 0.0, 0.0, 0.0, 0.0], STABLE),
    ],
)
def test_trend_guard_objects_to_three_rises_in_a_row_above_its_threshold(
    divergences: list[float], verdict: ConvergenceAction
) -> None:
    assert judged(TrendGuard(0.05), divergences)[-1] == verdict


@pytest.mark.parametrize(
    ("divergences", "verdict"),
    [
        ([0.01, 0.5, 0.3, 0.1], SUPPRESS),  # up at once, and still up
        ([0.01, 0.5, 0.3, 0.04], STABLE),  # it has come down
        ([0.20, 0.5, 0.45, 0.41], SUPPRESS),
        ([0.20, 0.5, 0.45, 0.40], STABLE),  # twice is not above twice
        ([0.01, 0.5, 0.3, 0.1, 0.1, 0.1], SUPPRESS),
        ([0.01, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1], STABLE),  # the level from which it jumped is forgotten
        ([0.0, 0.06, 0.06, 0.06], SUPPRESS),
    ],
)
def test_trend_guard_objects_to_a_jump_that_does_not_come_down(
    divergences: list[float], verdict: ConvergenceAction
) -> None:
    assert judged(TrendGuard(0.05), divergences)[-1] == verdict


@pytest.mark.parametrize(
    ("threshold", "divergences", "verdict"),
    [
        (0.05, [1.0], STABLE),
        (0.05, [1.01], SUPPRESS),  # at once, and
        (0.05, [1.33] * 20, SUPPRESS),  # as long as it stays there
        (0.05, [1.33, 0.9, 0.8, 0.7, 0.6, 0.5], SUPPRESS),  # and a while longer
        (0.05, [1.33, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], STABLE),
        (2.0, [1.33], STABLE),  # asked for
        (2.0, [2.5], SUPPRESS),
    ],
)
def test_trend_guard_objects_to_ranks_that_are_lost(
    threshold: float, divergences: list[float], verdict: ConvergenceAction
) -> None:
    assert judged(TrendGuard(threshold), divergences)[-1] == verdict


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_trend_guard_skips_what_is_not_finite(odd: float) -> None:
    guard = TrendGuard()
    assert judged(guard, [0.1, odd, 0.2, odd, 0.3, odd, 0.4])[-1] == SUPPRESS
    assert guard.history == (0.1, 0.2, 0.3, 0.4)


def test_trend_guard_goes_on_from_its_history() -> None:
    guard, other = TrendGuard(), TrendGuard()
    judged(guard, [0.9, 0.8, 0.7, 0.5, 0.6, 0.7])
    other.recall(guard.history)
    assert other.history == (0.8, 0.7, 0.5, 0.6, 0.7)
    assert judged(other, [0.8]) == judged(guard, [0.8]) == [SUPPRESS]


def test_value_that_is_not_finite_is_no_objection_in_itself() -> None:
    guard = TrendGuard()
    assert judged(guard, [0.1, 0.2, 0.3, 0.4, math.nan]) == [STABLE, STABLE, STABLE, SUPPRESS, STABLE]


def test_recalled_history_is_as_short_and_finite_as_an_own_one() -> None:
    guard = TrendGuard()
    guard.recall([math.nan, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert guard.history == (1.0, 2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize("threshold", [0, -1, math.inf, math.nan, "0.1", None, True])
def test_trend_guard_refuses_a_threshold_that_is_none(threshold: Any) -> None:
    with pytest.raises(ConfigError, match=r"^threshold is .*; it must be a finite number above 0$"):
        TrendGuard(threshold)


# ----------------------------------------------------------------------------------------------------------- msf guard
def test_msf_guard_averages_the_growth_per_step() -> None:
    guard = MsfGuard()
    rates = []
    for value in (1.0, E, E, E**2):
        guard.judge(figures(value, k_max=10))
        rates.append(guard.rate)
    assert rates == pytest.approx([0.0, 0.05, 0.025, 0.0625])


def test_msf_guard_counts_the_longest_window_and_never_less_than_a_step() -> None:
    long, none = MsfGuard(), MsfGuard()
    judged(long, [1.0, E], k_max=100)
    judged(none, [1.0, E], k_max=0)
    assert (long.rate, none.rate) == pytest.approx((0.005, 0.5))


def test_msf_guard_objects_after_its_rounds_in_a_row_until_the_growth_ends() -> None:
    guard = MsfGuard().with_suppress(0.01, 2).with_nudge(9.0)
    assert judged(guard, [FAR * each for each in (1.0, E, E**2, E**3, E**3, E**2)]) == [
        STABLE,
        STABLE,
        SUPPRESS,
        SUPPRESS,
        SUPPRESS,
        STABLE,
    ]


def test_msf_guard_that_nudges_at_once_reacts_to_the_first_jump() -> None:
    guard = MsfGuard().with_nudge(n=1)
    assert judged(guard, [0.01, 0.011, 0.2], k_max=100)[-1] == ConvergenceAction.nudge_down(0.5)


def test_msf_guard_needs_new_evidence_for_every_cut() -> None:
    guard = MsfGuard().with_nudge(0.01, n=2, factor=0.25)
    nudge = ConvergenceAction.nudge_down(0.25)
    assert judged(guard, [FAR * E**n for n in range(7)]) == [STABLE, STABLE, nudge, SUPPRESS, nudge, SUPPRESS, nudge]


def test_msf_guard_objects_to_ranks_that_are_lost_whatever_their_growth() -> None:
    guard = MsfGuard()
    assert judged(guard, [1.0, 1.01, 1.01, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]) == [STABLE, *[SUPPRESS] * 7, STABLE]
    assert judged(MsfGuard(), [1.0, 1.01, math.inf, 0.9]) == [STABLE, SUPPRESS, STABLE, STABLE]
    assert judged(MsfGuard().with_nudge(n=1), [0.1, 1.3])[-1] == ConvergenceAction.nudge_down(0.5)


def test_rates_at_the_threshold_are_not_above_it() -> None:
    guard = MsfGuard().with_suppress(0.05, 1).with_nudge(0.05, 1)
    assert judged(guard, [1.0 / E, 1.0]) == [STABLE, STABLE]
    assert guard.rate == 0.05


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan, math.inf])
def test_divergence_without_a_logarithm_breaks_the_row_and_is_no_jump(odd: float) -> None:
    guard = MsfGuard().with_suppress(1e-6, 2).with_nudge(9.0)
    assert judged(guard, [FAR, FAR * E, odd, FAR * E**9, FAR * E**10]) == [STABLE] * 5
    assert guard.rate == pytest.approx(0.075)
    assert judged(guard, [E**11]) == [SUPPRESS]


def test_smallest_and_largest_divergences_have_a_finite_rate() -> None:
    guard = MsfGuard()
    judged(guard, [5e-324, 1.7e308], k_max=1)
    assert 700 < guard.rate < 750


def test_with_setters_leave_the_guard_alone_and_keep_the_other_numbers() -> None:
    guard = MsfGuard()
    changed = guard.with_suppress(0.5, 4).with_nudge(0.7, 5, 0.9)
    assert changed.settings == GuardSettings(GuardKind.MSF, 0.05, 0.5, 4, 0.7, 5, 0.9)
    assert guard.settings == GuardSettings(GuardKind.MSF)
    assert guard.with_suppress().with_nudge().settings == guard.settings


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", None, True])
def test_msf_guard_refuses_what_counts_no_rounds(n: Any) -> None:
    for setter in (MsfGuard().with_suppress, MsfGuard().with_nudge):
        with pytest.raises(ConfigError, match=r"^n is .*, a number of rounds in a row; it must be a whole number of"):
            setter(0.1, n)


@pytest.mark.parametrize("threshold", [0, -1, math.inf, math.nan, "0.1"])
def test_msf_guard_refuses_a_threshold_that_is_none(threshold: Any) -> None:
    for setter in (MsfGuard().with_suppress, MsfGuard().with_nudge):
        with pytest.raises(ConfigError, match=r"^threshold is .*; it must be a finite number above 0$"):
            setter(threshold)


def test_msf_guard_refuses_a_factor_that_does_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"^factor is 1; the anchor is multiplied by it"):
        MsfGuard().with_nudge(factor=1)


# -------------------------------------------------------------------------------------------------------------- travel
@pytest.mark.parametrize(
    "guard", [NoGuard(), TrendGuard(0.2), MsfGuard().with_suppress(0.3, 2).with_nudge(0.4, 1, 0.1)]
)
def test_guards_of_ours_travel_as_settings(guard: Any) -> None:
    settings = settings_of(guard)
    rebuilt = built_in(settings)
    assert type(rebuilt) is type(guard)
    assert settings_of(rebuilt) == settings  # type: ignore[arg-type]


def test_threshold_of_a_trend_guard_travels() -> None:
    assert settings_of(TrendGuard(0.2)) == GuardSettings(GuardKind.TREND, threshold=0.2)


def test_other_guards_are_the_users_own() -> None:
    class Mine(TrendGuard):
        pass

    assert settings_of(Mine()) == GuardSettings(GuardKind.USER)
    assert built_in(GuardSettings(GuardKind.USER)) is None


def test_defaults_are_those_of_the_reference() -> None:
    assert TrendGuard().threshold == 0.05
    assert EASGD_THRESHOLD == 0.3
    assert MsfGuard().settings == GuardSettings(GuardKind.MSF, 0.05, 1e-3, 3, 1e-2, 3, 0.5)
