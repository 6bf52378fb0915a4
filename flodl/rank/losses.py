"""The losses of one window, summed where they lie, and the first step whose loss was not finite.

A sum that is not finite stays so, whatever is added: after each step it tells whether all losses so far were.
"""

import math
from typing import Protocol

import torch


class LossSum(Protocol):
    """What the stepper needs; one per kind of device."""

    def add(self, loss: torch.Tensor, samples: int) -> None:
        """Add the mean loss of ``samples`` samples."""
        ...

    def end_step(self) -> None:
        """All losses of one step are added."""
        ...

    def take(self) -> tuple[float, int]:
        """The sum since the last call, and the first step (from 1) that made it not finite, or 0."""
        ...


class HostSum:
    """Reading a loss on the CPU waits for nothing."""

    def __init__(self) -> None:
        self._sum, self._steps, self._bad_step = 0.0, 0, 0

    def add(self, loss: torch.Tensor, samples: int) -> None:
        """See ``LossSum``."""
        self._sum += loss.item() * samples

    def end_step(self) -> None:
        """See ``LossSum``."""
        self._steps += 1
        if not self._bad_step and not math.isfinite(self._sum):
            self._bad_step = self._steps

    def take(self) -> tuple[float, int]:
        """See ``LossSum``."""
        taken = self._sum, self._bad_step
        self._sum, self._steps, self._bad_step = 0.0, 0, 0
        return taken


class DeviceSum:
    """Sum and count stay on the device, in float64 and int64, until they are taken."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._finite_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._steps = 0

    def add(self, loss: torch.Tensor, samples: int) -> None:
        """See ``LossSum``."""
        self._sum.add_(loss.reshape(()), alpha=samples)

    def end_step(self) -> None:
        """See ``LossSum``."""
        self._steps += 1
        self._finite_steps.add_(torch.isfinite(self._sum))

    def take(self) -> tuple[float, int]:
        """See ``LossSum``."""
        taken, finite_steps = float(self._sum), int(self._finite_steps)
        bad_step = finite_steps + 1 if finite_steps < self._steps else 0
        self._sum.zero_()
        self._finite_steps.zero_()
        self._steps = 0
        return taken, bad_step
