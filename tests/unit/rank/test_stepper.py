"""One step and one window: who does what to the model, what is summed, what is refused."""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import flodl
from flodl.core.events import StepDone
from flodl.data.permutation import EpochOrder
from flodl.errors import UsageError
from flodl.ids import Grant, Span
from flodl.rank.stepper import Stepper, build_stepper, merges_single_tail

CPU = torch.device("cpu")
Build = Callable[..., Stepper]


@pytest.fixture
def build(make_job: Any, in_run: None) -> Iterator[Build]:
    built: list[Stepper] = []

    def make(**kwargs: Any) -> Stepper:
        built.append(build_stepper(make_job(**kwargs), CPU, 0))
        return built[-1]

    yield make
    for stepper in built:
        stepper.close()


def step(stepper: Stepper) -> StepDone:
    for _ in range(3_000):  # each waits for the loader a moment
        if (done := stepper.step()) is not None:
            return done
    raise AssertionError("no batch")


def test_a_step_is_what_a_plain_loop_does(build: Build, make_job: Any) -> None:
    torch.manual_seed(0)
    stepper = build(make_optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    stepper.push(Grant(0, (Span(0, 20),)))
    dataset, losses = make_job().config.dataset, 0.0

    for _ in range(5):
        step(stepper)
    order = EpochOrder(20, 0, 0).indices([Span(0, 20)]).tolist()
    for start in range(0, 20, 4):
        x, y = (torch.stack(part) for part in zip(*(dataset[i] for i in order[start : start + 4]), strict=True))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses += 4 * loss.item()

    assert all(torch.equal(a, b) for a, b in zip(stepper.model.parameters(), model.parameters(), strict=True))
    assert stepper.account().loss_sum == losses


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)])
def test_the_window_tells_the_learning_rate_of_the_first_group(build: Build, rate: Any) -> None:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight], "lr": rate}, {"params": [bias], "lr": 0.5}])

    stepper = build(make_optimizer=make_optimizer)

    assert stepper.account().learning_rate == 0.25
    stepper.optimizer.param_groups[0]["lr"] = 0.125
    assert stepper.account().learning_rate == 0.125


def test_optimizer_without_a_learning_rate_tells_none(build: Build) -> None:
    stepper = build()
    del stepper.optimizer.param_groups[0]["lr"]

    assert stepper.account().learning_rate is None


def test_the_window_weighs_losses_by_samples_and_starts_anew(build: Build) -> None:
    def step_of_size(model: Any, batch: Any) -> torch.Tensor:
        flodl.record_scalar("size", len(batch[0]))
        return model.weight.sum() * 0 + len(batch[0])

    stepper = build(train_step=step_of_size, batch_size=8)
    stepper.push(Grant(3, (Span(0, 20),)))

    done = [step(stepper) for _ in range(3)]
    window = stepper.account()

    assert [each.samples for each in done] == [8, 8, 4]
    assert all(each.started_s <= each.ended_s for each in done)
    assert (window.loss_sum, window.is_finite) == (64.0 + 64.0 + 16.0, True)
    assert window.scalars == {"size": (20.0, 3)}
    assert stepper.newest_epoch == 3
    assert stepper.account().loss_sum == 0.0


def test_a_loss_that_is_not_finite_marks_the_window(build: Build) -> None:
    stepper = build(train_step=lambda model, batch: model.weight.sum() * math.inf)
    stepper.push(Grant(0, (Span(0, 4),)))
    step(stepper)

    assert not stepper.account().is_finite
    assert stepper.account().is_finite


def test_gradients_are_clipped_to_the_norm(build: Build) -> None:
    stepper = build(train_step=lambda model, batch: 1e3 * model.weight.sum(), max_grad_norm=0.5)
    before = stepper.model.weight.item()
    stepper.push(Grant(0, (Span(0, 4),)))
    step(stepper)

    assert before - stepper.model.weight.item() == pytest.approx(0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("returned", "words"),
    [(None, "None"), (1.0, "a float"), (torch.zeros(3), r"a tensor of shape \[3\]")],
)
def test_a_step_that_returns_no_loss_is_refused_with_what_it_returned(build: Build, returned: Any, words: str) -> None:
    stepper = build(train_step=lambda model, batch: returned)
    stepper.push(Grant(0, (Span(0, 4),)))

    with pytest.raises(UsageError, match=f"train_step returned {words}"):
        step(stepper)


def test_functions_that_return_something_else_are_named(make_job: Any) -> None:
    with pytest.raises(UsageError, match="build_model returned a int"):
        build_stepper(make_job(build_model=lambda device: 3), CPU, 0)
    with pytest.raises(UsageError, match="make_optimizer returned None"):
        build_stepper(make_job(make_optimizer=lambda parameters: None), CPU, 0)


def test_a_slow_dataset_lets_the_rank_listen(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flodl.rank.stepper.BATCH_WAIT_S", 0.01)
    gate = threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            gate.wait(30.0)
            return torch.zeros(1), torch.zeros(1)

    stepper = build(dataset=Slow())
    stepper.push(Grant(0, (Span(0, 4),)))

    assert stepper.step() is None
    gate.set()
    assert step(stepper).samples == 4


def test_batch_norm_asks_for_no_lone_last_sample() -> None:
    assert merges_single_tail(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    assert not merges_single_tail(nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)))
