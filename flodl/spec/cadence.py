"""The user's side of ElChe: which mode, and how far the cadence may move. The rules themselves are in core."""

from typing import Any, NoReturn, TypeAlias

from flodl.errors import ConfigError
from flodl.messages import CadenceSettings, Mode
from flodl.spec.knob import Chained, Knob, KnobTable, knob, non_negative_number, positive_number, whole_number

ElCheMode: TypeAlias = Mode
"""When a round fires and how parameters are averaged: NCCL_SYNC, NCCL_CADENCE, CPU_SYNC, CPU_CADENCE, CPU_ASYNC."""

MAX_GAMMA = 16
"""Any count of samples to this power is a float; beyond, the largest contribution would be all there is."""

_NO_NCCL_ASYNC = (
    "nccl_async is not a mode: its in-place write-back raced with autograd and gained nothing. "
    "Asynchronous averaging belongs to the CPU plane, as cpu_async"
)


def _mode(name: str, value: Any) -> Mode:
    try:
        return Mode(value)
    except ValueError:
        offered = ", ".join(Mode)
        reason = _NO_NCCL_ASYNC if value == "nccl_async" else f"{name} is {value!r}"
        raise ConfigError(f"{reason}; this version offers {offered}") from None


def _alpha(name: str, value: Any) -> float | None:
    number: float | None = positive_number(optional=True)(name, value)
    if number is not None and number > 1:
        raise ConfigError(f"{name} is {number:g}; it must be in (0, 1]: 1 replaces the rank's own values")
    return number


class CadenceKnobs(KnobTable):
    """Every knob of the cadence; the defaults are ``messages.CadenceSettings``'."""

    mode: Knob[Mode | str] = knob(default=CadenceSettings().mode, check=_mode)
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
    easgd_alpha: Knob[float | None] = knob(default=None, check=_alpha)
    """cpu_async: the weight of the consensus when a rank blends it into its own values, in (0, 1]; None takes 0.5."""
    max_overshoot: Knob[int | None] = knob(default=None, check=whole_number(0, optional=True))
    """cpu_async: steps beyond its count after which a rank waits for the round; None is one more window."""


class ElCheConfig(CadenceKnobs, Chained):
    """The cadence of a run: ``ElCheConfig.nccl_cadence().max_anchor(20)`` or ``ElCheConfig(mode=..., max_anchor=20)``.

    ``ElCheConfig()`` equals ``ElCheConfig.nccl_cadence()``. Setters change this object and return it.
    """

    @classmethod
    def nccl_cadence(cls) -> "ElCheConfig":
        """Windows in proportion to each rank's speed, averaged by torch.distributed. The default."""
        return cls(mode=Mode.NCCL_CADENCE)

    @classmethod
    def nccl_sync(cls) -> "ElCheConfig":
        """A round after every rank's step, averaged by torch.distributed."""
        return cls(mode=Mode.NCCL_SYNC)

    @classmethod
    def cpu_cadence(cls) -> "ElCheConfig":
        """Windows in proportion to each rank's speed, averaged through the hosts' daemons."""
        return cls(mode=Mode.CPU_CADENCE)

    @classmethod
    def cpu_sync(cls) -> "ElCheConfig":
        """A round after every rank's step, averaged through the hosts' daemons."""
        return cls(mode=Mode.CPU_SYNC)

    @classmethod
    def cpu_async(cls) -> "ElCheConfig":
        """No rank waits for an averaging: it trains on and blends the consensus in; through the hosts' daemons."""
        return cls(mode=Mode.CPU_ASYNC)

    @classmethod
    def nccl_async(cls) -> NoReturn:
        """Refused. Raises ConfigError that names the way to go."""
        _mode("mode", "nccl_async")
        raise AssertionError("nccl_async passed the check of modes")

    def settings(self) -> CadenceSettings:
        """The values as they travel. Raises ConfigError when the bounds contradict each other."""
        values = self.all_values()
        mode = Mode(values["mode"])
        for name in ("easgd_alpha", "max_overshoot"):
            if values[name] is not None and not mode.is_async:
                raise ConfigError(f"{name} belongs to cpu_async and the mode is {mode}; drop it, or use cpu_async()")
        if values["easgd_alpha"] is None:
            del values["easgd_alpha"]
        settings = CadenceSettings(**values)
        if settings.min_anchor > settings.max_anchor:
            raise ConfigError(
                f"min_anchor {settings.min_anchor} is above max_anchor {settings.max_anchor}; raise max_anchor"
            )
        if settings.anchor is not None and not settings.min_anchor <= settings.anchor <= settings.max_anchor:
            raise ConfigError(
                f"anchor {settings.anchor} is outside [min_anchor, max_anchor] = "
                f"[{settings.min_anchor}, {settings.max_anchor}]; move it inside or widen the bounds"
            )
        return settings
