"""The trained state and its bytes: a safetensors file whose header says in which order and under which names.

Parameters and persistent buffers stand under their state-dict names, so any safetensors reader opens the file; buffers
that the state dict leaves out stand under ``nonpersistent/``. A tensor with several names (tied weights) is stored
once, the other names are aliases in the header. Nothing is pickled, on neither path.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from flodl.errors import CheckpointError
from flodl.spec.state_file import (
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    Composition,
    StateFile,
    compose,
    describe_tensor,
    parse_note,
)

log = logging.getLogger(__name__)

_COMPILED = "_orig_mod."
_NONPERSISTENT = "nonpersistent/"


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What travels beside the tensors. ``epochs`` counts completed passes, ``version`` names the consensus."""

    epochs: int
    version: int

    def note(self) -> dict[str, int]:
        """What the file's note says of it."""
        return {"format": FORMAT_VERSION, "epochs": self.epochs, "version": self.version}


@dataclass(frozen=True, slots=True)
class TrainedState:
    """The weights after training, on the CPU.

    ``params`` and ``buffers`` are in the order of ``model.parameters()`` and ``model.buffers()``; a tied parameter
    stands there once. ``outcome`` says how the run ended (``completed`` or ``stopped``).
    """

    params: list[torch.Tensor]
    buffers: list[torch.Tensor]
    epochs: int
    version: int
    outcome: str
    _named: Mapping[str, torch.Tensor] = field(repr=False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What ``model.load_state_dict`` takes; tied names share one tensor."""
        return dict(self._named)

    @classmethod
    def from_model(cls, model: torch.nn.Module, info: StateInfo, outcome: str) -> "TrainedState":
        """A copy of ``model``'s state."""
        return load_state(dump_state(model, info), outcome)


def dump_state(model: torch.nn.Module, info: StateInfo) -> bytes:
    """``model``'s state as the bytes of a safetensors file.

    Raises:
        CheckpointError: a tensor's dtype has no place in the format; the message names the tensor.
    """
    return b"".join(_composed(model, info).chunks())


def write_state(model: torch.nn.Module, info: StateInfo, fd: int) -> int:
    """Write ``dump_state``'s bytes at the start of ``fd`` without a second copy in memory; returns their number.

    Raises:
        CheckpointError: as ``dump_state``.
        OSError: the file cannot be written.
    """
    offset = 0
    for chunk in _composed(model, info).chunks():
        rest = memoryview(chunk)
        while rest:
            written = os.pwrite(fd, rest, offset)
            offset += written
            rest = rest[written:]
    return offset


def load_state(source: bytes | str | os.PathLike[str], outcome: str) -> TrainedState:
    """Read a state back, from its bytes or from the file at a path.

    Raises:
        CheckpointError: the file is missing, damaged, or was not written by ``dump_state``.
    """
    data = source if isinstance(source, bytes) else _read(Path(source))
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{_name(source)} is not a whole safetensors file: {error}") from None
    header = parse_note(_header(data), _name(source))
    try:
        named = {name: tensors[stored] for name, stored in header["state_dict"].items()}
        return TrainedState(
            params=[tensors[stored] for stored in header["parameters"]],
            buffers=[tensors[stored] for stored in header["buffers"]],
            epochs=int(header["epochs"]),
            version=int(header["version"]),
            outcome=outcome,
            _named=named,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{_name(source)} has a flodl header that does not fit its tensors: {error!r}") from None


def match_state(model: torch.nn.Module, file: StateFile) -> dict[str, torch.Tensor]:
    """``model``'s own tensors by the names under which ``file`` stores what belongs into them. Changes nothing.

    Raises:
        CheckpointError: the file is of another model; the message names the first tensor that differs.
    """
    stored, header = inventory(model)
    try:
        mine, theirs = _names(stored, header), _names(file.places, file.note)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.name} has a flodl header that does not fit its tensors: {error!r}") from None
    for name, own in mine.items():
        if name not in theirs:
            raise CheckpointError(f"{file.name} has no {name}, which this model has; resume with the model it is of")
        place, here = str(file.places[theirs[name]]), describe_tensor(stored[own])
        if place != here:
            raise CheckpointError(f"{name} is {place} in {file.name}, and {here} in this model")
        if theirs[name] != own:
            raise CheckpointError(
                f"{name} is another tensor than in {file.name}: there its values are those of {theirs[name]}, in this "
                f"model those of {own}"
            )
    for name in theirs:
        if name not in mine:
            raise CheckpointError(
                f"{file.name} has {name}, which this model does not have; resume with the model it is of"
            )
    return stored


def _names(stored: Mapping[str, object], header: Mapping[str, Any]) -> dict[str, str]:
    """Every name of a model's tensors, and the name it is stored under."""
    stored_names = [*header["parameters"], *header["buffers"]]
    names: dict[str, str] = {name: name for name in stored_names} | header["state_dict"]
    for name in names.values():
        stored[name]
    return names


def _composed(model: torch.nn.Module, info: StateInfo) -> Composition:
    stored, header = inventory(model)
    return compose(stored, header | info.note())


def inventory(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """``model``'s own tensors by the name they are stored under, and the note's maps from names to stored names."""
    stored: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    state_dict: dict[str, str] = {}
    for raw_name, value in model.state_dict(keep_vars=True).items():
        name = raw_name.replace(_COMPILED, "")
        if not isinstance(value, torch.Tensor):
            log.warning("state left out name=%s type=%s (only tensors are kept)", name, type(value).__name__)
            continue
        state_dict[name] = first_name.setdefault(id(value), name)
        stored.setdefault(state_dict[name], value)
    orders: dict[str, list[str]] = {"parameters": [], "buffers": []}
    for kind, named in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        for raw_name, value in named:
            name = first_name.setdefault(id(value), _NONPERSISTENT + raw_name.replace(_COMPILED, ""))
            stored.setdefault(name, value)
            orders[kind].append(name)
    return stored, {"state_dict": state_dict, **orders}


def _header(data: bytes) -> bytes:
    return data[8 : 8 + min(int.from_bytes(data[:8], "little"), MAX_HEADER_BYTES)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _name(source: bytes | str | os.PathLike[str]) -> str:
    return "the state" if isinstance(source, bytes) else os.fspath(source)
