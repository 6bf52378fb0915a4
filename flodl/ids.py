"""The identities and quantities that every room shares.

A rank id, an incarnation and a version are plain integers with one meaning each (docs/glossary.md); the type
aliases below exist so that a signature says which one it takes.
"""

from dataclasses import dataclass
from typing import TypeAlias

RankId: TypeAlias = int
"""One training process on one device. Given in admission order, never reused within a run."""

HostName: TypeAlias = str
"""The name of a machine in the roster."""

Incarnation: TypeAlias = int
"""The membership generation: 0 before the first formation, one more with every change of the live set."""

Version: TypeAlias = int
"""The number of a published consensus; version 0 is the initial weights."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open run of positions ``[start, start + count)`` of one pass's order."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        """The first position behind the span."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, order=True)
class RoundKey:
    """Names one attempt at one averaging round; a stale key is a stale message.

    ``version`` is the version that the round would publish, ``attempt`` counts the tries at it.
    """

    incarnation: Incarnation
    version: Version
    attempt: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease of samples: spans of one pass's order, cut into batches that never cross a grant.

    ``pass_index`` counts the passes over the data; an epoch is a pass, or a part of it (``epoch_splits``).
    """

    pass_index: int
    spans: tuple[Span, ...]

    @property
    def samples(self) -> int:
        """How many samples the grant holds."""
        return sum(span.count for span in self.spans)


def batches_of(samples: int, batch_size: int, merge_single_tail: bool) -> tuple[int, ...]:
    """Cut ``samples`` into batch sizes: full batches, then the short rest.

    With ``merge_single_tail`` a rest of exactly one sample joins the batch before it (batch norm cannot train on
    one sample); a lone sample with no batch before it stays as it is.
    """
    full, rest = divmod(samples, batch_size)
    sizes = [batch_size] * full
    if rest == 1 and full and merge_single_tail:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return tuple(sizes)


def batch_count(samples: int, batch_size: int, merge_single_tail: bool) -> int:
    """How many batches ``batches_of`` would cut, without cutting them (an epoch may have millions)."""
    full, rest = divmod(samples, batch_size)
    has_short_batch = rest > 1 or (rest == 1 and not (full and merge_single_tail))
    return full + has_short_batch
