"""One averaging round: it commits, or it never was.

States: *collecting* windows → (some ranks go on past their minimum: *closing*) → *gathered*: every live rank is done →
*reducing* one attempt → committed by the caller, who begins the next window, or *gathered* again for the next attempt.
Invariants: nothing is committed unless every participant of the attempt reported the same digest, finite and without
error; a report of another version or key changes nothing; a dropped rank's report is forgotten. It knows no samples'
places, no time and no messages' transport.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from flodl.errors import InvariantViolation
from flodl.ids import Incarnation, RankId, RoundKey, Version
from flodl.messages import Reduced, WindowDone


class RoundState(StrEnum):
    """Where the round stands."""

    COLLECTING = "collecting"
    CLOSING = "closing"
    GATHERED = "gathered"
    REDUCING = "reducing"


class RoundVerdict(StrEnum):
    """What the reports of one attempt amount to."""

    WAIT = "wait"
    COMMIT = "commit"
    BROKEN = "broken"
    NOT_FINITE = "not finite"
    DISAGREED = "disagreed"


@dataclass(frozen=True, slots=True)
class Contribution:
    """One rank's part in an attempt: its share for parameters and for float buffers (both 0: it sends zeros)."""

    weight: float
    buffer_weight: float


def weigh(samples: Mapping[RankId, int], gamma: float) -> dict[RankId, Contribution]:
    """``w_r = samples_r^gamma / Σ samples^gamma`` over the ranks that trained; float buffers count them equally."""
    powers = {rank: float(count) ** gamma for rank, count in samples.items() if count > 0}
    total = sum(powers.values())
    return {
        rank: Contribution(powers[rank] / total, 1.0 / len(powers)) if rank in powers else Contribution(0.0, 0.0)
        for rank in samples
    }


