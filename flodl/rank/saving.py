"""A rank's whole state, as a checkpoint needs it: one safetensors file in the rank's outbox.

Parameters and buffers stand there as in the trained state (``flodl.spec.state``), the optimizer's tensors under
``optim/``, the outer optimizer's under ``outer/``; what is no tensor stands in the header's note, under ``whole``.

The outbox is shared memory, and the copy is taken right into it, in one pass: as soon as it is taken the daemon can
send it while the rank trains on, and no memory is held but the outbox's own. So the next state must not be ordered
before the daemon has sent this one.

Whose optimizer: where a window ends with the round, the optimizer as it is between the two. An asynchronous rank has
trained beyond what it gave to the round; its ``Backup`` was taken with that, and is saved. It is the published
version's from the commit until the rank's next window ends. Where the outer optimizer has let the inner ones start
afresh, they remember nothing.
"""

import dataclasses
import logging
import mmap
import os
from collections.abc import Mapping
from typing import Any, Final

import torch

from flodl.averaging.outer_step import OuterStep
from flodl.errors import CheckpointError
from flodl.rank.backup import Memory
from flodl.rank.stepper import Stepper
from flodl.spec.state import StateInfo, inventory
from flodl.spec.state_file import compose
from flodl.spec.tree import NamedTensors, Node, encode

log = logging.getLogger(__name__)

OPTIMIZER: Final = "optim"
OUTER: Final = "outer"
GROWTH_BYTES: Final = 1 << 20
"""The outbox grows by multiples: a header that is a digit longer shall not cost a new mapping."""


class WholeState:
    """Of one rank; made once, taken again and again. Belongs to the training thread."""

    def __init__(self, stepper: Stepper, outer: OuterStep | None, is_async: bool, outbox_fd: int) -> None:
        """Assigns only.

        Args:
            stepper: has model, optimizer, schedule and loss scaler.
            outer: None without an outer optimizer.
            is_async: whether the rank trains beyond what it gives to a round.
            outbox_fd: a memfd; it grows, and never shrinks.
        """
        self._stepper, self._outer, self._is_async, self._fd = stepper, outer, is_async, outbox_fd
        self._image = torch.empty(0, dtype=torch.uint8)

    def write(self, info: StateInfo) -> int:
        """Put everything into the outbox, from its start; returns the size in bytes, behind which old bytes may lie.

        The model must hold the consensus (``Plane.consensus``).

        Raises:
            CheckpointError: something cannot be saved; the message says what and where.
            OSError: the host has no memory left for the outbox.
        """
        stored, header = inventory(self._stepper.model)
        tensors = NamedTensors(stored)
        names = {id(tensor): name for name, tensor in stored.items()}
        whole = self._note(self._memory(), names, tensors)
        file = compose(tensors.named, header | info.note() | {"whole": whole})
        if file.size_bytes > self._image.numel():
            self._grow(-(-file.size_bytes // GROWTH_BYTES) * GROWTH_BYTES)
        file.fill(self._image)
        return file.size_bytes

    def _memory(self) -> Memory:
        memory = self._stepper.kept_memory if self._is_async else None
        if memory is None:
            memory = self._stepper.memory
        elif self._outer is not None and self._outer.has_reset_inner:
            memory = dataclasses.replace(memory, state={})
        return memory

    def _note(self, memory: Memory, names: Mapping[int, str], tensors: NamedTensors) -> dict[str, Node]:
        outer = {} if self._outer is None else self._outer.slots
        return {
            "optimizer": _optimizer_note(self._stepper.optimizer, memory, names, tensors),
            "scheduler": {
                "class": self._stepper.schedule.name,
                "state": encode(memory.schedule, "scheduler", tensors),
            },
            "scaler": encode(memory.scaler, "scaler", tensors),
            "outer": {
                "class": None if self._outer is None else self._outer.name,
                "slots": {name: encode(slot, f"{OUTER}/{name}", tensors) for name, slot in outer.items()},
            },
        }

    def _grow(self, size_bytes: int) -> None:
        os.posix_fallocate(self._fd, 0, size_bytes)  # no memory is an error now instead of SIGBUS at the first touch
        self._image = torch.frombuffer(mmap.mmap(self._fd, size_bytes), dtype=torch.uint8)


def parameter_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[tuple[str, torch.Tensor]]]:
    """The optimizer's parameters by group, each under its name in the model; ``[7]``, its place, where it has none.

    Args:
        optimizer: whose groups count.
        names: of the model's tensors, by id.
    """
    found: list[list[tuple[str, torch.Tensor]]] = []
    place = 0
    for group in optimizer.param_groups:
        found.append([])
        for parameter in group["params"]:
            found[-1].append((names.get(id(parameter), f"[{place}]"), parameter))
            place += 1
    return found


def _optimizer_note(
    optimizer: torch.optim.Optimizer, memory: Memory, names: Mapping[int, str], tensors: NamedTensors
) -> dict[str, Node]:
    kind = type(optimizer)
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        raise CheckpointError(
            f"{OPTIMIZER}: {kind.__qualname__} has a state_dict() of its own, and a checkpoint keeps what torch's "
            "optimizers keep, their state and param_groups; use an optimizer that leaves state_dict() as it is"
        )
    groups = parameter_names(optimizer, names)
    name_of = {id(parameter): name for group in groups for name, parameter in group}
    state: list[Node] = []
    other: list[tuple[Any, Any]] = []
    for key, values in memory.state.items():
        if not isinstance(key, torch.Tensor):
            other.append((key, values))
        elif id(key) in name_of:
            name = name_of[id(key)]
            state.append([name, encode(values, f"{OPTIMIZER}/{name}", tensors)])
        else:
            log.warning("optimizer state left out shape=%s (its parameter is in no group)", list(key.shape))
    return {
        "class": kind.__qualname__,
        "parameters": [[name for name, _ in group] for group in groups],
        "groups": [encode(_plain(group), f"{OPTIMIZER}/{i}", tensors) for i, group in enumerate(memory.groups)],
        "state": state,
        "other": encode(dict(other), OPTIMIZER, tensors),
    }


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
