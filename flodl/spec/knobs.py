"""The knobs of a training run: the one table behind TrainerConfig, the builder and what the roles read.

Each knob is checked where it is set, so that the traceback shows the user's line; relations between knobs are checked
by ``resolve``, when all of them are known.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, ClassVar, Protocol, Self, TypeAlias, TypeVar, overload

from flodl.averaging.outer import OuterAvg, OuterOptimizer
from flodl.checkpoint.bundle import RESUME_VARIABLE, name_fault, name_of
from flodl.config.builder import ClusterBuilder
from flodl.config.model import ClusterSpec
from flodl.errors import ConfigError, UnknownArgument
from flodl.ids import RankId, batch_count
from flodl.messages import CheckpointSettings, OnError, Precision, Settings
from flodl.spec.cadence import ElCheConfig, checked_mode
from flodl.spec.knob import (
    Chained,
    ChainedT,
    Check,
    Knob,
    KnobTable,
    Values,
    call_fault,
    function,
    knob,
    non_negative_number,
    positive_number,
    whole_number,
    yes_or_no,
)
from flodl.spec.metrics import EpochMetrics
from flodl.spec.worker import Worker

MapDataset: TypeAlias = Any
"""Anything with ``__len__`` and ``__getitem__(int)``; ``__getitems__(list[int])`` is used where it exists.

Not a Protocol: torch's own Dataset declares no ``__len__``, and every subclass of it must be welcome.
"""

FilePath: TypeAlias = str | os.PathLike[str]

MAX_PATH = 4096
"""Characters; Linux takes no longer path."""

MAX_NAMED_EPOCHS = 10_000
"""They travel with the settings; who wants more wants them at regular distances."""

TableT_co = TypeVar("TableT_co", bound=Chained, covariant=True)


@dataclass(frozen=True, slots=True)
class EpochCallbackPolicy:
    """Which rank runs the per-epoch callbacks: ``FASTEST`` or ``EpochCallbackPolicy.rank(n)``."""

    callback_rank: RankId | None
    """None elects the rank with the lowest time per batch; it keeps the post until it dies."""

    FASTEST: ClassVar["EpochCallbackPolicy"]

    @classmethod
    def rank(cls, rank: RankId) -> "EpochCallbackPolicy":
        """Always this rank; one that does not exist is refused when the ranks are known."""
        return cls(whole_number(0)("rank", rank))


EpochCallbackPolicy.FASTEST = EpochCallbackPolicy(None)


def _dataset(name: str, value: Any) -> Any:
    if not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise ConfigError(
            f"{name} is a {type(value).__name__} without __len__ and __getitem__; "
            "pass a map-style dataset, for samples are dealt to the ranks by index"
        )
    if len(value) == 0:
        raise ConfigError(f"{name} has length 0; there is nothing to train on: check the path or the filter behind it")
    return value


def _eval_dataset(name: str, value: Any) -> Any:
    return None if value is None else _dataset(name, value)


def _elche(name: str, value: Any) -> ElCheConfig:
    if not isinstance(value, ElCheConfig):
        preset = checked_mode(name, value).value if isinstance(value, str) else "cpu_cadence"
        raise ConfigError(f"{name} is {value!r}; pass an ElCheConfig such as ElCheConfig.{preset}()")
    return value


def _one_of(kind: type[StrEnum]) -> Check:
    def check(name: str, value: Any) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(kind)}") from None

    return check


def _max_failure(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = 0.0 if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0.0 < number < 1.0 and not (number >= 1.0 and number.is_integer()):
        raise ConfigError(
            f"{name} is {value!r}; it must be a number of ranks, 1 or more, or a part of them between 0 and 1, or None"
        )
    return number


def _policy(name: str, value: Any) -> EpochCallbackPolicy:
    if not isinstance(value, EpochCallbackPolicy):
        raise ConfigError(f"{name} is {value!r}; pass EpochCallbackPolicy.FASTEST or EpochCallbackPolicy.rank(n)")
    return value


def _outer(name: str, value: Any) -> OuterOptimizer:
    if isinstance(value, type) or not callable(getattr(value, "step", None)) or not hasattr(value, "slots"):
        raise ConfigError(f"{name} is {value!r}; pass an outer optimizer such as flodl.SlowMomentum(lr=1.0, mu=0.5)")
    if fault := call_fault(f"{name}.step", value.step, ("prev", "consensus", "state")):
        raise ConfigError(fault)
    whole_number(0)(f"slots of {name}", value.slots)
    if not isinstance(getattr(value, "resets_inner", None), bool):
        raise ConfigError(f"{name} does not say whether it resets the inner optimizers; give it resets_inner = False")
    if repr(value) == object.__repr__(value):
        raise ConfigError(
            f"{name} prints as {value!r}, in every process differently, so the ranks cannot be compared; "
            f"give {type(value).__name__} a __repr__ that names its settings, or make it a dataclass"
        )
    outer: OuterOptimizer = value
    return outer


def _cluster(name: str, value: Any) -> ClusterBuilder | ClusterSpec | None:
    if value is not None and not isinstance(value, ClusterBuilder | ClusterSpec):
        raise ConfigError(f"{name} is {value!r}; pass a ClusterBuilder, or start with fdl launch -c FILE")
    return value


def _stem(name: str, value: Any) -> str | None:
    """The text of a path, as it was given: which folder it counts from is the head's affair."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(path, str):
        raise ConfigError(f"{name} is {value!r}; pass a path such as 'ckpts/run43'")
    if not name_of(path):
        raise ConfigError(
            f"{name} is {path!r}, which names no file; add a name, such as {os.path.join(path, 'run43')!r}"
        )
    if len(path) > MAX_PATH or not path.isprintable():
        raise ConfigError(f"{name} is {path!r:.200}; it must be at most {MAX_PATH} printable characters")
    if fault := name_fault(path):
        raise ConfigError(f"{name} is {path!r:.200}, which {fault}")
    return path


