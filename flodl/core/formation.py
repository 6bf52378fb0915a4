"""Forming the collective group of one incarnation: asked of every live rank, answered by each.

States: *idle* → *forming* attempt n → *formed*, or attempt n + 1 after an error or the deadline, at most
``MAX_ATTEMPTS`` times without success for one incarnation: then *failed*. Invariant: an answer of another incarnation
or attempt changes nothing.
"""

from collections.abc import Sequence
from enum import StrEnum

from flodl.ids import Incarnation, RankId

FORMATION_TIMEOUT_S = 60.0
"""One attempt's limit: Gloo forms in milliseconds on a LAN; skewed imports are over before the first attempt."""

MAX_ATTEMPTS = 3
"""Attempts without success. A network that refuses three times will refuse the fourth."""


class FormationState(StrEnum):
    """Where the formation stands."""

    IDLE = "idle"
    FORMING = "forming"
    FORMED = "formed"
    FAILED = "failed"


class Formation:
    """See the module docstring."""

    def __init__(self) -> None:
        self.state = FormationState.IDLE
        self.incarnation: Incarnation = 0
        self.attempt = 0
        self.ranks: tuple[RankId, ...] = ()
        self.errors: dict[RankId, str] = {}
        self._deadline_s: float | None = None
        self._tries = 0
        self._formed: dict[RankId, None] = {}

    def begin(self, incarnation: Incarnation, ranks: Sequence[RankId], now_s: float) -> None:
        """Form ``ranks`` for ``incarnation``; asked again for the same incarnation it is the next attempt."""
        is_again = incarnation == self.incarnation
        self.attempt = self.attempt + 1 if is_again else 1
        self._tries = self._tries + 1 if is_again and self.state is FormationState.FORMING else 1
        self.incarnation, self.ranks = incarnation, tuple(ranks)
        self._formed, self.errors = {}, {}
        self.state = FormationState.FORMING if self._tries <= MAX_ATTEMPTS else FormationState.FAILED
        self._deadline_s = now_s + FORMATION_TIMEOUT_S if self.state is FormationState.FORMING else None

    def answer(self, rank: RankId, incarnation: Incarnation, attempt: int, error: str) -> None:
        """A rank's answer."""
        if self.state is not FormationState.FORMING or (incarnation, attempt) != (self.incarnation, self.attempt):
            return
        if error:
            self.errors[rank] = error
            return
        self._formed[rank] = None
        if len(self._formed) == len(self.ranks):
            self.state, self._deadline_s = FormationState.FORMED, None

    def needs_retry(self, now_s: float) -> bool:
        """True when this attempt has failed: a rank said so, or the deadline has passed."""
        return self.state is FormationState.FORMING and (
            bool(self.errors) or (self._deadline_s is not None and now_s >= self._deadline_s)
        )

    def silent(self, now_s: float) -> tuple[RankId, ...]:
        """The ranks that have not answered this attempt at all, once its time is over."""
        if self._deadline_s is None or now_s < self._deadline_s:
            return ()
        return tuple(rank for rank in self.ranks if rank not in self._formed and rank not in self.errors)

    def next_deadline_s(self) -> float | None:
        """When the attempt is given up."""
        return self._deadline_s
