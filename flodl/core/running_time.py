"""The time that every deadline of the controller is counted in: without that in which its process did not run.

Invariants: it never runs backwards; a deadline that is reached in running time is due at the time that is said for it.
"""

import math
from collections.abc import Iterable


class RunningTime:
    """See the module docstring. All in monotonic seconds."""

    def __init__(self) -> None:
        self._stalled_s = 0.0

    def stand_still(self, gap_s: float) -> None:
        """The process did not run for ``gap_s``."""
        self._stalled_s += gap_s

    def running_s(self, now_s: float) -> float:
        """The running time at ``now_s``."""
        return now_s - self._stalled_s

    def earliest_s(self, deadlines_s: Iterable[float | None]) -> float | None:
        """When the first of these deadlines, in running time, is due; None when there is none."""
        first_s = min((at for at in deadlines_s if at is not None), default=None)
        if first_s is None:
            return None
        at_s = first_s + self._stalled_s
        # a sum that was rounded down would be too early for the deadline, and tick for ever
        return at_s if self.running_s(at_s) >= first_s else math.nextafter(at_s, math.inf)
