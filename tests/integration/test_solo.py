"""Solo end to end in this process: coverage, results, failures, stopping; and Ctrl-C in a process of its own."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flodl
from flodl.errors import TooFewRanks

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


class Blobs:
    """Two classes of points; every read is noted."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.y = torch.arange(size) % 2
        self.x = torch.randn(size, 2, generator=generator) + 4.0 * self.y[:, None]
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads[index] += 1
        return self.x[index], self.y[index]


def build_model(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return (model(x).argmax(dim=1) == y).float().mean().item()


def builder(dataset: Any, step: Any = train_step, build: Any = build_model) -> Any:
    return flodl.Trainer.builder(build, make_optimizer, step).dataset(dataset).batch_size(8)


@pytest.mark.parametrize("mode", list(flodl.ElCheMode))
def test_every_sample_of_every_epoch_is_trained_once_in_every_mode(mode: flodl.ElCheMode) -> None:
    data = Blobs(101)  # the last sample joins the batch before it, for the model has batch norm

    state = builder(data).num_epochs(3).elche(flodl.ElCheConfig(mode=mode)).run().join(LIMIT_S)

    assert data.reads == dict.fromkeys(range(101), 3)
    assert (state.outcome, state.epochs) == ("completed", 3)


def test_results_arrive_and_the_state_is_the_models() -> None:
    models: list[nn.Module] = []
    metrics: list[flodl.EpochMetrics] = []
    evals: list[tuple[int, float]] = []

    def build(device: torch.device) -> nn.Module:
        models.append(build_model(device))
        return models[-1]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        flodl.record_scalar("size", len(batch[1]))
        return train_step(model, batch)

    handle = (
        builder(Blobs(100), step, build)
        .num_epochs(4)
        .eval_dataset(Blobs(50))
        .eval_fn(accuracy)
        .metrics_fn(metrics.append)
        .eval_result_fn(lambda epoch, value: evals.append((epoch, value)))
        .run()
    )
    state = handle.join(LIMIT_S)

    assert [(m.epoch, m.samples, m.scalars["size"]) for m in metrics] == [
        (e, 100, pytest.approx(100 / 13)) for e in range(4)
    ]
    assert metrics[-1].avg_loss is not None
    assert metrics[-1].avg_loss < metrics[0].avg_loss
    assert metrics[-1].per_rank_batch_share == {0: 1.0}
    assert handle.poll_metrics() == metrics
    assert [epoch for epoch, _ in evals] == [0, 1, 2, 3]
    assert evals[-1][1] > 0.95
    wanted = models[0].state_dict()
    assert state.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in state.state_dict().items())
    assert flodl.is_head()
    assert (flodl.rank(), flodl.world_size()) == (0, 1)


def test_the_same_seed_gives_the_same_weights() -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return builder(Blobs(64)).num_epochs(2).seed(5).run().join(LIMIT_S).params

    assert all(torch.equal(a, b) for a, b in zip(weights(), weights(), strict=True))


@pytest.mark.parametrize("place", ["build", "step", "data"])
def test_join_raises_the_scripts_own_exception(place: str) -> None:
    def fail(*arguments: Any) -> Any:
        raise ValueError("planted")

    class Broken(Blobs):
        __getitem__ = fail

    handle = (
        builder(
            (Broken if place == "data" else Blobs)(20),
            fail if place == "step" else train_step,
            fail if place == "build" else build_model,
        )
        .num_epochs(1)
        .run()
    )

    with pytest.raises(ValueError, match="planted"):
        handle.join(LIMIT_S)
    builder(Blobs(20)).num_epochs(1).run().join(LIMIT_S)  # the next run is welcome


def test_a_loss_that_is_not_finite_ends_the_run_by_name() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return train_step(model, batch) * float("nan")

    with pytest.raises(TooFewRanks, match="not finite") as raised:
        builder(Blobs(20), step).num_epochs(50).run().join(LIMIT_S)
    assert raised.value.exit_code == 5, "as in a cluster"


