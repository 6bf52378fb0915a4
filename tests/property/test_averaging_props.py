"""The consensus against an oracle of higher precision: real FlatModels over a real block of shared memory.

u is the rounding unit of what sums are taken in: 2⁻²⁴ (float32) or 2⁻⁵³ (float64). For n contributions the distance to
the exact Σ w·x is at most ``(n + 1) · u · Σ|w·x|``: one rounding of the weight, one of the product, n − 1 of the sum
(docs/engine.md has the proof); the weights themselves are off by ``(n + 3) · 2⁻⁵³``. bfloat16 and float16 are then
rounded once more, and stay within one unit in the last place of the largest contribution.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flodl.averaging.flat import FlatModel
from flodl.averaging.shared import SharedPlane
from flodl.core.rounds import Contribution, weigh

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-24, torch.float16: 2.0**-24, torch.float64: 2.0**-53}
LARGEST_EXPONENT = {torch.float32: 100, torch.bfloat16: 100, torch.float16: 13, torch.float64: 900}


@dataclass(frozen=True)
class Shape:
    """A tensor's shape and how it lies in memory."""

    sizes: tuple[int, ...]
    kind: str

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` (contiguous) in this layout."""
        match self.kind:
            case "transposed":
                return values.mT.contiguous().mT
            case "every second":
                room = values.new_zeros(values.numel(), 2)
                room[:, 0] = values.flatten()
                return room[:, 0].view(values.shape) if values.dim() < 2 else room[:, 0].unflatten(0, values.shape)
            case _:
                return values


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model, on every rank; its values follow from ``seed``."""

    dtype: torch.dtype
    shape: Shape
    is_parameter: bool
    exponent: int
    seed: int

    def values(self, rank: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(self.seed * 100 + rank)
        drawn = torch.randn(self.shape.sizes, generator=dice, dtype=torch.float64)
        spread = torch.randint(-8, 1, self.shape.sizes, generator=dice).double()
        return self.shape.lay((drawn * torch.exp2(spread) * 2.0**self.exponent).to(self.dtype))


class Model(nn.Module):
    def __init__(self, tensors: Sequence[Tensor], rank: int) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            values = tensor.values(rank)
            if tensor.is_parameter:
                self.register_parameter(f"t{number}", nn.Parameter(values, requires_grad=tensor.seed % 3 != 0))
            else:
                self.register_buffer(f"t{number}", values)


sizes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
shapes = st.builds(Shape, sizes, st.just("plain")) | st.builds(
    Shape,
    st.lists(st.integers(1, 5), min_size=2, max_size=3).map(tuple),
    st.sampled_from(["transposed", "every second"]),
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    largest = LARGEST_EXPONENT[dtype]
    exponent = draw(st.integers(-largest - (30 if dtype is not torch.float64 else 120), largest))
    return Tensor(dtype, draw(shapes), draw(st.booleans()), exponent, draw(st.integers(0, 10**6)))


counts = st.lists(st.integers(0, 10**9) | st.integers(0, 4), min_size=1, max_size=7).filter(any)
gammas = st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(0.0, 16.0)


def consensus(models: Sequence[nn.Module], parts: Sequence[Contribution]) -> None:
    """One round of the CPU plane over ``models``, each a rank of one host."""
    fd = os.memfd_create("plane")
    try:
        flats = [FlatModel(model) for model in models]
        planes = [SharedPlane(fd, len(models), slot) for slot in range(len(models))]
        layout, slots = flats[0].layout, tuple(range(len(models)))
        if not layout.total_bytes:
            return
        for flat, plane, part in zip(flats, planes, parts, strict=True):
            image = torch.frombuffer(plane.contribution(layout), dtype=torch.uint8)
            assert flat.pack(image, part.weight, part.buffer_weight, include_raw=False)
        for index, plane in enumerate(planes):
            plane.reduce_slice(layout, index, len(planes), slots)
        for flat, plane in zip(flats, planes, strict=True):
            flat.adopt(torch.frombuffer(plane.result(layout), dtype=torch.uint8), take_raw=False)
    finally:
        os.close(fd)


def exact_weights(samples: Sequence[int], gamma: float) -> list[np.longdouble]:
    powers = [np.power(np.longdouble(count), np.longdouble(gamma)) if count else np.longdouble(0) for count in samples]
    total = sum(powers, np.longdouble(0))
    return [power / total for power in powers]


def wide(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.longdouble]]":
    return tensor.detach().double().numpy().astype(np.longdouble)


@given(st.lists(tensors(), min_size=1, max_size=4), counts, gammas)
def test_consensus_is_within_the_bound_of_the_oracle(of: list[Tensor], samples: list[int], gamma: float) -> None:
    ranks = range(len(samples))
    models = [Model(of, rank) for rank in ranks]
    before = [[wide(tensor.values(rank)) for rank in ranks] for tensor in of]
    places = [[(t.stride(), t.dtype, t.shape) for t in model.state_dict().values()] for model in models]
    sent = weigh(dict(enumerate(samples)), gamma)

    consensus(models, [sent[rank] for rank in ranks])

    assert [[(t.stride(), t.dtype, t.shape) for t in model.state_dict().values()] for model in models] == places
    trained = [rank for rank in ranks if samples[rank]]
    n = len(trained)
    shares = exact_weights(samples, gamma)
    for number, tensor in enumerate(of):
        weights = shares if tensor.is_parameter else [np.longdouble(bool(samples[r])) / n for r in ranks]
        expected = sum((weights[r] * before[number][r] for r in trained), np.longdouble(0))
        size = sum((weights[r] * abs(before[number][r]) for r in trained), np.longdouble(0))
        largest = np.max([abs(before[number][r]) for r in trained], axis=0)
        results = [model.state_dict()[f"t{number}"] for model in models]
        assert all(torch.equal(results[0], result) for result in results)
        error = abs(wide(results[0]) - expected)
        info = torch.finfo(tensor.dtype)
        accumulated = torch.finfo(torch.float64 if tensor.dtype is torch.float64 else torch.float32)
        tiny = (n + 1) * accumulated.smallest_normal * accumulated.eps + info.smallest_normal * info.eps
        bound = ((n + 1) * UNIT[tensor.dtype] + (n + 3) * 2.0**-53) * size * (1 + 2.0**-20) + tiny
        if tensor.dtype in (torch.bfloat16, torch.float16):
            bound = bound + info.eps / 2 * abs(expected) * (1 + 2.0**-10)
            exponents = np.floor(np.log2(np.maximum(largest.astype(float), float(info.smallest_normal))))
            assert (error <= info.eps * np.exp2(exponents) + tiny).all()
        assert (error <= bound).all()


@given(counts, gammas)
def test_weights_are_a_partition_of_one_and_follow_the_power(samples: list[int], gamma: float) -> None:
    sent = weigh(dict(enumerate(samples)), gamma)
    exact = exact_weights(samples, gamma)
    n = sum(map(bool, samples))
    for rank, share in enumerate(exact):
        assert abs(np.longdouble(sent[rank].weight) - share) <= (n + 3) * 2.0**-53 * share
        assert sent[rank].buffer_weight == (1.0 / n if samples[rank] else 0.0)
    assert math.fsum(part.weight for part in sent.values()) == pytest.approx(1.0, abs=(n + 3) * 2.0**-53)


@given(st.integers(2, 6), st.integers(0, 5), st.sampled_from(DTYPES), st.integers(0, 10**6))
def test_one_rank_with_all_the_work_arrives_to_the_bit(ranks: int, source: int, dtype: torch.dtype, seed: int) -> None:
    source %= ranks
    of = [Tensor(dtype, Shape((4, 3), "plain"), True, 0, seed), Tensor(dtype, Shape((), "plain"), False, 0, seed)]
    models = [Model(of, rank) for rank in range(ranks)]
    sent = weigh({rank: 7 if rank == source else 0 for rank in range(ranks)}, 1.0)
    consensus(models, [sent[rank] for rank in range(ranks)])
    for model in models:
        assert all(torch.equal(model.state_dict()[f"t{i}"], tensor.values(source)) for i, tensor in enumerate(of))
