"""How a run ends: the first failure, what was tolerated, what only followed, and the exit code.

Invariants: the first failure that stops the run is the root cause, except that a script's own exception outranks the
lost connections it causes; the exit code is never that of a rank that we stopped ourselves. Order is the order in which
the controller heard of things. docs/operations.md has the table of exit codes.
"""

from dataclasses import replace

from flodl.core.actions import Failure, Outcome
from flodl.ids import HostName, RankId

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_UNREACHABLE = 4
EXIT_TOO_FEW_RANKS = 5
EXIT_CHECKPOINT = 6
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

KIND_EXCEPTION = "exception"
KIND_EXIT = "exit"
KIND_SIGNAL = "signal"
KIND_HOST = "host lost"
KIND_SILENCE = "silent"
KIND_HEAD = "head"
KIND_REFUSED = "refused"
KIND_DISSENT = "another consensus"
KIND_STALL = "stall"
KIND_STATE = "final state"


def loss(kind: str, host: HostName, rank: RankId, error: str) -> Failure:
    """Something that no process has died of by itself; where it ends the run, too few ranks are left of it."""
    return Failure(kind, host, rank, error, "", EXIT_TOO_FEW_RANKS, 0)


def process_exit_code(code: int, signal: int) -> int:
    """A process's end as a shell would say it: its code, or 128 + the signal."""
    return 128 + signal if signal else code


class Ending:
    """Collects what went wrong and says how the run ended."""

    def __init__(self) -> None:
        self.root: Failure | None = None
        self.losses: list[Failure] = []
        self.collateral = 0
        self._status = "completed"
        self._exit_code = EXIT_OK
        self._message = ""

    @property
    def is_decided(self) -> bool:
        """True once the run is stopping, for whatever reason."""
        return self._status != "completed"

    @property
    def status(self) -> str:
        """completed, stopped or failed."""
        return self._status

    @property
    def message(self) -> str:
        """One sentence for a person."""
        return self._message

    @property
    def exit_code(self) -> int:
        """As far as it is known by now."""
        return self._exit_code

    def tolerate(self, failure: Failure) -> None:
        """A loss that the run survives."""
        self.losses.append(failure)

    def exhausted(self, failure: Failure) -> Failure:
        """``failure`` leaves too few ranks. A signal is the root cause, and gives its code, where it is the only loss;
        behind others it is the last of several, none of which alone has ended the run.
        """
        is_one_of_several = failure.kind == KIND_SIGNAL and bool(self.losses)
        return replace(failure, exit_code=EXIT_TOO_FEW_RANKS) if is_one_of_several else failure

    def stop(self, exit_code: int, message: str) -> None:
        """The run stops in order, on someone's word or because too little is left of it."""
        if not self.is_decided:
            self._status, self._exit_code, self._message = "stopped", exit_code, message

    def fail(self, failure: Failure, message: str) -> None:
        """The run fails. What comes after the run was failed or stopped is collateral, unless it is the script's own
        exception behind a failure that was not.
        """
        if self.is_decided and not self._outranks(failure):
            self.collateral += 1
            return
        if self.root is not None:
            self.collateral += 1
        self._status, self._exit_code, self._message = "failed", failure.exit_code, message
        self.root = failure

    def correct_exit_code(self, rank: int, exit_code: int) -> bool:
        """The root cause's process has ended: its code is the run's. False when it is not the root cause."""
        if self.root is None or self.root.rank != rank or self.root.kind != KIND_EXCEPTION:
            return False
        if exit_code:
            self.root = replace(self.root, exit_code=exit_code)
            self._exit_code = exit_code
        return True

    def finish(self, head_exit_code: int) -> Outcome:
        """The outcome. A head that fails after a completed training gives the run its own code."""
        exit_code = self._exit_code
        if self._status == "completed" and head_exit_code:
            exit_code = head_exit_code
        return Outcome(self._status, exit_code, self._message, self.root, tuple(self.losses), self.collateral)

    def _outranks(self, failure: Failure) -> bool:
        return failure.kind == KIND_EXCEPTION and self.root is not None and self.root.kind != KIND_EXCEPTION