def test_a_failing_evaluation_does_not_stop_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*arguments: Any) -> float:
        raise ValueError("planted in eval_fn")

    handle = builder(Blobs(20)).num_epochs(2).eval_dataset(Blobs(8)).eval_fn(fail).run()

    assert handle.join(LIMIT_S).epochs == 2
    assert capsys.readouterr().err.count("ValueError: planted in eval_fn") == 2


def test_a_slow_callback_does_not_hold_the_training_and_join_waits_for_it() -> None:
    gate, done = threading.Event(), []

    def slow(metrics: flodl.EpochMetrics) -> None:
        gate.wait(LIMIT_S)
        done.append(metrics.epoch)

    handle = builder(Blobs(20)).num_epochs(3).metrics_fn(slow).run()
    taken = [handle.next_metrics(LIMIT_S) for _ in range(3)]
    assert [each.epoch for each in taken if each is not None] == [0, 1, 2]
    assert done == []
    gate.set()
    handle.join(LIMIT_S)
    assert done == [0, 1, 2]


# ------------------------------------------------------------------------------------------- in a process of its own
SCRIPT = """
    import sys, time
    import torch
    from torch import nn
    import flodl

    class Zeros:
        def __len__(self): return 1000
        def __getitem__(self, index): return torch.zeros(2)

    def step(model, batch):
        print("step", flush=True)
        time.sleep(0.02)
        return model(batch).sum()

    handle = flodl.Trainer.builder(lambda device: nn.Linear(2, 1), lambda p: torch.optim.SGD(p, 0.1), step)
    handle = handle.dataset(Zeros()).batch_size(4).num_epochs(1000).run()
"""
JOIN = """
    state = handle.join()
    print("joined", state.outcome, flush=True)
"""


def script(folder: Path, text: str) -> "subprocess.Popen[str]":
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_the_first_ctrl_c_stops_in_order_and_join_returns(tmp_path: Path, deadline_factor: float) -> None:
    with script(tmp_path, SCRIPT + JOIN) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S * deadline_factor)

    assert out.splitlines()[-1] == "joined stopped"
    assert "stopping in order" in err
    assert process.returncode == 0


def test_the_second_ctrl_c_ends_at_once(tmp_path: Path, deadline_factor: float) -> None:
    text = SCRIPT.replace("time.sleep(0.02)", "time.sleep(600)") + JOIN
    with script(tmp_path, text) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert "stopping in order" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S * deadline_factor)

    assert "KeyboardInterrupt" in err
    assert process.returncode == -signal.SIGINT


def test_a_script_that_never_joins_is_told_so(tmp_path: Path, deadline_factor: float) -> None:
    with script(tmp_path, SCRIPT) as process:
        _, err = process.communicate(timeout=LIMIT_S * deadline_factor)

    assert "keep the handle and call join()" in err
    assert process.returncode == 2


@pytest.mark.parametrize("size", [41, 42])
def test_rate_of_each_batch_is_that_of_a_plain_loop(size: int) -> None:
    rates: list[float] = []
    optimizers: list[torch.optim.Optimizer] = []
    totals: list[int] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(make_optimizer(parameters))
        return optimizers[-1]

    def schedule(optimizer: torch.optim.Optimizer, total: int) -> Any:
        totals.append(total)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        rates.append(optimizers[0].param_groups[0]["lr"])
        return train_step(model, batch)

    run = flodl.Trainer.builder(build_model, make, step).dataset(Blobs(size)).batch_size(4).num_epochs(2)
    run.epoch_splits(2).scheduler_fn(schedule).run().join(LIMIT_S)

    plain = make_optimizer(build_model(torch.device("cpu")).parameters())
    expected, scheduler = [], schedule(plain, totals[0])
    for _ in range(totals[0]):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    assert rates == expected


def test_last_sample_alone_trains_in_mixed_precision_and_micro_batches() -> None:
    sizes: list[int] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        sizes.append(len(batch[0]))
        return train_step(model, batch)

    run = builder(Blobs(5), step).batch_size(4).num_epochs(2)
    state = run.precision("bf16").accumulate(2).max_grad_norm(1.0).run().join(LIMIT_S)

    assert sizes == [3, 2] * 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.params)
