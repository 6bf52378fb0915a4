"""What must be equal in every process of a run, as text: names, shapes, hyperparameters and the script, never weights
or data.
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flodl.spec.knobs import JobConfig

MAX_TEXT = 200
"""A hyperparameter that prints longer is told by its type alone."""

_PLAIN = (bool, int, float, str, tuple, list, type(None))
_ADDRESS = " at 0x"
"""In the text of an object without one of its own, and different in every process."""

_OUTER_RULES = frozenset({"slots", "resets_inner"})
"""What an outer optimizer's class says to flodl; as good as its name."""


def config_fingerprint(config: JobConfig) -> dict[str, str]:
    """The part that the head knows as well as the ranks."""
    found = {"dataset": _dataset(config.dataset), "outer_optimizer": _outer(config.outer_optimizer)}
    if config.eval_dataset is not None:
        found["eval_dataset"] = _dataset(config.eval_dataset)
    script = _script()
    return found if script is None else {**found, "script": script}


def model_fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: object) -> dict[str, str]:
    """The classes of model, optimizer and scheduler, and each parameter group's size and hyperparameters."""
    groups = "; ".join(_group(group) for group in optimizer.param_groups)
    return {
        "model": _name(model),
        "optimizer": f"{_name(optimizer)} over {groups}",
        "scheduler": "none" if scheduler is None else _name(scheduler),
    }


def _script() -> str | None:
    """The file that this process was started with: its name and the beginning of its SHA-256; None in a session."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        content = Path(path).read_bytes() if path else None
    except OSError:
        return None
    return None if path is None or content is None else f"{Path(path).name} {hashlib.sha256(content).hexdigest()[:12]}"


def _dataset(dataset: Any) -> str:
    return f"{_name(dataset)} of {len(dataset)} samples"


def _outer(optimizer: Any) -> str:
    """As it prints; then the class and the attributes of one of the user's own, for its text may leave them out."""
    text = repr(optimizer)
    of_class = {name: value for owner in reversed(type(optimizer).__mro__) for name, value in vars(owner).items()}
    attributes = {
        name: value
        for name, value in of_class.items()
        if not name.startswith("_") and name not in _OUTER_RULES and isinstance(value, _PLAIN)
    } | getattr(optimizer, "__dict__", {})
    told = [f"{name}={_value(value)}" for name, value in sorted(attributes.items())]
    missing = [each for each in told if f"{each}," not in text and f"{each})" not in text]
    if not missing and text.startswith(f"{_name(optimizer)}("):
        return text
    return f"{text}, {_name(optimizer)} with {', '.join(missing) or 'nothing more'}"


def _group(group: Mapping[str, Any]) -> str:
    parameters = group["params"]
    values = ", ".join(f"{key}={_value(value)}" for key, value in sorted(group.items()) if key != "params")
    return f"{len(parameters)} tensors ({values})"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)}"
    text = repr(value)
    is_plain = isinstance(value, _PLAIN) and len(text) <= MAX_TEXT and _ADDRESS not in text
    return text if is_plain else type(value).__name__


def _name(value: object) -> str:
    return type(value).__qualname__
