"""One step and one window: who does what to the model, what is summed, what is refused."""

import functools
import math
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import flodl
from flodl.core.events import StepDone
from flodl.data.permutation import EpochOrder
from flodl.errors import UsageError
from flodl.ids import Grant, Span
from flodl.rank.losses import DeviceSum, HostSum
from flodl.rank.stepper import Stepper, build_stepper, merges_single_tail
from flodl.spec import context
from tests.unit.rank.conftest import mse

CPU = torch.device("cpu")
Build = Callable[..., Stepper]


@pytest.fixture
def build(make_job: Any, in_run: None) -> Iterator[Build]:
    built: list[Stepper] = []

    def make(**kwargs: Any) -> Stepper:
        built.append(build_stepper(make_job(**kwargs), CPU, 0))
        return built[-1]

    yield make
    for stepper in built:
        stepper.close()


def step(stepper: Stepper) -> StepDone:
    for _ in range(3_000):  # each waits for the loader a moment
        if (done := stepper.step()) is not None:
            return done
    raise AssertionError("no batch")


def test_a_step_is_what_a_plain_loop_does(build: Build, make_job: Any) -> None:
    torch.manual_seed(0)
    stepper = build(make_optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    stepper.push(Grant(0, (Span(0, 20),)))
    dataset, losses = make_job().config.dataset, 0.0

    for _ in range(5):
        step(stepper)
    order = EpochOrder(20, 0, 0).indices([Span(0, 20)]).tolist()
    for start in range(0, 20, 4):
        x, y = (torch.stack(part) for part in zip(*(dataset[i] for i in order[start : start + 4]), strict=True))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses += 4 * loss.item()

    assert all(torch.equal(a, b) for a, b in zip(stepper.model.parameters(), model.parameters(), strict=True))
    assert stepper.account().loss_sum == losses


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)])
def test_the_window_tells_the_learning_rate_of_the_first_group(build: Build, rate: Any) -> None:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight], "lr": rate}, {"params": [bias], "lr": 0.5}])

    stepper = build(make_optimizer=make_optimizer)

    assert stepper.account().learning_rate == 0.25
    stepper.optimizer.param_groups[0]["lr"] = 0.125
    assert stepper.account().learning_rate == 0.125


def test_optimizer_without_a_learning_rate_tells_none(build: Build) -> None:
    stepper = build()
    del stepper.optimizer.param_groups[0]["lr"]

    assert stepper.account().learning_rate is None


def test_the_window_weighs_losses_by_samples_and_starts_anew(build: Build) -> None:
    def step_of_size(model: Any, batch: Any) -> torch.Tensor:
        flodl.record_scalar("size", len(batch[0]))
        return model.weight.sum() * 0 + len(batch[0])

    stepper = build(train_step=step_of_size, batch_size=8)
    stepper.push(Grant(3, (Span(0, 20),)))

    done = [step(stepper) for _ in range(3)]
    window = stepper.account()

    assert [each.samples for each in done] == [8, 8, 4]
    assert all(each.started_s <= each.ended_s for each in done)
    assert (window.loss_sum, window.is_finite) == (64.0 + 64.0 + 16.0, True)
    assert window.scalars == {"size": (20.0, 3)}
    assert stepper.newest_epoch == 3
    assert stepper.account().loss_sum == 0.0


def test_a_loss_that_is_not_finite_marks_the_window(build: Build) -> None:
    stepper = build(train_step=lambda model, batch: model.weight.sum() * math.inf)
    stepper.push(Grant(0, (Span(0, 4),)))
    step(stepper)

    assert not stepper.account().is_finite
    assert stepper.account().is_finite


