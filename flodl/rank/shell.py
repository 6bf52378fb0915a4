"""The loop of one rank: what the core decides is done here, on the training thread, one thing at a time.

Messages and effects are handled before the next step begins, so an order waits for one step at most. Nothing here
waits for a peer: the thread is in a step, in an effect, or at its inbox.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, assert_never

from flodl.core.actions import (
    AbandonReduce,
    AccountWindow,
    Adopt,
    BackUp,
    Blend,
    CallBack,
    DigestTensors,
    EndRank,
    Evaluate,
    FormCollective,
    LoadAhead,
    OpenWindow,
    Pack,
    RankAction,
    ReduceCollective,
    RollBack,
    SendUp,
    SumSlice,
    TakeResult,
    TakeSnapshot,
    TakeState,
    WriteState,
)
from flodl.core.events import CalledBack, Evaluated, RankEvent, StateTaken, StateWritten
from flodl.core.rank import RankCore
from flodl.messages import RankToDaemon
from flodl.rank.inbox import Inbox
from flodl.rank.planes import Plane
from flodl.rank.stepper import Stepper
from flodl.rank.words import MAX_CHARS, describe, encodable
from flodl.spec.state import StateInfo

IDLE_S: Final = 1.0
"""The controller watches every wait of a rank and ends it with a message; the loop only looks again."""


class RankShell:
    """Drives one RankCore to its end."""

    def __init__(
        self,
        core: RankCore,
        stepper: Stepper,
        plane: Plane,
        inbox: Inbox,
        send: Callable[[RankToDaemon], None],
        call: Callable[[Evaluate | CallBack], Evaluated | CalledBack],
        hand_over: Callable[[StateInfo, bool], int],
        take_over: Callable[[], Sequence[str]],
    ) -> None:
        """Assigns only.

        Args:
            core: of this rank.
            stepper: trains batches.
            plane: averages.
            inbox: where messages and late effects arrive.
            send: says something to the daemon; never raises.
            call: calls the script's functions that run behind an epoch. The model holds the consensus meanwhile.
            hand_over: puts the state where the daemon takes it, the whole of it if the flag says so; returns its size
                in bytes. The model holds the consensus meanwhile.
            take_over: loads the whole state that the daemon has left; returns what the user should know of it.
        """
        self._core, self._stepper, self._plane, self._inbox = core, stepper, plane, inbox
        self._send, self._call, self._hand_over, self._take_over = send, call, hand_over, take_over
        self._effects: deque[RankEvent] = deque()
        self._end: EndRank | None = None

    def run(self) -> EndRank:
        """Train until the core ends the rank.

        Raises:
            Exception: whatever the script's own code raised in a step.
        """
        core, inbox, effects = self._core, self._inbox, self._effects
        while self._end is None:
            event: RankEvent | None
            if effects:
                event = effects.popleft()
            elif inbox.is_empty and core.wants_step:
                event = self._stepper.step()
            else:
                event = inbox.take(IDLE_S)
            if event is not None:
                for action in core.handle(event, time.monotonic()):
                    self._execute(action)
        return self._end

    def _execute(self, action: RankAction) -> None:
        match action:
            case SendUp(message):
                self._send(message)
            case LoadAhead(grant):
                self._stepper.push(grant)
            case OpenWindow(progress_samples, stride, steps):
                self._stepper.open_window(progress_samples, stride, steps)
            case AccountWindow():
                self._effects.append(self._stepper.account())
            case (
                FormCollective()
                | TakeSnapshot()
                | Pack()
                | ReduceCollective()
                | SumSlice()
                | TakeResult()
                | DigestTensors()
                | AbandonReduce()
                | Adopt()
                | Blend()
            ):
                event = self._plane.execute(action)
                if event is not None:
                    self._effects.append(event)
            case BackUp():
                self._stepper.back_up()
            case RollBack():
                self._stepper.roll_back()
            case Evaluate() | CallBack():
                with self._plane.consensus():
                    self._effects.append(self._call(action))
            case WriteState(transfer, whole):
                self._effects.append(self._write_state(transfer, whole))
            case TakeState(transfer):
                self._effects.append(self._take_state(transfer))
            case EndRank():
                self._end = action
            case _:
                assert_never(action)

    def _write_state(self, transfer: int, whole: bool) -> StateWritten:
        info = StateInfo(self._stepper.newest_epoch, self._core.version)
        try:
            with self._plane.consensus():
                return StateWritten(transfer, self._hand_over(info, whole), "")
        except Exception as error:  # noqa: BLE001  # the training is not hurt; what is lost is told by name
            return StateWritten(transfer, 0, describe(error))

    def _take_state(self, transfer: int) -> StateTaken:
        try:
            warnings = tuple(encodable(text)[:MAX_CHARS] for text in self._take_over())
        except Exception as error:  # noqa: BLE001  # whether the run can do without is the controller's to judge
            return StateTaken(transfer, describe(error))
        return StateTaken(transfer, "", warnings)
