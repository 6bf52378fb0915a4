"""When a wait that has no end yet is worth a word: after a short while, and then rarely.

Decides nothing about the wait itself: whoever waits has a deadline of its own.
"""

SLOW_S = 30.0
"""A few GB are written by then, and a person who watches has begun to wonder."""

RARITY = 4.0
"""It is told again when it has taken so many times as long: at 30 s, 2 min, 8 min."""


class Slowness:
    """Of one wait that began at ``began_s``. ``next_s`` is when there is something to tell."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self.next_s = began_s + SLOW_S

    def take(self, now_s: float) -> float | None:
        """How many seconds it has taken, where that is to be told now; then not again for a while."""
        if now_s < self.next_s:
            return None
        waited_s = now_s - self._began_s
        self.next_s = self._began_s + RARITY * waited_s
        return waited_s
