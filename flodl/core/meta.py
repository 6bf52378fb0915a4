"""The meta-controller: shortens the window when the training itself changes, and knows when the window has settled.

Purpose: overhead and guard look at one round; this looks at the last ten. It nudges the anchor down when the learning
rate has dropped to half or less in one round, for then the ranks stand at a new scale of motion, and when the guard has
objected K rounds in a row and the window is still as long. The younger the phase, the more objections it takes and the
deeper the cut. A drop is sudden: the rounds at the end of a schedule that runs smoothly towards 0 halve the rate too,
but each comes after one that took nearly as much. Invariants: one nudge per round at most; none in Probe. It changes
nothing itself.

Source: the flodl reference's meta-controller (docs/engine.md).
"""

import math
from collections import deque
from dataclasses import dataclass

from flodl.core.elche import Phase
from flodl.messages import GuardVerdict

WINDOW = 10  # rounds that it looks back
RATE_DROP = 0.5  # of the learning rate, in one round: a new scale of motion
RATE_FALLING = 0.7  # of the learning rate, in the round before: what follows is no drop, the rate was falling already
SETTLED_WITHIN = 0.01  # of the anchor, over the window


@dataclass(frozen=True, slots=True)
class NudgeRule:
    """How deep a phase cuts, and after how many objections in a row."""

    factor: float
    objections: int


RULES = {
    Phase.WARMUP: NudgeRule(0.3, 5),
    Phase.STABLE: NudgeRule(0.5, 3),
    Phase.MATURE: NudgeRule(0.7, 2),
}


@dataclass(frozen=True, slots=True)
class Nudge:
    """Cut the anchor to ``factor`` of itself; ``reason`` is for people."""

    factor: float
    reason: str


class MetaController:
    """Fed once per committed round."""

    def __init__(self, is_active: bool) -> None:
        """``is_active`` False never nudges; ``is_settled`` is known all the same."""
        self._is_active = is_active
        self._rate: float | None = None
        self._kept = math.inf  # the part of the rate that the last round left; nothing is known to have gone
        self._objections = 0
        self._anchors: deque[int] = deque(maxlen=WINDOW)

    def observe(self, phase: Phase, anchor: int, learning_rate: float | None, verdict: GuardVerdict) -> Nudge | None:
        """Take one round in.

        Args:
            phase: ElChe's, after the round.
            anchor: as it stands after guard and commit.
            learning_rate: the ranks' median; None when none is known, which counts as no change.
            verdict: the guard's. One that nudges has helped itself: it starts a new row of objections.

        Returns:
            What to do about the anchor; None for nothing.
        """
        self._anchors.append(anchor)
        drop = self._drop_to(learning_rate)
        is_objection = verdict is GuardVerdict.SUPPRESS_GROWTH
        self._objections = self._objections + 1 if is_objection else 0
        rule = RULES.get(phase)
        if rule is None or not self._is_active or verdict is GuardVerdict.NUDGE_DOWN:
            return None
        if drop is not None:
            return Nudge(rule.factor, f"the learning rate dropped to {drop:.3g} of itself")
        if self._objections >= rule.objections:
            self._objections = 0
            return Nudge(rule.factor, f"the guard objected {rule.objections} rounds in a row")
        return None

    @property
    def is_settled(self) -> bool:
        """True once the anchor has moved by less than 1 % (of its highest value) over the last 10 rounds."""
        anchors = self._anchors
        return len(anchors) == WINDOW and max(anchors) - min(anchors) < SETTLED_WITHIN * max(anchors)

    def _drop_to(self, learning_rate: float | None) -> float | None:
        """What part of the last known rate is left, if that is a drop."""
        before, now = self._rate, learning_rate
        if now is None or not math.isfinite(now):
            return None
        was_falling = self._kept <= RATE_FALLING
        self._rate = now
        self._kept = now / before if before is not None and before > 0 else math.inf
        return self._kept if self._kept <= RATE_DROP and not was_falling else None
