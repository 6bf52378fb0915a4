"""Both planes on the same contributions: the same bits for two ranks, a proven bound for more (docs/engine.md).

A sum of n numbers, rounded after each addition and in any order, differs from the exact sum by at most
``(n - 1) · u · Σ|c|``, with u half a unit of the type's rounding (Jeannerod and Rump 2013). So two planes that add in
other orders differ by at most twice that.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from flodl.averaging.flat import FlatModel
from flodl.averaging.reducer import BufferPool, HostSums
from flodl.averaging.regions import sum_range
from flodl.core.rounds import weigh
from flodl.ids import RoundKey
from flodl.messages import Layout
from tests.integration.gloo_cohort import Cohort
from tests.integration.shared_host import Host

MOST_RANKS = 4
CHUNK_BYTES = 4096
UNIT = {np.float32: Fraction(1, 2**24), np.float64: Fraction(1, 2**53)}


class Mixture(nn.Module):
    """Parameters of every averaged type, float and integer buffers; the largest spreads over all ranks' segments."""

    def __init__(self) -> None:
        super().__init__()
        self.f32 = nn.Parameter(torch.zeros(3001))
        self.bf16 = nn.Parameter(torch.zeros(17, dtype=torch.bfloat16))
        self.f64 = nn.Parameter(torch.zeros(501, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def floats(self) -> Iterator[torch.Tensor]:
        return (tensor for tensor in (*self.parameters(), *self.buffers()) if tensor.is_floating_point())


# ------------------------------------------------------------------------------------------- what the ranks hold
def ordinary(tensor: torch.Tensor, rank: int, dice: torch.Generator) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=dice, dtype=torch.float64)


def of_all_magnitudes(tensor: torch.Tensor, rank: int, dice: torch.Generator) -> torch.Tensor:
    exponents = torch.randint(-120, 120, tensor.shape, generator=dice).double()
    return ordinary(tensor, rank, dice).sign() * torch.exp2(exponents) * (1 + torch.rand(tensor.shape, generator=dice))


def cancelling(tensor: torch.Tensor, rank: int, dice: torch.Generator) -> torch.Tensor:
    """Ranks 0 and 1 nearly cancel, what the others hold is of the size of the rounding."""
    common = torch.linspace(1.0, 2.0, tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    tiny = torch.finfo(tensor.dtype).eps * torch.randint(-8, 9, tensor.shape, generator=dice).double()
    return (common, -common)[rank] + tiny if rank < 2 else tiny / 16


def half_way(tensor: torch.Tensor, rank: int, dice: torch.Generator) -> torch.Tensor:
    """One large value and others of half its last place: each addition is a tie, and the order decides."""
    return torch.full(tensor.shape, 1.0 if rank == 0 else torch.finfo(tensor.dtype).eps / 2, dtype=torch.float64)


def subnormal(tensor: torch.Tensor, rank: int, dice: torch.Generator) -> torch.Tensor:
    return ordinary(tensor, rank, dice) * torch.finfo(tensor.dtype).tiny


CONTENTS = [ordinary, of_all_magnitudes, cancelling, half_way, subnormal]


def contributions(samples: Sequence[int], content: object = ordinary) -> tuple[Layout, list[bytes]]:
    """Each rank's packed image; rank 0 is the source of the integers."""
    weights = weigh(dict(enumerate(samples)), 1.0)
    images = []
    for rank in range(len(samples)):
        model, dice = Mixture(), torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for tensor in model.floats():
                tensor.copy_(content(tensor, rank, dice))  # type: ignore[operator]
            model.get_buffer("count").fill_(1000 + rank)
        flat = FlatModel(model)
        image = flat.allocate()
        assert flat.pack(image, weights[rank].weight, weights[rank].buffer_weight, rank == 0)
        images.append(image.numpy().tobytes())
    return flat.layout, images


# -------------------------------------------------------------------------------------------------- the planes
@pytest.fixture(scope="module")
def cohort() -> Iterator[Cohort]:
    running = Cohort(MOST_RANKS)
    try:
        yield running
    finally:
        codes = running.close()
    assert codes == [0] * MOST_RANKS


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(MOST_RANKS)
    yield host
    assert host.close() == [0] * MOST_RANKS


def over_gloo(cohort: Cohort, images: list[bytes], layout: Layout) -> bytes:
    """The consensus of the collective plane, the same bytes on every rank."""
    cohort.begin()
    cohort.form(list(range(len(images))), incarnation=1)
    held = cohort.sum_images(images, layout)
    assert len(set(held)) == 1
    return held[0]


def in_shared_memory(host: Host, images: list[bytes], layout: Layout) -> bytes:
    """The consensus of the CPU plane with all ranks on one host, the same bytes on every rank."""
    held = host.sum_images(images, layout)
    assert len(set(held)) == 1
    return held[0]


def over_hosts(images: list[bytes], layout: Layout, sizes: Sequence[int]) -> bytes:
    """The consensus of the CPU plane with ``sizes`` ranks on each host: sums of hosts, summed by the controller."""
    names = [f"host{index}" for index in range(len(sizes))]
    sums = HostSums(RoundKey(1, 1, 1), layout, names, BufferPool(0))
    rest = [np.frombuffer(image, np.uint8) for image in images]
    for name, size in zip(names, sizes, strict=True):
        own, rest = rest[:size], rest[size:]
        result = np.empty(layout.total_bytes, np.uint8)
        sum_range(layout, result, own, 0, layout.total_bytes)
        for start in range(0, layout.total_bytes, CHUNK_BYTES):
            sums.add_chunk(name, start, result[start : start + CHUNK_BYTES].tobytes())
    with sums.sending(0, layout.total_bytes) as view:
        return bytes(view)


# --------------------------------------------------------------------------------------------------- the bound
def values(image: bytes, layout: Layout, kind: type[np.floating]) -> npt.NDArray[np.floating]:
    if kind is np.float32:
        return np.frombuffer(image, np.float32, layout.f32_count)
    return np.frombuffer(image, np.float64, layout.f64_count, layout.f64_offset)


def worst_error(consensus: bytes, images: list[bytes], layout: Layout, kind: type[np.floating]) -> Fraction:
    """The largest ``|consensus - Σc| / (u · Σ|c|)``, in exact arithmetic."""
    parts = zip(*(values(image, layout, kind).tolist() for image in images), strict=True)
    worst = Fraction(0)
    for got, part in zip(values(consensus, layout, kind).tolist(), parts, strict=True):
        exact = [Fraction(value) for value in part]
        error, size = abs(Fraction(got) - sum(exact)), sum(abs(value) for value in exact)
        worst = max(worst, error / (UNIT[kind] * size) if size else error)
    return worst


# ------------------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("content", CONTENTS)
def test_two_ranks_get_the_same_bits_from_every_plane(cohort: Cohort, host: Host, content: object) -> None:
    layout, images = contributions([64, 23], content)

    consensus = over_gloo(cohort, images, layout)

    assert in_shared_memory(host, images, layout) == consensus
    assert over_hosts(images, layout, [1, 1]) == consensus


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("samples", [(64, 64, 64), (64, 23, 1), (64, 64, 23, 1)])
def test_more_ranks_keep_the_bound_on_every_plane(
    cohort: Cohort, host: Host, samples: tuple[int, ...], content: object
) -> None:
    layout, images = contributions(samples, content)
    most = len(samples) - 1

    planes = {
        "gloo": over_gloo(cohort, images, layout),
        "shared memory": in_shared_memory(host, images, layout),
        "two hosts": over_hosts(images, layout, [1, most]),
    }

    for kind in UNIT:
        errors = {name: worst_error(consensus, images, layout, kind) for name, consensus in planes.items()}
        assert all(error <= most for error in errors.values()), errors
    assert len({consensus[layout.raw_offset :] for consensus in planes.values()}) == 1


@pytest.mark.parametrize("size", [2, 3, MOST_RANKS])
def test_one_rank_with_all_the_weight_arrives_to_the_bit(cohort: Cohort, host: Host, size: int) -> None:
    layout, images = contributions([64] + [0] * (size - 1), of_all_magnitudes)

    assert over_gloo(cohort, images, layout) == images[0]
    assert in_shared_memory(host, images, layout) == images[0]
    assert over_hosts(images, layout, [1] * size) == images[0]


def test_hosts_of_one_rank_add_in_the_order_of_shared_memory(host: Host) -> None:
    layout, images = contributions([64, 64, 23, 1], cancelling)

    assert over_hosts(images, layout, [1, 1, 1, 1]) == in_shared_memory(host, images, layout)
    assert over_hosts(images, layout, [3, 1]) == in_shared_memory(host, images, layout)
