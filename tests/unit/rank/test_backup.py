"""What a rank whose work was left out returns to: everything the optimizer remembers, in place."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from flodl.messages import CadenceSettings, Settings
from flodl.rank.backup import Backup
from flodl.rank.schedule import Schedule

SETTINGS = Settings(100, 4, 2, 0, CadenceSettings())
CONSTANT = Schedule(None, SETTINGS, False)


def train(optimizer: torch.optim.Optimizer, value: float, steps: int = 1) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, value)
        optimizer.step()


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2).t()), nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(4).double())]


def remembered(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
        lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}], torch.tensor(0.1)),
        lambda p: torch.optim.RMSprop(p, 0.1, centered=True),
        lambda p: torch.optim.Adagrad(p, 0.1),
        lambda p: torch.optim.NAdam(p, 0.1),
    ],
)
def test_everything_comes_back_and_training_goes_on_as_if_nothing_had_happened(make: Callable[..., Any]) -> None:
    weights = parameters()
    optimizer = make(weights)
    train(optimizer, 1.0, steps=2)
    backup = Backup(optimizer, CONSTANT, None)
    backup.save()
    before, weights_before = remembered(optimizer), [w.detach().clone() for w in weights]
    train(optimizer, 0.5)
    after, weights_after = remembered(optimizer), [w.detach().clone() for w in weights]

    for _ in range(2):
        train(optimizer, float("nan"), steps=2)
        backup.restore()
        assert_same(remembered(optimizer), before)
    with torch.no_grad():
        for weight, kept in zip(weights, weights_before, strict=True):
            weight.copy_(kept)
    train(optimizer, 0.5)
    assert_same(remembered(optimizer), after)
    assert all(torch.equal(*pair) for pair in zip(weights, weights_after, strict=True))


def test_before_the_first_step_there_is_nothing_and_so_it_is_afterwards() -> None:
    optimizer = torch.optim.Adam(parameters(), 0.1)
    backup = Backup(optimizer, CONSTANT, None)
    backup.restore()
    backup.save()
    train(optimizer, float("nan"))
    backup.restore()
    assert not optimizer.state


def test_copies_are_filled_again_not_made_again() -> None:
    optimizer = torch.optim.Adam(parameters(), 0.1)
    train(optimizer, 1.0)
    backup = Backup(optimizer, CONSTANT, None)
    backup.save()
    first = {id(value) for entry in backup._state.values() for value in entry.values()}
    tensors = [value for entry in optimizer.state.values() for value in entry.values()]
    train(optimizer, 2.0)
    backup.save()
    backup.restore()
    assert {id(value) for entry in backup._state.values() for value in entry.values()} == first
    assert {id(value) for entry in optimizer.state.values() for value in entry.values()} == set(map(id, tensors))


def test_state_that_appears_later_is_kept_from_then_on() -> None:
    early, late = parameters()[:2]
    optimizer = torch.optim.SGD([early], 0.1, momentum=0.9)
    train(optimizer, 1.0)
    backup = Backup(optimizer, CONSTANT, None)
    backup.save()
    optimizer.add_param_group({"params": [late]})
    train(optimizer, float("nan"))
    backup.restore()
    assert list(optimizer.state) == [early]
    train(optimizer, 1.0)
    backup.save()
    kept = optimizer.state[late]["momentum_buffer"].clone()
    train(optimizer, float("nan"))
    backup.restore()
    assert torch.equal(optimizer.state[late]["momentum_buffer"], kept)


class Odd(torch.optim.Optimizer):
    """State of every shape: under a name, nested, sparse, of another size each time, coming and going."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        (parameter,) = self.param_groups[0]["params"]
        self.state["global"] = self.count  # type: ignore[index]
        entry = self.state[parameter]
        entry["history"] = [torch.full((2,), float(self.count))]
        entry["sparse"] = torch.eye(2).mul(self.count).to_sparse()
        entry["grows"] = torch.ones(self.count)
        entry[f"only {self.count}"] = True


def test_state_of_any_shape_comes_back() -> None:
    optimizer = Odd([nn.Parameter(torch.zeros(2))])
    optimizer.step()
    backup = Backup(optimizer, CONSTANT, None)
    backup.save()
    optimizer.step()
    backup.restore()
    (parameter,) = optimizer.param_groups[0]["params"]
    entry = optimizer.state[parameter]
    assert optimizer.state["global"] == 1  # type: ignore[index]
    assert sorted(entry) == ["grows", "history", "only 1", "sparse"]
    assert torch.equal(entry["history"][0], torch.ones(2))
    assert torch.equal(entry["sparse"].to_dense(), torch.eye(2))
    assert torch.equal(entry["grows"], torch.ones(1))


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)])
def test_schedule_and_rates_go_back_together(rate: Any) -> None:
    optimizer = torch.optim.SGD(parameters(), rate)
    schedule = Schedule(ExponentialLR(optimizer, 0.5), SETTINGS, False)
    backup = Backup(optimizer, schedule, None)
    schedule.open_window(8, 1.0)
    backup.save()
    for _ in range(3):
        schedule.advance()
    backup.restore()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    schedule.open_window(12, 1.0)
    assert float(optimizer.param_groups[0]["lr"]) == 0.125


def test_rate_stays_where_a_scheduler_without_state_has_put_it() -> None:
    optimizer = torch.optim.SGD(parameters(), 1.0)

    class Halving:
        def step(self) -> None:
            optimizer.param_groups[0]["lr"] /= 2

    schedule = Schedule(Halving(), SETTINGS, False)
    backup = Backup(optimizer, schedule, None)
    backup.save()
    schedule.open_window(8, 1.0)
    backup.restore()
    schedule.open_window(12, 1.0)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_loss_scale_goes_back() -> None:
    weights = parameters()[:1]
    optimizer = torch.optim.SGD(weights, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    backup = Backup(optimizer, CONSTANT, scaler)
    backup.save()
    scaler.scale(weights[0].sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    backup.restore()
    assert scaler.get_scale() == 8.0
