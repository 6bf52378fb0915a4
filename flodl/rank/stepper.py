"""One rank's model, optimizer and data: trains one batch at a time and keeps the window's sums.

No step waits for the device on account of the loss: it is summed where it lies and read once per window. On CUDA the
thread stays at most one step ahead of the device, so that the times of steps are the device's times.
"""

import math
import time
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flodl.core.events import StepDone, WindowAccounted
from flodl.data.device import to_device
from flodl.data.loader import BatchLoader
from flodl.errors import DeadlineExceeded, UsageError
from flodl.ids import Grant, RankId
from flodl.spec import context
from flodl.spec.job import TrainingJob

BATCH_WAIT_S: Final = 0.2
"""How long a step waits for the data before the rank listens to orders again; then it waits on."""


class Stepper:
    """Made by ``build_stepper``. Everything but ``close`` belongs to the training thread."""

    def __init__(
        self,
        job: TrainingJob,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: BatchLoader,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.newest_epoch = 0
        self._train_step, self._max_grad_norm = job.train_step, job.config.max_grad_norm
        self._loader = loader
        self._losses = _DeviceSum(device) if device.type == "cuda" else _HostSum()
        self._pace = _Pace() if device.type == "cuda" else None

    def push(self, grant: Grant) -> None:
        """A new lease: load its batches behind those of earlier ones."""
        self._loader.push(grant)

    def step(self) -> StepDone | None:
        """Train the next batch; None when the dataset has not delivered it yet.

        Raises:
            UsageError: ``train_step`` returned no 0-d tensor.
            Exception: whatever the dataset, ``train_step``, backward or the optimizer raised.
        """
        try:
            batch = self._loader.next_batch(BATCH_WAIT_S)
        except DeadlineExceeded:
            return None
        self.newest_epoch = batch.epoch
        started_s = time.monotonic()
        data = to_device(batch.data, self.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss: Any = self._train_step(self.model, data)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(f"train_step returned {_describe(loss)}; return the loss of the batch, a 0-d tensor")
        loss.backward()  # type: ignore[no-untyped-call]
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()
        self._losses.add(loss.detach(), batch.samples)
        if self._pace is not None:
            self._pace.keep()
        return StepDone(batch.samples, started_s, time.monotonic())

    def account(self) -> WindowAccounted:
        """The sums since the last call: loss weighted by samples, and the user's scalars. Waits for the device."""
        loss_sum = self._losses.take()
        return WindowAccounted(
            loss_sum, math.isfinite(loss_sum), context.scalars().drain(), _learning_rate(self.optimizer)
        )

    def close(self) -> None:
        """End the loading thread and its processes."""
        self._loader.close()


def build_stepper(job: TrainingJob, device: torch.device, rank: RankId) -> Stepper:
    """Build the user's model and optimizer on ``device``, and a loader over the dataset.

    Raises:
        UsageError: one of the functions returned something else.
        Exception: whatever the script's functions raised.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = job.build_model(device)
    if not isinstance(model, nn.Module):
        raise UsageError(f"build_model returned {_describe(model)}; return the model, a torch.nn.Module")
    optimizer = job.make_optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"make_optimizer returned {_describe(optimizer)}; return a torch.optim.Optimizer")
    config = job.config
    loader = BatchLoader(
        config.dataset,
        config.batch_size,
        config.seed,
        merges_single_tail(model),
        config.collate_fn,
        config.num_workers,
        worker_seed=config.seed * 1_000_003 + rank,
    )
    return Stepper(job, device, model, optimizer, loader)


def _learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The first parameter group's; schedules and fused optimizers may keep it in a tensor."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def merges_single_tail(model: nn.Module) -> bool:
    """Whether a last batch of one sample must join the one before it: batch norm cannot train on one sample."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


class _HostSum:
    """Reading a loss on the CPU waits for nothing."""

    def __init__(self) -> None:
        self._sum = 0.0

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self._sum += loss.item() * samples

    def take(self) -> float:
        taken, self._sum = self._sum, 0.0
        return taken


class _DeviceSum:
    """The sum stays on the device, in float64, until it is taken."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self._sum.add_(loss.reshape(()), alpha=samples)

    def take(self) -> float:
        taken = float(self._sum)
        self._sum.zero_()
        return taken


class _Pace:
    """Keeps the thread one step ahead of the device: after queuing step n it waits for the end of step n - 1."""

    def __init__(self) -> None:
        self._ends: list[Any] = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]

    def keep(self) -> None:
        self._ends[0].record()
        self._ends.reverse()
        self._ends[0].synchronize()


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
