"""A resume point as three JSON values: ``position``, ``cadence`` and ``settings``.

All of a run that another one needs to go on, in words that every later version must understand: what is written today
is pinned by ``tests/unit/checkpoint/format_1.meta.json``. Whoever renames a field of these classes keeps its old name
readable here.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from flodl.checkpoint.plain import lift, lower
from flodl.core.position import CadenceState, Covered, Position, ResumePoint
from flodl.errors import CheckpointError
from flodl.messages import Settings

MAX_SPANS: Final = 1 << 17
"""Gaps in what is merged come from leases under way: a few for each rank."""

MAX_RANKS: Final = 1 << 14
MAX_HISTORY: Final = 1024
"""Values of a guard's ring; today it keeps five."""

LEAST: Final = dict.fromkeys(
    (
        "accumulate", "anchor", "at_epochs", "batch_counts", "batch_size", "count", "dataset_size", "epoch_splits",
        "keep_last", "max_anchor", "max_nonfinite", "min_anchor", "num_epochs", "world_size",
    ),
    1,
)  # fmt: skip
"""Fields that 0 makes no sense for."""


def point_to_json(point: ResumePoint) -> dict[str, Any]:
    """The three values by name, as ``json.dumps`` takes them."""
    return {name: lower(getattr(point, name)) for name in ("position", "cadence", "settings")}


def point_from_json(data: Mapping[str, Any]) -> ResumePoint:
    """Read them back; a cadence that is not there starts afresh.

    Raises:
        CheckpointError: a value is missing, of another type, out of range, or contradicts another; it is named.
    """
    cadence = data.get("cadence")
    point = ResumePoint(
        lift(Position, data.get("position"), "position", LEAST),
        None if cadence is None else lift(CadenceState, cadence, "cadence", LEAST),
        lift(Settings, data.get("settings"), "settings", LEAST),
    )
    _check_position(point.position, point.settings)
    if point.cadence is not None:
        _check_cadence(point.cadence)
    return point


def _check_position(position: Position, settings: Settings) -> None:
    epochs = settings.num_epochs * settings.epoch_splits
    _require(position.epoch <= epochs, "position.epoch", f"at most {epochs}, all epochs of the run")
    covered = position.covered
    _require(sum(len(each.spans) for each in covered) <= MAX_SPANS, "position.covered", f"at most {MAX_SPANS} spans")
    named = [each.epoch for each in covered]
    is_open = all(position.epoch <= epoch < epochs for epoch in named)
    _require(is_open and _ascend(named), "position.covered", "open epochs, each once, in order")
    for place, each in enumerate(covered):
        _check_spans(each, settings.dataset_size, f"position.covered[{place}].spans")


def _check_spans(covered: Covered, dataset_size: int, where: str) -> None:
    stop = 0
    for span in covered.spans:
        is_behind = stop <= span.start and span.stop <= dataset_size
        _require(is_behind, where, f"spans in order, apart, and within {dataset_size} samples")
        stop = span.stop


def _check_cadence(cadence: CadenceState) -> None:
    elche = cadence.elche
    _require(len(cadence.trend_history) <= MAX_HISTORY, "cadence.trend_history", f"at most {MAX_HISTORY} values")
    _require(
        len(elche.ranks) <= MAX_RANKS and _ascend(elche.ranks), "cadence.elche.ranks", f"up to {MAX_RANKS}, ascending"
    )
    for name in ("ms_per_batch", "batch_counts", "partition_ratios"):
        _require(getattr(elche, name).keys() <= set(elche.ranks), f"cadence.elche.{name}", "ranks of the run only")
    _require(all(elche.ms_per_batch.values()), "cadence.elche.ms_per_batch", "times above 0")
    is_measured = elche.slow_rank in elche.ms_per_batch if elche.ms_per_batch else elche.slow_rank is None
    _require(is_measured, "cadence.elche.slow_rank", "a rank with a time, or null when there is none")


def _ascend(numbers: list[int] | tuple[int, ...]) -> bool:
    return all(before < after for before, after in pairwise(numbers))


def _require(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise CheckpointError(f"{where} does not fit, expected {expected}")
