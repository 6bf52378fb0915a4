"""A batch on its way to the device that trains it."""

from collections.abc import Mapping
from typing import Any

import torch


def to_device(data: Any, device: torch.device) -> Any:
    """``data`` with every tensor in it on ``device``; containers keep their type, everything else is passed through.

    Walks mappings, lists, tuples and named tuples; objects with a ``to`` method of their own (packed sequences,
    tokenizer batches) are asked themselves.
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(item, device) for item in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(item, device) for item in data)
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: to_device(value, device) for key, value in data.items()}
    return data
