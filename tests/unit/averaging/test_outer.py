"""Outer optimizers against a float64 oracle, over rounds of a real model; what is left alone and what is reset."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flodl.averaging import outer as outer_module
from flodl.averaging.flat import FlatModel
from flodl.averaging.outer import NesterovMomentum, OuterAvg, OuterOptimizer, SlowMomentum
from flodl.averaging.outer_step import OuterStep
from flodl.errors import UsageError

ROUNDS = 6


class Mixed(nn.Module):
    """float32, bfloat16 and float64 parameters, float and integer buffers; odd sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, size, dtype in (
            ("single", 1001, torch.float32),
            ("brain", 7, torch.bfloat16),
            ("wide", 33, torch.float64),
        ):
            values = torch.randn(size, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(values.to(dtype)))
        self.register_buffer("mean", torch.randn(5, generator=generator))
        self.register_buffer("steps", torch.tensor(seed))


class Oracle:
    """The formulas of ENGINE in float64, over one vector."""

    def __init__(self, optimizer: OuterOptimizer, version: torch.Tensor) -> None:
        self.optimizer, self.version, self.momentum = optimizer, version, torch.zeros_like(version)

    def step(self, consensus: torch.Tensor) -> torch.Tensor:
        gradient = self.version - consensus
        match self.optimizer:
            case SlowMomentum(lr, mu):
                self.momentum = mu * self.momentum + gradient
                self.version = self.version - lr * self.momentum
            case NesterovMomentum(lr, mu):
                self.momentum = mu * self.momentum + gradient
                self.version = self.version - lr * (gradient + mu * self.momentum)
            case _:
                self.version = consensus
        return self.version


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def image_of(seed: int) -> torch.Tensor:
    model = Mixed(seed)
    flat = FlatModel(model)
    image = flat.allocate()
    flat.pack(image, 1.0, 1.0, include_raw=True)
    return image


def flatten(flat: FlatModel, image: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.double() for part in flat.parameters(image)])


lrs = st.floats(0.01, 2.0)
mus = st.floats(0.0, 0.95)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from([SlowMomentum, NesterovMomentum]), lr=lrs, mu=mus, seed=st.integers(0, 1000))
def test_rounds_follow_the_float64_oracle(kind: Any, lr: float, mu: float, seed: int) -> None:
    model = Mixed(seed)
    flat = FlatModel(model)
    step = OuterStep(flat, kind(lr, mu), inner(model))
    start = image_of(seed + 1)
    oracle = Oracle(kind(lr, mu), flatten(flat, step.publish(start)).clone())
    largest = 1.0

    for number in range(ROUNDS):
        consensus = image_of(seed + 2 + number)
        published = flatten(flat, step.publish(consensus))
        wanted = oracle.step(flatten(flat, consensus))

        largest = max(largest, float(wanted.abs().max()), float(oracle.momentum.abs().max()))
        error = (published - wanted).abs()
        assert float(error[:-33].max()) <= 32 * ROUNDS * 2.0**-24 * largest
        assert float(error[-33:].max()) <= 32 * ROUNDS * 2.0**-53 * largest


def test_a_step_of_many_blocks_is_the_step_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prev, consensus, momentum = torch.randn(3, 1000)
    for kind in (SlowMomentum, NesterovMomentum):
        whole = [prev.clone(), momentum.clone()]
        kind(0.3, 0.7).step(whole[0], consensus, whole[1:])
        monkeypatch.setattr(outer_module, "BLOCK_ELEMENTS", 64)
        parts = [prev.clone(), momentum.clone()]
        kind(0.3, 0.7).step(parts[0], consensus, parts[1:])
        monkeypatch.undo()

        assert torch.equal(whole[0], parts[0])
        assert torch.equal(whole[1], parts[1])


def test_no_product_is_fused_with_a_sum() -> None:
    """Each operation rounds once, so that every device computes the same bits."""
    prev, consensus, momentum = (torch.randn(4096, generator=torch.Generator().manual_seed(n)) for n in range(3))
    lr, mu = torch.tensor(0.3), torch.tensor(0.7)
    wanted_momentum = momentum * mu + (prev - consensus)
    wanted = prev - wanted_momentum * lr

    new, state = prev.clone(), momentum.clone()
    SlowMomentum(0.3, 0.7).step(new, consensus, (state,))

    assert torch.equal(state, wanted_momentum)
    assert torch.equal(new, wanted)


def test_averaging_adopts_the_consensus_to_the_bit() -> None:
    prev, consensus = torch.randn(100), torch.randn(100)
    OuterAvg().step(prev, consensus, ())

    assert torch.equal(prev, consensus)


