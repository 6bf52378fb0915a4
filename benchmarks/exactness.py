"""How exact an average is: the CPU plane of one host against float64, over float32 values and random counts.

    python benchmarks/exactness.py

Each of n ranks holds ``ELEMENTS`` values (normal, times 2⁻⁸ … 2⁰, drawn by element and rank) and trains a random number
of samples. They pack, reduce in shared memory and adopt as in a round; the exact average is taken in float64. Told are
the share of elements that are off by at most one unit in the last place, and the worst error in such units: once of the
largest value that a rank holds (docs/engine.md proves less than n + 1), once of the largest contribution, which is a
value times its rank's weight. Seeds are fixed, so the figures repeat.

The last line of output is a JSON object; the exit code is 1 when an error reaches what is proven.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flodl.averaging.flat import FlatModel  # noqa: E402  # found from the root
from flodl.averaging.shared import SharedPlane  # noqa: E402
from flodl.core.rounds import weigh  # noqa: E402

RANKS = (2, 3, 4, 8)
ELEMENTS, REPEATS = 100_000, 120
MAX_SAMPLES = 100_000

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figures:
    """Over ``elements`` elements of ``ranks`` ranks; shares within one unit, worst errors in units."""

    ranks: int
    elements: int
    share_of_value: float
    worst_of_value: float
    share_of_contribution: float
    worst_of_contribution: float

    @property
    def is_as_proven(self) -> bool:
        """Whether no error reaches the bound of docs/engine.md."""
        return self.worst_of_value < self.ranks + 1


def main() -> int:
    torch.set_num_threads(1)
    found = []
    print("| ranks | within one unit of the largest value | worst | within one of the largest contribution | worst |")
    print("| --- | --- | --- | --- | --- |")
    for ranks in RANKS:
        figures = measure(ranks, ELEMENTS, REPEATS)
        found.append(figures)
        print(row(figures), flush=True)
    print(json.dumps({"figures": [asdict(figures) for figures in found]}))
    return 0 if all(figures.is_as_proven for figures in found) else 1


def row(figures: Figures) -> str:
    """A line of the table in docs/engine.md."""
    return (
        f"| {figures.ranks} | {figures.share_of_value:.4%} | {figures.worst_of_value:.2f} "
        f"| {figures.share_of_contribution:.2%} | {figures.worst_of_contribution:.2f} |"
    )


def measure(ranks: int, elements: int, repeats: int) -> Figures:
    """``repeats`` rounds of ``elements`` values each."""
    of_value, of_contribution = _Units(), _Units()
    for repeat in range(repeats):
        dice = np.random.default_rng((ranks, repeat))
        samples = dice.integers(1, MAX_SAMPLES, ranks, endpoint=True)
        values = [_draw(dice, elements) for _ in range(ranks)]
        wide = [each.double().numpy() for each in values]
        weights = samples / samples.sum()
        exact = sum((weight * each for weight, each in zip(weights, wide, strict=True)), np.zeros(elements))
        error = abs(average(values, [int(count) for count in samples]).double().numpy() - exact)
        of_value.add(error, np.max(np.abs(wide), axis=0))
        of_contribution.add(error, np.max(np.abs(weights[:, None] * wide), axis=0))
    count = elements * repeats
    return Figures(
        ranks, count, of_value.within / count, of_value.worst, of_contribution.within / count, of_contribution.worst
    )


def average(values: list[torch.Tensor], samples: list[int]) -> torch.Tensor:
    """One round of ranks of one host, each with its float32 values [elements] as its only parameter."""
    models = [_Model(each) for each in values]
    flats = [FlatModel(model) for model in models]
    layout, slots = flats[0].layout, tuple(range(len(flats)))
    fd = os.memfd_create("exactness")
    try:
        planes = [SharedPlane(fd, len(flats), slot) for slot in slots]
        for slot, part in weigh(dict(enumerate(samples)), gamma=1.0).items():
            image = torch.frombuffer(planes[slot].contribution(layout), dtype=torch.uint8)
            flats[slot].pack(image, part.weight, part.buffer_weight, include_raw=False)
        for slot in slots:
            planes[slot].reduce_slice(layout, slot, len(slots), slots)
        flats[0].adopt(torch.frombuffer(planes[0].result(layout), dtype=torch.uint8), take_raw=False)
    finally:
        os.close(fd)
    return models[0].values.detach()


class _Model(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())


class _Units:
    """Errors in units in the last place of what they are measured by."""

    def __init__(self) -> None:
        self.within, self.worst = 0, 0.0

    def add(self, error: Doubles, size: Doubles) -> None:
        units = error / np.spacing(size.astype(np.float32)).astype(np.float64)
        self.within += int((units <= 1).sum())
        self.worst = max(self.worst, float(units.max()))


def _draw(dice: np.random.Generator, elements: int) -> torch.Tensor:
    spread = np.exp2(dice.integers(-8, 0, elements, endpoint=True))
    return torch.from_numpy((dice.standard_normal(elements) * spread).astype(np.float32))


if __name__ == "__main__":
    sys.exit(main())
