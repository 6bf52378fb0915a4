"""What a ``.fdl`` says about itself: the header of a safetensors file, read and checked without torch.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header, little-endian; the header,
a JSON object from each tensor's name to its dtype, shape and place; then the tensors' bytes, without gaps. flodl's own
note stands in the header's ``__metadata__``: which of the tensors the model's state dict names, which are parameters,
and under ``whole`` what a training needs beside them.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, Final

from flodl.checkpoint.plain import expect, lift
from flodl.errors import CheckpointError

FORMAT: Final = 1
"""Of the note, as ``flodl.spec`` writes it."""
LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format itself."""
MAX_DIMENSIONS: Final = 64

ITEM_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4,
    "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: dtype as safetensors calls it, and its bytes ``[start, stop)``, counted from the file's begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """All tensors by the names they are stored under, in the file's order.

    ``state_dict`` maps the names of the model's state dict to stored names: tied ones share one. ``parameters`` are
    the stored names of the model's parameters, each once. The optimizers' state is there, or is not.
    """

    tensors: Mapping[str, StoredTensor]
    state_dict: Mapping[str, str]
    parameters: tuple[str, ...]
    has_optimizer: bool
    has_outer_optimizer: bool

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(self.tensors[name].elements for name in self.parameters)


def read_tensor_file(file: BinaryIO, name: str) -> TensorFile:
    """Read the header of ``file``, which stands at its begin.

    Raises:
        CheckpointError: no safetensors file, not one of flodl's, or damaged; the message begins with ``name``.
        OSError: it cannot be read.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    stop = LENGTH_BYTES + header_bytes
    header = _object(file.read(header_bytes)) if header_bytes <= MAX_HEADER_BYTES and stop <= size_bytes else None
    if header is None:
        raise CheckpointError(
            f"{name} was not written by this flodl: it is no safetensors file. "
            "A .fdl of the Rust flodl cannot be read; export the weights there, or start afresh"
        )
    metadata = header.pop("__metadata__", None)
    note = metadata.get("flodl") if isinstance(metadata, dict) else None
    noted = _object(note) if isinstance(note, str) else None
    if noted is None:
        raise CheckpointError(f"{name} was not written by this flodl: its header has no note of flodl's")
    if (found := noted.get("format")) != FORMAT:
        raise CheckpointError(f"{name} has format {found!a:.40}, this flodl reads {FORMAT}; upgrade flodl")
    try:
        return _described(noted, _tensors(header, stop, size_bytes))
    except CheckpointError as error:
        raise CheckpointError(f"{name} is damaged: {error}") from None


def _object(text: str | bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _tensors(header: Mapping[str, Any], begin: int, size_bytes: int) -> dict[str, StoredTensor]:
    found = {name: _tensor(name, entry, begin) for name, entry in header.items()}
    inside = dict(sorted(found.items(), key=lambda each: (each[1].start, each[1].stop)))
    stop = begin
    for name, tensor in inside.items():
        if tensor.start != stop:
            raise CheckpointError(f"{name!a:.80} begins at byte {tensor.start}, expected {stop}")
        stop = tensor.stop
    if stop != size_bytes:
        raise CheckpointError(f"its tensors end at byte {stop}, it has {size_bytes}")
    return inside


def _tensor(name: str, entry: object, begin: int) -> StoredTensor:
    where = f"{name!a:.80}"
    values = expect(dict, entry, where)
    dtype = values.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} has dtype {dtype!a:.40}, this flodl knows {', '.join(ITEM_BYTES)}")
    shape: tuple[int, ...] = lift(tuple[int, ...], values.get("shape"), f"{where}: shape", {})
    place: tuple[int, ...] = lift(tuple[int, ...], values.get("data_offsets"), f"{where}: data_offsets", {})
    if len(shape) > MAX_DIMENSIONS or len(place) != 2:
        raise CheckpointError(f"{where} has {len(shape)} dimensions and {len(place)} offsets")
    if place[1] - place[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(f"{where} has {place[1] - place[0]} bytes, which do not fit its dtype and shape")
    return StoredTensor(dtype, shape, begin + place[0], begin + place[1])


def _described(note: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> TensorFile:
    state_dict: dict[str, str] = lift(Mapping[str, str], note.get("state_dict"), "state_dict", {})
    parameters: tuple[str, ...] = lift(tuple[str, ...], note.get("parameters"), "parameters", {})
    for stored in chain(state_dict.values(), parameters):
        if stored not in tensors:
            raise CheckpointError(f"its header names {stored!a:.80}, which is not there")
    whole = expect(dict, note.get("whole", {}), "whole")
    outer = expect(dict, whole.get("outer", {}), "whole.outer")
    return TensorFile(
        tensors, state_dict, tuple(dict.fromkeys(parameters)), "optimizer" in whole, outer.get("class") is not None
    )