@pytest.mark.parametrize("optimizer", [SlowMomentum(), NesterovMomentum()])
def test_version_0_is_taken_as_it_is(optimizer: OuterOptimizer) -> None:
    model = Mixed(0)
    step = OuterStep(FlatModel(model), optimizer, inner(model))
    start = image_of(1)

    assert torch.equal(step.publish(start), start)
    assert all(not state.any() for region in step.regions for state in region.state)


def test_buffers_take_the_plain_consensus_and_the_shared_sum_stays_as_it_is() -> None:
    model = Mixed(0)
    flat = FlatModel(model)
    step = OuterStep(flat, NesterovMomentum(), inner(model))
    step.publish(image_of(1))
    consensus = image_of(2)
    before = consensus.clone()

    flat.adopt(step.publish(consensus), take_raw=True)

    assert torch.equal(consensus, before)
    other = Mixed(2)
    assert torch.equal(model.mean, other.mean)
    assert int(model.steps) == 2
    assert not torch.equal(model.single, other.single)


@pytest.mark.parametrize(("optimizer", "is_reset"), [(NesterovMomentum(), True), (SlowMomentum(), False)])
def test_the_inner_state_is_reset_where_the_outer_optimizer_says_so(optimizer: OuterOptimizer, is_reset: bool) -> None:
    model = nn.Linear(3, 2)
    flat, adam = FlatModel(model), inner(model)
    step = OuterStep(flat, optimizer, adam)
    step.publish(flat.allocate())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    assert adam.state

    step.publish(flat.allocate())
    assert bool(adam.state) is not is_reset

    adam.step()  # it starts afresh
    first_steps = {int(state["step"]) for state in adam.state.values()}
    assert first_steps == {1 if is_reset else 2}


def test_the_digest_covers_version_and_state() -> None:
    model = Mixed(0)
    step = OuterStep(FlatModel(model), SlowMomentum(), inner(model))
    step.publish(image_of(1))
    step.publish(image_of(2))
    digest = step.digest("sum")

    assert step.digest("sum") == digest
    assert step.digest("another sum") != digest
    for tensor in (step.image, step.regions[0].state[0].view(torch.uint8), step.regions[1].state[0].view(torch.uint8)):
        tensor[0] ^= 1
        assert step.digest("sum") != digest
        tensor[0] ^= 1
    assert step.digest("sum") == digest


def test_state_has_one_tensor_per_slot_and_dtype() -> None:
    class Two:
        slots, resets_inner = 2, False

        def step(self, prev: torch.Tensor, consensus: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
            state[1].add_(state[0].add_(1))

    model = Mixed(0)
    flat = FlatModel(model)
    step = OuterStep(flat, Two(), inner(model))
    for seed in range(4):
        step.publish(image_of(seed))

    shapes = [(region.prev.dtype, region.prev.numel(), len(region.state)) for region in step.regions]
    assert shapes == [(torch.float32, 1008, 2), (torch.float64, 33, 2)]
    assert [[float(state[0]) for state in region.state] for region in step.regions] == [[3.0, 6.0]] * 2


def test_step_that_returns_its_version_instead_of_leaving_it_in_prev_is_refused() -> None:
    class Returns:
        slots, resets_inner = 0, False

        def step(self, prev: torch.Tensor, consensus: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
            return consensus.clone()

        def __repr__(self) -> str:
            return "Returns()"

    model = Mixed(0)
    wrong: Any = Returns()
    step = OuterStep(FlatModel(model), wrong, inner(model))
    step.publish(image_of(0))

    with pytest.raises(UsageError, match=r"step\(\) of Returns\(\) returned a Tensor, .* End it with prev\.copy_"):
        step.publish(image_of(1))


def test_step_may_return_prev_itself() -> None:
    class Chains(OuterAvg):
        def step(self, prev: torch.Tensor, consensus: torch.Tensor, state: Sequence[torch.Tensor]) -> Any:
            return prev.copy_(consensus)

    model = Mixed(0)
    flat = FlatModel(model)
    step = OuterStep(flat, Chains(), inner(model))
    step.publish(image_of(0))

    assert torch.equal(step.publish(image_of(1)), flat.near(image_of(1)))


def test_replicas_publish_the_same_bits() -> None:
    models = [Mixed(seed) for seed in (0, 9)]
    steps = [OuterStep(FlatModel(model), NesterovMomentum(), inner(model)) for model in models]
    for seed in range(ROUNDS):
        consensus = image_of(seed)
        images = [step.publish(copy.deepcopy(consensus)) for step in steps]
        assert torch.equal(*images)
    assert steps[0].digest("") == steps[1].digest("")
