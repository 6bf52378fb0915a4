"""The user's side of ElChe: which mode, and how far the cadence may move. The rules themselves are in core."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

from flodl.core.guards import EASGD_THRESHOLD, ConvergenceGuard, settings_of
from flodl.errors import ConfigError
from flodl.messages import CadenceSettings, GuardKind, GuardSettings, Mode
from flodl.spec.knob import (
    Chained,
    Knob,
    KnobTable,
    call_fault,
    knob,
    non_negative_number,
    positive_number,
    whole_number,
    yes_or_no,
)

ElCheMode: TypeAlias = Mode
"""When a round fires and how parameters are averaged: NCCL_SYNC, NCCL_CADENCE, CPU_SYNC, CPU_CADENCE, CPU_ASYNC."""

MAX_GAMMA = 16
"""Any count of samples to this power is a float; beyond, the largest contribution would be all there is."""

RATIO_TOLERANCE = 1e-6
"""By how much ``partition_ratios`` may miss a sum of 1: thirds are written with a few digits."""

_NO_NCCL_ASYNC = (
    "nccl_async is not a mode: its in-place write-back raced with autograd and gained nothing. "
    "Asynchronous averaging belongs to the CPU plane, as cpu_async"
)


def checked_mode(name: str, value: Any) -> Mode:
    """``value`` as a mode. Raises ConfigError that names the modes there are."""
    try:
        return Mode(value)
    except ValueError:
        offered = ", ".join(Mode)
        reason = _NO_NCCL_ASYNC if value == "nccl_async" else f"{name} is {value!r}"
        raise ConfigError(f"{reason}; this version offers {offered}") from None


def _guard(name: str, value: Any) -> ConvergenceGuard | None:
    if value is not None and (isinstance(value, type) or not callable(getattr(value, "judge", None))):
        raise ConfigError(f"{name} is {value!r}; pass a guard such as flodl.TrendGuard(0.1), or an object with judge()")
    if value is not None and (fault := call_fault(f"{name}.judge", value.judge, ("figures",))):
        raise ConfigError(fault)
    guard: ConvergenceGuard | None = value
    return guard


def _ratios(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    ratios = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
    if not ratios:
        raise ConfigError(f"{name} is {value!r}; pass one number per rank, such as (0.5, 0.25, 0.25)")
    checked = tuple(positive_number()(f"{name}[{place}]", ratio) for place, ratio in enumerate(ratios))
    total = math.fsum(checked)
    if abs(total - 1) > RATIO_TOLERANCE:
        raise ConfigError(f"{name} add up to {total:g}; they must add up to 1: divide each by {total:g}")
    return checked


class CadenceKnobs(KnobTable):
    """Every knob of the cadence; the defaults are ``messages.CadenceSettings``'."""

    mode: Knob[Mode | str] = knob(default=CadenceSettings().mode, check=checked_mode)
    """The mode, as a member of ElCheMode or by its name."""
    anchor: Knob[int | None] = knob(default=None, check=whole_number(1, optional=True))
    """Batches the slowest rank does in the first window; None takes the mode's default (10, sync modes 1)."""
    min_anchor: Knob[int] = knob(default=CadenceSettings().min_anchor, check=whole_number(1))
    """The anchor never shrinks below this."""
    max_anchor: Knob[int] = knob(default=CadenceSettings().max_anchor, check=whole_number(1))
    """The anchor never grows beyond this."""
    overhead_target: Knob[float] = knob(default=CadenceSettings().overhead_target, check=positive_number())
    """The averaging time to aim at, as a fraction of the compute time of a window."""
    max_batch_diff: Knob[int | None] = knob(default=None, check=whole_number(0, optional=True))
    """How many batches the fastest rank may lead the slowest in a window; 0 is lockstep, None no cap."""
    gamma: Knob[float] = knob(default=CadenceSettings().gamma, check=non_negative_number(MAX_GAMMA))
    """A rank's weight in the average is its samples to this power: 1 by work, 0 all alike."""
    easgd_alpha: Knob[float | None] = knob(default=None, check=positive_number(1.0, optional=True))
    """cpu_async: the weight of the consensus when a rank blends it into its own values, in (0, 1]; None takes 0.5."""
    max_overshoot: Knob[int | None] = knob(default=None, check=whole_number(0, optional=True))
    """cpu_async: steps beyond its count after which a rank waits for the round; None is one more window."""
    guard: Knob[ConvergenceGuard | None] = knob(default=None, check=_guard)
    """Judges each round's proposal: ``NoGuard``, ``TrendGuard``, ``MsfGuard``, or an object with ``judge``; None takes
    ``TrendGuard``."""
    divergence_threshold: Knob[float | None] = knob(default=None, check=positive_number(optional=True))
    """The default ``TrendGuard``'s threshold; None takes 0.05, in cpu_async 0.3. Refused together with ``guard``."""
    no_divergence_guard: Knob[bool] = knob(default=False, check=yes_or_no)
    """True lets the overhead alone decide, as ``guard(NoGuard())`` does."""
    meta_controller: Knob[bool] = knob(default=CadenceSettings().meta_controller, check=yes_or_no)
    """Whether a drop of the learning rate, or a guard that keeps objecting, shortens the window."""
    relax_up: Knob[bool] = knob(default=CadenceSettings().relax_up, check=yes_or_no)
    """Whether every five Stable verdicts in a row propose one batch more, where the overhead asks for nothing."""
    partition_ratios: Knob[Sequence[float] | None] = knob(default=None, check=_ratios)
    """Sync modes: each rank's fixed share of an epoch, in rank order, adding up to 1; None deals equally."""
    bf16_wire: Knob[bool] = knob(default=CadenceSettings().bf16_wire, check=yes_or_no)
    """CPU modes over several hosts: parameters cross the network as bfloat16, in half the bytes."""


