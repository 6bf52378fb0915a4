"""tests/scripts/job.py with faults in chosen phases of chosen rounds, and a diary of what each rank packs and adopts.

FLODL_TEST_FAULTS is a JSON list of ``{"rank", "version", "phase", "action"}`` and, if need be, ``"attempt"``. Version
is the one that the round would publish, or "last"; the phases are ``PHASES``; action is "kill" or "stop" (SIGKILL and
SIGSTOP of the own process). A phase in which bytes are written is entered with half of them written as garbage.

In the folder of --log: ``diary-R.jsonl``, what rank R did: ``packed`` and ``adopted`` with the round's key, the image
and a digest of the model, ``fault`` just before one, ``woke`` after a stop. All of it is done by wrapping methods in
this process; flodl has no hook.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import job
import torch

from flodl.averaging.collective import CollectivePlane
from flodl.averaging.flat import FlatModel
from flodl.averaging.regions import slice_bounds
from flodl.averaging.shared import SharedPlane
from flodl.core import actions as act
from flodl.messages import ContributionWritten, Reduced, SliceReduced, WindowDone
from flodl.rank.agent import Agent
from flodl.rank.planes import AsyncRounds, CollectiveRounds, SharedRounds
from flodl.rank.stepper import Stepper

PHASES = (
    "forming",  # asked to form a group; the version counts incarnations
    "window",  # between the first and the second step
    "accounted",  # the window's report is sent, the go has not come
    "packing",  # half of the contribution is garbage
    "packed",  # all of it is written, nobody has been told
    "written",  # CPU plane: the daemon has been told
    "reducing",  # collective: the all-reduce has just begun; CPU plane: half of the own slice is garbage
    "sliced",  # CPU plane: the own slice is summed, the daemon has been told
    "reduced",  # the sum is here, the controller has not been told
    "holding",  # the controller has been told
    "adopting",  # the commit is here; half of the first parameter is garbage, unless it is blended
    "adopted",
)
GARBAGE = 0x7F


class Diary:
    """Appends one line at a time, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, did: str, **fields: object) -> None:
        os.write(self._fd, (json.dumps({"did": did, **fields}) + "\n").encode())


