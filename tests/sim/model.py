"""Virtual weights: a model *is* the multiset of samples that it absorbed, on top of one initial model."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from flodl.ids import Grant, batches_of

Sample: TypeAlias = tuple[int, int]
"""An epoch and a position in its order."""

Batch: TypeAlias = tuple[Sample, ...]


class Model:
    """Immutable by agreement. ``bits`` tell apart what was summed in another order, with other weights or in other
    rounds, as they do in floating point; they depend on no interpreter's hash seed: hashes of numbers do not.
    """

    def __init__(self, origin: str, samples: Counter[Sample] | None = None, bits: int = 0) -> None:
        self.origin = origin
        self.samples: Counter[Sample] = Counter() if samples is None else samples
        self.bits = bits

    @property
    def digest(self) -> str:
        return f"{self.origin}/{self.bits:x}"

    def plus(self, parts: "Iterable[Contribution]") -> "Model":
        samples, bits = self.samples.copy(), self.bits
        for part in parts:
            samples.update(part.delta)
            mark = sum(hash(sample) * count for sample, count in part.delta.items())
            bits = hash((bits, part.weight, mark))
        return Model(self.origin, samples, bits)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Model):
            return False
        return (self.origin, self.bits, self.samples) == (other.origin, other.bits, other.samples)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Contribution:
    """What a rank puts into a round: its weight, the consensus it started from and what it trained since."""

    weight: float
    base: Model
    delta: Counter[Sample]


@dataclass(frozen=True)
class Sum:
    """A sum of contributions, of one host or of all."""

    parts: tuple[Contribution, ...]
    _model: list[Model | None] = field(default_factory=list)

    def model(self) -> Model | None:
        """The common base of those with weight plus all that they trained; None if the sum is garbage."""
        if not self._model:
            self._model.append(merge(self.parts))
        return self._model[0]


def merge(parts: Sequence[Contribution]) -> Model | None:
    """The model that a weighted sum amounts to; None where weights do not add up or bases differ."""
    used = [part for part in parts if part.weight > 0]
    if not used or abs(sum(part.weight for part in used) - 1.0) > 1e-9:
        return None
    base = used[0].base
    if any(part.base is not base and part.base != base for part in used):
        return None
    return base.plus(used)


def cut(grant: Grant, batch_size: int, merge_single_tail: bool) -> list[Batch]:
    """The loader: a grant's batches."""
    positions = [(grant.pass_index, p) for span in grant.spans for p in range(span.start, span.stop)]
    batches, at = [], 0
    for size in batches_of(grant.samples, batch_size, merge_single_tail):
        batches.append(tuple(positions[at : at + size]))
        at += size
    return batches
