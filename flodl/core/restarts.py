"""Whether the ranks of a plain run start again: what stopped their last start, and how many restarts are left.

Invariants: a start is stopped by its first failure, unless a later one explains that better; a port that a stranger has
taken costs no restart, and is no accident any more after ``MAX_PORT_TRIES``. It knows nothing of processes and phases.
"""

from flodl.core import ending as end
from flodl.core.actions import Failure, Record, Severity
from flodl.core.counted import counted

MAX_PORT_TRIES = 5
"""Ports in a row that a stranger may take before our rank does; each is another number, so more is no accident."""

SIGABRT = 6
"""How a library ends a process whose peer is gone: alone among signals it may only follow from another failure."""


class Restarts:
    """See the module docstring. ``count`` is of those so far; ``failure`` has stopped the last start, and is None while
    nothing has; ``are_forbidden`` once a host is gone that will not come back.
    """

    def __init__(self, ending: end.Ending, limit: int) -> None:
        self.count = 0
        self.failure: Failure | None = None
        self.are_forbidden = False
        self._ending, self._limit = ending, limit
        self._followers = 0
        self._port_tries = 0

    @property
    def are_left(self) -> bool:
        """Whether the ranks may start again after the next failure."""
        return not self.are_forbidden and self.count < self._limit

    def take(self, failure: Failure) -> None:
        """A failure of this start."""
        if self.failure is None:
            self.failure = failure
            return
        self._followers += 1
        if _explains(failure, self.failure):
            self.failure = failure

    def judge(self, failure: Failure, port: int, was_taken: bool) -> Record | None:
        """All ranks of a start that ``failure`` has stopped have ended: why they start again; None when they do not.

        ``was_taken``: a stranger listens at ``port``, where they were to meet.
        """
        if was_taken and self._port_tries < MAX_PORT_TRIES:
            self._port_tries += 1
            detail = f"port {port} was taken by somebody else before rank 0 could use it: the ranks start again"
            note = Record("port_taken", Severity.WARNING, detail, {"port": port})
        elif self.are_left:
            self.count += 1
            self._port_tries = 0
            self._ending.tolerate(failure)
            detail = f"restart {self.count} of {self._limit}, after {_named(failure)}"
            note = Record("restarting", Severity.WARNING, detail, {"restart": self.count})
        else:
            return None
        self.failure, self._followers = None, 0
        return note

    def give_up(self, failure: Failure) -> None:
        """``failure`` is the run's."""
        after = f", after {counted(self.count, 'restart')}" if self.count else ""
        self._ending.fail(failure, _named(failure) + after)
        self._ending.collateral += self._followers


def _explains(later: Failure, first: Failure) -> bool:
    """A killed or crashed process ends no sooner than its peers notice, and none of them dies of that by a signal."""
    return first.kind == end.KIND_EXIT and later.kind == end.KIND_SIGNAL and later.signal != SIGABRT


def _named(failure: Failure) -> str:
    who = f"rank {failure.rank}" if failure.rank >= 0 else f"host {failure.host}"
    return f"{who}: {failure.error}"
