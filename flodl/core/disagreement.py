"""Ranks that hold another consensus than the others: who, in which tensors, and when one has to go.

Purpose: name what differs in an attempt whose digests differ. States: *asked*, once the ranks concerned shall digest
their sums tensor by tensor; their answers come while the round is redone already, or never. Invariants: at most
``MAX_ASKED`` ranks are asked; a rank is named once per attempt; nobody is called wrong without a majority against it.
It decides nothing about the round.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flodl.ids import RankId, RoundKey
from flodl.messages import SumDescribed

MAX_ASKED = 8
"""An answer takes up to 1 MB; a fault that concerns more ranks is not one rank's memory."""

MAX_DISSENTS = 3
"""Attempts at one round in which a rank may differ from the majority before it is removed."""

TENSOR_DIGEST_BYTES = 8
"""Enough to tell two tensors apart that an accident made different."""

VERSION_BEFORE = " of the version before"
"""Ends the name of a tensor that the last step of the outer optimizer has left."""

OUTER_SLOT = "slot "
"""Begins the name of a tensor of the outer optimizer's state."""

MAX_NAMED = 5
"""Tensors named in one line; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``rank`` differs from ``other`` in ``tensors``, of ``count`` that were compared."""

    rank: RankId
    other: RankId
    tensors: tuple[str, ...]
    count: int

    def describe(self) -> str:
        """The difference in words."""
        if not self.tensors:
            return f"rank {self.rank} differs from rank {self.other} in none of {self.count} tensors: it was transient"
        named = ", ".join(self.tensors[:MAX_NAMED])
        more = f" and {len(self.tensors) - MAX_NAMED} more" if len(self.tensors) > MAX_NAMED else ""
        told = f"rank {self.rank} differs from rank {self.other} in {named}{more} ({self.count} tensors compared)"
        if all(name.endswith(VERSION_BEFORE) or name.startswith(OUTER_SLOT) for name in self.tensors):
            return (
                f"{told}: the sums agree, what the outer optimizer made of the last one does not; give it the same "
                "settings in every rank, and a step() that leaves the same bytes everywhere"
            )
        return told


class Disagreement:
    """One attempt's; see the module docstring."""

    def __init__(self, key: RoundKey, digests: Mapping[RankId, str]) -> None:
        """``digests``: what each participant reported; at least two differ."""
        self.key = key
        counted = list(digests.values())
        chosen = max(dict.fromkeys(counted), key=counted.count)
        self.dissenters = tuple(rank for rank, digest in digests.items() if digest != chosen)
        self.has_majority = 2 * counted.count(chosen) > len(counted)
        self._other = next(rank for rank, digest in digests.items() if digest == chosen)
        self._answers: dict[RankId, SumDescribed] = {}
        self._named: dict[RankId, None] = {}

    @property
    def asked(self) -> tuple[RankId, ...]:
        """One rank of those that agree, and who differs from them."""
        return (self._other, *self.dissenters[: MAX_ASKED - 1])

    def hear(self, answer: SumDescribed) -> tuple[Difference, ...]:
        """An asked rank's tensors; returns what can be named now."""
        if answer.key != self.key or answer.rank not in self.asked:
            return ()
        self._answers[answer.rank] = answer
        other = self._answers.get(self._other)
        if other is None:
            return ()
        ready = [rank for rank in self._answers if rank != self._other and rank not in self._named]
        self._named |= dict.fromkeys(ready)
        return tuple(_compare(self._answers[rank], other) for rank in ready)


def _compare(answer: SumDescribed, other: SumDescribed) -> Difference:
    mine, theirs = _by_name(answer), _by_name(other)
    names = tuple(name for name in mine | theirs if mine.get(name) != theirs.get(name))
    return Difference(answer.rank, other.rank, names, len(mine | theirs))


def _by_name(answer: SumDescribed) -> dict[str, bytes]:
    size = TENSOR_DIGEST_BYTES
    return {name: answer.digests[i * size : (i + 1) * size] for i, name in enumerate(answer.names)}