def _epochs(name: str, value: Any) -> tuple[int, ...]:
    is_several = isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) != 0
    several = tuple(islice(value, MAX_NAMED_EPOCHS + 1)) if is_several else (value,)
    if len(several) > MAX_NAMED_EPOCHS:
        raise ConfigError(f"{name} names more than {MAX_NAMED_EPOCHS} epochs; use checkpoint_every")
    return () if value is None else tuple(sorted({whole_number(1)(name, epoch) for epoch in several}))


class ResumeSetter(Protocol[TableT_co]):
    """``config.resume_from(stem, reshape=True)``."""

    def __call__(self, stem: FilePath | None, *, reshape: bool | None = None) -> TableT_co:
        """Set ``resume_from``, and ``reshape`` too unless that is None; returns the table."""
        ...


class ResumeKnob(Knob[FilePath | None]):
    """``resume_from``: its setter sets ``reshape`` as well."""

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: ChainedT, owner: type) -> ResumeSetter[ChainedT]: ...
    @overload
    def __get__(self, instance: Values, owner: type) -> FilePath | None: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        found: Any = super().__get__(instance, owner)
        if instance is None or isinstance(instance, Values):
            return found

        def setter(stem: FilePath | None, *, reshape: bool | None = None, **others: object) -> Any:
            if others:
                raise UnknownArgument(f"resume_from has no {next(iter(others))}; it takes a stem, and reshape=True")
            return found(stem) if reshape is None else found(stem).reshape(reshape)

        setter.__name__ = self.name
        return setter


