"""What one of torch's optimizers remembers of a parameter behind a step: which values, of what shape and dtype.

Nothing says so beforehand, so a step is rehearsed: a copy of the optimizer takes one over a few zeros. Only code of
torch is run; of an optimizer with a ``step`` of its own, or of one that cannot be rehearsed, nothing is known.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from flodl.errors import CheckpointError
from flodl.rank.words import describe
from flodl.spec.state_file import Place, describe_tensor

_Kind: TypeAlias = tuple[int, int, torch.dtype, torch.device]
_PLAIN = (int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Remembered:
    """``values`` by name, as they are for a parameter of the shape ``shape``."""

    values: Mapping[str, Any]
    shape: torch.Size

    def check(self, where: str, found: Any, parameter: torch.Tensor) -> None:
        """Whether a step can start from ``found``, the memory of ``parameter``, with a ``Place`` for each tensor.

        An empty one can be started from: it is as before the first step.

        Raises:
            CheckpointError: it cannot; the message begins with ``where``, and names the first value that differs.
        """
        if not isinstance(found, dict):
            raise CheckpointError(f"{where} is {found!r:.200} in the saved state, expected {', '.join(self.values)}")
        for name, wanted in self.values.items() if found else ():
            if name not in found:
                raise CheckpointError(
                    f"{where} has no {name} in the saved state, and this training's optimizer needs it"
                )
            here = self._misfit(wanted, found[name], parameter)
            if here:
                there = str(found[name]) if isinstance(found[name], Place) else f"{found[name]!r:.200}"
                raise CheckpointError(f"{where}/{name} is {there} in the saved state, and {here} in this training")

    def _misfit(self, wanted: Any, found: Any, parameter: torch.Tensor) -> str:
        """What stands in the place of ``found`` here; empty when that fits, or when nothing can be said of it."""
        if not isinstance(wanted, torch.Tensor):
            fits = not isinstance(wanted, int | float) or isinstance(found, int | float)
            return "" if fits else f"a number such as {wanted!r}"
        if not isinstance(found, Place):
            return "a tensor"
        if wanted.shape == self.shape:
            here = describe_tensor(torch.empty_like(parameter, dtype=wanted.dtype, device="meta"))
            return "" if str(found) == here else here
        if wanted.numel() != 1:
            return ""
        # How often it has stepped, and the like.
        fits = math.prod(found.shape) == 1 and found.dtype.is_floating_point == wanted.is_floating_point()
        return "" if fits else describe_tensor(wanted)


class Rehearsal:
    """Of one optimizer. Changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Assigns only."""
        self._optimizer = optimizer
        step: Callable[[Any], object] = inspect.unwrap(type(optimizer).step)  # without what hooks and profilers add
        is_torchs = str(getattr(step, "__module__", "")).startswith("torch.optim.")
        self._step = step if is_torchs else None
        self._known: dict[_Kind, Remembered | None] = {}

    def behind(self, place: int, settings: Mapping[str, Any], parameter: torch.Tensor) -> Remembered | None:
        """What is remembered of ``parameter`` behind a step; None where that is not known.

        Args:
            place: of its group.
            settings: the group's, as they will be then; those that it has now count where these are silent.
            parameter: in that group.

        Raises:
            CheckpointError: no step can be taken with ``settings``, though it can with those that the group has now.
        """
        kind = (place, parameter.ndim, parameter.dtype, parameter.device)
        if self._step is not None and kind not in self._known:
            self._known[kind] = self._rehearse(self._step, place, settings, parameter)
        return self._known.get(kind)

    def _rehearse(
        self, step: Callable[[Any], object], place: int, settings: Mapping[str, Any], parameter: torch.Tensor
    ) -> Remembered | None:
        group = self._optimizer.param_groups[place]
        try:
            self._take(step, group, parameter)
        except Exception:  # noqa: BLE001  # not over zeros that come from nowhere, and so nothing can be told of others
            state = self._optimizer.state.get(parameter)
            return Remembered(state, parameter.shape) if state else None
        plain = {name: value for name, value in settings.items() if _is_plain(value)}
        try:
            return self._take(step, {**group, **plain}, parameter)
        except Exception as error:  # noqa: BLE001  # it will do the same at the first step
            raise CheckpointError(
                f"group {place} of the optimizer has settings in the saved state with which it cannot step here: "
                f"{describe(error)}"
            ) from None

    def _take(self, step: Callable[[Any], object], group: Mapping[str, Any], parameter: torch.Tensor) -> Remembered:
        shape = torch.Size(range(2, 2 + parameter.ndim))
        zeros = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device).requires_grad_()
        zeros.grad = torch.zeros_like(zeros)
        copy = object.__new__(type(self._optimizer))
        memory: Any = defaultdict(dict)
        vars(copy).update(vars(self._optimizer), state=memory, param_groups=[{**group, "params": [zeros]}])
        with torch.no_grad():
            step(copy)
        return Remembered(memory[zeros], shape)


def _is_plain(value: Any) -> bool:
    """Whether it holds no tensor: where one is saved, the group's own shows whether it fits."""
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, _PLAIN)
