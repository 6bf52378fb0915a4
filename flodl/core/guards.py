"""Convergence guards: whether the ranks drift apart, and what that means for the anchor that the overhead asks for.

A guard sees every committed round once, in order, and answers with an action. ``NoGuard`` never objects. ``TrendGuard``
(the default) objects while the divergence keeps rising. ``MsfGuard`` follows the divergence's rate of growth per step,
and objects or cuts the anchor when it stays positive. Both object to ranks that are lost, and for some rounds more: a
runaway rank pulls the consensus with it, so the divergence settles about 1 and rises no more. Anything with a ``judge``
method is a guard; one of the user's own is asked in the head (``core.cadence`` knows how).

Invariant: a divergence of 0 and one that is not finite are harmless. A guard does not know what its action leads to.

Source: the flodl reference's guards (docs/engine.md); the rate is its proxy of a master stability function's exponent.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Protocol, assert_never

from flodl.errors import ConfigError
from flodl.messages import GuardKind, GuardSettings, GuardVerdict, RoundFigures

HISTORY = 5  # values of the divergence that TrendGuard remembers beside the newest
RISES = 3  # in a row, among those: that is a trend
JUMP = 2  # times the value before the row: a divergence that stays so high has not stopped rising, it has jumped
LOST = 1.0  # a divergence above it: on average the ranks are further from the consensus than it is from zero
EASGD_THRESHOLD = 0.3  # TrendGuard's in cpu_async: ranks that blend keep a distance from the center
RATE_WEIGHT = 0.5  # of a new value in MsfGuard's average: a jump shows at once, noise about a level cancels out

_DEFAULT = GuardSettings()


@dataclass(frozen=True, slots=True)
class ConvergenceAction:
    """What a guard answers: ``STABLE``, ``SUPPRESS_GROWTH``, or ``nudge_down(factor)``."""

    verdict: GuardVerdict
    factor: float = 1.0

    def __post_init__(self) -> None:
        verdict: object = self.verdict
        factor: object = self.factor
        if not isinstance(verdict, GuardVerdict) or not isinstance(factor, int | float):
            raise ConfigError(
                f"ConvergenceAction({verdict!r}, {factor!r}) is no verdict; use ConvergenceAction.STABLE, "
                "SUPPRESS_GROWTH or nudge_down(0.5)"
            )

    STABLE: ClassVar["ConvergenceAction"]
    """The proposal is committed."""
    SUPPRESS_GROWTH: ClassVar["ConvergenceAction"]
    """A proposal to grow is dropped, one to shrink is committed."""

    @classmethod
    def nudge_down(cls, factor: float) -> "ConvergenceAction":
        """Whatever was proposed is dropped, and the anchor becomes ``floor(anchor · factor)``.

        Args:
            factor: above 0 and below 1.

        Raises:
            ConfigError: the factor is anything else.
        """
        return cls(GuardVerdict.NUDGE_DOWN, _checked_factor(factor))


ConvergenceAction.STABLE = ConvergenceAction(GuardVerdict.STABLE)
ConvergenceAction.SUPPRESS_GROWTH = ConvergenceAction(GuardVerdict.SUPPRESS_GROWTH)


class ConvergenceGuard(Protocol):
    """What a guard must be able to do. It may remember what it likes; it is asked once per committed round."""

    def judge(self, figures: RoundFigures) -> ConvergenceAction:
        """Look at one round and say what is to become of its proposal."""
        ...


class NoGuard:
    """The overhead alone decides."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def judge(self, figures: RoundFigures) -> ConvergenceAction:
        """Never an objection."""
        return ConvergenceAction.STABLE


class TrendGuard:
    """Objects to growth while the divergence keeps rising.

    That is: among the last 5 values and the newest there are three rises in a row, each to a value above ``threshold``.
    A value has risen when it is above the one before it, or still above twice the one before the whole row: a rank that
    goes astray shows as one jump that does not come down again. The objection stands while those rises are remembered.
    A value above 1 (and the threshold) is an objection by itself, as long as it is remembered: the ranks are lost.
    """

    def __init__(self, threshold: float = _DEFAULT.threshold) -> None:
        """``threshold``: of ``‖own − consensus‖ / ‖consensus‖``, > 0; the engine's default in cpu_async is 0.3.

        Raises:
            ConfigError: the threshold is not a finite number above 0.
        """
        self.threshold = _checked_positive("threshold", threshold)
        self._history: deque[float] = deque(maxlen=HISTORY)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.threshold!r})"

    @property
    def history(self) -> tuple[float, ...]:
        """The last values, oldest first: all that the guard remembers."""
        return tuple(self._history)

    def recall(self, history: Iterable[float]) -> None:
        """Go on from ``history``, as if these had been the last values."""
        self._history = deque((value for value in history if math.isfinite(value)), maxlen=HISTORY)

    def judge(self, figures: RoundFigures) -> ConvergenceAction:
        """Take the round's divergence in; a value that is not finite is skipped."""
        if not math.isfinite(figures.divergence):
            return ConvergenceAction.STABLE
        values = [*self._history, figures.divergence]
        self._history.append(figures.divergence)
        has_trend = any(self._rises_after(values, start) for start in range(len(values) - RISES))
        is_lost = max(values) > max(LOST, self.threshold)
        return ConvergenceAction.SUPPRESS_GROWTH if has_trend or is_lost else ConvergenceAction.STABLE

    def _rises_after(self, values: Sequence[float], start: int) -> bool:
        """Whether ``RISES`` values in a row have risen since the one at ``start``."""
        row = values[start : start + RISES + 1]
        return all(
            value > self.threshold and (value > before or value > JUMP * row[0]) for before, value in pairwise(row)
        )


