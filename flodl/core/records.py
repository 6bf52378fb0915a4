"""What one epoch amounted to, over committed windows only: a loss that nobody's weights contain does not count."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flodl.ids import RankId, Version
from flodl.messages import Device, EpochReport, WindowDone


@dataclass(slots=True)
class _RankAccount:
    samples: int = 0
    steps: float = 0.0
    loss_sum: float = 0.0
    busy_ms: float = 0.0
    scalars: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LastWindow:
    """A rank's last committed window with a step, for status: samples per second, mean loss."""

    steps: int
    samples: int
    rate: float | None
    loss: float | None


class EpochAccounts:
    """Sums of one epoch, whose first samples were trained from ``started_s`` on."""

    def __init__(self, epoch: int, started_s: float) -> None:
        self.epoch = epoch
        self._started_s = started_s
        self._ranks: dict[RankId, _RankAccount] = {}

    def add(self, report: WindowDone, samples: int) -> None:
        """A committed window, ``samples`` (≥ 1) of which belong to this epoch; its figures count in proportion."""
        part = samples / report.samples
        account = self._ranks.setdefault(report.rank, _RankAccount())
        account.samples += samples
        account.steps += report.steps * part
        account.loss_sum += report.loss_sum * part
        account.busy_ms += report.window_ms * part
        for name, (total, count) in report.scalars.items():
            before_total, before_count = account.scalars.get(name, (0.0, 0.0))
            account.scalars[name] = (before_total + total * part, before_count + count * part)

    def report(self, version: Version, devices: Mapping[RankId, Device], now_s: float) -> EpochReport:
        """Close the epoch."""
        ranks = dict(sorted(self._ranks.items()))
        samples = sum(account.samples for account in ranks.values())
        steps = sum(account.steps for account in ranks.values())
        loss_sum = sum(account.loss_sum for account in ranks.values())
        return EpochReport(
            epoch=self.epoch,
            avg_loss=loss_sum / samples if samples else None,
            epoch_ms=(now_s - self._started_s) * 1e3,
            samples=samples,
            version=version,
            scalars=_mean_scalars(ranks.values()),
            per_rank_loss={str(rank): account.loss_sum / account.samples for rank, account in ranks.items()},
            per_rank_samples={str(rank): account.samples for rank, account in ranks.items()},
            per_rank_throughput={
                str(rank): account.steps / account.busy_ms * 1e3
                for rank, account in ranks.items()
                if account.busy_ms > 0
            },
            per_rank_batch_share={
                str(rank): account.steps / steps if steps else 0.0 for rank, account in ranks.items()
            },
            device_indices={str(rank): devices[rank].index for rank in ranks},
        )


def last_windows(reports: Mapping[RankId, WindowDone]) -> dict[RankId, LastWindow]:
    """Status figures of one committed round, of the ranks that trained in it."""
    return {
        rank: LastWindow(
            steps=report.steps,
            samples=report.samples,
            rate=report.samples / report.window_ms * 1e3 if report.window_ms > 0 else None,
            loss=report.loss_sum / report.samples,
        )
        for rank, report in reports.items()
        if report.samples
    }


def _mean_scalars(accounts: Iterable[_RankAccount]) -> dict[str, float]:
    sums: dict[str, tuple[float, float]] = {}
    for account in accounts:
        for name, (total, count) in account.scalars.items():
            before_total, before_count = sums.get(name, (0.0, 0.0))
            sums[name] = (before_total + total, before_count + count)
    return {name: total / count for name, (total, count) in sums.items() if count}
