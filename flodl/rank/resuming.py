"""Taking a whole state into a rank before it trains: all of it is checked against this training, then loaded.

What comes back is what ``flodl.rank.saving`` wrote, in place wherever there is a place: model, parameter groups, tensor
learning rates and the outer optimizer's slots keep their memory, so that whoever holds them sees the new values.
Hyperparameters come from the file, as with torch's own ``load_state_dict``; one that only this training has stays. The
number of steps that a scheduler is built for is the script's where the rate follows from it and the position. With
a scheduler that cannot be put back, groups stay as they are: it is stepped from its beginning to where the run is.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from flodl.averaging.outer_step import OuterStep
from flodl.errors import CheckpointError
from flodl.rank.backup import fits
from flodl.rank.rehearsal import Rehearsal
from flodl.rank.saving import OPTIMIZER, OUTER, parameter_names
from flodl.rank.schedule import Schedule
from flodl.rank.stepper import Stepper
from flodl.rank.words import describe
from flodl.spec.state import match_state
from flodl.spec.state_file import Place, StateFile, describe_tensor
from flodl.spec.tree import Node, decode

NAME = "the saved state"
Warn: TypeAlias = Callable[[str], object]


def take_whole_state(
    fd: int, stepper: Stepper, outer: OuterStep | None, *, is_alone: bool = False, warn: Warn = lambda _: None
) -> None:
    """Load the file behind ``fd`` into model, optimizer, schedule and loss scaler, and into ``outer``.

    Args:
        fd: a file that ``WholeState`` has filled.
        stepper: has model, optimizer, schedule and loss scaler.
        outer: None without an outer optimizer.
        is_alone: there is nobody to average with, so that what an outer optimizer remembers is left where it is.
        warn: is told, in a line each, what the script asks for now and what goes on instead.

    Raises:
        CheckpointError: the file is damaged, or of another training; the message names the first thing that differs.
            Nothing has been changed.
    """
    file = StateFile(fd, NAME)
    model = match_state(stepper.model, file)
    names = {id(tensor): name for name, tensor in model.items()}
    try:
        whole = file.note["whole"]
    except KeyError:
        raise CheckpointError(f"{NAME} has no optimizer: it is the trained state only, and no checkpoint") from None
    try:
        parts = (
            _Schedule(whole["scheduler"], file, stepper.schedule, warn),
            _Scaler(whole["scaler"], file, stepper.scaler),
            _Optimizer(whole["optimizer"], file, stepper, names, warn),
            _Outer(whole["outer"], file, outer, is_alone),
        )
        newest_epoch = int(file.note["epochs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{NAME} is damaged: its header does not fit together: {error!r:.200}") from None
    for part in parts:  # the schedule first: its code is the script's, and may refuse
        part.load()
    parts[0].settle()
    for name, tensor in model.items():
        tensor.detach().copy_(file.read(name))
    stepper.newest_epoch = newest_epoch


class _Schedule:
    def __init__(self, saved: Mapping[str, Any], file: StateFile, schedule: Schedule, warn: Warn) -> None:
        _require_same("scheduler", saved["class"], schedule.name)
        self._schedule, self._file, self._node, self._own = schedule, file, saved["state"], schedule.state()
        state = _look(file, self._node, "scheduler")
        if (state is None) is not (self._own is None):
            raise ValueError("scheduler")
        if state is not None and not (isinstance(state, tuple) and [type(part) for part in state] == [int, dict]):
            raise ValueError("scheduler")
        self._warn, self._has_moved = warn, False

    def load(self) -> None:
        if self._own is None:
            return
        try:
            state = decode(self._node, "scheduler", lambda name, _: self._file.read(name))
            differing = self._schedule.horizons(state)
            kept = self._schedule.keep_horizon(state) if differing else None
            self._schedule.restore(state if kept is None else kept)
        except Exception as error:
            self._schedule.restore(self._own)
            raise CheckpointError(
                f"{self._schedule.name} did not take its state from {NAME}: {describe(error)}"
            ) from error
        if differing:
            self._has_moved = kept is not None
            goes_on = "it goes on with the script's" if kept is not None else "what is there stays, not the script's"
            self._warn(
                f"{self._schedule.name} in {NAME} was built for another length ({'; '.join(differing)}): {goes_on}"
            )

    def settle(self) -> None:
        """After the optimizer's groups: the rate is that of the position in the script's own horizon."""
        if self._has_moved:
            self._schedule.renew_rate()


class _Scaler:
    def __init__(self, saved: Node, file: StateFile, scaler: torch.amp.GradScaler | None) -> None:
        state = _look(file, saved, "scaler")
        own = None if scaler is None else scaler.state_dict()
        if (state is None) is not (own is None):
            with_it, without = (NAME, "this training") if own is None else ("this training", NAME)
            raise CheckpointError(
                f"{with_it} has a loss scaler and {without} has none; resume with the precision it was saved with"
            )
        if own is not None and (
            state.keys() != own.keys() or not all(isinstance(state[key], int | float) for key in state)
        ):
            raise CheckpointError(f"the loss scaler in {NAME} has {sorted(state)}, this torch's has {sorted(own)}")
        self._scaler, self._state = scaler, state

    def load(self) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(self._state)


class _Outer:
    """A file without an outer optimizer fits any: its state then is zeros, as at the start of a training."""

    def __init__(self, saved: Mapping[str, Any], file: StateFile, outer: OuterStep | None, is_alone: bool) -> None:
        self._file, self._nodes = file, saved["slots"]
        self._slots = {} if outer is None or saved["class"] is None else outer.slots
        if saved["class"] is None or is_alone:
            return
        _require_same("outer optimizer", saved["class"], None if outer is None else outer.name)
        found = {name: _look(file, node, f"{OUTER}/{name}") for name, node in self._nodes.items()}
        if found.keys() != self._slots.keys():
            raise CheckpointError(
                f"the outer optimizer has slots {sorted(found)} in {NAME}, and {sorted(self._slots)} here"
            )
        for name, slot in self._slots.items():
            _require_fit(f"{OUTER}/{name}", found[name], slot)

    def load(self) -> None:
        for name, slot in self._slots.items():
            slot.copy_(decode(self._nodes[name], name, lambda stored, _: self._file.read(stored)))


class _Optimizer:
    def __init__(
        self, saved: Mapping[str, Any], file: StateFile, stepper: Stepper, names: Mapping[int, str], warn: Warn
    ) -> None:
        optimizer = stepper.optimizer
        self._warn, self._compared = warn, _compared(stepper.schedule.scheduler)
        _require_same("optimizer", saved["class"], type(optimizer).__qualname__)
        self._file, self._optimizer = file, optimizer
        self._takes_groups = stepper.schedule.scheduler is None or stepper.schedule.state() is not None
        self._read: dict[str, torch.Tensor] = {}
        own = parameter_names(optimizer, names)
        self._check_groups(saved, [[name for name, _ in group] for group in own])
        self._parameters = {name: parameter for group in own for name, parameter in group}
        self._group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        self._groups, self._other = saved["groups"], saved["other"]
        self._state = dict(saved["state"])
        for name in self._state:
            self._parameters[name]
        dict(_look(file, self._other, OPTIMIZER))
        self._check_state(own)

    def load(self) -> None:
        state: dict[Any, Any] = self._optimizer.state
        for key in [key for key in state if not isinstance(key, torch.Tensor)]:
            del state[key]
        state.update(decode(self._other, OPTIMIZER, lambda name, _: self._fetch(name)))
        for name, parameter in self._parameters.items():
            if name in self._state:
                self._load_state(name, parameter)
            else:
                state.pop(parameter, None)
        if self._takes_groups:
            kept: dict[str, None] = {}
            for group, node in zip(self._optimizer.param_groups, self._groups, strict=True):
                values = decode(node, OPTIMIZER, lambda name, _: self._fetch(name))
                for key in self._compared:
                    there, here = _plain(values.get(key)), _plain(group.get(key))
                    if None not in (there, here) and there != here:
                        kept[f"{key.removeprefix('initial_')} {there!r} (the script asks for {here!r})"] = None
                _put(group, values)
            if kept:
                self._warn(f"resume_from keeps the optimizer's {', '.join(kept)}")
        self._read.clear()

    def _load_state(self, name: str, parameter: torch.Tensor) -> None:
        def settled(stored: str, key: object) -> torch.Tensor:
            return self._settle(stored, key, parameter)

        values, state = decode(self._state[name], name, settled), self._optimizer.state
        if not isinstance(values, dict) or not isinstance(state.get(parameter), dict):
            state[parameter] = values
            return
        for key in [key for key in state[parameter] if key not in values]:
            del state[parameter][key]
        _put(state[parameter], values)

    def _settle(self, stored: str, key: object, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of ``parameter``'s state where torch's ``load_state_dict`` would put it, but of its own dtype."""
        tensor, group = self._fetch(stored), self._group_of[id(parameter)]
        if key != "step" or group.get("capturable") or group.get("fused"):
            if tensor.shape == parameter.shape and not parameter.is_contiguous():
                tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
            tensor = self._read[stored] = tensor.to(parameter.device)
        return tensor

    def _fetch(self, stored: str) -> torch.Tensor:
        """Read once: values that shared a tensor share it again."""
        if stored not in self._read:
            self._read[stored] = self._file.read(stored)
        return self._read[stored]

    def _check_groups(self, saved: Mapping[str, Any], own: list[list[str]]) -> None:
        theirs = saved["parameters"]
        if len(theirs) != len(own) or len(saved["groups"]) != len(own):
            raise CheckpointError(f"the optimizer has {len(theirs)} parameter groups in {NAME}, and {len(own)} here")
        for place, (their_names, own_names) in enumerate(zip(theirs, own, strict=True)):
            if list(their_names) != own_names:
                raise CheckpointError(
                    f"group {place} of the optimizer {_first_difference(list(their_names), own_names)}"
                )
        for place, (node, group) in enumerate(zip(saved["groups"], self._optimizer.param_groups, strict=True)):
            for key, value in dict(_look(self._file, node, f"{OPTIMIZER}/{place}")).items():
                if key == "params":
                    raise ValueError(key)
                if key in group and (isinstance(value, Place) or isinstance(group[key], torch.Tensor)):
                    _require_fit(f"{OPTIMIZER}/{place}/{key}", value, group[key])

    def _check_state(self, own: list[list[tuple[str, torch.Tensor]]]) -> None:
        """Else torch would say in its own words, and at the first step, that something does not fit."""
        rehearsal = Rehearsal(self._optimizer)
        for place, (group, node) in enumerate(zip(own, self._groups, strict=True)):
            settings = _look(self._file, node, f"{OPTIMIZER}/{place}") if self._takes_groups else {}
            for name, parameter in group:
                if name not in self._state:
                    continue
                where = f"{OPTIMIZER}/{name}"
                found, remembered = (
                    _look(self._file, self._state[name], where),
                    rehearsal.behind(place, settings, parameter),
                )
                if remembered is not None:
                    remembered.check(where, found, parameter)


