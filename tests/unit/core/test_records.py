"""What an epoch and a round amounted to."""

from dataclasses import replace

from flodl.core.records import EpochAccounts, LastWindow, last_windows
from flodl.messages import Device, WindowDone

WINDOW = WindowDone(0, 3, 40, 10, 20.0, True, 1.0, 1.0, 2000.0, {"acc": (30.0, 40)})
DEVICES = {0: Device("cuda", 0), 1: Device("cuda", 3)}


def test_epoch_sums_its_committed_windows() -> None:
    accounts = EpochAccounts(2, started_s=100.0)
    accounts.add(WINDOW, 40)
    accounts.add(
        replace(WINDOW, rank=1, samples=20, steps=5, loss_sum=40.0, scalars={"acc": (10.0, 20), "lr": (1.0, 1)}), 20
    )
    accounts.add(replace(WINDOW, loss_sum=10.0), 40)
    report = accounts.report(version=7, devices=DEVICES, now_s=160.5)
    assert (report.epoch, report.version, report.samples, report.epoch_ms) == (2, 7, 100, 60500.0)
    assert report.avg_loss == 0.7
    assert report.scalars == {"acc": 0.7, "lr": 1.0}
    assert report.per_rank_loss == {"0": 0.375, "1": 2.0}
    assert report.per_rank_samples == {"0": 80, "1": 20}
    assert report.per_rank_throughput == {"0": 5.0, "1": 2.5}
    assert report.per_rank_batch_share == {"0": 0.8, "1": 0.2}
    assert report.device_indices == {"0": 0, "1": 3}


def test_window_over_the_end_of_an_epoch_counts_in_proportion() -> None:
    ends, begins = EpochAccounts(0, started_s=0.0), EpochAccounts(1, started_s=0.0)
    ends.add(WINDOW, 10)
    begins.add(WINDOW, 30)
    first, second = ends.report(1, DEVICES, 1.0), begins.report(1, DEVICES, 1.0)
    assert (first.samples, second.samples) == (10, 30)
    assert first.avg_loss == second.avg_loss == 0.5
    assert first.scalars == second.scalars == {"acc": 0.75}
    assert first.per_rank_throughput == second.per_rank_throughput == {"0": 5.0}


def test_epoch_without_windows_has_no_figures() -> None:
    report = EpochAccounts(0, started_s=0.0).report(1, DEVICES, 1.0)
    assert (report.avg_loss, report.samples, report.scalars, report.per_rank_loss) == (None, 0, {}, {})


def test_figures_that_a_peer_leaves_empty_divide_nothing() -> None:
    accounts = EpochAccounts(0, started_s=0.0)
    accounts.add(replace(WINDOW, steps=0, window_ms=0.0, scalars={"acc": (0.0, 0)}), 40)
    report = accounts.report(1, DEVICES, 1.0)
    assert (report.per_rank_throughput, report.per_rank_batch_share, report.scalars) == ({}, {"0": 0.0}, {})


def test_last_windows_tell_rate_and_loss_of_who_trained() -> None:
    reports = {0: WINDOW, 1: replace(WINDOW, rank=1, samples=10, steps=2, loss_sum=1.0, window_ms=0.0)}
    assert last_windows(reports) == {
        0: LastWindow(10, 40, 20.0, 0.5), 1: LastWindow(2, 10, None, 0.1),
    }  # fmt: skip
    assert last_windows({0: replace(WINDOW, samples=0)}) == {}
