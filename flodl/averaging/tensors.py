"""Which tensors of a model are averaged, how, and where each lies in the flat image.

- float32, bfloat16 and float16 accumulate in float32, float64 in float64.
- Integers and bools are carried as raw bytes of one rank.
- A float buffer that holds a value that is not finite when training starts (an attention mask of -inf) cannot be
  averaged and is carried as raw bytes too.
- Non-persistent buffers are averaged like the others, so that all ranks compute with the same values.
- Tied tensors (the same memory under several names) are one tensor; empty tensors take no part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flodl.errors import ConfigError

_MEAN32 = (torch.float32, torch.bfloat16, torch.float16)
_RAW = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


class Carriage(StrEnum):
    """How a tensor travels: summed in float32, summed in float64, or as the bytes of one rank."""

    MEAN32 = "float32 mean"
    MEAN64 = "float64 mean"
    RAW = "bytes of one rank"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model: its first name, and how to find it again when the module has rebound it."""

    name: str
    owner: nn.Module
    key: str
    is_parameter: bool
    carriage: Carriage
    dtype: torch.dtype
    shape: torch.Size

    def tensor(self) -> torch.Tensor:
        """The tensor as it is now.

        Raises:
            ConfigError: The module replaced it by one of another shape or dtype, or dropped it.
        """
        table = self.owner._parameters if self.is_parameter else self.owner._buffers
        tensor = table.get(self.key)
        if tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype:
            now = "is gone" if tensor is None else f"is now {_describe(tensor.dtype, tensor.shape)}"
            raise ConfigError(
                f"{self.kind} {self.name} was {_describe(self.dtype, self.shape)} when training started and {now}: "
                "averaged tensors keep shape and dtype. Keep a value that grows or changes type as a plain attribute."
            )
        return tensor.detach()

    @property
    def kind(self) -> str:
        """The word for messages."""
        return "parameter" if self.is_parameter else "buffer"

    def describe(self) -> str:
        """Name, dtype, shape and carriage in one line, for the fingerprint."""
        return f"{self.name} {_describe(self.dtype, self.shape)} {self.carriage}"


def discover(model: nn.Module) -> tuple[Entry, ...]:
    """All tensors to carry, parameters first, each in the module's own order.

    Raises:
        ConfigError: A tensor that cannot be averaged, by name; or tensors on more than one device.
    """
    entries: list[Entry] = []
    seen: set[tuple[object, ...]] = set()
    first: tuple[str, torch.device] | None = None
    for name, owner, key, tensor, is_parameter in _named_tensors(model):
        _refuse_unusable(name, tensor, is_parameter)
        if tensor.numel() == 0 or _identity(tensor) in seen:
            continue
        seen.add(_identity(tensor))
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise ConfigError(
                f"{name} is on {tensor.device} and {first[0]} on {first[1]}: flodl trains a model on one device; "
                "move it there in the model factory"
            )
        carriage = _carriage(name, tensor.detach(), is_parameter)
        entries.append(Entry(name, owner, key, is_parameter, carriage, tensor.dtype, tensor.shape))
    return tuple(entries)


def parameter_names(model: nn.Module) -> frozenset[str]:
    """The names of all parameters, tied and empty ones too, as in messages."""
    return frozenset(name for name, *_, is_parameter in _named_tensors(model) if is_parameter)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor, bool]]:
    modules = [(name.replace("_orig_mod.", ""), module) for name, module in model.named_modules()]
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, module, key, parameter, True
    for prefix, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{key}" if prefix else key, module, key, buffer, False


def _refuse_unusable(name: str, tensor: torch.Tensor, is_parameter: bool) -> None:
    reason = ""
    if nn.parameter.is_lazy(tensor):
        reason = "has no shape yet: run one batch through the model in the model factory"
    elif _is_wrapper(tensor):
        reason = f"is a {type(tensor).__name__}, which flodl cannot average: use plain tensors"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        reason = f"is {'quantized' if tensor.is_quantized else tensor.layout}: only dense tensors can be averaged"
    elif tensor.is_meta:
        reason = "is on the meta device and has no values: materialise the model in the model factory"
    elif _is_expanded(tensor):
        reason = "shares memory between its own elements (expand): call .contiguous() on it"
    if reason:
        raise ConfigError(f"{'parameter' if is_parameter else 'buffer'} {name} {reason}")


def _is_expanded(tensor: torch.Tensor) -> bool:
    repeats = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return repeats and tensor.numel() > 0


def _is_wrapper(value: object) -> bool:
    return is_traceable_wrapper_subclass(value)


def _carriage(name: str, tensor: torch.Tensor, is_parameter: bool) -> Carriage:
    if tensor.dtype in _RAW:
        return Carriage.RAW
    if tensor.dtype not in _MEAN32 and tensor.dtype != torch.float64:
        raise ConfigError(
            f"{'parameter' if is_parameter else 'buffer'} {name} has dtype {tensor.dtype}, which cannot be averaged: "
            "use float32, bfloat16, float16 or float64 (for complex numbers store real and imaginary parts)"
        )
    if not is_parameter and not bool(torch.isfinite(tensor).all()):
        return Carriage.RAW
    return Carriage.MEAN64 if tensor.dtype == torch.float64 else Carriage.MEAN32


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    # A transposed view of a dense tensor is the same memory, so only other views are told apart by their strides.
    strides = () if _is_dense(tensor) else tuple(zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, tensor.data_ptr(), tensor.numel(), tensor.dtype, strides


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