class ElCheConfig(CadenceKnobs, Chained):
    """The cadence of a run: ``ElCheConfig.nccl_cadence().max_anchor(20)`` or ``ElCheConfig(mode=..., max_anchor=20)``.

    ``ElCheConfig()`` equals ``ElCheConfig.nccl_cadence()``. Setters change this object and return it.
    """

    @classmethod
    def nccl_cadence(cls, **knobs: Any) -> "ElCheConfig":
        """Windows in proportion to each rank's speed, averaged by torch.distributed. The default."""
        return cls(mode=Mode.NCCL_CADENCE, **knobs)

    @classmethod
    def nccl_sync(cls, **knobs: Any) -> "ElCheConfig":
        """A round after every rank's step, averaged by torch.distributed."""
        return cls(mode=Mode.NCCL_SYNC, **knobs)

    @classmethod
    def cpu_cadence(cls, **knobs: Any) -> "ElCheConfig":
        """Windows in proportion to each rank's speed, averaged through the hosts' daemons."""
        return cls(mode=Mode.CPU_CADENCE, **knobs)

    @classmethod
    def cpu_sync(cls, **knobs: Any) -> "ElCheConfig":
        """A round after every rank's step, averaged through the hosts' daemons."""
        return cls(mode=Mode.CPU_SYNC, **knobs)

    @classmethod
    def cpu_async(cls, **knobs: Any) -> "ElCheConfig":
        """No rank waits for an averaging: it trains on and blends the consensus in; through the hosts' daemons."""
        return cls(mode=Mode.CPU_ASYNC, **knobs)

    @classmethod
    def nccl_async(cls) -> NoReturn:
        """Refused. Raises ConfigError that names the way to go."""
        checked_mode("mode", "nccl_async")
        raise AssertionError("nccl_async passed the check of modes")

    @property
    def user_guard(self) -> ConvergenceGuard | None:
        """The guard, if it is the user's own and not one of flodl's: the head asks it."""
        guard: ConvergenceGuard | None = self.all_values()["guard"]
        return guard if guard is not None and settings_of(guard).kind is GuardKind.USER else None

    def settings(self) -> CadenceSettings:
        """The values as they travel. Raises ConfigError when some contradict each other."""
        values = self.all_values()
        mode = Mode(values["mode"])
        for name in ("easgd_alpha", "max_overshoot"):
            if values[name] is not None and not mode.is_async:
                raise ConfigError(f"{name} belongs to cpu_async and the mode is {mode}; drop it, or use cpu_async()")
        if values["easgd_alpha"] is None:
            del values["easgd_alpha"]
        guard, threshold, no_guard = (
            values.pop(name) for name in ("guard", "divergence_threshold", "no_divergence_guard")
        )
        default = EASGD_THRESHOLD if mode.is_async else GuardSettings().threshold
        settings = CadenceSettings(**values, guard=_guard_settings(guard, threshold, no_guard, default))
        _check_anchors(settings)
        _check_mode(settings)
        return settings


def _guard_settings(
    guard: ConvergenceGuard | None, threshold: float | None, no_guard: bool, default_threshold: float
) -> GuardSettings:
    if guard is not None and threshold is not None:
        raise ConfigError("guard and divergence_threshold are both set; write guard(flodl.TrendGuard(...)) or drop one")
    if no_guard and (guard is not None or threshold is not None):
        other = "guard" if guard is not None else "divergence_threshold"
        raise ConfigError(f"no_divergence_guard is set, and so is {other}; drop one of them")
    if no_guard:
        return GuardSettings(GuardKind.NONE)
    if guard is not None:
        return settings_of(guard)
    return GuardSettings(threshold=default_threshold if threshold is None else threshold)


def _check_anchors(settings: CadenceSettings) -> None:
    if settings.min_anchor > settings.max_anchor:
        raise ConfigError(
            f"min_anchor {settings.min_anchor} is above max_anchor {settings.max_anchor}; lower one or raise the other"
        )
    if settings.anchor is not None and not settings.min_anchor <= settings.anchor <= settings.max_anchor:
        raise ConfigError(
            f"anchor {settings.anchor} is outside [min_anchor, max_anchor] = "
            f"[{settings.min_anchor}, {settings.max_anchor}]; move it inside or widen the bounds"
        )


def _check_mode(settings: CadenceSettings) -> None:
    mode = settings.mode
    if mode.is_sync and settings.relax_up:
        raise ConfigError(f"relax_up lengthens windows, and {mode} has none; drop it or take a cadence mode")
    if not mode.is_sync and settings.partition_ratios is not None:
        raise ConfigError(
            f"partition_ratios are for the sync modes, and the mode is {mode}, which deals by measured speed; "
            "drop them or take nccl_sync or cpu_sync"
        )
    if mode.is_collective and settings.bf16_wire:
        raise ConfigError(
            f"bf16_wire halves what hosts send to the controller, and {mode} sends from rank to rank; "
            "drop bf16_wire, or use ElCheConfig.cpu_cadence() or another cpu mode"
        )
