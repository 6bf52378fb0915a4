"""The learning rate follows the run: by whom the samples are trained does not matter."""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from flodl.core.dispatch import Dispatch
from flodl.core.elche import ElChe, WindowTiming
from flodl.core.supply import Supply
from flodl.errors import UsageError
from flodl.messages import CadenceSettings, Mode, Settings
from flodl.rank.schedule import Schedule, build_scheduler, scale_learning_rates, total_steps

SETTINGS = Settings(dataset_size=22, batch_size=4, num_epochs=2, seed=0, cadence=CadenceSettings())
"""Six batches a pass, the last one short."""


def optimizer(lr: Any = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr)


def ramp(of: torch.optim.Optimizer) -> LambdaLR:
    """The rate is the number of the global batch."""
    return LambdaLR(of, float)


class Steps:
    """A scheduler that only counts."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1


def test_alone_it_is_one_scheduler_step_per_batch_as_in_a_plain_loop() -> None:
    mine, plain = optimizer(), optimizer()
    schedule = Schedule(CosineAnnealingLR(mine, 12), SETTINGS, False)
    expected = CosineAnnealingLR(plain, 12)
    rates, plain_rates = [], []
    for merged, window in ((0, 3), (12, 3), (22, 5), (42, 1)):
        schedule.open_window(merged, 1.0)
        for _ in range(window):
            rates.append(mine.param_groups[0]["lr"])
            mine.step()
            schedule.advance()
    for _ in range(12):
        plain_rates.append(plain.param_groups[0]["lr"])
        plain.step()
        expected.step()
    assert rates == plain_rates
    assert schedule.scheduler.last_epoch == expected.last_epoch == 12


@pytest.mark.parametrize("stride", [1.5, 3.0, 7.0, 10 / 3])
def test_step_of_one_rank_moves_the_rate_by_what_everyone_does_meanwhile(stride: float) -> None:
    mine = optimizer()
    settings = Settings(4000, 4, 1, 0, CadenceSettings())
    schedule = Schedule(ramp(mine), settings, False)
    schedule.open_window(400, stride)
    rates = []
    for _ in range(9):
        rates.append(mine.param_groups[0]["lr"])
        mine.step()
        schedule.advance()
    assert rates == [100 + math.floor(step * stride + 1e-6) for step in range(9)]


def test_rate_never_goes_back_and_waits_for_the_run_to_catch_up() -> None:
    counter = Steps()
    schedule = Schedule(counter, SETTINGS, False)
    schedule.open_window(0, 5.0)
    schedule.advance()
    assert counter.count == 5
    schedule.open_window(8, 1.0)  # the others were slower than planned: two batches are merged
    assert counter.count == 5
    for _ in range(3):
        schedule.advance()
    assert counter.count == 5
    schedule.advance()
    assert counter.count == 6


def test_rank_that_was_idle_catches_up() -> None:
    counter = Steps()
    schedule = Schedule(counter, SETTINGS, False)
    schedule.open_window(22 + 8, 1.0)
    assert counter.count == 6 + 2


def test_schedule_is_never_stepped_beyond_its_end() -> None:
    schedule = Schedule(OneCycleLR(optimizer(), 1.0, total_steps=12), SETTINGS, False)
    schedule.open_window(40, 9.0)
    schedule.advance()
    schedule.open_window(44, 9.0)
    assert schedule.scheduler.last_epoch == 12


def test_scheduler_that_ends_before_the_run_says_for_how_many_steps_to_build_it() -> None:
    schedule = Schedule(OneCycleLR(optimizer(), max_lr=1.0, total_steps=4), SETTINGS, False)
    with pytest.raises(ValueError, match="Tried to step") as raised:
        schedule.open_window(22, 1.0)
    assert raised.value.__notes__[0].startswith("scheduler_fn's OneCycleLR failed at step 5 of 12: flodl steps it")


def test_last_batch_that_took_a_lone_sample_in_is_one_batch() -> None:
    settings = Settings(21, 4, 2, 0, CadenceSettings())
    assert (total_steps(settings, True), total_steps(settings, False)) == (10, 12)
    counter = Steps()
    schedule = Schedule(counter, settings, True)
    schedule.open_window(20, 1.0)
    assert counter.count == 5
    schedule.open_window(21, 1.0)
    assert counter.count == 5


def test_without_a_scheduler_the_rate_stays() -> None:
    schedule = Schedule(None, SETTINGS, False)
    schedule.open_window(20, 1.0)
    schedule.advance()
    assert schedule.state() is None


def test_first_step_of_a_scheduler_before_the_optimizers_is_no_mistake_of_the_script() -> None:
    schedule = Schedule(ramp(optimizer()), SETTINGS, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.open_window(16, 1.0)


def test_restored_schedule_goes_on_from_there() -> None:
    mine = optimizer()
    schedule = Schedule(ExponentialLR(mine, 0.5), SETTINGS, False)
    schedule.open_window(8, 2.0)
    state = schedule.state()
    assert state is not None
    schedule.advance()
    schedule.restore(state)
    mine.param_groups[0]["lr"] = 0.25
    schedule.advance()
    schedule.restore(state)
    mine.param_groups[0]["lr"] = 0.25
    schedule.open_window(16, 2.0)
    assert mine.param_groups[0]["lr"] == 0.5**4
    assert schedule.scheduler.last_epoch == 4


def test_scheduler_that_cannot_be_put_back_says_so() -> None:
    assert Schedule(Steps(), SETTINGS, False).state() is None


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize(
    ("ratio", "world_size", "expected"), [(0.0, 8, 0.5), (1.0, 4, 2.0), (0.5, 3, 1.0), (1.0, 1, 0.5)]
)
def test_rate_is_scaled_to_the_number_of_ranks(rate: Any, ratio: float, world_size: int, expected: float) -> None:
    scaled = optimizer(rate)
    scale_learning_rates(scaled, ratio, world_size)
    assert float(scaled.param_groups[0]["lr"]) == expected


def test_scheduler_fn_gets_the_optimizer_and_the_length_of_the_run() -> None:
    seen = []
    mine = optimizer()
    made = build_scheduler(lambda *arguments: seen.append(arguments) or ramp(mine), mine, 12)
    assert (seen, type(made)) == ([(mine, 12)], LambdaLR)
    assert build_scheduler(None, mine, 12) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o, n: ReduceLROnPlateau(o), "returned a ReduceLROnPlateau, which follows a metric.*CosineAnnealingLR"),
        (lambda o, n: None, r"returned None; return a scheduler, an object with step\(\)"),
        (lambda o, n: 3, "returned a int"),
    ],
)
def test_what_cannot_follow_steps_is_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_scheduler(make, optimizer(), 12)


# ---------------------------------------------------------------------------------------- whatever the number of ranks
@dataclass
class Trace:
    """Every step of a run: the global batches done when it began, the batch whose rate it used, its stride."""

    steps: list[tuple[int, int, float]] = field(default_factory=list)
    window_ends: list[int] = field(default_factory=list)

    def lag(self) -> float:
        """The largest distance of a step's rate from its position, in strides, after two windows."""
        return max(abs(batch - at) / stride for at, batch, stride in self.steps if at >= self.window_ends[1])

    def early_lag(self) -> int:
        """The same before, when speeds are not measured, in global batches."""
        return max(abs(batch - at) for at, batch, _ in self.steps if at < self.window_ends[1])