class MsfGuard:
    """Follows ``λ``, an average of ``ln(D_t / D_{t−1}) / k_max``: by how much the divergence grows with every step.

    λ above the suppress threshold for n rounds in a row objects to growth, until it falls below. λ above the nudge
    threshold for n rounds in a row cuts the anchor; the next cut needs n rounds of its own. A divergence above 1 is an
    objection whatever λ is, in its round and the five that follow: the ranks are lost.
    ``MsfGuard().with_nudge(n=1)`` reacts to the first jump. Nothing of it survives a resume: it warms up again.
    """

    def __init__(self) -> None:
        self.settings = GuardSettings(GuardKind.MSF)
        self._rate = 0.0
        self._previous: float | None = None
        self._suppress_streak = 0
        self._nudge_streak = 0
        self._lost_rounds = 0

    def __repr__(self) -> str:
        s = self.settings
        suppress = f"with_suppress(threshold={s.suppress_above!r}, n={s.suppress_rounds!r})"
        nudge = f"with_nudge(threshold={s.nudge_above!r}, n={s.nudge_rounds!r}, factor={s.nudge_factor!r})"
        return f"{type(self).__name__}().{suppress}.{nudge}"

    @classmethod
    def of(cls, settings: GuardSettings) -> "MsfGuard":
        """A fresh guard with the numbers of ``settings``."""
        guard = cls()
        guard.settings = settings
        return guard

    def with_suppress(
        self, threshold: float = _DEFAULT.suppress_above, n: int = _DEFAULT.suppress_rounds
    ) -> "MsfGuard":
        """A fresh guard that objects to growth when λ is above ``threshold`` (per step, > 0) for ``n`` rounds in a row.

        Raises:
            ConfigError: a number is out of its range.
        """
        above, rounds = _checked_positive("threshold", threshold), _checked_rounds(n)
        return MsfGuard.of(replace(self.settings, suppress_above=above, suppress_rounds=rounds))

    def with_nudge(
        self,
        threshold: float = _DEFAULT.nudge_above,
        n: int = _DEFAULT.nudge_rounds,
        factor: float = _DEFAULT.nudge_factor,
    ) -> "MsfGuard":
        """A fresh guard that cuts the anchor to ``factor`` of itself when λ is above ``threshold`` for ``n`` rounds.

        Raises:
            ConfigError: a number is out of its range: ``factor`` above 0 and below 1.
        """
        above, rounds, factor = _checked_positive("threshold", threshold), _checked_rounds(n), _checked_factor(factor)
        return MsfGuard.of(replace(self.settings, nudge_above=above, nudge_rounds=rounds, nudge_factor=factor))

    @property
    def rate(self) -> float:
        """λ, per step; 0 before two rounds have been seen."""
        return self._rate

    def judge(self, figures: RoundFigures) -> ConvergenceAction:
        """Take the round in; one whose divergence has no logarithm says nothing and breaks every streak."""
        self._lost_rounds = HISTORY + 1 if LOST < figures.divergence < math.inf else max(0, self._lost_rounds - 1)
        if not self._follow(figures):
            self._suppress_streak = self._nudge_streak = 0
            return ConvergenceAction.STABLE
        settings = self.settings
        self._suppress_streak = self._suppress_streak + 1 if self._rate > settings.suppress_above else 0
        self._nudge_streak = self._nudge_streak + 1 if self._rate > settings.nudge_above else 0
        if self._nudge_streak >= settings.nudge_rounds:
            self._nudge_streak = 0
            return ConvergenceAction.nudge_down(settings.nudge_factor)
        if self._suppress_streak >= settings.suppress_rounds or self._lost_rounds:
            return ConvergenceAction.SUPPRESS_GROWTH
        return ConvergenceAction.STABLE

    def _follow(self, figures: RoundFigures) -> bool:
        """Move λ; False where the round gives no rate, because it or the one before has no usable divergence."""
        before, value = self._previous, figures.divergence
        is_usable = math.isfinite(value) and value > 0
        self._previous = value if is_usable else None
        if before is None or not is_usable:
            return False
        rate = (math.log(value) - math.log(before)) / max(1, figures.k_max)
        self._rate += RATE_WEIGHT * (rate - self._rate)
        return True


def built_in(settings: GuardSettings) -> NoGuard | TrendGuard | MsfGuard | None:
    """A fresh guard of these settings; None for one of the user's own, which is asked in the head."""
    match settings.kind:
        case GuardKind.NONE:
            return NoGuard()
        case GuardKind.TREND:
            return TrendGuard(settings.threshold)
        case GuardKind.MSF:
            return MsfGuard.of(settings)
        case GuardKind.USER:
            return None
        case _:
            assert_never(settings.kind)


def settings_of(guard: ConvergenceGuard) -> GuardSettings:
    """How ``guard`` travels; a class of the user's, and one derived from ours, is the user's own."""
    if type(guard) is NoGuard:
        return GuardSettings(GuardKind.NONE)
    if type(guard) is TrendGuard:
        return GuardSettings(GuardKind.TREND, threshold=guard.threshold)
    if type(guard) is MsfGuard:
        return guard.settings
    return GuardSettings(GuardKind.USER)


def _checked_positive(name: str, value: object) -> float:
    number = _number(value)
    if not 0 < number < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a finite number above 0")
    return number


def _checked_factor(factor: object) -> float:
    number = _number(factor)
    if not 0 < number < 1:
        raise ConfigError(f"factor is {factor!r}; the anchor is multiplied by it: it must be above 0 and below 1")
    return number


def _checked_rounds(rounds: object) -> int:
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ConfigError(f"n is {rounds!r}, a number of rounds in a row; it must be a whole number of at least 1")
    return rounds


def _number(value: object) -> float:
    """``value`` as a float; NaN, which no range contains, for what is no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
