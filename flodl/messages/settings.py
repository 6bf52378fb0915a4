"""What a run is made of, as every participant must agree on it, and the layout of its model."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from flodl.ids import RankId

Scalar: TypeAlias = int | float | str | bool | None


class Mode(StrEnum):
    """When a round fires and how parameters are averaged (docs/engine.md)."""

    NCCL_SYNC = "nccl_sync"
    NCCL_CADENCE = "nccl_cadence"
    CPU_SYNC = "cpu_sync"
    CPU_CADENCE = "cpu_cadence"
    CPU_ASYNC = "cpu_async"

    @property
    def is_sync(self) -> bool:
        """A round after every live rank's first step, samples split equally."""
        return self in (Mode.NCCL_SYNC, Mode.CPU_SYNC)

    @property
    def is_async(self) -> bool:
        """No rank waits for an averaging: it trains on, and blends the consensus in when that is published."""
        return self is Mode.CPU_ASYNC

    @property
    def is_collective(self) -> bool:
        """Averaged by torch.distributed between the ranks; else on the CPU plane."""
        return self in (Mode.NCCL_SYNC, Mode.NCCL_CADENCE)


class Precision(StrEnum):
    """What ``train_step`` computes in; parameters keep their own dtype."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class GuardKind(StrEnum):
    """Which convergence guard judges the rounds (``flodl.core.guards``); a user's own lives in the head."""

    NONE = "none"
    TREND = "trend"
    MSF = "msf"
    USER = "user"


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """A convergence guard and its numbers: ``threshold`` is TrendGuard's, the rest is MsfGuard's."""

    kind: GuardKind = GuardKind.TREND
    threshold: float = 0.05
    suppress_above: float = 1e-3
    suppress_rounds: int = 3
    nudge_above: float = 1e-2
    nudge_rounds: int = 3
    nudge_factor: float = 0.5


@dataclass(frozen=True, slots=True)
class CadenceSettings:
    """What ElChe needs to know; the defaults are the reference's.

    ``anchor`` None takes the mode's default (10; sync 1). ``max_batch_diff`` None means no cap. Of the asynchronous
    mode are ``easgd_alpha``, the weight of the consensus in a blend, in (0, 1], and ``max_overshoot``, the steps that a
    rank may do beyond its count before it waits for the round: None is one more window. ``partition_ratios`` are sync
    modes' fixed shares of an epoch by rank; None deals equally.
    """

    mode: Mode = Mode.NCCL_CADENCE
    anchor: int | None = None
    min_anchor: int = 1
    max_anchor: int = 1000
    overhead_target: float = 0.05
    max_batch_diff: int | None = None
    gamma: float = 1.0
    easgd_alpha: float = 0.5
    max_overshoot: int | None = None
    guard: GuardSettings = GuardSettings()
    meta_controller: bool = True
    relax_up: bool = False
    partition_ratios: tuple[float, ...] | None = None
    bf16_wire: bool = False


class OnError(StrEnum):
    """What an exception of the script in one rank means for the others."""

    STOP = "stop"
    SHRINK = "shrink"


class CallbackKind(StrEnum):
    """A function of the script that runs behind an epoch, by its knob; the evaluation has words of its own."""

    EPOCH = "epoch_fn"
    CHECKPOINT = "checkpoint_fn"


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """What is saved, and what the run goes on from. Paths are the head's: relative ones count from its folder.

    ``save_path`` empty saves nothing. ``every`` saves after so many epochs (0: not), ``at_epochs`` after these (from
    1). ``resume_from`` empty starts afresh; ``reshape`` lets another number of ranks, or other settings, go on. So many
    checkpoints stay on disk, ``keep_last``; with 1 each replaces the one before.
    """

    save_path: str = ""
    every: int = 0
    at_epochs: tuple[int, ...] = ()
    resume_from: str = ""
    reshape: bool = False
    keep_last: int = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """What every participant must agree on before training starts; compared field by field.

    ``eval_samples`` is 0 without an evaluation. ``callback_rank`` None elects the fastest rank.
    ``num_epochs`` counts passes over the data, each delivered as ``epoch_splits`` epochs. ``accumulate`` says how many
    micro-batches make a full batch. ``max_failure`` is the number of lost ranks at which the run saves and stops, or,
    below 1, their part of all; None bears any loss while a rank is left. ``has_epoch_fn`` and ``has_checkpoint_fn`` say
    which of the script's functions there are to be called.
    """

    dataset_size: int
    batch_size: int
    num_epochs: int
    seed: int
    cadence: CadenceSettings
    max_grad_norm: float | None = None
    eval_samples: int = 0
    callback_rank: RankId | None = None
    epoch_splits: int = 1
    lr_scale_ratio: float = 0.0
    precision: Precision = Precision.FP32
    accumulate: int = 1
    max_nonfinite: int = 3
    checkpoint: CheckpointSettings = CheckpointSettings()
    max_failure: float | None = None
    on_error: OnError = OnError.STOP
    has_epoch_fn: bool = False
    has_checkpoint_fn: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat image of a model: float32 sums, float64 sums, then raw bytes of integer and bool buffers.

    Each region starts at a multiple of 64 bytes in the order f32, f64, raw.
    """

    f32_count: int
    f64_count: int
    raw_bytes: int

    @property
    def f64_offset(self) -> int:
        """Byte offset of the float64 region."""
        return _align(self.f32_count * 4)

    @property
    def raw_offset(self) -> int:
        """Byte offset of the raw region."""
        return self.f64_offset + _align(self.f64_count * 8)

    @property
    def total_bytes(self) -> int:
        """Size of the whole image, a multiple of 64."""
        return self.raw_offset + _align(self.raw_bytes)


def _align(size: int) -> int:
    return (size + 63) // 64 * 64
