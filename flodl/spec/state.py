"""The trained state and its bytes: a safetensors file whose header says in which order and under which names.

Parameters and persistent buffers stand under their state-dict names, so any safetensors reader opens the file; buffers
that the state dict leaves out stand under ``nonpersistent/``. A tensor with several names (tied weights) is stored
once, the other names are aliases in the header. Nothing is pickled, on neither path.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from flodl.errors import CheckpointError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""

_COMPILED = "_orig_mod."
_NONPERSISTENT = "nonpersistent/"
_DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What travels beside the tensors. ``epochs`` counts completed passes, ``version`` names the consensus."""

    epochs: int
    version: int


@dataclass(frozen=True, slots=True)
class TrainedState:
    """The weights after training, on the CPU.

    ``params`` and ``buffers`` are in the order of ``model.parameters()`` and ``model.buffers()``; a tied parameter
    stands there once. ``outcome`` says how the run ended (``complete``, ``stopped``, …).
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
    return b"".join(_chunks(model, info))


def write_state(model: torch.nn.Module, info: StateInfo, fd: int) -> int:
    """Write ``dump_state``'s bytes at the start of ``fd`` without a second copy in memory; returns their number.

    Raises:
        CheckpointError: as ``dump_state``.
        OSError: the file cannot be written.
    """
    offset = 0
    for chunk in _chunks(model, info):
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
    header = _header(data, _name(source))
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


def _chunks(model: torch.nn.Module, info: StateInfo) -> Iterator[bytes | memoryview]:
    stored, header = _inventory(model)
    # Wide elements first: readers take each tensor as a view, which must start at a multiple of its element size.
    order = sorted(stored, key=lambda name: -stored[name].element_size())
    entries: dict[str, Any] = {}
    offset = 0
    for name in order:
        tensor = stored[name]
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    note = header | {"format": FORMAT_VERSION, "epochs": info.epochs, "version": info.version}
    text = json.dumps({"__metadata__": {"format": "pt", "flodl": json.dumps(note)}} | entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if stored[name].numel():
            yield stored[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _inventory(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors by the name they are stored under, and the header's maps from names to stored names."""
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


def _header(data: bytes, name: str) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    try:
        note = json.loads(data[8 : 8 + min(size, MAX_HEADER_BYTES)])["__metadata__"]["flodl"]
        header: dict[str, Any] = json.loads(note)
        found = header["format"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{name} is a safetensors file, but not one that flodl wrote") from None
    if found != FORMAT_VERSION:
        raise CheckpointError(f"{name} has format {found!r}, this flodl reads {FORMAT_VERSION}; upgrade flodl")
    return header


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _name(source: bytes | str | os.PathLike[str]) -> str:
    return "the state" if isinstance(source, bytes) else os.fspath(source)
