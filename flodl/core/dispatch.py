"""The next window's plan: who does how many batches, from which leases.

Cadence modes take ElChe's counts, shaped by the epoch's tail; sync modes take one step each at least and at most
ElChe's counts, within what is left of a share, equal or by ``partition_ratios``: whoever is slowest does one step and
begins no second one, unless the others are through with their shares or gone. The asynchronous mode takes the counts,
shaped by the run's tail, and lets a rank overshoot them into leases ahead. Leases are granted ahead, so that loading
never waits for the controller, except near the end of an epoch, where the tail decides. Invariants: a rank's
``max_steps`` never exceeds the batches it holds; in an epoch's last window the plans add up to exactly what is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flodl.core.elche import SYNC_LEAD_BATCHES, ElChe
from flodl.core.supply import Supply
from flodl.core.tail import allocate, equal_shares, ratio_shares
from flodl.errors import InvariantViolation
from flodl.ids import RankId, Version
from flodl.messages import CadenceSettings, WindowPlan

AHEAD_BATCHES = 2
"""Batches leased beyond the window: as many as a loader prefetches by default."""

RATIO_SCALE = 10**9
"""``partition_ratios`` count in billionths: shares are dealt in whole numbers."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Steps of one window, and the batches that the rank should hold a lease of when it starts."""

    least: int
    most: int
    hold: int


class Dispatch:
    """Turns the state of ElChe and of the supply of samples into window plans."""

    def __init__(self, settings: CadenceSettings) -> None:
        self._settings = settings
        self._shares: dict[RankId, int] = {}

    def plan(self, version: Version, live: Sequence[RankId], elche: ElChe, supply: Supply) -> dict[RankId, WindowPlan]:
        """One plan for each of ``live``, in rank order. Leases what it grants.

        Raises:
            InvariantViolation: samples are left and nobody would train any of them.
        """
        held = {rank: supply.held_batches(rank) for rank in live}
        if self._settings.mode.is_sync:
            bounds = self._sync_bounds(live, held, elche, supply)
        elif self._settings.mode.is_async:
            bounds = self._async_bounds(live, held, elche, supply)
        else:
            bounds = self._cadence_bounds(live, held, elche, supply)
        plans = {rank: self._grant(rank, version, bounds[rank], held[rank], supply) for rank in live}
        if not any(plan.max_steps for plan in plans.values()):
            raise InvariantViolation(
                f"{supply.remaining_batches} batches are left and no rank of {live} may train them"
            )
        strides = self._strides(plans)
        return {rank: replace(plan, stride=strides[rank]) for rank, plan in plans.items()}

    def _strides(self, plans: Mapping[RankId, WindowPlan]) -> dict[RankId, float]:
        """How many batches all ranks together train while a rank does one step; 1 for a rank that does none."""
        is_sync = self._settings.mode.is_sync
        paces = {rank: plan.max_steps if is_sync else plan.min_steps for rank, plan in plans.items() if plan.max_steps}
        total = sum(paces.values())
        return {rank: total / paces[rank] if rank in paces else 1.0 for rank in plans}

    def _cadence_bounds(
        self, live: Sequence[RankId], held: Mapping[RankId, int], elche: ElChe, supply: Supply
    ) -> dict[RankId, _Bounds]:
        planned = elche.plan(supply.epoch_batches)
        counts = {rank: planned[rank] for rank in live}
        window = allocate(supply.remaining_batches, counts, held)
        is_far = supply.remaining_batches >= 2 * sum(window.values()) + 2 * AHEAD_BATCHES * len(live)
        ahead = AHEAD_BATCHES if is_far else 0
        # Less than the rank's count: what it holds is the least of its next window, which an anchor that shrinks by one
        # makes one shorter; the fast ranks would wait for whoever must do more.
        return {
            rank: _Bounds(count, count, count + min(ahead, max(1, counts[rank] - 1))) for rank, count in window.items()
        }

    def _async_bounds(
        self, live: Sequence[RankId], held: Mapping[RankId, int], elche: ElChe, supply: Supply
    ) -> dict[RankId, _Bounds]:
        planned = elche.plan(supply.epoch_batches)
        counts = _within({rank: planned[rank] for rank in live}, supply.epoch_batches)
        total, remaining = sum(counts.values()), supply.remaining_batches
        # What is held beyond the counts is trained later, but not in the run's last two windows.
        is_far = remaining >= total + sum(max(held[rank], counts[rank]) for rank in live)
        window = counts if is_far else allocate(remaining, counts, held)
        rest = remaining - sum(window.values())
        bounds = {}
        for rank, count in window.items():
            overshoot = counts[rank] if self._settings.max_overshoot is None else self._settings.max_overshoot
            # In proportion to the speeds, so that nobody ends the run with more than its share.
            ahead = min(overshoot, rest * counts[rank] // total)
            bounds[rank] = _Bounds(count, count + overshoot, count + ahead)
        return bounds

    def _sync_bounds(
        self, live: Sequence[RankId], held: Mapping[RankId, int], elche: ElChe, supply: Supply
    ) -> dict[RankId, _Bounds]:
        remaining = supply.remaining_batches
        if set(self._shares) != set(live) or sum(self._shares.values()) != remaining:
            self._shares = self._deal(remaining, live, held)
        counts = elche.plan(supply.epoch_batches)
        # One step of whoever is the slowest of those that are not through with their share.
        busy = [rank for rank, share in self._shares.items() if share]
        least = min((counts[rank] for rank in busy), default=1)
        most = {rank: counts[rank] // least for rank in live}
        if len(busy) == 1 and self._settings.max_batch_diff is None:
            most[busy[0]] = SYNC_LEAD_BATCHES  # nobody has anything to give that it would have to be averaged with
        return {
            rank: _Bounds(min(1, share), min(most[rank], share), min(most[rank] + AHEAD_BATCHES, share))
            for rank, share in self._shares.items()
        }

    def _deal(self, remaining: int, live: Sequence[RankId], held: Mapping[RankId, int]) -> dict[RankId, int]:
        ratios = self._settings.partition_ratios
        if ratios is None:
            return equal_shares(remaining, live, held)
        return ratio_shares(remaining, {rank: max(1, round(ratios[rank] * RATIO_SCALE)) for rank in live}, held)

    def settle(self, steps: Mapping[RankId, int]) -> None:
        """The window ended with these steps done: sync shares shrink by them."""
        for rank, done in steps.items():
            if rank in self._shares:
                self._shares[rank] -= done

    @staticmethod
    def _grant(rank: RankId, version: Version, bounds: _Bounds, held: int, supply: Supply) -> WindowPlan:
        grants = supply.lease(rank, bounds.hold - held)
        most = min(bounds.most, supply.held_batches(rank))
        return WindowPlan(rank, version, min(bounds.least, most), most, grants)


def _within(counts: Mapping[RankId, int], batches: int) -> dict[RankId, int]:
    """The counts in proportion, each at least 1, that make a window of at most one epoch: one cold measurement could
    otherwise deal most of the run at once, and no round would correct it.
    """
    total = sum(counts.values())
    if total <= batches:
        return dict(counts)
    return {rank: max(1, count * batches // total) for rank, count in counts.items()}
