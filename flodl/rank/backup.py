"""What a rank returns to when its work was left out of a round: the optimizer's memory as of the last commit.

The copies are made once and filled again at every commit; a state that appears later (Adam's moments come with the
first step) gets its copy then. It takes as much memory as the optimizer's state does. Nothing is done per step.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch

from flodl.rank.schedule import Schedule

_Pairs: TypeAlias = dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Targets and sources that one call copies, by device and dtype."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What an optimizer, its schedule and its loss scaler remember beside the weights. A view, not a copy.

    ``state``: parameter (or any key) → name → value; ``groups``: the parameter groups, perhaps without ``params``;
    ``schedule``: as ``Schedule.state`` gives it; ``scaler``: None without one.
    """

    state: Mapping[Any, Any]
    groups: Sequence[Mapping[str, Any]]
    schedule: tuple[int, Mapping[str, Any]] | None
    scaler: Mapping[str, Any] | None


class Backup:
    """Of an optimizer, its schedule and its loss scaler."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Assigns only; until the first ``save`` there is nothing to restore."""
        self._optimizer, self._schedule, self._scaler = optimizer, schedule, scaler
        self._state: dict[Any, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        self._scaler_state: dict[str, Any] = {}
        self._kept_schedule: Any = None
        self._is_filled = False

    def save(self) -> None:
        """Take what the optimizer remembers now, in place of what was taken before."""
        state = self._optimizer.state
        _fill(self._state, state)
        self._groups = [_plain(group) for group in self._optimizer.param_groups]
        self._kept_schedule = self._schedule.state()
        if self._scaler is not None:
            self._scaler_state = self._scaler.state_dict()
        self._is_filled = True

    @property
    def kept(self) -> Memory | None:
        """What the last ``save`` took; None before the first."""
        if not self._is_filled:
            return None
        scaler = None if self._scaler is None else self._scaler_state
        return Memory(self._state, self._groups, self._kept_schedule, scaler)

    def restore(self) -> None:
        """Put everything back as ``save`` found it, in place. A schedule without ``load_state_dict`` goes on."""
        if not self._is_filled:
            return
        _fill(self._optimizer.state, self._state)
        if self._kept_schedule is not None:
            self._schedule.restore(self._kept_schedule)
            for group, kept in zip(self._optimizer.param_groups, self._groups, strict=False):
                _fill_one(group, kept, _copy_now)
        if self._scaler is not None:
            self._scaler.load_state_dict(self._scaler_state)


def _fill(target: Any, source: Any) -> None:
    """Make ``target`` (key → name → value) equal to ``source``; tensors that fit are copied in place, all at once."""
    for key in [key for key in target if key not in source]:
        del target[key]
    pairs: _Pairs = {}

    def note(into: torch.Tensor, value: torch.Tensor) -> None:
        targets, sources = pairs.setdefault((into.device, into.dtype), ([], []))
        targets.append(into)
        sources.append(value)

    for key, values in source.items():
        if isinstance(values, dict):
            _fill_one(target.setdefault(key, {}), values, note)
        else:
            target[key] = copy.deepcopy(values)
    for targets, sources in pairs.values():
        torch._foreach_copy_(targets, sources)


def _fill_one(
    target: dict[str, Any], source: dict[str, Any], copy_in_place: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    for name in [name for name in target if name not in source and name != "params"]:
        del target[name]
    for name, value in source.items():
        kept = target.get(name)
        if isinstance(value, torch.Tensor):
            if fits(kept, value):
                copy_in_place(kept, value.detach())
            else:
                target[name] = value.detach().clone()
        else:
            target[name] = copy.deepcopy(value)


def fits(kept: Any, value: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether ``kept`` is a tensor that ``value`` can be copied into without a loss."""
    return (
        isinstance(kept, torch.Tensor)
        and kept.layout == value.layout == torch.strided
        and (kept.shape, kept.dtype, kept.device) == (value.shape, value.dtype, value.device)
    )


def _copy_now(into: torch.Tensor, value: torch.Tensor) -> None:
    into.copy_(value)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters, copied."""
    plain: dict[str, Any] = {}
    _fill_one(plain, {name: value for name, value in group.items() if name != "params"}, _copy_now)
    return plain
