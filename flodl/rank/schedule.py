"""The learning rate follows the run, not the rank: the user's scheduler is stepped to the position of the whole run.

A position counts global batches: how many the run as a whole has trained, one after the other. A scheduler that was
stepped n times gives the rate of global batch n, so the curve over samples does not depend on the number of ranks.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, PolynomialLR, ReduceLROnPlateau

from flodl.errors import UsageError
from flodl.ids import batch_count
from flodl.messages import Settings
from flodl.rank.words import describe_value

SchedulerFn = Callable[[torch.optim.Optimizer, int], Any]

_HORIZONS: Final = ("T_max", "total_steps", "total_iters")
"""What torch's schedulers call the number of steps that they are built for."""

_ROUNDING: Final = 1e-6
"""Batches: a position that is a whole number but for the noise of a division counts as that number."""


class Schedule:
    """The position of one rank's learning rate."""

    def __init__(self, scheduler: Any, settings: Settings, merge_single_tail: bool) -> None:
        """Assigns only. ``scheduler`` has ``step()``, or is None for a constant rate."""
        self.scheduler = scheduler
        self._dataset_size, self._batch_size = settings.dataset_size, settings.batch_size
        self._pass_batches = batch_count(settings.dataset_size, settings.batch_size, merge_single_tail)
        self._total_steps = total_steps(settings, merge_single_tail)
        self._position, self._stride = 0.0, 1.0
        self._done = 0

    def open_window(self, progress_samples: int, stride: float, steps: int = 0) -> None:
        """The run has merged ``progress_samples``; a step of this rank is ``stride`` batches; ``steps`` are done."""
        passes, samples = divmod(progress_samples, self._dataset_size)
        batches = min(samples / self._batch_size, self._pass_batches)
        self._position, self._stride = passes * self._pass_batches + batches + steps * stride, stride
        self._follow()

    def advance(self) -> None:
        """This rank has done a step."""
        self._position += self._stride
        self._follow()

    @property
    def name(self) -> str | None:
        """The scheduler's class; None without one."""
        return None if self.scheduler is None else type(self.scheduler).__qualname__

    def state(self) -> tuple[int, Mapping[str, Any]] | None:
        """What ``restore`` takes; None for a scheduler that cannot be put back."""
        if not hasattr(self.scheduler, "state_dict") or not hasattr(self.scheduler, "load_state_dict"):
            return None
        return self._done, copy.deepcopy(self.scheduler.state_dict())

    def horizons(self, state: tuple[int, Mapping[str, Any]]) -> list[str]:
        """What the script's scheduler and one saved as ``state`` were built for, where they differ: named, both."""
        own = self.state()
        return [] if own is None else _differing(state[1], own[1])

    def keep_horizon(self, state: tuple[int, Mapping[str, Any]]) -> tuple[int, Mapping[str, Any]] | None:
        """``state`` with the horizon that the script's scheduler was built for.

        None where the rate does not follow from position and horizon alone, or where the position is beyond it.
        """
        own = self.state()
        if own is None or type(self.scheduler) not in (CosineAnnealingLR, PolynomialLR, OneCycleLR):
            return None
        horizon = {key: own[1][key] for key in (*_HORIZONS, "_schedule_phases") if key in own[1]}
        kept = {**state[1], **horizon}
        beyond = any(kept["last_epoch"] > horizon[key] for key in _HORIZONS if key in horizon)
        return None if beyond else (state[0], kept)

    def renew_rate(self) -> None:
        """The rate, and a momentum that cycles, of where a scheduler that ``keep_horizon`` knows stands."""
        scheduler = self.scheduler
        if isinstance(scheduler, OneCycleLR):
            scheduler.last_epoch -= 1
            scheduler._step_count -= 1
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                scheduler.step()
            return
        rates = scheduler._get_closed_form_lr()
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = float(rate)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]

    def restore(self, state: tuple[int, Mapping[str, Any]]) -> None:
        """Back to ``state``; the next window's position is caught up with as ever."""
        self._done = state[0]
        self.scheduler.load_state_dict(copy.deepcopy(state[1]))

    def _follow(self) -> None:
        """Step the scheduler as often as it lags behind; a position behind it waits until the run has caught up."""
        if self.scheduler is None:
            return
        due = min(math.floor(self._position + _ROUNDING), self._total_steps)
        while self._done < due:
            try:
                self._step_scheduler()
            except Exception as error:
                error.add_note(
                    f"scheduler_fn's {type(self.scheduler).__name__} failed at step {self._done + 1} of "
                    f"{self._total_steps}: flodl steps it once per batch of the whole run; build it for total_steps, "
                    f"the second argument of scheduler_fn"
                )
                raise
            self._done += 1

    def _step_scheduler(self) -> None:
        if self._done:
            self.scheduler.step()
            return
        with warnings.catch_warnings():  # a rank without a step yet, or one that the loss scaler skipped, is no mistake
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.scheduler.step()


def _differing(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    found = [
        f"{key.lstrip('_')} {_shown(saved[key])} there, {_shown(own[key])} in the script"
        for key in (*_HORIZONS, "milestones", "_milestones")
        if key in saved and key in own and saved[key] != own[key]
    ]
    parts = (saved.get("_schedulers"), own.get("_schedulers"))  # of one that is made of others
    if all(isinstance(part, list | tuple) for part in parts):
        for there, here in zip(*parts, strict=False):  # type: ignore[arg-type]  # they are sequences
            found += _differing(there, here) if isinstance(there, Mapping) and isinstance(here, Mapping) else []
    return found


def _shown(value: Any) -> str:
    return f"{sorted(value) if isinstance(value, Mapping) else value!r}"[:80]


def total_steps(settings: Settings, merge_single_tail: bool) -> int:
    """Global batches of the whole run."""
    return settings.num_epochs * batch_count(settings.dataset_size, settings.batch_size, merge_single_tail)


def scale_learning_rates(optimizer: torch.optim.Optimizer, ratio: float, world_size: int) -> None:
    """Multiply every group's rate by ``1 + ratio · (world_size − 1)``."""
    factor = 1.0 + ratio * (world_size - 1)
    for group in optimizer.param_groups:
        if factor != 1.0 and "lr" in group:
            group["lr"] = group["lr"] * factor


def build_scheduler(make: SchedulerFn | None, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """What ``scheduler_fn`` returns, checked; None without one.

    Raises:
        UsageError: it cannot follow a count of steps.
        Exception: whatever the script's function raised.
    """
    if make is None:
        return None
    scheduler = make(optimizer, steps)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "scheduler_fn returned a ReduceLROnPlateau, which follows a metric; flodl steps a schedule once per batch "
            "of the whole run: return one that follows steps, such as CosineAnnealingLR(optimizer, total_steps)"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise UsageError(
            f"scheduler_fn returned {describe_value(scheduler)}; return a scheduler, an object with step(), such as "
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)"
        )
    return scheduler