class Round:
    """The round that would publish ``version + 1``; see the module docstring."""

    def __init__(self, version: Version, bounds: Mapping[RankId, tuple[int, int]]) -> None:
        """``bounds`` maps each live rank to its window's (min_steps, max_steps)."""
        self.version = version
        self.state = RoundState.COLLECTING
        self.key: RoundKey | None = None
        self.attempts = 0
        self._below_min = {rank for rank, (least, _) in bounds.items() if least > 0}
        self._training = dict.fromkeys(bounds)
        self._reports: dict[RankId, WindowDone] = {}
        self._participants: dict[RankId, None] = {}
        self._reduced: dict[RankId, Reduced] = {}
        self._dissents: dict[RankId, int] = {}

    # --------------------------------------------------------------------------------------------- the window's end
    @property
    def reports(self) -> Mapping[RankId, WindowDone]:
        """What the ranks did in this window, of those that are done."""
        return self._reports

    @property
    def trained_samples(self) -> dict[RankId, int]:
        """Samples that each done rank offers."""
        return {rank: report.samples for rank, report in self._reports.items()}

    def add(self, rank: RankId) -> None:
        """A newcomer with nothing to give takes part as well."""
        self._reports[rank] = WindowDone(rank, self.version, 0, 0, 0.0, True, None, None, 0.0)

    def reach_min(self, rank: RankId) -> None:
        """The rank has done its least and goes on."""
        self._below_min.discard(rank)

    def finish_window(self, report: WindowDone) -> bool:
        """The rank is done; False for a report of another window or a second one."""
        if report.version != self.version or report.rank not in self._training:
            return False
        del self._training[report.rank]
        self._below_min.discard(report.rank)
        self._reports[report.rank] = report
        if not self._training:
            self.state = RoundState.GATHERED
        return True

    def ranks_to_close(self, now: bool = False) -> tuple[RankId, ...]:
        """The ranks to be told to end their window: once, when all have done their least, or ``now``."""
        if self.state is not RoundState.COLLECTING or not (now or (not self._below_min and self._training)):
            return ()
        self.state = RoundState.CLOSING
        return tuple(self._training)

    def discard_samples(self, rank: RankId) -> None:
        """The rank's loss or parameters are not finite: it takes part with zeros from now on."""
        report = self._reports[rank]
        self._reports[rank] = replace(report, samples=0, steps=0, loss_sum=0.0, is_finite=False, scalars={})

    # --------------------------------------------------------------------------------------------------- an attempt
    def start(self, incarnation: Incarnation) -> RoundKey:
        """Begin the next attempt over every rank that is done."""
        if self.state is not RoundState.GATHERED:
            raise InvariantViolation(f"round {self.version + 1} started while {self.state}")
        self.attempts += 1
        self.key = RoundKey(incarnation, self.version + 1, self.attempts)
        self.state = RoundState.REDUCING
        self._participants = dict.fromkeys(self._reports)
        self._reduced = {}
        return self.key

    def reduce(self, report: Reduced) -> bool:
        """A participant's result; False when it belongs to another attempt."""
        if self.state is not RoundState.REDUCING or report.key != self.key or report.rank not in self._participants:
            return False
        self._reduced[report.rank] = report
        return True

    def verdict(self) -> RoundVerdict:
        """What the attempt's reports say so far."""
        if self.state is not RoundState.REDUCING:
            return RoundVerdict.WAIT
        if any(report.error for report in self._reduced.values()):
            return RoundVerdict.BROKEN
        if len(self._reduced) < len(self._participants):
            return RoundVerdict.WAIT
        if self.not_finite():
            return RoundVerdict.NOT_FINITE
        digests = {report.digest: None for report in self._reduced.values()}
        return RoundVerdict.COMMIT if len(digests) == 1 else RoundVerdict.DISAGREED

    def not_finite(self) -> tuple[RankId, ...]:
        """The participants that found their own parameters not finite."""
        return tuple(rank for rank, report in self._reduced.items() if not report.is_finite)

    def error(self) -> str:
        """The first error of the attempt, with its rank."""
        return next((f"rank {r.rank}: {r.error}" for r in self._reduced.values() if r.error), "")

    def digests(self) -> dict[RankId, str]:
        """What each participant reported, lowest rank first."""
        return {rank: self._reduced[rank].digest for rank in sorted(self._reduced)}

    def count_dissent(self, rank: RankId) -> int:
        """The rank differed from the majority in this attempt; returns in how many of the round it has."""
        self._dissents[rank] = self._dissents.get(rank, 0) + 1
        return self._dissents[rank]

    def reduce_ms(self, is_async: bool = False) -> float:
        """What the attempt cost: the slowest participant's time.

        Where ranks train on meanwhile the quickest one's: the others' may have waited for a slow peer's step, which
        is no cost of averaging, and in the end nobody has time to spare when averaging is what takes long.
        """
        times = [report.reduce_ms for report in self._reduced.values()]
        return (min if is_async else max)(times, default=0.0)

    def divergence(self) -> float | None:
        """Mean over the ranks that trained, of those whose figure is finite; None when there is none."""
        known = [
            report.divergence
            for rank, report in self._reduced.items()
            if self._reports[rank].samples and math.isfinite(report.divergence)
        ]
        return sum(known) / len(known) if known else None

    def missing(self) -> tuple[RankId, ...]:
        """Who has not answered yet: the participants of an attempt, or the ranks still in their window."""
        if self.state is RoundState.REDUCING:
            return tuple(rank for rank in self._participants if rank not in self._reduced)
        return tuple(self._training)

    def abort(self) -> RoundKey:
        """The attempt never was; back to gathered. Returns its key."""
        key = self.key
        if key is None:
            raise InvariantViolation(f"round {self.version + 1} aborted while {self.state}")
        self.state, self.key = RoundState.GATHERED, None
        return key

    def drop(self, rank: RankId) -> None:
        """The rank is lost: its window, its report and its part in an attempt are forgotten."""
        self._training.pop(rank, None)
        self._below_min.discard(rank)
        self._reports.pop(rank, None)
        self._participants.pop(rank, None)
        self._reduced.pop(rank, None)
        if self.state in (RoundState.COLLECTING, RoundState.CLOSING) and not self._training and self._reports:
            self.state = RoundState.GATHERED