class Faults:
    """What shall go wrong in this rank, each once."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        asked = json.loads(os.environ.get("FLODL_TEST_FAULTS", "[]"))
        self._left = [fault for fault in asked if str(fault["rank"]) == job.RANK]
        assert all(fault["phase"] in PHASES for fault in self._left), self._left

    def are_due(self, phase: str, version: int, attempt: int | None = None, is_last: bool = False) -> list[Any]:
        """The faults of this moment; they are gone from the list then."""
        due = [
            fault
            for fault in self._left
            if fault["phase"] == phase
            and (fault["version"] == version or (is_last and fault["version"] == "last"))
            and fault.get("attempt", attempt) == attempt
        ]
        self._left = [fault for fault in self._left if fault not in due]
        return due

    def strike(self, due: list[Any]) -> None:
        for fault in due:
            self._diary.write("fault", **fault)
            os.kill(os.getpid(), signal.SIGKILL if fault["action"] == "kill" else signal.SIGSTOP)
            self._diary.write("woke", **fault)


class Phases:
    """Wraps the methods that lie between two phases. ``key`` is the round at hand, ``version`` the one adopted last."""

    def __init__(self, diary: Diary) -> None:
        self._diary, self._faults = diary, Faults(diary)
        self._key: Any = None
        self._action: Any = None
        self._is_last = False
        self._version, self._steps = -1, 0
        self._model: Any = None

    def install(self) -> None:
        for owner, name in (
            (CollectivePlane, "form"),
            (Stepper, "step"),
            (Agent, "send"),
            (FlatModel, "__init__"),
            (FlatModel, "pack"),
            (FlatModel, "rescale"),
            (FlatModel, "adopt"),
            (FlatModel, "blend"),
            (SharedPlane, "reduce_slice"),
            (CollectiveRounds, "execute"),
            (SharedRounds, "execute"),
            (AsyncRounds, "execute"),
        ):
            _wrap(owner, name, getattr(self, f"_on_{name.strip('_')}"))

    def _on_form(self, form: Callable[..., None], plane: CollectivePlane, incarnation: int, *rest: Any) -> None:
        form(plane, incarnation, *rest)
        self._faults.strike(self._faults.are_due("forming", incarnation))

    def _on_init(self, init: Callable[..., None], flat: FlatModel, model: torch.nn.Module) -> None:
        self._model = model
        init(flat, model)

    def _on_step(self, step: Callable[..., Any], stepper: Stepper) -> Any:
        if self._steps == 1:
            self._at_window()
        done = step(stepper)
        self._steps += done is not None
        return done

    def _on_send(self, send: Callable[..., None], agent: Agent, message: Any) -> None:
        if isinstance(message, Reduced) and not message.error:
            self._at("reduced")
        send(agent, message)
        match message:
            case WindowDone():
                self._faults.strike(self._faults.are_due("accounted", self._version + 1))
            case ContributionWritten():
                self._at("written")
            case SliceReduced():
                self._at("sliced")
            case Reduced(error=""):
                self._at("holding")

    def _on_execute(self, execute: Callable[..., Any], rounds: Any, action: Any) -> Any:
        if isinstance(action, act.Pack):
            self._key, self._is_last = action.key, action.include_raw and action.key.version > 0
        outer, self._action = self._action, action
        event = execute(rounds, action)
        self._action = outer
        match action:
            case act.Pack():
                self._at("packed")
            case act.ReduceCollective():
                self._at("reducing")
            case act.Adopt() | act.Blend():
                self._at("adopted")
        return event

    def _on_pack(
        self, pack: Callable[..., bool], flat: FlatModel, out: torch.Tensor, *shares: Any, **more: Any
    ) -> bool:
        if not isinstance(self._action, act.Pack):  # a snapshot, which nobody gets
            return pack(flat, out, *shares, **more)
        self._spoil(out)
        is_finite = pack(flat, out, *shares, **more)
        self._note_packed(out, shares, self._digest())
        return is_finite

    def _on_rescale(
        self, rescale: Callable[..., None], flat: FlatModel, src: torch.Tensor, out: torch.Tensor, *shares: Any
    ) -> None:
        self._spoil(out)
        rescale(flat, src, out, *shares)
        self._note_packed(out, shares, job.digest([src]))

    def _spoil(self, out: torch.Tensor) -> None:
        due = self._due("packing")
        if due:
            out[: out.numel() // 2] = GARBAGE
            self._faults.strike(due)

    def _note_packed(self, out: torch.Tensor, shares: Sequence[Any], held: str) -> None:
        image = out.numpy().tobytes().hex()
        self._diary.write("packed", key=_plain(self._key), shares=shares, held=held, image=image)

    def _on_reduce_slice(self, reduce: Callable[..., None], plane: SharedPlane, layout: Any, *rest: Any) -> None:
        due = self._due("reducing")
        if due:
            reduce(plane, layout, *rest)
            start, stop = slice_bounds(layout, rest[0], rest[1])
            half = (stop - start) // 2
            plane.result(layout)[start : start + half] = bytes([GARBAGE]) * half
            self._faults.strike(due)
        reduce(plane, layout, *rest)

    def _on_adopt(
        self, adopt: Callable[..., None], flat: FlatModel, src: torch.Tensor, *rest: Any, **more: Any
    ) -> None:
        if not isinstance(self._action, act.Adopt):  # a look at the consensus
            return adopt(flat, src, *rest, **more)
        image = src.numpy().tobytes().hex()
        due = self._due("adopting")
        if due:
            first = next(self._model.parameters()).detach().flatten()
            first[: first.numel() // 2] = float("nan")
            self._faults.strike(due)
        adopt(flat, src, *rest, **more)
        self._note_adopted(image, self._digest())
        return None

    def _on_blend(self, blend: Callable[..., None], flat: FlatModel, src: torch.Tensor, alpha: float) -> None:
        self._faults.strike(self._due("adopting"))
        blend(flat, src, alpha)
        self._note_adopted(src.numpy().tobytes().hex(), "a blend of its own")

    def _note_adopted(self, image: str, holds: str) -> None:
        self._version, self._steps = self._key.version, 0
        self._diary.write("adopted", key=_plain(self._key), holds=holds, image=image)

    def _at_window(self) -> None:
        """An asynchronous rank may take its second step of a window before it knows of it: then in the next one."""
        for version in range(self._version + 2):
            self._faults.strike(self._faults.are_due("window", version))

    def _at(self, phase: str) -> None:
        self._faults.strike(self._due(phase))

    def _due(self, phase: str) -> list[Any]:
        return self._faults.are_due(phase, self._key.version, self._key.attempt, self._is_last)

    def _digest(self) -> str:
        """Of what is averaged."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        return job.digest(tensor for tensor in tensors if tensor.is_floating_point())


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **named: wrapper(original, self, *args, **named))


def _plain(key: Any) -> list[int]:
    return [key.incarnation, key.version, key.attempt]


if __name__ == "__main__":
    if job.RANK.isdigit():
        log = Path(sys.argv[sys.argv.index("--log") + 1])
        Phases(Diary(log / f"diary-{job.RANK}.jsonl")).install()
    job.main()
