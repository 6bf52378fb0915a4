"""The loop's orders about states: what the core asks for is done between two steps, and told under its number."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from flodl.core.actions import CallBack, EndRank, Evaluate, RankAction, TakeState, WriteState
from flodl.core.events import Evaluated, RankEvent, StateTaken, StateWritten, Ticked
from flodl.errors import CheckpointError
from flodl.messages import CallbackKind
from flodl.rank.inbox import Inbox
from flodl.rank.shell import RankShell
from flodl.spec.state import StateInfo


class Core:
    """Answers the first event with ``action``, the next with the end."""

    wants_step = False
    version = 7

    def __init__(self, action: RankAction) -> None:
        self._answers: list[list[RankAction]] = [[action], [EndRank("done", 0)]]
        self.heard: list[RankEvent] = []

    def handle(self, event: RankEvent, now_s: float) -> list[RankAction]:
        self.heard.append(event)
        return self._answers.pop(0)


class Plane:
    """Its consensus is a model of twos."""

    def __init__(self, model: nn.Linear) -> None:
        self._model = model

    @contextmanager
    def consensus(self) -> Iterator[None]:
        with torch.no_grad():
            self._model.weight.fill_(2.0)
            yield
            self._model.weight.fill_(1.0)


class Stepper:
    newest_epoch = 5

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)


Run = Callable[..., RankEvent]


@pytest.fixture
def run() -> Run:
    def run(action: RankAction, hand_over: Any = None, take_over: Any = None, call: Any = None) -> RankEvent:
        """What the shell makes of ``action``."""
        core, stepper, inbox = Core(action), Stepper(), Inbox()
        inbox.post(Ticked())
        hand = (lambda info, whole: hand_over(stepper.model, info, whole)) if hand_over else None
        shell: Any = RankShell
        calls = (lambda action: call(stepper.model, action)) if call else None
        shell(core, stepper, Plane(stepper.model), inbox, print, calls, hand, take_over).run()
        return core.heard[-1]

    return run


@pytest.mark.parametrize("whole", [False, True])
def test_state_is_written_of_the_consensus_and_told_under_its_number(run: Run, whole: bool) -> None:
    calls: list[Any] = []

    def hand_over(model: nn.Linear, info: StateInfo, is_whole: bool) -> int:
        calls.append((model.weight.item(), info, is_whole))
        return 99

    assert run(WriteState(3, whole), hand_over) == StateWritten(3, 99, "")
    assert calls == [(2.0, StateInfo(epochs=5, version=7), whole)]


def test_state_that_cannot_be_written_is_told_in_words(run: Run) -> None:
    def hand_over(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    assert run(WriteState(3, True), hand_over) == StateWritten(3, 0, "OSError: [Errno 28] No space left on device")


@pytest.mark.parametrize("action", [Evaluate(3), CallBack(CallbackKind.CHECKPOINT, 3)])
def test_functions_of_the_script_see_the_consensus(run: Run, action: RankAction) -> None:
    seen: list[Any] = []

    def call(model: nn.Linear, given: RankAction) -> RankEvent:
        seen.append((model.weight.item(), given))
        return Evaluated(3, 0.5, "")

    assert run(action, call=call) == Evaluated(3, 0.5, "")
    assert seen == [(2.0, action)]


def test_state_is_taken_and_told_under_its_number(run: Run) -> None:
    assert run(TakeState(4), take_over=list) == StateTaken(4, "")
    assert run(TakeState(4), take_over=lambda: ["the lr", "\udcff"]) == StateTaken(4, "", ("the lr", "\\udcff"))


def test_state_that_does_not_fit_is_told_in_words(run: Run) -> None:
    def take_over() -> list[str]:
        raise CheckpointError("scale is float32 [] in the saved state, and float32 [2] in this model")

    told = run(TakeState(4), take_over=take_over)

    assert told == StateTaken(
        4, "CheckpointError: scale is float32 [] in the saved state, and float32 [2] in this model"
    )
