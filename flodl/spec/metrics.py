"""What the user sees of one closed epoch."""

from collections.abc import Mapping
from dataclasses import dataclass

from flodl.ids import RankId, Version
from flodl.messages import EpochReport


@dataclass(frozen=True, slots=True)
class RankEpoch:
    """One rank's part of an epoch. ``loss`` is None for a rank that merged no sample."""

    loss: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """One closed epoch. ``epoch_ms`` is the slowest rank's; ``avg_loss`` the mean over samples.

    ``epoch`` counts from 0, as everywhere in code; what ``fdl`` prints for people counts from 1.
    ``avg_loss`` is None when no rank reported a loss. ``per_rank_throughput`` is in batches per second (``RATE`` of
    ``fdl status``: samples), ``per_rank_batch_share`` a fraction of the epoch's batches. ``device_indices`` holds each
    rank's local device ordinal; ranks that left during the epoch stay in the mappings.
    """

    epoch: int
    avg_loss: float | None
    epoch_ms: float
    samples: int
    version: Version
    scalars: Mapping[str, float]
    per_rank: Mapping[RankId, RankEpoch]
    per_rank_throughput: Mapping[RankId, float]
    per_rank_batch_share: Mapping[RankId, float]
    device_indices: Mapping[RankId, int]

    @classmethod
    def from_report(cls, report: EpochReport) -> "EpochMetrics":
        """The controller's report with its string keys turned back into ranks."""
        return cls(
            epoch=report.epoch,
            avg_loss=report.avg_loss,
            epoch_ms=report.epoch_ms,
            samples=report.samples,
            version=report.version,
            scalars=dict(report.scalars),
            per_rank={
                int(rank): RankEpoch(report.per_rank_loss.get(rank), samples)
                for rank, samples in report.per_rank_samples.items()
            },
            per_rank_throughput={int(rank): value for rank, value in report.per_rank_throughput.items()},
            per_rank_batch_share={int(rank): value for rank, value in report.per_rank_batch_share.items()},
            device_indices={int(rank): value for rank, value in report.device_indices.items()},
        )
