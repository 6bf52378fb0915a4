"""A toy job: a line through numbers, with everything that a test may want to bend."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flodl.rank.stepper import build_stepper
from flodl.spec import context
from flodl.spec.job import TrainingJob
from flodl.spec.knobs import resolve
from flodl.trainer.config import TrainerConfig
from tests.unit.rank.whole_states import Build, Net


class Line:
    """Sample i is (x, 2x + 1); every read is noted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append(index)
        x = torch.tensor([index / self.size])
        return x, 2 * x + 1


def mse(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


@pytest.fixture
def make_job() -> Callable[..., TrainingJob]:
    def make(
        dataset: Any = None,
        build_model: Any = lambda device: nn.Linear(1, 1),
        make_optimizer: Any = lambda parameters: torch.optim.SGD(parameters, 0.1),
        train_step: Any = mse,
        batch_size: int = 4,
        num_epochs: int = 1,
        **knobs: Any,
    ) -> TrainingJob:
        config = TrainerConfig(dataset or Line(20), batch_size=batch_size, num_epochs=num_epochs, **knobs)
        return TrainingJob(build_model, make_optimizer, train_step, resolve(config))

    return make


@pytest.fixture
def in_run() -> Iterator[None]:
    """This process is in a run: scalars are collected."""
    context.enter(context.Role.SOLO)
    yield
    context.leave()


@pytest.fixture
def build_net(make_job: Any, in_run: None) -> Iterator[Build]:
    """A stepper with weights of its own at every call."""
    built: list[Any] = []

    def make(model: Callable[[], nn.Module] = Net, **kwargs: Any) -> Any:
        torch.manual_seed(len(built))
        job = make_job(build_model=lambda device: model(), **kwargs)
        built.append(build_stepper(job, torch.device("cpu"), 0))
        return built[-1]

    yield make
    for stepper in built:
        stepper.close()


@pytest.fixture
def fd() -> Iterator[int]:
    """A file in memory, as a daemon gives it to a rank."""
    number = os.memfd_create("state")
    yield number
    os.close(number)
