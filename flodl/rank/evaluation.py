"""The evaluation on the elected rank: it leaves no trace in the training.

Modes of all modules and the state of every random generator that a dataset or a model may use are as before.
"""

import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from flodl.core.events import Evaluated
from flodl.data.device import to_device
from flodl.rank.words import describe
from flodl.spec.knobs import JobConfig


def evaluate(model: nn.Module, device: torch.device, config: JobConfig, epoch: int) -> Evaluated:
    """Run ``eval_fn`` over the evaluation dataset, in its own order: the mean weighted by the batches' samples.

    An exception of the script is printed here and goes into the event: the training goes on.
    """
    try:
        with undisturbed(model, device):
            value = _mean(model, device, config)
    except Exception as error:  # noqa: BLE001  # whatever the script raised
        traceback.print_exc()
        return Evaluated(epoch, 0.0, describe(error))
    return Evaluated(epoch, value, "")


def _mean(model: nn.Module, device: torch.device, config: JobConfig) -> float:
    eval_fn = config.eval_fn
    assert eval_fn is not None
    dataset: Any = config.eval_dataset
    total, size = 0.0, len(dataset)
    loader: DataLoader[Any] = DataLoader(dataset, config.batch_size, collate_fn=config.collate_fn)
    for number, data in enumerate(loader):
        samples = min(config.batch_size, size - number * config.batch_size)
        batch = to_device(data, device)
        total += samples * float(eval_fn(model, *_arguments(batch)))
    return total / size


def _arguments(batch: Any) -> tuple[Any, ...]:
    """What follows the model: the parts of a tuple or list, anything else as one argument."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it ``model`` is in eval mode and makes no gradients; afterwards all is as it was before."""
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            model.eval()
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, was_training in modes:
            module.training = was_training
