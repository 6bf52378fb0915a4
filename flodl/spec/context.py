"""Who this process is in a run, and where its scalars go. One per process; torch-free.

Before ``Trainer.run`` the answers come from the environment that the daemon gave the process; from then on from the
role that ``Trainer.run`` took. A process without any role is solo: rank 0 of 1, and the head as well.
"""

import os
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flodl.errors import UsageError
from flodl.ids import RankId

ROLE_VARIABLE = "FLODL_ROLE"
MAX_SCALAR_NAMES = 256
"""A name per step would grow every message without end; this many curves nobody looks at."""


class Role(StrEnum):
    """What a process does in a run."""

    SOLO = "solo"
    HEAD = "head"
    RANK = "rank"


class ScalarSums:
    """Sums of the user's scalars since the last drain. Filled by the training thread, drained by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[Any, int]] = {}

    def add(self, name: object, value: Any) -> None:
        """Add one value; a tensor stays on its device until the drain, so that a step never waits for it."""
        if not (isinstance(name, str) and name.isprintable()):
            raise UsageError(f"record_scalar: the name is {name!r}; use printable text")
        if hasattr(value, "numel") and value.numel() != 1:
            raise UsageError(f"record_scalar({name!r}): a tensor of shape {list(value.shape)}; record one number")
        detached = value.detach() if hasattr(value, "detach") else float(value)
        with self._lock:
            if name not in self._sums and len(self._sums) >= MAX_SCALAR_NAMES:
                raise UsageError(
                    f"record_scalar: {name!r} would be name number {MAX_SCALAR_NAMES + 1}; "
                    "use a fixed set of names, not one per step"
                )
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + detached, count + 1)

    def drain(self) -> dict[str, tuple[float, int]]:
        """Each name's (sum, count) since the last drain."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return {name: (float(total), count) for name, (total, count) in taken.items()}


@dataclass(slots=True)
class _Place:
    role: Role
    rank: RankId
    world_size: int
    save_path: str
    scalars: ScalarSums | None


@dataclass(slots=True)
class _Process:
    place: _Place | None = None


_process = _Process()


def refuse_running() -> None:
    """Raise UsageError while an earlier run of this process is still going."""
    if _process.place is not None and _process.place.scalars is not None:
        raise UsageError("Trainer.run was called while a run is still going in this process; join() the first one")


def enter(role: Role, rank: RankId = 0, world_size: int = 1, save_path: str | os.PathLike[str] | None = None) -> None:
    """Take a role in this process; ``save_path`` is the run's, and counts from the current folder."""
    refuse_running()
    stem = "" if save_path is None else os.path.abspath(save_path)
    _process.place = _Place(role, rank, world_size, stem, ScalarSums())


def scalars() -> ScalarSums:
    """Where the running job's scalars are collected. Raises UsageError outside a run."""
    place = _process.place
    if place is None or place.scalars is None:
        raise UsageError("there is no run in this process; call record_scalar inside train_step")
    return place.scalars


def save_path() -> str:
    """Where the run that is going in this process saves, as it would be on this machine; empty where it does not."""
    place = _process.place
    return "" if place is None or place.scalars is None else place.save_path


def leave() -> None:
    """The run of this process is over: scalars are refused again, the answers stay what they were."""
    if _process.place is not None:
        _process.place.scalars = None


def rank() -> RankId:
    """This process's rank; 0 in a solo process and in the head."""
    return _process.place.rank if _process.place else _number("RANK", 0)


def world_size() -> int:
    """Ranks at formation; 1 in a solo process and, before ``Trainer.run``, in the head."""
    return _process.place.world_size if _process.place else _number("WORLD_SIZE", 1)


def is_head() -> bool:
    """True where host-side code belongs: in the head and in a solo process, never in a rank."""
    if _process.place:
        return _process.place.role is not Role.RANK
    return os.environ.get(ROLE_VARIABLE, "").startswith("head:") or "RANK" not in os.environ


def record_scalar(name: str, value: Any) -> None:
    """Add a value to the epoch's curve ``name`` (mean over steps and ranks); call it inside ``train_step``.

    Args:
        name: of the curve; at most 256 different ones per window.
        value: a number or a one-element tensor; it is detached and never waited for.

    Raises:
        UsageError: no run is going in this process, or too many names.
    """
    scalars().add(name, value)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"the environment says {variable}={text!r}; it must be a whole number") from None
