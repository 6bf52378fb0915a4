"""The next window's plan: who does how many batches, from which leases.

Cadence modes take ElChe's counts, shaped by the epoch's tail; sync modes take one step each at least and at most what
is left of an equal share. Leases are granted ahead, so that loading never waits for the controller, except near the
end of an epoch, where the tail decides. Invariants: a rank's ``max_steps`` never exceeds the batches it holds; in the
last window of an epoch the plans add up to exactly what is left.
"""

from collections.abc import Mapping, Sequence

from flodl.core.elche import ElChe
from flodl.core.pool import Pool
from flodl.core.tail import allocate
from flodl.ids import Grant, RankId, Version
from flodl.messages import CadenceSettings, WindowPlan

AHEAD_BATCHES = 2
"""Batches leased beyond the window: as many as a loader prefetches by default."""

SYNC_LEAD_BATCHES = 16
"""Steps a fast rank may do in one sync round without ``max_batch_diff``; bounds its lease, not the mode's semantics."""


class Dispatch:
    """Turns the state of ElChe and of the epoch's pool into window plans."""

    def __init__(self, settings: CadenceSettings) -> None:
        self._settings = settings
        self._shares: dict[RankId, int] = {}

    def plan(
        self, version: Version, live: Sequence[RankId], elche: ElChe, pool: Pool, epoch_batches: int
    ) -> dict[RankId, WindowPlan]:
        """One plan for each of ``live``, in rank order. Leases what it grants."""
        held = {rank: pool.held_batches(rank) for rank in live}
        bounds = (
            self._sync_bounds(live, held, pool)
            if self._settings.mode.is_sync
            else self._cadence_bounds(live, held, elche, pool, epoch_batches)
        )
        ahead = self._ahead(bounds, held, pool)
        return {rank: self._grant(rank, version, bounds[rank], held[rank], ahead, pool) for rank in live}

    def _cadence_bounds(
        self, live: Sequence[RankId], held: Mapping[RankId, int], elche: ElChe, pool: Pool, epoch_batches: int
    ) -> dict[RankId, tuple[int, int]]:
        planned = elche.plan(epoch_batches)
        counts = {rank: planned[rank] for rank in live}
        return {rank: (count, count) for rank, count in allocate(pool.remaining_batches, counts, held).items()}

    def _sync_bounds(
        self, live: Sequence[RankId], held: Mapping[RankId, int], pool: Pool
    ) -> dict[RankId, tuple[int, int]]:
        remaining = pool.remaining_batches
        if set(self._shares) != set(live) or sum(self._shares.values()) != remaining:
            equal = -(-remaining // len(live))
            self._shares = allocate(remaining, dict.fromkeys(live, max(1, equal)), held)
        lead = self._settings.max_batch_diff
        most = SYNC_LEAD_BATCHES if lead is None else 1 + lead
        return {rank: (min(1, share), min(most, share)) for rank, share in self._shares.items()}

    def settle(self, steps: Mapping[RankId, int]) -> None:
        """The window ended with these steps done: sync shares shrink by them."""
        for rank, done in steps.items():
            if rank in self._shares:
                self._shares[rank] -= done

    @staticmethod
    def _ahead(bounds: Mapping[RankId, tuple[int, int]], held: Mapping[RankId, int], pool: Pool) -> int:
        """Batches to lease beyond the window: none where the epoch's tail is near."""
        window = sum(most for _, most in bounds.values())
        return AHEAD_BATCHES if pool.remaining_batches >= 2 * window + 2 * AHEAD_BATCHES * len(bounds) else 0

    @staticmethod
    def _grant(
        rank: RankId, version: Version, bounds: tuple[int, int], held: int, ahead: int, pool: Pool
    ) -> WindowPlan:
        least, most = bounds
        wanted = most + ahead - held
        grant = pool.lease(rank, wanted) if wanted > 0 else None
        grants: tuple[Grant, ...] = () if grant is None else (grant,)
        most = min(most, pool.held_batches(rank))
        return WindowPlan(rank, version, min(least, most), most, grants)
