"""ElChe, the cadence controller: how many batches each rank does between two averagings.

Fed once per window with what the window cost, it keeps a smoothed cost per batch and rank, the slow rank, and the
anchor, which is the number of batches that the slow rank does in one window. It proposes a new anchor; whether that is
committed is not its decision (``core.cadence``).

Phases, by the number of calibrations:
    Probe: nothing is known; equal counts.
    Warmup: counts follow the speeds; the slow rank is held, the anchor grows only under heavy overhead.
    Stable: the slow rank may change, with hysteresis; the anchor is tuned both ways.
    Mature: as Stable; for those who watch.

Invariants: every live rank has a count of at least 1; the anchor stays within its bounds; the slow rank is a measured
one whenever there is one; multiplying all times by a constant changes no count; the same feed gives the same counts.

In sync modes the anchor is 1: a count is what a rank may do while the slow rank does its one step. Does not know
epochs' ends (``core.tail``), rounds or ranks' health.

Source: the flodl reference's ElChe (docs/engine.md).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeGuard

from flodl.errors import InvariantViolation
from flodl.ids import RankId
from flodl.messages import CadenceSettings

DEFAULT_ANCHOR = 10
PROBE_EPOCH_FRACTION = 10  # a Probe window takes at most one tenth of the epoch per rank
PROBE_MIN_BATCHES = 2  # the least that gives a delivered timing
SMOOTHING_MIN = 0.1
SMOOTHING_MAX = 0.8
HYSTERESIS = 1.1  # a rank must be 10 % slower than the slow rank to take its place
SHRINK_BELOW = 0.5  # times the overhead target
MAX_GROWTH = 3  # times the anchor, in one round
TUNING_STARTS_AT = 2  # calibrations: the first cost of a rank is cold
EARLY_GROWTH_OVERHEAD = 3  # times the target, before Stable
ANCHOR_STEP = 20  # one twentieth (5 %) of the anchor: the size of a shrink, and the least growth
SYNC_LEAD_BATCHES = 16  # the most that a fast rank may do in one window of a sync mode; bounds its lease
MAX_SPEED = 1e6  # batches per batch of the slow rank: beyond, a measurement is broken, not a rank fast
ROUNDING_DIGITS = 9  # float noise behind these must not decide between two counts, else the unit of time would


class Phase(IntEnum):
    """How much is known; the value is the number of calibrations at which the phase starts."""

    PROBE = 0
    WARMUP = 1
    STABLE = 5
    MATURE = 20


@dataclass(frozen=True, slots=True)
class WindowTiming:
    """What one rank's window cost, in ms (``messages.WindowDone``).

    ``delivered_ms`` is per full batch and includes the wait for data; None with fewer than two steps. ``compute_ms``
    is per full batch inside steps. ``window_ms`` is the whole time inside steps.
    """

    steps: int
    delivered_ms: float | None
    compute_ms: float | None
    window_ms: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """A step of the anchor, from what is committed to what the overhead asks for; equal where nothing is to change.

    ``overhead`` is the averaging time per time of a full window; None when the window did not tell.
    """

    anchor: int
    proposed_anchor: int
    overhead: float | None


@dataclass(frozen=True, slots=True)
class ElCheState:
    """All that ElChe remembers, as plain values.

    ``ms_per_batch`` names the measured ranks only. ``phase``, ``batch_counts`` and ``partition_ratios`` follow from
    the other fields: they are written for readers, ``restore`` computes them again.
    """

    phase: Phase
    calibration_count: int
    anchor: int
    ranks: tuple[RankId, ...]
    slow_rank: RankId | None
    ms_per_batch: Mapping[RankId, float]
    batch_counts: Mapping[RankId, int]
    partition_ratios: Mapping[RankId, float]


class ElChe:
    """The cadence of one run."""

    def __init__(self, settings: CadenceSettings, ranks: Sequence[RankId]) -> None:
        """Start at Probe.

        Args:
            settings: the run's cadence; an anchor outside its bounds is moved to the nearer one.
            ranks: the live ranks, each once.
        """
        self._settings = settings
        self._ranks = sorted(ranks)
        self._calibration_count = 0
        self._anchor = self._bounded(DEFAULT_ANCHOR if settings.anchor is None else settings.anchor)
        self._slow_rank: RankId | None = None
        self._ms: dict[RankId, float] = {}

    @property
    def phase(self) -> Phase:
        """How much is known."""
        return max(phase for phase in Phase if phase <= self._calibration_count)

    @property
    def anchor(self) -> int:
        """Batches that the slow rank does in one window; 1 in sync modes."""
        return self._anchor

    @property
    def slow_rank(self) -> RankId | None:
        """The rank that the anchor counts for; None before anything is measured."""
        return self._slow_rank

    @property
    def ms_per_batch(self) -> dict[RankId, float]:
        """Smoothed cost of a full batch, in ms; only measured ranks."""
        return {rank: self._ms[rank] for rank in self._ranks if rank in self._ms}

    @property
    def batch_counts(self) -> dict[RankId, int]:
        """Batches of a full window per live rank, each ≥ 1, in rank order; ``plan`` bounds them in Probe."""
        counts = {rank: max(1, _nearest(self._anchor * speed)) for rank, speed in self._speeds().items()}
        if self._settings.mode.is_sync:
            counts = {rank: min(count, SYNC_LEAD_BATCHES) for rank, count in counts.items()}
        if self._settings.max_batch_diff is None:
            return counts
        most = min(counts.values(), default=1) + self._settings.max_batch_diff
        return {rank: min(count, most) for rank, count in counts.items()}

    @property
    def partition_ratios(self) -> dict[RankId, float]:
        """Each live rank's share of the work, by speed or as the settings fix it; they add up to 1."""
        fixed = self._settings.partition_ratios
        shares = self._speeds() if fixed is None else {rank: fixed[rank] for rank in self._ranks}
        total = sum(shares.values())
        return {rank: share / total for rank, share in shares.items()}

    def plan(self, epoch_batches: int) -> dict[RankId, int]:
        """The batches of one full window.

        Args:
            epoch_batches: batches of the whole epoch; in Probe no rank gets more than a tenth of them, but at least
                2 (a window that may be larger than what is left is the tail's business).

        Returns:
            A count ≥ 1 for every live rank, in rank order.
        """
        counts = self.batch_counts
        if self._settings.mode.is_sync or self.phase > Phase.PROBE:
            return counts
        most = epoch_batches // PROBE_EPOCH_FRACTION
        return {rank: max(PROBE_MIN_BATCHES, min(count, most)) for rank, count in counts.items()}

    def observe(self, timings: Mapping[RankId, WindowTiming], reduce_ms: float) -> Proposal | None:
        """Learn from one window: smooth the costs, elect the slow rank, and say what the anchor should become.

        Args:
            timings: per rank; a rank without steps, with unusable times or not live keeps its estimate.
            reduce_ms: how long the averaging took.

        Returns:
            What is proposed, for ``commit``; None when no rank gave a sample, which is no calibration.
        """
        overhead = self._overhead(timings, reduce_ms)  # of the window as it was planned: before the costs move
        return self.propose(overhead) if self._calibrate(timings) else None

    def propose(self, overhead: float | None) -> Proposal:
        """What the overhead asks for in this phase; changes nothing.

        Args:
            overhead: averaging time per time of a full window; None proposes no change.
        """
        anchor = self._anchor
        if overhead is None or self._settings.mode.is_sync or self._calibration_count < TUNING_STARTS_AT:
            return Proposal(anchor, anchor, overhead)
        ratio = round(overhead / self._settings.overhead_target, ROUNDING_DIGITS)
        if self.phase < Phase.STABLE and ratio < EARLY_GROWTH_OVERHEAD:
            return Proposal(anchor, anchor, overhead)
        tuned = self._bounded(_tuned(anchor, ratio))
        is_too_small = 0 < (tuned - anchor) * ANCHOR_STEP < anchor
        return Proposal(anchor, anchor if is_too_small else tuned, overhead)

    def relax(self, proposal: Proposal) -> Proposal:
        """One batch more, where ``proposal`` asks for no change and the bounds and the phase allow it."""
        if self.phase < Phase.STABLE or proposal.proposed_anchor != self._anchor:
            return proposal
        return replace(proposal, proposed_anchor=self._bounded(self._anchor + 1))

    def commit(self, proposal: Proposal) -> None:
        """Make the proposed anchor the anchor."""
        self._anchor = proposal.proposed_anchor

    def nudge(self, factor: float) -> None:
        """Cut the anchor to ``factor`` (above 0, below 1) of itself, rounded down, within its bounds."""
        self._anchor = self._bounded(math.floor(round(self._anchor * factor, ROUNDING_DIGITS)))

    def add_rank(self, rank: RankId) -> None:
        """Take a rank in; until it is measured it counts as being as fast as the slow rank.

        Raises:
            InvariantViolation: the rank is in already.
        """
        if rank in self._ranks:
            raise InvariantViolation(f"rank {rank} is in the cadence already")
        self._ranks = sorted([*self._ranks, rank])

    def remove_rank(self, rank: RankId) -> None:
        """Forget a rank; if it was the slow one, the slowest measured rank takes its place.

        Raises:
            InvariantViolation: the rank is not in.
        """
        if rank not in self._ranks:
            raise InvariantViolation(f"rank {rank} is not in the cadence")
        self._ranks.remove(rank)
        self._ms.pop(rank, None)
        if rank == self._slow_rank:
            self._slow_rank = self._slowest()

    def state(self) -> ElCheState:
        """All that there is to remember."""
        return ElCheState(
            phase=self.phase,
            calibration_count=self._calibration_count,
            anchor=self._anchor,
            ranks=tuple(self._ranks),
            slow_rank=self._slow_rank,
            ms_per_batch=self.ms_per_batch,
            batch_counts=self.batch_counts,
            partition_ratios=self.partition_ratios,
        )

    def restore(self, state: ElCheState) -> None:
        """Go on from ``state``, with its ranks, under this run's settings.

        Raises:
            InvariantViolation: the state contradicts itself.
        """
        self._ranks = sorted(state.ranks)
        self._calibration_count = state.calibration_count
        self._anchor = self._bounded(state.anchor)
        self._slow_rank = state.slow_rank
        self._ms = dict(state.ms_per_batch)
        self.check()

    def check(self) -> None:
        """Verify every invariant.

        Raises:
            InvariantViolation: names the first that does not hold.
        """
        measured = self._ms.keys()
        self._require(len(set(self._ranks)) == len(self._ranks), "a rank is listed once")
        self._require(measured <= set(self._ranks), "only live ranks have a cost")
        self._require(all(_is_usable(ms) for ms in self._ms.values()), "costs are positive and finite")
        self._require(self._slow_rank in measured if measured else self._slow_rank is None, "the slow rank is measured")
        self._require(self._calibration_count >= 0, "calibrations are counted up from 0")
        self._require(self._anchor == self._bounded(self._anchor), "the anchor is within its bounds")
        self._require(min(self.batch_counts.values(), default=1) >= 1, "no live rank is starved")

    # ------------------------------------------------------------------------------------------------- calibration
    def _calibrate(self, timings: Mapping[RankId, WindowTiming]) -> bool:
        samples = _samples_of({rank: timings[rank] for rank in self._ranks if rank in timings})
        for rank, measured in samples.items():
            self._ms[rank] = _smoothed(self._ms.get(rank, measured), measured)
        if not samples:
            return False
        self._calibration_count += 1
        self._elect()
        return True

    def _elect(self) -> None:
        slow = self._slow_rank
        if slow is None:
            self._slow_rank = self._slowest()
        elif self.phase >= Phase.STABLE:
            lead = round(max(self._ms.values()) / self._ms[slow], ROUNDING_DIGITS)
            self._slow_rank = self._slowest() if lead > HYSTERESIS else slow

    def _slowest(self) -> RankId | None:
        """The measured rank with the highest cost; among equals the lowest id."""
        return max(sorted(self._ms), key=lambda rank: self._ms[rank], default=None)

    def _overhead(self, timings: Mapping[RankId, WindowTiming], reduce_ms: float) -> float | None:
        """Averaging time per compute time of a full window; a short window (a tail) is scaled up to its counts."""
        counts = self.batch_counts
        stepped = [(timing, counts[rank]) for rank, timing in timings.items() if rank in counts and timing.steps > 0]
        full_ms = [timing.window_ms / timing.steps * count for timing, count in stepped]
        usable = [ms for ms in full_ms if _is_usable(ms)]
        if not usable or not (math.isfinite(reduce_ms) and reduce_ms >= 0):
            return None
        return reduce_ms / max(usable)

    # ------------------------------------------------------------------------------------------------------ derived
    def _speeds(self) -> dict[RankId, float]:
        """Batches that a rank does while the slow rank does one; 1 for a rank that is not measured."""
        slow_ms = None if self._slow_rank is None else self._ms[self._slow_rank]
        return {
            rank: 1.0 if slow_ms is None or rank not in self._ms else min(slow_ms / self._ms[rank], MAX_SPEED)
            for rank in self._ranks
        }

    def _bounded(self, anchor: int) -> int:
        if self._settings.mode.is_sync:
            return 1
        return max(self._settings.min_anchor, min(anchor, self._settings.max_anchor))

    def _require(self, holds: bool, invariant: str) -> None:
        if not holds:
            raise InvariantViolation(
                f"ElChe: not so: {invariant} (ranks {self._ranks}, ms {self._ms}, slow rank {self._slow_rank}, "
                f"anchor {self._anchor}, calibrations {self._calibration_count})"
            )


