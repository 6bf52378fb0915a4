"""A small model with everything that a state may hold, and what the tests of saving and resuming do with it."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from flodl.averaging.flat import FlatModel
from flodl.averaging.outer import OuterOptimizer
from flodl.averaging.outer_step import OuterStep
from flodl.rank.saving import WholeState
from flodl.rank.stepper import Stepper
from flodl.spec.state import StateInfo, inventory

INFO = StateInfo(epochs=3, version=17)
Build = Callable[..., Stepper]


class Net(nn.Module):
    """Tied weights, a frozen parameter, a strided one, two dtypes, buffers in and outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(4, 3).t())
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(int(torch.randint(0, 99, ()))), persistent=False)

    def loss(self, batch: int) -> torch.Tensor:
        x = torch.linspace(-1, batch, 15).reshape(5, 3) + self.narrow + self.mean
        return ((self.head(x) + x @ self.strided) * self.scale).square().mean()


class Table(nn.Module):
    """An embedding with sparse gradients, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 3, sparse=True)

    def loss(self, batch: int) -> torch.Tensor:
        return (self.rows(torch.tensor([batch % 10, 3])) - 1).square().mean()


class Warmup:
    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __call__(self, step: int) -> float:
        return 1.0


def train(stepper: Stepper, batches: range) -> None:
    model: Any = stepper.model
    for batch in batches:
        stepper.optimizer.zero_grad()
        model.loss(batch).backward()
        stepper.optimizer.step()
        stepper.schedule.advance()


def save(stepper: Stepper, fd: int, outer: OuterStep | None = None, is_async: bool = False) -> int:
    return WholeState(stepper, outer, is_async, fd).write(INFO)


def contents(fd: int, size_bytes: int) -> bytes:
    return os.pread(fd, size_bytes, 0)


def note_of(fd: int) -> Any:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    return json.loads(json.loads(os.pread(fd, length, 8))["__metadata__"]["flodl"])


def change_note(fd: int, change: Callable[[Any], Any]) -> None:
    """Write the file anew with its note changed."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    rest = os.pread(fd, os.fstat(fd).st_size, 8 + length)
    header = json.loads(os.pread(fd, length, 8))
    note = json.loads(header["__metadata__"]["flodl"])
    change(note)
    header["__metadata__"]["flodl"] = json.dumps(note)
    text = json.dumps(header).encode()
    os.pwrite(fd, len(text).to_bytes(8, "little") + text + rest, 0)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
        assert (
            left.detach()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(right.detach().contiguous().reshape(-1).view(torch.uint8))
        )
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right or left != left


def everything(stepper: Stepper) -> dict[str, Any]:
    return {
        "model": inventory(stepper.model)[0],
        "optimizer": stepper.optimizer.state_dict(),
        "schedule": stepper.schedule.state(),
        "scaler": None if stepper.scaler is None else stepper.scaler.state_dict(),
    }


def two_groups(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], torch.optim.Optimizer]:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        *rest, last = parameters
        return make([{"params": rest}, {"params": [last], "lr": 0.003, "weight_decay": 0.1}])

    return make_optimizer


def outer_of(stepper: Stepper, optimizer: OuterOptimizer, versions: int = 0) -> OuterStep:
    """An outer optimizer that has published ``versions`` + 1 versions of what the rank trains."""
    flat = FlatModel(stepper.model)
    outer = OuterStep(flat, optimizer, stepper.optimizer)
    for version in range(versions + 1 if versions else 0):
        image = flat.allocate()
        flat.pack(image, 1.0, 1.0, include_raw=True)
        flat.adopt(outer.publish(image), take_raw=True)
        train(stepper, range(version, version + 1))
    return outer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adam, a tensor rate": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
    "two groups": two_groups(lambda p: torch.optim.AdamW(p, 0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}

SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "cosine": lr_scheduler.CosineAnnealingLR,
    "milestones": lambda o, steps: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "one cycle": lambda o, steps: lr_scheduler.OneCycleLR(o, 0.1, total_steps=steps + 1),
    "cyclic": lambda o, steps: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "restarts": lambda o, steps: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "sequence": lambda o, steps: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chain": lambda o, steps: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.PolynomialLR(o, steps)], o
    ),
    "lambda": lambda o, steps: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}