class Knobs(KnobTable):
    """Every knob of a run, in the order of the reference."""

    dataset: Knob[MapDataset] = knob(check=_dataset, kw_only=False)
    """The training data, any map-style torch dataset."""
    batch_size: Knob[int] = knob(check=whole_number(1))
    """Samples of one step of one rank."""
    num_epochs: Knob[int] = knob(check=whole_number(1))
    """Passes over the data; every sample is trained exactly once in each."""
    epoch_splits: Knob[int] = knob(default=1, check=whole_number(1))
    """Epochs that one pass is delivered as: metrics and evaluation come so many times per pass."""
    elche: Knob[ElCheConfig] = knob(default=ElCheConfig(), check=_elche, table=ElCheConfig)
    """How often and how the ranks are averaged."""
    max_grad_norm: Knob[float | None] = knob(default=None, check=positive_number(optional=True))
    """Gradients are clipped to this global norm before each step; None clips nothing."""
    scheduler_fn: Knob[Callable[[Any, int], Any] | None] = knob(
        default=None, check=function("optimizer", "total_steps")
    )
    """``scheduler_fn(optimizer, total_steps)`` returns a torch scheduler, stepped once per batch of the whole run."""
    lr_scale_ratio: Knob[float] = knob(default=0.0, check=non_negative_number())
    """The learning rates are multiplied by ``1 + ratio · (world_size − 1)`` at the start; 0 leaves them."""
    precision: Knob[Precision | str] = knob(default=Precision.FP32, check=_one_of(Precision))
    """What ``train_step`` computes in: fp32, bf16 or fp16 (with loss scaling). Parameters keep their dtype."""
    accumulate: Knob[int] = knob(default=1, check=whole_number(1))
    """``train_step`` sees a batch in this many micro-batches, one after the other; the step is the whole batch's."""
    max_nonfinite: Knob[int] = knob(default=3, check=whole_number(1))
    """After so many rounds in a row with a loss or parameters that are not finite, the run saves and stops."""
    max_failure: Knob[int | float | None] = knob(default=None, check=_max_failure)
    """When so many ranks are lost, or such a part of those at the start (a number below 1), the run saves and stops;
    None bears any loss while enough are left."""
    on_error: Knob[OnError | str] = knob(default=OnError.STOP, check=_one_of(OnError))
    """What an exception of the script in one rank means: ``stop`` saves and ends the run, ``shrink`` goes on without
    the rank."""
    metrics_fn: Knob[Callable[[EpochMetrics], None] | None] = knob(default=None, check=function("metrics"))
    """``metrics_fn(metrics)`` once per epoch on the head's callback thread; ``metrics.epoch`` counts from 0."""
    epoch_fn: Knob[Callable[[int, Worker], None] | None] = knob(default=None, check=function("epoch", "worker"))
    """``epoch_fn(epoch, worker)`` behind every epoch on one rank, with the consensus in ``worker.model``; ``epoch``
    counts from 0."""
    eval_dataset: Knob[MapDataset | None] = knob(default=None, check=_eval_dataset)
    """Held-out data, evaluated after every epoch on one rank; needs ``eval_fn``."""
    eval_fn: Knob[Callable[..., float] | None] = knob(
        default=None, check=function("model", "input", "target", is_open=True)
    )
    """``eval_fn(model, input, target) -> float`` per batch; the batches are combined as a sample-weighted mean."""
    eval_result_fn: Knob[Callable[[int, float], None] | None] = knob(default=None, check=function("epoch", "value"))
    """``eval_result_fn(epoch, value)`` on the head's callback thread; ``epoch`` counts from 0."""
    epoch_callback_policy: Knob[EpochCallbackPolicy] = knob(default=EpochCallbackPolicy.FASTEST, check=_policy)
    """Which rank runs ``eval_fn``, ``epoch_fn`` and ``checkpoint_fn``."""
    outer_optimizer: Knob[OuterOptimizer] = knob(default=OuterAvg(), check=_outer)
    """What a round makes of the consensus before it is adopted: also ``SlowMomentum(…)``, ``NesterovMomentum(…)``."""
    seed: Knob[int] = knob(default=0, check=whole_number(0))
    """Fixes the order of the samples of every epoch. The weights' own seed is the script's affair."""
    num_workers: Knob[int] = knob(default=0, check=whole_number(0))
    """Processes per rank that load data; 0 loads ahead on a thread, which shares the process's random generators."""
    collate_fn: Knob[Callable[[list[Any]], Any] | None] = knob(default=None, check=function("samples"))
    """Makes a batch from a list of samples; None takes torch's default."""
    save_path: Knob[FilePath | None] = knob(default=None, check=_stem)
    """Where checkpoints go: ``ckpts/run43`` makes ``ckpts/run43.fdl`` and ``.meta.json`` on the head's machine; a
    relative path counts from the head's folder. None saves nothing."""
    checkpoint_every: Knob[int | None] = knob(default=None, check=whole_number(1, optional=True))
    """A checkpoint after each so many epochs; needs ``save_path`` or ``checkpoint_fn``."""
    checkpoint_at_epoch: Knob[int | Iterable[int] | None] = knob(default=None, check=_epochs)
    """A checkpoint after this epoch, or after each of several, counted from 1; needs ``save_path`` or
    ``checkpoint_fn``."""
    checkpoint_fn: Knob[Callable[[int, Any], None] | None] = knob(default=None, check=function("epoch", "model"))
    """``checkpoint_fn(epoch, model)`` on one rank where ``checkpoint_every`` or ``checkpoint_at_epoch`` says so, with
    the consensus in ``model``; ``epoch`` counts from 0."""
    keep_last: Knob[int] = knob(default=1, check=whole_number(1))
    """So many checkpoints stay, the newest ones; above 1 each also lies under a stem of its own, such as
    ``ckpts/run43-e0005``. With 1 each replaces the one before."""
    resume_from: ResumeKnob = knob(default=None, check=_stem, kind=ResumeKnob)
    """The checkpoint to go on from, with or without ``.fdl``; as a setter also ``resume_from(stem, reshape=True)``."""
    reshape: Knob[bool] = knob(default=False, check=yes_or_no)
    """Go on from ``resume_from`` with another number of ranks, batch size or mode: the cadence starts at Probe."""
    cluster: Knob[ClusterBuilder | ClusterSpec | None] = knob(default=None, check=_cluster)
    """The hosts, named in code; None runs where the script was started. Refused together with a cluster file."""


