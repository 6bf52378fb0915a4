"""How long a managed daemon waits between two tries, and whether the daemon that serves a run still moves. Pure."""

from typing import Final

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0
"""A question every ten seconds costs a controller nothing, and a launch does not wait long for its hosts."""

STARTUP_S: Final = 150.0
"""From a daemon's start to its first beat: 30 s to start, 60 s to find the controller, two slow handshakes."""

BEATS_MISSED: Final = 3


def pause_s(failures: int, luck: float) -> float:
    """Seconds until the next try after ``failures`` (1 or more) in a row: doubled each time up to ``LONGEST_PAUSE_S``.
    ``luck`` from 0 to 1 takes up to half of it off, so that hosts do not come all at once.
    """
    doublings = min(failures - 1, 10)
    return min(FIRST_PAUSE_S * float(1 << doublings), LONGEST_PAUSE_S) * (1 - luck / 2)


class Pulse:
    """What a daemon's beats say. It beats for the first time when it serves a run, not before."""

    def __init__(self, started_s: float, heartbeat_s: float, watchdog_s: float) -> None:
        """A beat is due every ``heartbeat_s``; who watches us wants a sign every ``watchdog_s``."""
        self.ranks: int | None = None
        """Ranks that run, None before the first beat."""
        self.has_served = False
        self._due_s = started_s + STARTUP_S
        self._limit_s = max(watchdog_s / 2, BEATS_MISSED * heartbeat_s)

    def beat(self, ranks: int, now_s: float) -> bool:
        """The daemon has said a beat, with so many ranks running; True when that is another number than before."""
        is_new, self.ranks = ranks != self.ranks, ranks
        self.has_served |= ranks > 0
        self._due_s = now_s + self._limit_s
        return is_new

    def is_moving(self, now_s: float) -> bool:
        """False when a beat is overdue: the daemon's loop stands still."""
        return now_s < self._due_s