def _compared(scheduler: Any) -> tuple[str, ...]:
    """The hyperparameters of a group that ``scheduler`` does not move, so that a difference is the script's."""
    moved = ("momentum", "betas") if getattr(scheduler, "cycle_momentum", False) else ()
    rate = "lr" if scheduler is None else "initial_lr"
    return (
        rate,
        *(key for key in ("momentum", "betas", "weight_decay", "dampening", "eps", "alpha") if key not in moved),
    )


def _plain(value: Any) -> Any:
    """A tensor of one element as its number, a list as a tuple."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return tuple(value) if isinstance(value, list) else value


def _look(file: StateFile, node: Node, where: str) -> Any:
    """What ``node`` says, with a ``Place`` for every tensor: nothing is read."""
    return decode(node, where, lambda name, _: file.places[name])


def _put(target: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    for key, value in values.items():
        kept = target.get(key)
        if isinstance(value, torch.Tensor) and fits(kept, value):
            kept.copy_(value)
        else:
            target[key] = value


def _require_same(what: str, saved: object, own: object) -> None:
    if saved != own:
        raise CheckpointError(
            f"the {what} is {saved or 'none'} in {NAME}, and {own or 'none'} in this training; resume with the one it "
            "was saved with"
        )


def _require_fit(where: str, saved: object, own: object) -> None:
    """One of the two is a tensor; so must be the other."""
    there = str(saved) if isinstance(saved, Place) else f"{saved!r:.200}"
    here = describe_tensor(own) if isinstance(own, torch.Tensor) else f"{own!r:.200}"
    if not isinstance(saved, Place) or there != here:
        raise CheckpointError(f"{where} is {there} in {NAME}, and {here} in this training")


def _first_difference(theirs: list[str], own: list[str]) -> str:
    if len(theirs) != len(own):
        return f"has {len(theirs)} parameters in {NAME}, and {len(own)} here"
    name, mine = next((a, b) for a, b in zip(theirs, own, strict=True) if a != b)
    return f"has {name} in {NAME} where this training has {mine}"