class JobConfig(Knobs, Values):
    """The knobs as plain values, checked against each other; what the roles read."""

    def settings(self) -> Settings:
        """What every participant must agree on."""
        return Settings(
            dataset_size=len(self.dataset),
            batch_size=self.batch_size,
            num_epochs=self.num_epochs,
            seed=self.seed,
            cadence=self.elche.settings(),
            max_grad_norm=self.max_grad_norm,
            eval_samples=0 if self.eval_dataset is None else len(self.eval_dataset),
            callback_rank=self.epoch_callback_policy.callback_rank,
            epoch_splits=self.epoch_splits,
            lr_scale_ratio=self.lr_scale_ratio,
            precision=Precision(self.precision),
            accumulate=self.accumulate,
            max_nonfinite=self.max_nonfinite,
            max_failure=self.max_failure,
            on_error=OnError(self.on_error),
            has_epoch_fn=self.epoch_fn is not None,
            has_checkpoint_fn=self.checkpoint_fn is not None,
            checkpoint=self.checkpoint_settings(),
        )

    def checkpoint_settings(self) -> CheckpointSettings:
        """What is saved when and where, and what the run goes on from: FDL_RESUME, of ``fdl launch --resume``, wins."""
        again = os.environ.get(RESUME_VARIABLE, "")
        return CheckpointSettings(
            save_path=os.fspath(self.save_path or ""),
            every=self.checkpoint_every or 0,
            at_epochs=_epochs("checkpoint_at_epoch", self.checkpoint_at_epoch),
            resume_from=again or os.fspath(self.resume_from or ""),
            reshape=self.reshape or bool(again),
            keep_last=self.keep_last,
        )


def resolve(knobs: Knobs) -> JobConfig:
    """The values of ``knobs``, checked against each other.

    Raises:
        UsageError: a knob without a default is not set.
        ConfigError: two knobs contradict each other; the message names both and the fix.
    """
    config = JobConfig(**knobs.all_values())
    _check_batches(config)
    _check_evaluation(config)
    _check_checkpoints(config)
    config.elche.settings()
    return config


def _check_batches(config: JobConfig) -> None:
    size = len(config.dataset)
    if config.batch_size > size:
        raise ConfigError(
            f"batch_size {config.batch_size} is larger than the dataset of {size} samples; "
            f"lower batch_size to at most {size}"
        )
    if config.accumulate > config.batch_size:
        raise ConfigError(
            f"accumulate {config.accumulate} is more than the {config.batch_size} samples of a batch; lower accumulate "
            f"to at most {config.batch_size}, or raise batch_size"
        )
    batches = batch_count(size, config.batch_size, merge_single_tail=True)
    if config.epoch_splits > batches:
        raise ConfigError(
            f"epoch_splits {config.epoch_splits} is more than the {batches} batches of a pass; use at most {batches}"
        )


def _check_evaluation(config: JobConfig) -> None:
    if (config.eval_dataset is None) != (config.eval_fn is None):
        given, missing = ("eval_fn", "eval_dataset") if config.eval_dataset is None else ("eval_dataset", "eval_fn")
        raise ConfigError(f"{given} is set but {missing} is not; set both, or neither")
    if config.eval_result_fn is not None and config.eval_fn is None:
        raise ConfigError("eval_result_fn is set but there is nothing to evaluate; set eval_dataset and eval_fn too")


def _check_checkpoints(config: JobConfig) -> None:
    chosen = config.checkpoint_settings()
    is_asked_for = bool(chosen.every or chosen.at_epochs)
    if is_asked_for and not chosen.save_path and config.checkpoint_fn is None:
        name = "checkpoint_every" if chosen.every else "checkpoint_at_epoch"
        raise ConfigError(
            f"{name} is set but save_path is not; add save_path='ckpts/run43' or a checkpoint_fn, or drop {name}"
        )
    if config.checkpoint_fn is not None and not is_asked_for:
        raise ConfigError(
            "checkpoint_fn is set but neither checkpoint_every nor checkpoint_at_epoch is, so nobody would call it; "
            "add checkpoint_every=1, or drop checkpoint_fn"
        )
    if not chosen.save_path and chosen.keep_last > 1:
        raise ConfigError("keep_last is set but save_path is not; add save_path='ckpts/run43', or drop keep_last")
    epochs = config.num_epochs * config.epoch_splits
    if chosen.at_epochs and chosen.at_epochs[-1] > epochs:
        count = f"{epochs} epochs" if config.epoch_splits == 1 else f"{epochs} epochs (num_epochs × epoch_splits)"
        raise ConfigError(
            f"checkpoint_at_epoch names epoch {chosen.at_epochs[-1]}, and the run has {count}; use at most {epochs}"
        )
    if chosen.reshape and not chosen.resume_from:
        raise ConfigError("reshape is set but resume_from is not; add resume_from='ckpts/run42', or drop reshape")