def _is_usable(ms: float | None) -> TypeGuard[float]:
    return ms is not None and math.isfinite(ms) and ms > 0


def _samples_of(timings: Mapping[RankId, WindowTiming]) -> dict[RankId, float]:
    """The window's cost per batch: delivered where every rank that stepped has one, else compute-only for all."""
    stepped = {rank: timing for rank, timing in timings.items() if timing.steps > 0}
    is_delivered = all(timing.steps > 1 and _is_usable(timing.delivered_ms) for timing in stepped.values())
    costs = {rank: timing.delivered_ms if is_delivered else timing.compute_ms for rank, timing in stepped.items()}
    return {rank: ms for rank, ms in costs.items() if _is_usable(ms)}


def _smoothed(smoothed: float, measured: float) -> float:
    """An average that follows a jump quickly and ignores noise: its weight grows with the surprise."""
    alpha = max(SMOOTHING_MIN, min(abs(measured - smoothed) / smoothed, SMOOTHING_MAX))
    return smoothed + alpha * (measured - smoothed)


def _tuned(anchor: int, ratio: float) -> int:
    """The anchor that ``ratio``, overhead per target, asks for."""
    if ratio > 1:
        return anchor + math.ceil(round(anchor * min(ratio, MAX_GROWTH - 1), ROUNDING_DIGITS))
    if ratio < SHRINK_BELOW:
        return anchor - max(1, anchor // ANCHOR_STEP)
    return anchor


def _nearest(batches: float) -> int:
    """Rounded, halves up."""
    return math.floor(round(batches, ROUNDING_DIGITS) + 0.5)
