"""Which rank runs the script's callbacks: the fastest, or the one that the user named.

Invariant: the choice is sticky; it changes only when the chosen rank is no longer alive.
"""

from collections.abc import Mapping, Sequence

from flodl.ids import RankId


class Election:
    """``wanted`` None elects the rank with the lowest smoothed ms per batch; ties go to the lower rank."""

    def __init__(self, wanted: RankId | None) -> None:
        self._wanted = wanted
        self._elected: RankId | None = None

    def elect(self, live: Sequence[RankId], ms_per_batch: Mapping[RankId, float]) -> RankId | None:
        """The rank that runs callbacks now, None when nobody is alive."""
        if self._elected in live:
            return self._elected
        if self._wanted in live:
            self._elected = self._wanted
        else:
            self._elected = min(live, key=lambda rank: (ms_per_batch.get(rank, float("inf")), rank), default=None)
        return self._elected
