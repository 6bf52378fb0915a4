"""One rank's step in real processes: what is undone, what the learning rate follows, what a precision changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.messages import EpochReport, WindowDone
from flodl.spec.state import load_state
from tests.integration.one_host import ROOT, OneHost

JOB = ROOT / "tests" / "scripts" / "job.py"
SIZE, EPOCHS, BATCH_SIZE = 240, 3, 8
MODES = ["cpu_cadence", "nccl_cadence", "cpu_sync", "cpu_async"]


@pytest.fixture
def play(tmp_path: Path, deadline_factor: float) -> Any:
    def make(ranks: int, mode: str, *arguments: str) -> OneHost:
        size = ["--size", str(SIZE), "--epochs", str(EPOCHS), "--batch-size", str(BATCH_SIZE), "--max-anchor", "4"]
        argv = [str(JOB), "--mode", mode, *size, "--log", str(tmp_path), *arguments]
        return OneHost(ranks, argv, tmp_path, deadline_factor)

    return make


def details(host: OneHost, event: str) -> list[str]:
    return [record.detail for record in host.records if record.event == event]


def merged(host: OneHost) -> int:
    return sum(report.samples for report in host.head if isinstance(report, EpochReport))


def assert_finite_state(host: OneHost, outcome: str) -> None:
    state = load_state(host.state, outcome)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in [*state.params, *state.buffers])


@pytest.mark.parametrize("mode", MODES)
def test_one_bad_step_is_undone_with_all_that_adam_learned_from_it(play: Any, tmp_path: Path, mode: str) -> None:
    host: OneHost = play(2, mode, "--fault-rank", "1", "--fault-step", "5", "--poisoned", "1")

    outcome = host.run()

    assert (outcome.status, merged(host)) == ("completed", SIZE * EPOCHS), outcome
    (told,) = details(host, "nonfinite")
    assert told.endswith("not finite and left out: rank 1 (the loss of its step 5)")
    assert (tmp_path / "final-0.json").read_text() == (tmp_path / "final-1.json").read_text()
    assert_finite_state(host, "completed")


@pytest.mark.parametrize("mode", ["nccl_cadence", "cpu_async"])
def test_rank_that_stays_bad_ends_the_run_with_the_others_work_saved(play: Any, mode: str) -> None:
    host: OneHost = play(2, mode, "--fault-rank", "1", "--fault-step", "3", "--poisoned", "1000000")

    outcome = host.run()

    assert (outcome.status, outcome.exit_code) == ("failed", 5)
    assert outcome.message.startswith("not finite in 3 rounds in a row (max_nonfinite)")
    assert len(details(host, "nonfinite")) == 3
    assert_finite_state(host, "failed")


def test_rate_of_every_rank_is_that_of_the_samples_merged_by_all(play: Any) -> None:
    host: OneHost = play(3, "cpu_cadence", "--decay", "--step-ms", "2,2,6")

    assert host.run().status == "completed"

    merged_by = {-1: 0}
    for record in host.records:
        if record.event == "commit":
            version = record.fields["version"]
            merged_by[version] = merged_by[version - 1] + sum(count for *_, count in record.fields["spans"])
    for rank in host.ranks.values():
        for report in (message for message in rank.said if isinstance(message, WindowDone) and message.steps):
            assert report.learning_rate is not None
            batches = merged_by[report.version + 1] / BATCH_SIZE
            assert 0.01 / report.learning_rate - 1 == pytest.approx(batches, abs=1.0)


def test_loss_scaling_and_micro_batches_train_every_sample_in_a_cohort(play: Any, tmp_path: Path) -> None:
    host: OneHost = play(2, "cpu_cadence", "--precision", "fp16", "--accumulate", "4")

    outcome = host.run()

    assert (outcome.status, merged(host)) == ("completed", SIZE * EPOCHS), outcome
    assert (tmp_path / "final-0.json").read_text() == (tmp_path / "final-1.json").read_text()
    assert details(host, "nonfinite") == []
