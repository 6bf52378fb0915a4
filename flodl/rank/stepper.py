"""One rank's model, optimizer and data: trains one batch at a time and keeps the window's sums.

No step waits for the device on account of the loss: it is summed where it lies and read once per window. On CUDA the
thread stays at most one step ahead of the device, so that the times of steps are the device's times.
"""

import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any, Final, assert_never

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flodl.core.events import StepDone, WindowAccounted
from flodl.data.device import to_device
from flodl.data.loader import BatchLoader, MicroBatch
from flodl.errors import DeadlineExceeded, UsageError
from flodl.ids import Grant, RankId
from flodl.messages import Precision
from flodl.rank.backup import Backup, Memory
from flodl.rank.clipping import clip_gradient
from flodl.rank.losses import DeviceSum, HostSum, LossSum
from flodl.rank.refusals import checked_loss, checked_optimizer, misuse_behind
from flodl.rank.schedule import Schedule, build_scheduler, scale_learning_rates, total_steps
from flodl.rank.words import describe_value
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
        schedule: Schedule,
        loader: BatchLoader,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.device = model, optimizer, schedule.scheduler, device
        self.newest_epoch = 0
        self._train_step, self._max_grad_norm = job.train_step, job.config.max_grad_norm
        self._precision = Precision(job.config.precision)
        self.scaler = torch.amp.GradScaler(device.type) if self._precision is Precision.FP16 else None
        self.schedule, self._loader = schedule, loader
        self._backup = Backup(optimizer, schedule, self.scaler)
        self._losses: LossSum = DeviceSum(device) if device.type == "cuda" else HostSum()
        self._pace = _Pace() if device.type == "cuda" else None

    def push(self, grant: Grant) -> None:
        """A new lease: load its batches behind those of earlier ones."""
        self._loader.push(grant)

    def open_window(self, progress_samples: int, stride: float, steps: int = 0) -> None:
        """A window begins: bring the learning rate to where the run is (``core.actions.OpenWindow``)."""
        self.schedule.open_window(progress_samples, stride, steps)

    def step(self) -> StepDone | None:
        """Train the next batch; None when the dataset has not delivered it yet.

        Raises:
            UsageError: ``train_step`` returned no loss that backward can start from, or met another misuse.
            Exception: whatever the dataset, ``train_step``, backward or the optimizer raised.
        """
        try:
            batch = self._loader.next_batch(BATCH_WAIT_S)
        except DeadlineExceeded:
            return None
        self.newest_epoch = batch.epoch
        started_s = time.monotonic()
        self.optimizer.zero_grad(set_to_none=True)
        for part in batch.parts:
            self._add_gradient(part, batch.samples)
        self._apply_gradient()
        self._losses.end_step()
        self.schedule.advance()
        if self._pace is not None:
            self._pace.keep()
        return StepDone(batch.samples, started_s, time.monotonic())

    def account(self) -> WindowAccounted:
        """The sums since the last call: loss weighted by samples, and the user's scalars. Waits for the device."""
        loss_sum, bad_step = self._losses.take()
        return WindowAccounted(
            loss_sum, not bad_step, context.scalars().drain(), _learning_rate(self.optimizer), bad_step
        )

    def back_up(self) -> None:
        """A round is committed: keep what optimizer, schedule and loss scaler remember."""
        self._backup.save()

    def roll_back(self) -> None:
        """The last window's work was left out, not being finite: forget what it did to them."""
        self._backup.restore()

    @property
    def memory(self) -> Memory:
        """What optimizer, schedule and loss scaler remember now."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return Memory(self.optimizer.state, self.optimizer.param_groups, self.schedule.state(), scaler)

    @property
    def kept_memory(self) -> Memory | None:
        """What they remembered at the last ``back_up``; None before the first."""
        return self._backup.kept

    def close(self) -> None:
        """End the loading thread and its processes."""
        self._loader.close()

    def _add_gradient(self, part: MicroBatch, batch_samples: int) -> None:
        """Weighted by samples, the gradients of mean losses add up to the whole batch's."""
        data = to_device(part.data, self.device)
        try:
            with self._autocast():
                returned = self._train_step(self.model, data)
            loss = checked_loss(returned, self._train_step)
            weighted = loss if part.samples == batch_samples else loss * (part.samples / batch_samples)
            scaled: Any = weighted if self.scaler is None else self.scaler.scale(weighted)
            scaled.backward()
        except (ValueError, RuntimeError) as error:
            misuse = misuse_behind(error, part.samples, self._train_step)
            if misuse is None:
                raise
            raise misuse from error
        self._losses.add(loss.detach(), part.samples)

    def _apply_gradient(self) -> None:
        if self.scaler is not None and self._max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
        if self._max_grad_norm is not None:
            clip_gradient(self.model.parameters(), self._max_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _autocast(self) -> AbstractContextManager[Any]:
        match self._precision:
            case Precision.FP32:
                return contextlib.nullcontext()
            case Precision.BF16:
                return torch.autocast(self.device.type, torch.bfloat16)
            case Precision.FP16:
                return torch.autocast(self.device.type, torch.float16)
            case _:
                assert_never(self._precision)


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
        raise UsageError(f"build_model returned {describe_value(model)}; return the model, a torch.nn.Module")
    if not any(isinstance(each, nn.UninitializedParameter) or each.numel() for each in model.parameters()):
        raise UsageError(
            f"build_model returned a {type(model).__name__} without parameters, so there is nothing to train; create "
            "them in build_model, also those that depend on the first batch"
        )
    optimizer = checked_optimizer(job.make_optimizer(model.parameters()), job.make_optimizer)
    config, merge_single_tail = job.config, merges_single_tail(model)
    _refuse_misfits(job, model, merge_single_tail)
    scale_learning_rates(optimizer, config.lr_scale_ratio, context.world_size())
    settings = config.settings()
    scheduler = build_scheduler(config.scheduler_fn, optimizer, total_steps(settings, merge_single_tail))
    loader = BatchLoader(
        config.dataset,
        config.batch_size,
        config.seed,
        merge_single_tail,
        config.collate_fn,
        config.num_workers,
        worker_seed=config.seed * 1_000_003 + rank,
        accumulate=config.accumulate,
    )
    return Stepper(job, device, model, optimizer, Schedule(scheduler, settings, merge_single_tail), loader)


def _refuse_misfits(job: TrainingJob, model: nn.Module, has_batch_norm: bool) -> None:
    """What can only be told once the model is there."""
    config = job.config
    if has_batch_norm and config.accumulate > max(1, config.batch_size // 2):
        raise UsageError(
            f"accumulate({config.accumulate}) cuts a batch of {config.batch_size} into micro-batches of one sample, "
            f"which batch norm cannot train on; lower accumulate to at most {max(1, config.batch_size // 2)}"
        )
    if config.precision == Precision.FP16:
        for name, parameter in model.named_parameters():
            if parameter.dtype is torch.float16:
                raise UsageError(
                    f"precision is fp16 and parameter {name} is float16 already; drop .half() and keep the model in "
                    "float32, for the loss scaler needs gradients in full precision"
                )


def _learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The first parameter group's; schedules and fused optimizers may keep it in a tensor."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def merges_single_tail(model: nn.Module) -> bool:
    """Whether a last batch of one sample must join the one before it: batch norm cannot train on one sample."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


class _Pace:
    """Keeps the thread one step ahead of the device: after queuing step n it waits for the end of step n - 1."""

    def __init__(self) -> None:
        self._ends: list[Any] = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]

    def keep(self) -> None:
        self._ends[0].record()
        self._ends.reverse()
        self._ends[0].synchronize()
