"""A toy job: a line through numbers, with everything that a test may want to bend."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flodl.spec import context
from flodl.spec.job import TrainingJob
from flodl.spec.knobs import resolve
from flodl.trainer.config import TrainerConfig


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
