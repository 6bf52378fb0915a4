"""tests/scripts/job.py in which the rank that is asked for a checkpoint's state goes wrong, once in a run.

FLODL_TEST_ASKED is a moment of ``MOMENTS`` and an action, "kill" or "stop" (SIGKILL and SIGSTOP of the own process):
``written kill``. It strikes the rank that is asked when the rank that was asked first has handed its state over; the
folder of --log then has ``struck-R``. All of it is done by wrapping methods in this process; flodl has no hook.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import job

from flodl.messages import StateSent
from flodl.rank.agent import Agent
from flodl.rank.saving import WholeState

MOMENTS = (
    "asked",  # nothing is written yet
    "writing",  # half of the outbox is garbage
    "written",  # all of it is there, nobody has been told
    "told",  # the daemon has been told, and sends
)
GARBAGE = b"\x7f"


class Fault:
    """What goes wrong in this rank, and when."""

    def __init__(self, log: Path, moment: str, action: str) -> None:
        assert moment in MOMENTS
        self._log, self._moment = log, moment
        self._number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action]
        self._is_ours = False

    def install(self) -> None:
        write, send = WholeState.write, Agent.send
        setattr(WholeState, "write", lambda own, info: self._write(write, own, info))  # noqa: B010
        setattr(Agent, "send", lambda own, message: self._send(send, own, message))  # noqa: B010

    def _write(self, write: Callable[[WholeState, Any], int], own: WholeState, info: Any) -> int:
        self._is_ours = (self._log / "handed-over").exists() and self._claims()
        self._at("asked")
        size_bytes = write(own, info)
        if self._is_ours and self._moment == "writing":
            os.pwrite(own._fd, GARBAGE * (size_bytes // 2), size_bytes // 2)
        self._at("writing")
        self._at("written")
        return size_bytes

    def _send(self, send: Callable[[Agent, Any], None], own: Agent, message: Any) -> None:
        send(own, message)
        if isinstance(message, StateSent):
            self._at("told")
            (self._log / "handed-over").touch()

    def _claims(self) -> bool:
        """Whether nobody else was struck."""
        try:
            (self._log / "struck").touch(exist_ok=False)
        except FileExistsError:
            return False
        (self._log / f"struck-{job.RANK}").touch()
        return True

    def _at(self, moment: str) -> None:
        if self._is_ours and moment == self._moment:
            os.kill(os.getpid(), self._number)


if __name__ == "__main__":
    if job.RANK.isdigit():
        log = Path(sys.argv[sys.argv.index("--log") + 1])
        Fault(log, *os.environ["FLODL_TEST_ASKED"].split()).install()
    job.main()