def played(cadence: CadenceSettings, costs_ms: dict[int, float], epochs: int = 3) -> Trace:
    """A run of 600 batches per epoch under the real plans, on a virtual clock."""
    settings = Settings(2400, 4, epochs, 0, cadence)
    supply, elche, dispatch = Supply(settings, False), ElChe(cadence, tuple(costs_ms)), Dispatch(cadence)
    counters = {rank: Steps() for rank in costs_ms}
    schedules = {rank: Schedule(counters[rank], settings, False) for rank in costs_ms}
    trace, done = Trace(), 0
    while not supply.is_exhausted:
        plans = dispatch.plan(0, tuple(costs_ms), elche, supply)
        for rank, plan in plans.items():
            schedules[rank].open_window(supply.merged_samples, plan.stride)
        least_s = max(plan.min_steps * costs_ms[rank] for rank, plan in plans.items())
        steps = {
            rank: min(plan.max_steps, max(plan.min_steps, math.ceil(least_s / costs_ms[rank] - 1e-9)))
            for rank, plan in plans.items()
        }
        starts = sorted((step * costs_ms[rank], rank) for rank, count in steps.items() for step in range(count))
        for at_ms, rank in starts:
            ended = sum(min(count, math.floor(at_ms / costs_ms[other] + 1e-9)) for other, count in steps.items())
            trace.steps.append((done + ended, counters[rank].count, plans[rank].stride))
            schedules[rank].advance()
        for rank, count in steps.items():
            supply.train(rank, count * 4)
            supply.merge(rank)
        done += len(starts)
        trace.window_ends.append(done)
        dispatch.settle(steps)
        elche.observe({r: WindowTiming(n, costs_ms[r], costs_ms[r], n * costs_ms[r]) for r, n in steps.items()}, 0.0)
        supply.close_epochs()
    assert len(trace.steps) == 600 * epochs
    return trace


@pytest.mark.parametrize("costs_ms", [{0: 1.0}, {0: 1.0, 1: 1.0}, {0: 1.0, 1: 3.0}, {0: 1.0, 1: 1.3, 2: 3.1}])
@pytest.mark.parametrize(
    "cadence",
    [
        CadenceSettings(Mode.CPU_CADENCE),
        CadenceSettings(Mode.CPU_SYNC),
        CadenceSettings(Mode.CPU_SYNC, max_batch_diff=0),
    ],
)
def test_rate_at_a_sample_position_is_within_a_stride_of_that_of_one_rank_alone(
    cadence: CadenceSettings, costs_ms: dict[int, float]
) -> None:
    trace = played(cadence, costs_ms)
    if len(costs_ms) == 1:
        assert trace.lag() == trace.early_lag() == 0
    assert trace.lag() < 1.0
    assert trace.early_lag() < trace.window_ends[0]