def test_gradients_are_clipped_to_the_norm(build: Build) -> None:
    stepper = build(train_step=lambda model, batch: 1e3 * model.weight.sum(), max_grad_norm=0.5)
    before = stepper.model.weight.item()
    stepper.push(Grant(0, (Span(0, 4),)))
    step(stepper)

    assert before - stepper.model.weight.item() == pytest.approx(0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "None"),
        (1.0, "a float"),
        ((torch.zeros(()), 1), "a tuple"),
        (torch.zeros(3), r"a tensor of shape \[3\]"),
        (torch.zeros((), dtype=torch.complex64), "a complex number"),
        (torch.zeros(()), r"a loss without a graph, .*\.detach\(\), \.item\(\)"),
    ],
)
def test_a_step_that_returns_no_loss_is_refused_with_what_it_returned(build: Build, returned: Any, words: str) -> None:
    stepper = build(train_step=lambda model, batch: returned)
    stepper.push(Grant(0, (Span(0, 4),)))

    with pytest.raises(UsageError, match=f"train_step returned {words}") as caught:
        step(stepper)
    assert re.fullmatch(r'  train_step: File ".*test_stepper.py", line \d+, in <lambda>', caught.value.__notes__[0])


def test_a_loss_under_no_grad_is_refused(build: Build) -> None:
    stepper = build(train_step=torch.no_grad()(lambda model, batch: model(batch[0]).mean()))
    stepper.push(Grant(0, (Span(0, 4),)))

    with pytest.raises(UsageError, match=r"outside of torch\.no_grad"):
        step(stepper)


@pytest.mark.parametrize(
    ("batch_size", "words"),
    [(1, "set batch_size to at least 2"), (4, r"though the batch has 4 samples \(Expected more than 1 value")],
)
def test_one_value_per_channel_is_told_by_the_batch(build: Build, batch_size: int, words: str) -> None:
    stepper = build(
        build_model=lambda device: nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)),
        train_step=lambda model, batch: model(batch[0][:1]).mean(),
        batch_size=batch_size,
    )
    stepper.push(Grant(0, (Span(0, 4),)))

    with pytest.raises(UsageError, match=words) as caught:
        step(stepper)
    places = traceback.extract_tb(caught.value.__traceback__)
    assert any(place.filename == __file__ and place.name == "<lambda>" for place in places)


def test_backward_in_train_step_is_told_from_an_error_of_the_script(build: Build) -> None:
    def twice(model: Any, batch: Any) -> torch.Tensor:
        loss = mse(model, batch)
        loss.backward()
        return loss

    for train_step, kind, words in (
        (functools.partial(twice), UsageError, "flodl calls it"),
        (lambda model, batch: model(batch[0].reshape(3)), RuntimeError, "invalid for input"),
    ):
        stepper = build(train_step=train_step)
        stepper.push(Grant(0, (Span(0, 4),)))
        with pytest.raises(kind, match=words):
            step(stepper)


def test_an_optimizer_that_needs_a_closure_is_refused_and_one_that_takes_it_is_not(make_job: Any, build: Build) -> None:
    with pytest.raises(UsageError, match="returned a LBFGS, whose step needs a closure"):
        build_stepper(make_job(make_optimizer=torch.optim.LBFGS), CPU, 0)
    build(make_optimizer=torch.optim.AdamW)


def test_functions_that_return_something_else_are_named(make_job: Any) -> None:
    with pytest.raises(UsageError, match="build_model returned a int"):
        build_stepper(make_job(build_model=lambda device: 3), CPU, 0)
    with pytest.raises(UsageError, match="make_optimizer returned None"):
        build_stepper(make_job(make_optimizer=lambda parameters: None), CPU, 0)


def test_a_slow_dataset_lets_the_rank_listen(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flodl.rank.stepper.BATCH_WAIT_S", 0.01)
    gate = threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            gate.wait(30.0)
            return torch.zeros(1), torch.zeros(1)

    stepper = build(dataset=Slow())
    stepper.push(Grant(0, (Span(0, 4),)))

    assert stepper.step() is None
    gate.set()
    assert step(stepper).samples == 4


def test_batch_norm_asks_for_no_lone_last_sample() -> None:
    assert merges_single_tail(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    assert not merges_single_tail(nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)))


