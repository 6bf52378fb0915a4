"""tests/scripts/job.py in which one rank is killed, once in a run, and says when.

FLODL_TEST_STRUCK is one of ``MOMENTS``. The rank writes the time (monotonic seconds) into ``struck-R`` in the folder of
--log and sends itself SIGKILL. "step" and "reduce" strike rank 1; "save" and "callback" whoever was chosen. All of it
is done by wrapping functions in this process; flodl has no hook.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import job

from flodl.averaging.collective import CollectivePlane
from flodl.averaging.shared import SharedPlane
from flodl.core import actions as act
from flodl.rank import evaluation
from flodl.rank.planes import AsyncRounds, CollectiveRounds, SharedRounds
from flodl.rank.saving import WholeState

MOMENTS = (
    "step",  # in the middle of a step
    "reduce",  # the all-reduce has just begun; CPU plane: half of the own slice is garbage
    "save",  # half of the state is written
    "callback",  # in the evaluation
)
FROM_STEP = 60
FROM_VERSION = 4
VICTIM = "1"


class Strike:
    """Of this rank, when its moment comes."""

    def __init__(self, log: Path, moment: str) -> None:
        assert moment in MOMENTS
        self._log, self._moment = log, moment
        self._steps = self._version = 0

    def install(self) -> None:
        match self._moment:
            case "step" if job.RANK == VICTIM:
                setattr(job, "time", SimpleNamespace(sleep=self._sleep, monotonic=time.monotonic))  # noqa: B010
            case "reduce" if job.RANK == VICTIM:
                for rounds in (CollectiveRounds, SharedRounds, AsyncRounds):
                    self._wrap(rounds, "execute", self._on_execute)
                self._wrap(CollectivePlane, "all_reduce", self._on_all_reduce)
                self._wrap(SharedPlane, "reduce_slice", self._on_reduce_slice)
            case "save":
                self._wrap(WholeState, "write", self._on_write)
            case "callback":
                self._wrap(evaluation, "_mean", self._on_mean)

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        wrapped = getattr(owner, name)
        setattr(owner, name, lambda *args, **more: around(wrapped, *args, **more))

    def _sleep(self, seconds: float) -> None:
        self._steps += 1
        time.sleep(seconds / 2)
        if self._steps >= FROM_STEP:
            self._strike()
        time.sleep(seconds / 2)

    def _on_execute(self, execute: Callable[..., Any], rounds: Any, action: Any) -> Any:
        if isinstance(action, act.Pack):
            self._version = action.key.version
        return execute(rounds, action)

    def _on_all_reduce(self, reduce: Callable[..., None], *args: Any) -> None:
        reduce(*args)
        if self._version >= FROM_VERSION:
            self._strike()

    def _on_reduce_slice(self, reduce: Callable[..., None], plane: SharedPlane, layout: Any, *rest: Any) -> None:
        reduce(plane, layout, *rest)
        if self._version >= FROM_VERSION:
            half = layout.total_bytes // 2
            plane.result(layout)[:half] = b"\x7f" * half
            self._strike()

    def _on_write(self, write: Callable[..., int], own: WholeState, info: Any) -> int:
        size_bytes = write(own, info)
        if self._is_second():
            os.pwrite(own._fd, b"\x7f" * (size_bytes // 2), size_bytes // 2)
            self._strike()
        return size_bytes

    def _on_mean(self, mean: Callable[..., float], *args: Any) -> float:
        if self._is_second():
            self._strike()
        return mean(*args)

    def _is_second(self) -> bool:
        """The first one of a run goes well, so that there is something to lose."""
        try:
            (self._log / "went-well").touch(exist_ok=False)
        except FileExistsError:
            return not any(self._log.glob("struck-*"))
        return False

    def _strike(self) -> None:
        path = self._log / f"struck-{job.RANK}"
        path.with_suffix(".tmp").write_text(str(time.monotonic()))
        path.with_suffix(".tmp").rename(path)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if job.RANK.isdigit():
        Strike(Path(sys.argv[sys.argv.index("--log") + 1]), os.environ["FLODL_TEST_STRUCK"]).install()
    job.main()
