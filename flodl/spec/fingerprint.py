"""What must be equal in every process of a run, as text: names, shapes and hyperparameters, never weights or data."""

from collections.abc import Mapping
from typing import Any

import torch

from flodl.spec.knobs import JobConfig

MAX_TEXT = 200
"""A hyperparameter that prints longer is told by its type alone."""


def config_fingerprint(config: JobConfig) -> dict[str, str]:
    """The part that the head knows as well as the ranks."""
    found = {"dataset": _dataset(config.dataset), "outer_optimizer": repr(config.outer_optimizer)}
    if config.eval_dataset is not None:
        found["eval_dataset"] = _dataset(config.eval_dataset)
    return found


def model_fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: object) -> dict[str, str]:
    """The classes of model, optimizer and scheduler, and each parameter group's size and hyperparameters."""
    groups = "; ".join(_group(group) for group in optimizer.param_groups)
    return {
        "model": _name(model),
        "optimizer": f"{_name(optimizer)} over {groups}",
        "scheduler": "none" if scheduler is None else _name(scheduler),
    }


def _dataset(dataset: Any) -> str:
    return f"{_name(dataset)} of {len(dataset)} samples"


def _group(group: Mapping[str, Any]) -> str:
    parameters = group["params"]
    values = ", ".join(f"{key}={_value(value)}" for key, value in sorted(group.items()) if key != "params")
    return f"{len(parameters)} tensors ({values})"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)}"
    text = repr(value)
    is_plain = isinstance(value, bool | int | float | str | tuple | list | None) and len(text) <= MAX_TEXT
    return text if is_plain else type(value).__name__


def _name(value: object) -> str:
    return type(value).__qualname__
