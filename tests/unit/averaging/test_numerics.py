"""What real models do between two rounds, and what the average makes of it: trained ranks against a float64 oracle."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from flodl.averaging.flat import FlatModel
from flodl.averaging.shared import SharedPlane
from flodl.core.rounds import weigh
from flodl.errors import ConfigError

SAMPLES = (30, 10, 24)


class Cohort:
    """Ranks of one host that start from the same weights; each round is the CPU plane's."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.models = []
        for _ in SAMPLES:
            torch.manual_seed(3)
            self.models.append(build())
        self.flats = [FlatModel(model) for model in self.models]

    def average(self) -> dict[str, torch.Tensor]:
        """One round by samples; returns the oracle's parameters and float buffers, in float64."""
        parts = weigh(dict(enumerate(SAMPLES)), 1.0)
        expected = self._oracle()
        fd = os.memfd_create("plane")
        try:
            planes = [SharedPlane(fd, len(self.flats), slot) for slot in range(len(self.flats))]
            layout = self.flats[0].layout
            for rank, (flat, plane) in enumerate(zip(self.flats, planes, strict=True)):
                image = torch.frombuffer(plane.contribution(layout), dtype=torch.uint8)
                assert flat.pack(image, parts[rank].weight, parts[rank].buffer_weight, include_raw=False)
            planes[0].reduce_slice(layout, 0, 1, tuple(range(len(planes))))
            for flat, plane in zip(self.flats, planes, strict=True):
                flat.adopt(torch.frombuffer(plane.result(layout), dtype=torch.uint8), take_raw=False)
        finally:
            os.close(fd)
        return expected

    def _oracle(self) -> dict[str, torch.Tensor]:
        parameters = dict(self.models[0].named_parameters(remove_duplicate=False))
        expected = {}
        for name in self.models[0].state_dict():
            values = [model.state_dict()[name] for model in self.models]
            if values[0].is_floating_point():
                shares = [count / sum(SAMPLES) if name in parameters else 1 / len(SAMPLES) for count in SAMPLES]
                expected[name] = torch.stack([s * v.double() for s, v in zip(shares, values, strict=True)]).sum(0)
        return expected

    def assert_consensus(self, expected: dict[str, torch.Tensor]) -> None:
        for model in self.models:
            for name, value in expected.items():
                torch.testing.assert_close(model.state_dict()[name].double(), value, rtol=2.0**-22, atol=2.0**-22)


def train(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    dice = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(5, 4, generator=dice)).square().mean().backward()
        optimizer.step()


def test_batch_norm_averages_its_statistics_alike_and_counts_on_its_own() -> None:
    cohort = Cohort(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))
    for rank, model in enumerate(cohort.models):
        train(model, rank, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), steps=rank + 1)

    cohort.assert_consensus(cohort.average())
    assert [int(model[1].num_batches_tracked) for model in cohort.models] == [1, 2, 3]


def test_frozen_parameters_stay_to_the_rounding_and_are_averaged_once_they_train() -> None:
    cohort = Cohort(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1)))
    frozen = cohort.models[0][0].weight.detach().clone()
    optimizers = []
    for rank, model in enumerate(cohort.models):
        model[0].weight.requires_grad_(False)
        optimizers.append(torch.optim.Adam(model.parameters(), 0.05))
        train(model, rank, optimizers[-1])
    cohort.assert_consensus(cohort.average())
    torch.testing.assert_close(cohort.models[1][0].weight, frozen, rtol=2.0**-22, atol=0.0)

    for rank, (model, optimizer) in enumerate(zip(cohort.models, optimizers, strict=True)):
        model[0].weight.requires_grad_(True)
        train(model, rank, optimizer)
    assert not torch.allclose(cohort.models[0][0].weight, cohort.models[1][0].weight)
    cohort.assert_consensus(cohort.average())
    assert all(torch.equal(model[0].weight, cohort.models[0][0].weight) for model in cohort.models)


def test_tied_weights_train_as_one_and_stay_one() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        return model

    cohort = Cohort(tied)
    for rank, model in enumerate(cohort.models):
        train(model, rank, torch.optim.Adam(model.parameters(), 0.05))
    cohort.assert_consensus(cohort.average())
    assert all(model[0].weight is model[2].weight for model in cohort.models)
    assert cohort.flats[0].layout.f32_count == 16


def test_parameter_that_the_module_rebinds_is_averaged_as_it_is_now() -> None:
    cohort = Cohort(lambda: nn.Sequential(nn.Linear(4, 1)))
    for rank, model in enumerate(cohort.models):
        model[0].weight = nn.Parameter(torch.full((1, 4), float(rank)))
    cohort.assert_consensus(cohort.average())


def test_parameter_that_is_rebound_to_another_dtype_is_named() -> None:
    cohort = Cohort(lambda: nn.Sequential(nn.Linear(4, 1)))
    cohort.models[0][0].weight = nn.Parameter(torch.zeros(1, 4, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"parameter 0\.weight was float32\[1, 4\] .* is now bfloat16\[1, 4\]"):
        cohort.average()


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, 0.5), lambda p: torch.optim.SparseAdam(list(p), 0.1)],
    ids=["SGD", "SparseAdam"],
)
def test_embeddings_with_sparse_gradients_are_averaged_like_any_parameter(make: Callable[[Any], Any]) -> None:
    cohort = Cohort(lambda: nn.Sequential(nn.Embedding(20, 3, sparse=True)))
    rows: Sequence[list[int]] = ([1, 2, 2], [2, 3], [19])
    for model, seen in zip(cohort.models, rows, strict=True):
        optimizer = make(model.parameters())
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            model(torch.tensor(seen)).square().sum().backward()
            assert model[0].weight.grad.is_sparse
            optimizer.step()
    cohort.assert_consensus(cohort.average())


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_complex_numbers_are_refused_by_name_with_the_way_out(kind: str) -> None:
    model = nn.Module()
    value = torch.zeros(2, dtype=torch.complex64)
    if kind == "parameter":
        model.phase = nn.Parameter(value)
    else:
        model.register_buffer("phase", value)
    with pytest.raises(ConfigError, match=f"{kind} phase has dtype torch.complex64.*store real and imaginary parts"):
        FlatModel(model)


def test_empty_tensor_of_any_stride_takes_no_part() -> None:
    model = nn.Module()
    model.register_buffer("nothing", torch.zeros(2, 1).expand(2, 3)[:0])
    model.register_buffer("none", torch.empty_strided((2, 0, 1), (0, 1, 1)))
    assert FlatModel(model).layout.total_bytes == 0
