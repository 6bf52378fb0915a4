"""The knobs of the cadence that choose who decides about a window, and what contradicts them."""

from typing import Any

import pytest

import flodl
from flodl.errors import ConfigError
from flodl.messages import GuardKind, GuardSettings
from flodl.spec.cadence import ElCheConfig


class Own:
    """A guard of the user's own."""

    def judge(self, figures: flodl.RoundFigures) -> flodl.ConvergenceAction:
        return flodl.ConvergenceAction.STABLE


class Deaf:
    def judge(self) -> None:
        """It does not hear what it shall judge."""


@pytest.mark.parametrize(
    ("config", "guard"),
    [
        (ElCheConfig(), GuardSettings(GuardKind.TREND, threshold=0.05)),
        (ElCheConfig.cpu_async(), GuardSettings(GuardKind.TREND, threshold=0.3)),
        (ElCheConfig.cpu_async().divergence_threshold(0.1), GuardSettings(GuardKind.TREND, threshold=0.1)),
        (ElCheConfig().divergence_threshold(0.2), GuardSettings(GuardKind.TREND, threshold=0.2)),
        (ElCheConfig().guard(flodl.TrendGuard(0.2)), GuardSettings(GuardKind.TREND, threshold=0.2)),
        (ElCheConfig().no_divergence_guard(True), GuardSettings(GuardKind.NONE)),
        (ElCheConfig().guard(flodl.NoGuard()), GuardSettings(GuardKind.NONE)),
        (ElCheConfig().guard(flodl.MsfGuard()), GuardSettings(GuardKind.MSF)),
        (
            ElCheConfig.nccl_cadence().guard(flodl.MsfGuard().with_nudge(0.02, n=1, factor=0.25)),
            GuardSettings(GuardKind.MSF, nudge_above=0.02, nudge_rounds=1, nudge_factor=0.25),
        ),
        (ElCheConfig().guard(Own()), GuardSettings(GuardKind.USER)),
        (ElCheConfig().guard(Own()).guard(None), GuardSettings()),
    ],
)
def test_guard_is_switched_in_one_line(config: ElCheConfig, guard: GuardSettings) -> None:
    assert config.settings().guard == guard


def test_only_a_guard_of_the_users_own_is_asked_in_the_head() -> None:
    own = Own()
    assert ElCheConfig().guard(own).user_guard is own
    assert ElCheConfig().user_guard is None
    assert ElCheConfig().guard(flodl.TrendGuard()).user_guard is None


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"guard": "trend"}, r"guard is 'trend'; pass a guard such as flodl.TrendGuard\(0.1\)"),
        ({"guard": Deaf()}, r"guard.judge is called as guard.judge\(figures\), and judge takes \(\)"),
        ({"guard": flodl.TrendGuard}, "guard is <class .*TrendGuard'>; pass a guard such as"),
        ({"no_divergence_guard": 1}, "no_divergence_guard is 1; it must be True or False"),
        ({"meta_controller": None}, "meta_controller is None; it must be True or False"),
        ({"relax_up": "yes"}, "relax_up is 'yes'; it must be True or False"),
        ({"divergence_threshold": 0}, "divergence_threshold is 0; it must be a finite number above 0 or None"),
        ({"easgd_alpha": 0.0}, r"easgd_alpha is 0.0; it must be a number in \(0, 1\] or None"),
        ({"easgd_alpha": 1.5}, r"easgd_alpha is 1.5; it must be a number in \(0, 1\] or None"),
        ({"easgd_alpha": "half"}, r"easgd_alpha is 'half'; it must be a number in \(0, 1\] or None"),
        ({"anchor": 0}, "anchor is 0; it must be at least 1 or None"),
        ({"max_overshoot": 0.5}, "max_overshoot is 0.5; it must be a whole number of at least 0 or None"),
        ({"min_anchor": 0}, "min_anchor is 0; it must be at least 1$"),
        ({"partition_ratios": "1"}, r"partition_ratios is '1'; pass one number per rank, such as \(0.5, 0.25, 0.25\)"),
        ({"partition_ratios": ()}, "pass one number per rank"),
        ({"partition_ratios": (0.5, -0.5)}, r"partition_ratios\[1\] is -0.5; it must be a finite number above 0"),
        ({"partition_ratios": (0.5, 0.4)}, "partition_ratios add up to 0.9; they must add up to 1: divide each by 0.9"),
    ],
)
def test_values_that_the_cadence_cannot_use_are_refused_where_they_are_set(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ElCheConfig(**knobs)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            {"guard": flodl.MsfGuard(), "divergence_threshold": 0.1},
            r"guard and divergence_threshold are both set; write guard\(flodl.TrendGuard\(...\)\) or drop one",
        ),
        (
            {"guard": flodl.NoGuard(), "no_divergence_guard": True},
            "no_divergence_guard is set, and so is guard; drop one",
        ),
        ({"divergence_threshold": 0.1, "no_divergence_guard": True}, "and so is divergence_threshold; drop one"),
        (
            {"mode": "nccl_sync", "relax_up": True},
            "relax_up lengthens windows, and nccl_sync has none; drop it or take",
        ),
        (
            {"partition_ratios": (0.5, 0.5)},
            "partition_ratios are for the sync modes, and the mode is nccl_cadence, .* take nccl_sync or cpu_sync",
        ),
    ],
)
def test_cadence_knobs_that_contradict_each_other_are_refused_with_the_fix(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ElCheConfig(**knobs).settings()


def test_ratios_travel_as_numbers_and_thirds_may_be_written_short() -> None:
    assert ElCheConfig.nccl_sync().partition_ratios([0.5, 0.5]).settings().partition_ratios == (0.5, 0.5)
    assert ElCheConfig.cpu_sync().partition_ratios((0.3333333, 0.3333333, 0.3333334)).settings().partition_ratios
    assert ElCheConfig.cpu_sync().settings().partition_ratios is None
