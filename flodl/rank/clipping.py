"""Clipping the gradient of one step; torch's own function knows no norm of a sparse gradient."""

from collections.abc import Iterable
from typing import Final

import torch
from torch import nn

_EPSILON: Final = 1e-6
"""That of ``torch.nn.utils.clip_grad_norm_``."""


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale the gradients of ``parameters``, dense and sparse, so that their common 2-norm is at most ``max_norm``.

    A row that a sparse gradient names several times counts with its sum, as the optimizer takes it.
    """
    having = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(parameter.grad.is_sparse for parameter in having if parameter.grad is not None):
        nn.utils.clip_grad_norm_(having, max_norm)
        return
    values = [_values(parameter) for parameter in having]
    scale = (max_norm / (nn.utils.get_total_norm(values) + _EPSILON)).clamp(max=1.0)
    for each in values:
        each.mul_(scale.to(each.device))


def _values(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient's numbers as a dense tensor over the same memory."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient = gradient.coalesce()
    return gradient._values()
