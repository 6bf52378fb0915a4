"""One training job as the roles take it: the three functions of the user and the resolved knobs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from flodl.errors import UsageError
from flodl.spec.knob import call_fault
from flodl.spec.knobs import JobConfig

BuildModel: TypeAlias = Callable[[torch.device], torch.nn.Module]
"""Builds the model on the given device."""

MakeOptimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]
"""Takes the model's parameters (an iterator, as torch's optimizers do)."""

TrainStep: TypeAlias = Callable[[Any, Any], torch.Tensor]
"""``train_step(model, batch) -> loss``, a 0-d tensor that backward can start from. The engine owns the rest."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What a role shell needs from the user's script."""

    build_model: BuildModel
    make_optimizer: MakeOptimizer
    train_step: TrainStep
    config: JobConfig


def checked_functions(build_model: object, make_optimizer: object, train_step: object) -> None:
    """Raise UsageError when one of the three is no function of its arguments, naming the usual slip."""
    if isinstance(build_model, torch.nn.Module):
        raise UsageError(
            "build_model is a model already; pass a function of the device, such as "
            "`lambda device: Net().to(device)`, for every rank builds its own"
        )
    if isinstance(make_optimizer, torch.optim.Optimizer):
        raise UsageError(
            "make_optimizer is an optimizer already; pass a function of the parameters, such as "
            "`lambda parameters: torch.optim.Adam(parameters, 1e-3)`"
        )
    given = {"build_model": build_model, "make_optimizer": make_optimizer, "train_step": train_step}
    arguments = {"build_model": ("device",), "make_optimizer": ("parameters",), "train_step": ("model", "batch")}
    for name, value in given.items():
        if not callable(value):
            raise UsageError(f"{name} is {value!r}; pass a function")
        if fault := call_fault(name, value, arguments[name]):
            raise UsageError(fault)
