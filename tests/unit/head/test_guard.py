"""The user's convergence guard in the head: asked in order on its own thread, never waited for, never let through."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import flodl
from flodl.core.guards import ConvergenceAction, TrendGuard
from flodl.head.guard import MAX_WAITING, GuardDesk
from flodl.head.main import run_head
from flodl.messages import GuardVerdict, JudgeRound, RoundFigures, RoundJudged
from flodl.spec import context
from flodl.spec.handle import TrainHandle
from flodl.spec.job import TrainingJob
from flodl.spec.knobs import resolve
from flodl.trainer.config import TrainerConfig

LIMIT_S = 30.0
STABLE = GuardVerdict.STABLE


def figures(version: int) -> RoundFigures:
    return RoundFigures(version, 0.1, 10, 10, 30)


class Calling:
    """A guard that does what it is told."""

    def __init__(self, judge: Callable[[RoundFigures], Any]) -> None:
        self.judge = judge


@pytest.fixture
def desk_of() -> Iterator[Callable[..., tuple[GuardDesk, list[RoundJudged]]]]:
    desks: list[GuardDesk] = []

    def make(judge: Callable[[RoundFigures], Any]) -> tuple[GuardDesk, list[RoundJudged]]:
        answers: list[RoundJudged] = []
        desks.append(GuardDesk(Calling(judge), answers.append))
        return desks[-1], answers

    yield make
    for desk in desks:
        desk.close()


def test_rounds_are_judged_in_order_on_one_other_thread(desk_of: Any, wait_until: Callable[..., Any]) -> None:
    threads: set[str] = set()

    def judge(seen: RoundFigures) -> ConvergenceAction:
        threads.add(threading.current_thread().name)
        return ConvergenceAction.nudge_down(0.5) if seen.version == 2 else ConvergenceAction.STABLE

    desk, answers = desk_of(judge)
    for version in (1, 2, 3):
        desk.ask(figures(version))

    wait_until(lambda: len(answers) == 3, LIMIT_S, "three verdicts")
    assert answers == [
        RoundJudged(1, STABLE, 1.0, ""),
        RoundJudged(2, GuardVerdict.NUDGE_DOWN, 0.5, ""),
        RoundJudged(3, STABLE, 1.0, ""),
    ]
    assert threads == {"flodl-guard"}


def test_exception_and_nonsense_are_stable_with_the_error(
    desk_of: Any, wait_until: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    desk, answers = desk_of(lambda seen: {}["x"] if seen.version == 1 else "stable")
    desk.ask(figures(1))
    desk.ask(figures(2))

    wait_until(lambda: len(answers) == 2, LIMIT_S, "two verdicts")
    assert answers == [
        RoundJudged(1, STABLE, 1.0, "KeyError: 'x'"),
        RoundJudged(2, STABLE, 1.0, "TypeError: judge returned a str; return a flodl.ConvergenceAction"),
    ]
    assert "the convergence guard failed; the round counts as stable" in caplog.text


def test_whole_number_of_a_factor_travels_as_a_float(desk_of: Any, wait_until: Callable[..., Any]) -> None:
    desk, answers = desk_of(lambda seen: ConvergenceAction(GuardVerdict.NUDGE_DOWN, 1))
    desk.ask(figures(1))
    wait_until(lambda: len(answers) == 1, LIMIT_S, "a verdict")
    assert type(answers[0].factor) is float


def test_asking_a_guard_that_hangs_never_blocks_and_keeps_a_few_rounds(
    desk_of: Any, wait_until: Callable[..., Any]
) -> None:
    is_going, may_go = threading.Event(), threading.Event()

    def judge(seen: RoundFigures) -> ConvergenceAction:
        is_going.set()
        may_go.wait(LIMIT_S)
        return ConvergenceAction.STABLE

    desk, answers = desk_of(judge)
    desk.ask(figures(0))
    assert is_going.wait(LIMIT_S)
    for version in range(1, 10 * MAX_WAITING):
        desk.ask(figures(version))
    may_go.set()

    wait_until(lambda: len(answers) == 1 + MAX_WAITING, LIMIT_S, "the kept rounds")
    assert [answer.version for answer in answers] == list(range(1 + MAX_WAITING))


def test_closed_desk_ends_behind_the_round_under_way(desk_of: Any, wait_until: Callable[..., Any]) -> None:
    is_going, may_go = threading.Event(), threading.Event()
    found: list[threading.Thread] = []

    def judge(seen: RoundFigures) -> ConvergenceAction:
        found.append(threading.current_thread())
        is_going.set()
        may_go.wait(LIMIT_S)
        return ConvergenceAction.STABLE

    desk, answers = desk_of(judge)
    for version in range(5):
        desk.ask(figures(version))
    assert is_going.wait(LIMIT_S)
    desk.close()
    may_go.set()

    wait_until(lambda: not found[0].is_alive(), LIMIT_S, "the thread ends")
    assert [answer.version for answer in answers] == [0]


@pytest.mark.parametrize("guard", [Calling(lambda seen: flodl.ConvergenceAction.SUPPRESS_GROWTH), None, TrendGuard()])
def test_only_a_guard_of_the_users_own_answers_the_controller(
    controller: Any, wait_until: Callable[..., Any], guard: Any
) -> None:
    def never(*arguments: Any) -> Any:
        raise AssertionError("the head builds and trains nothing")

    elche = flodl.ElCheConfig.cpu_cadence().guard(guard)
    config = TrainerConfig(TensorDataset(torch.zeros(8)), batch_size=2, num_epochs=1).elche(elche)
    context.enter(context.Role.HEAD)
    try:
        run_head(controller.ticket, TrainingJob(never, never, never, resolve(config)), TrainHandle())
        controller.say(JudgeRound(figures(7)))
        if isinstance(guard, Calling):
            wait_until(lambda: len(controller.heard) == 2, LIMIT_S, "the verdict")
            assert controller.heard[1] == RoundJudged(7, GuardVerdict.SUPPRESS_GROWTH, 1.0, "")
        else:
            wait_until(lambda: controller.heard, LIMIT_S, "the head speaks")
            assert len(controller.heard) == 1
    finally:
        context.leave()
