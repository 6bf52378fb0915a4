"""A state as one safetensors file: how its tensors lie in it, and how they are read back, one at a time.

The header's ``__metadata__`` carries a note under ``flodl``, JSON, which says what the tensors mean. Wide elements
come first, for readers take each tensor as a view, which must start at a multiple of its element size. Nothing is
pickled. What is read is checked before it is used: a file may be damaged, or made by somebody else.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch

from flodl.errors import CheckpointError

FORMAT_VERSION: Final = 1
ALIGNMENT_BYTES: Final = 64
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format itself."""

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
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
_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Composition:
    """A file that is to be written: its ``head``, and where each of its tensors begins. Made by ``compose``."""

    head: bytes
    tensors: Mapping[str, torch.Tensor]
    starts: Mapping[str, int]
    size_bytes: int

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file's bytes, one tensor after the other."""
        yield self.head
        for name in self.starts:
            tensor = self.tensors[name]
            if tensor.numel():
                yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    def fill(self, image: torch.Tensor) -> None:
        """Copy everything into ``image``: uint8 [at least ``size_bytes``], contiguous, on the CPU, at a multiple of 8.

        Nothing is allocated; what comes from a device has arrived when this returns.
        """
        image[: len(self.head)].copy_(torch.frombuffer(bytearray(self.head), dtype=torch.uint8))
        for name, start in self.starts.items():
            tensor = self.tensors[name].detach()
            stop = start + tensor.numel() * tensor.element_size()
            image[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def compose(tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> Composition:
    """Lay a file out that holds ``tensors`` under their names, and ``note``; reads no tensor's values.

    Raises:
        CheckpointError: a tensor's dtype has no place in the format, or there are too many names.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries: dict[str, Any] = {}
    stops: list[int] = [0]
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold")
        stops.append(stops[-1] + tensor.numel() * tensor.element_size())
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": stops[-2:],
        }
    text = json.dumps({"__metadata__": {"format": "pt", "flodl": json.dumps(note)}} | entries).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the names of {len(order)} tensors and what goes with them take {len(text)} bytes, but "
            f"safetensors holds at most {MAX_HEADER_BYTES}"
        )
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    starts = {name: len(head) + start for name, start in zip(order, stops, strict=False)}
    return Composition(head, tensors, starts, len(head) + stops[-1])


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor in a file: bytes ``[start, stop)``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return _describe(self.dtype, self.shape)


class StateFile:
    """A file of ours that is open for reading. ``note`` is its note, ``places`` are its tensors by name."""

    def __init__(self, fd: int, name: str) -> None:
        """Read the header and check that the tensors lie in the file.

        Bytes behind the last tensor are not looked at: in a file that is filled again and again they are old.

        Args:
            fd: seekable; stays the caller's.
            name: of the file, for messages.

        Raises:
            CheckpointError: the file is damaged, or not one of ours.
        """
        self._fd, self.name = fd, name
        size_bytes = self._size_bytes()
        length = int.from_bytes(self._read_bytes(0, min(_LENGTH_BYTES, size_bytes)), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
            raise CheckpointError(f"{name} is not a whole safetensors file: {size_bytes} bytes, a header of {length}")
        header = self._read_bytes(_LENGTH_BYTES, length)
        self.note = parse_note(header, name)
        self.places = self._places(json.loads(header), _LENGTH_BYTES + length, size_bytes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name`` as a new one on the CPU, contiguous.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        place = self.places[name]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        if tensor.numel():
            self._read_into(memoryview(tensor.view(-1).view(torch.uint8).numpy().data), place.start)
        return tensor

    def _places(self, header: Mapping[str, Any], first: int, size_bytes: int) -> dict[str, Place]:
        places = {name: self._place(name, entry, first) for name, entry in header.items() if name != "__metadata__"}
        ordered = sorted(places.values(), key=lambda place: (place.start, place.stop))
        stop = ordered[-1].stop if ordered else first
        if stop > size_bytes:
            raise CheckpointError(f"{self.name} is cut off: it has {size_bytes} bytes, expected {stop}")
        if ordered and (ordered[0].start != first or any(a.stop != b.start for a, b in pairwise(ordered))):
            raise CheckpointError(f"{self.name} is damaged: its tensors do not lie side by side")
        return places

    def _place(self, name: str, entry: Any, first: int) -> Place:
        try:
            dtype = _DTYPES[entry["dtype"]]
            shape = tuple(_count(length) for length in entry["shape"])
            start, stop = (_count(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{self.name} is damaged: tensor {name!r} is described by {entry!r:.200}") from None
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{self.name} is damaged: tensor {name!r} of {stop - start} bytes has shape {shape}")
        return Place(dtype, shape, first + start, first + stop)

    def _size_bytes(self) -> int:
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise CheckpointError(f"{self.name} cannot be read: {error.strerror}") from error

    def _read_bytes(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self._read_into(memoryview(data), offset)
        return bytes(data)

    def _read_into(self, target: memoryview, offset: int) -> None:
        while target:
            try:
                count = os.preadv(self._fd, [target], offset)
            except OSError as error:
                raise CheckpointError(f"{self.name} cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{self.name} has become shorter while it was read")
            target, offset = target[count:], offset + count


def parse_note(header: bytes, name: str) -> dict[str, Any]:
    """The note in a safetensors ``header``.

    Raises:
        CheckpointError: there is none, or it is of another format; the message begins with ``name``.
    """
    try:
        note: dict[str, Any] = json.loads(json.loads(header)["__metadata__"]["flodl"])
        found = note["format"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(f"{name} is a safetensors file, but not one that flodl wrote") from None
    if found != FORMAT_VERSION:
        raise CheckpointError(f"{name} has format {found!r}, this flodl reads {FORMAT_VERSION}; upgrade flodl")
    return note


def describe_tensor(tensor: torch.Tensor) -> str:
    """As a ``Place`` prints that fits it: ``float32 [3, 4]``."""
    return _describe(tensor.dtype, tuple(tensor.shape))


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