# -------------------------------------------------------------------------------------- micro-batches and precision
class Rows:
    """Sample i is a row of 3 numbers and a target."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def in_double(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x.double()), y.double())


def trained(stepper: Stepper, samples: int, steps: int) -> list[torch.Tensor]:
    stepper.push(Grant(0, (Span(0, samples),)))
    for _ in range(steps):
        step(stepper)
    return [parameter.detach() for parameter in stepper.model.parameters()]


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("accumulate", [2, 3, 7, 10])
def test_micro_batches_make_the_step_of_the_whole_batch(
    build: Build, accumulate: int, max_grad_norm: float | None
) -> None:
    def of(parts: int) -> tuple[list[torch.Tensor], float]:
        stepper = build(
            dataset=Rows(27), build_model=net, train_step=in_double, batch_size=10, accumulate=parts,
            max_grad_norm=max_grad_norm,
        )  # fmt: skip
        return trained(stepper, 27, 3), stepper.account().loss_sum  # 10, 10 and a short one of 7

    (whole, whole_loss), (parts, parts_loss) = of(1), of(accumulate)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-12)


def test_micro_batches_are_of_near_equal_size_whatever_the_collate_function(build: Build) -> None:
    sizes = []

    def note(model: Any, batch: list[Any]) -> torch.Tensor:
        sizes.append(len(batch))
        return model.weight.sum() * 0.0

    stepper = build(dataset=Rows(27), train_step=note, batch_size=10, accumulate=4, collate_fn=list)
    trained(stepper, 27, 3)
    assert sizes == [3, 3, 2, 2] * 2 + [3, 2, 2]


def test_batch_norm_never_sees_a_micro_batch_of_one(build: Build) -> None:
    def normed(device: torch.device) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))

    stepper = build(dataset=Rows(13), build_model=normed, batch_size=4, accumulate=2)
    weights = trained(stepper, 13, 3)  # the lone last sample has joined the batch before it: 4, 4, 5
    assert all(torch.isfinite(weight).all() for weight in weights)
    assert stepper.model[1].num_batches_tracked == 2 + 2 + 2


def test_micro_batches_of_one_are_refused_with_batch_norm(make_job: Any) -> None:
    def normed(device: torch.device) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    with pytest.raises(UsageError, match="batch norm cannot train on; lower accumulate to at most 2"):
        build_stepper(make_job(build_model=normed, batch_size=4, accumulate=3), CPU, 0)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_step_computes_in_the_precision_and_keeps_the_parameters(build: Build, precision: str, dtype: Any) -> None:
    seen = []

    def note(model: Any, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        seen.append(out.dtype)
        return 1e-2 * nn.functional.mse_loss(out.float(), batch[1])

    fast = {"train_step": note, "make_optimizer": lambda p: torch.optim.SGD(p, 10.0)}
    stepper, exact = build(**fast, precision=precision), build(**fast)
    exact.model.load_state_dict(stepper.model.state_dict())
    got, expected = trained(stepper, 20, 5), trained(exact, 20, 5)
    assert seen == [dtype] * 5 + [torch.float32] * 5
    assert [parameter.dtype for parameter in got] == [torch.float32] * 2
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_that_the_loss_scaler_skips_counts_its_samples(build: Build, accumulate: int) -> None:
    def far_off(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() - 100.0).square().mean()

    stepper = build(train_step=far_off, precision="fp16", accumulate=accumulate)
    before = stepper.model.weight.item()
    stepper.push(Grant(0, (Span(0, 20),)))

    assert step(stepper).samples == 4  # its gradients, times 65536, are beyond float16
    assert stepper.model.weight.item() == before
    assert [step(stepper).samples for _ in range(4)] == [4] * 4
    assert stepper.account().is_finite


def test_gradients_are_clipped_after_the_loss_scale_is_taken_off(build: Build) -> None:
    stepper = build(train_step=lambda model, batch: 1e2 * model.weight.sum(), max_grad_norm=0.5, precision="fp16")
    before = stepper.model.weight.item()
    stepper.push(Grant(0, (Span(0, 4),)))
    step(stepper)

    assert before - stepper.model.weight.item() == pytest.approx(0.1 * 0.5, rel=1e-4)


def test_parameters_in_half_precision_are_refused_with_a_loss_scaler(make_job: Any) -> None:
    job = make_job(build_model=lambda device: nn.Linear(1, 1).half(), precision="fp16")
    with pytest.raises(UsageError, match=r"parameter weight is float16 already; drop \.half\(\)"):
        build_stepper(job, CPU, 0)


# ------------------------------------------------------------------------------------------ learning rate, rolling back
def test_rate_is_scaled_once_and_then_follows_the_run(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "world_size", lambda: 3)
    halve = torch.optim.lr_scheduler.ExponentialLR
    stepper = build(lr_scale_ratio=1.0, scheduler_fn=lambda optimizer, total: halve(optimizer, 0.5))
    stepper.open_window(0, 2.0)
    rates = [stepper.account().learning_rate]
    stepper.push(Grant(0, (Span(0, 8),)))
    for _ in range(2):
        step(stepper)
        rates.append(stepper.account().learning_rate)
    assert rates == pytest.approx([0.3, 0.3 / 4, 0.3 / 16])


@pytest.mark.parametrize("bad_step", [1, 3])
def test_the_first_step_that_is_not_finite_is_told(build: Build, bad_step: int) -> None:
    steps = iter(range(1, 6))
    stepper = build(train_step=lambda model, batch: model.weight.sum() * (math.nan if next(steps) >= bad_step else 1.0))
    stepper.push(Grant(0, (Span(0, 20),)))
    for _ in range(5):
        step(stepper)
    accounted = stepper.account()
    assert (accounted.is_finite, accounted.nonfinite_step) == (False, bad_step)
    assert (stepper.account().is_finite, stepper.account().nonfinite_step) == (True, 0)


class Hollow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))


@pytest.mark.parametrize("model", [nn.Sequential(), Hollow()])
def test_model_without_parameters_is_refused(build: Build, model: nn.Module) -> None:
    with pytest.raises(UsageError, match=rf"a {type(model).__name__} without parameters.*create them in build_model"):
        build(build_model=lambda device: model)


def test_rolled_back_optimizer_goes_on_from_the_commit(build: Build) -> None:
    is_sick = False

    def sick(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * (math.nan if is_sick else 1.0)

    stepper = build(train_step=sick, make_optimizer=lambda p: torch.optim.Adam(p, 0.1))
    stepper.push(Grant(0, (Span(0, 20),)))
    step(stepper)
    stepper.back_up()
    weights = {name: value.clone() for name, value in stepper.model.state_dict().items()}
    is_sick = True
    step(stepper)
    stepper.model.load_state_dict(weights)
    stepper.roll_back()
    is_sick = False
    step(stepper)
    assert all(torch.isfinite(parameter).all() for parameter in stepper.model.parameters())
    assert {int(state["step"]) for state in stepper.optimizer.state.values()} == {2}


@pytest.mark.parametrize("kind", [HostSum, lambda: DeviceSum(CPU)])
def test_sums_of_losses_tell_the_first_step_that_was_not_finite(kind: Any) -> None:
    losses = kind()
    for values in ([1.0, 2.0], [math.inf, 1.0], [-math.inf, 1.0]):
        for value in values:
            losses.add(torch.tensor(value), 2)
        losses.end_step()
    total, bad_step = losses.take()
    assert (math.isnan(total), bad_step) == (True, 2)
    losses.add(torch.tensor([3.0], dtype=torch.bfloat16), 5)
    losses.end_step()
    assert losses.take() == (15.0, 0)
    assert losses.take() == (0.0, 0)
