"""Whatever the size, the seed and the cuts: every sample of an epoch is loaded exactly once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flodl.data.loader import BatchLoader
from flodl.data.permutation import EpochOrder
from flodl.ids import Grant, Span

SEEDS = st.integers(0, 2**63 - 1)
TIMEOUT_S = 20.0


@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = EpochOrder(size, seed, epoch).indices([Span(0, size)])
    assert np.array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(1, 2**48), seed=SEEDS, epoch=st.integers(0, 10**6), data=st.data())
def test_indices_stay_inside_and_do_not_collide_at_any_size(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, min(500, size - start)))
    order = EpochOrder(size, seed, epoch).indices([Span(start, count)])
    assert order.min() >= 0
    assert order.max() < size
    assert len(set(order.tolist())) == count


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    batch_size=st.integers(1, 7),
    grants=st.integers(1, 4),
    merge=st.booleans(),
)
def test_any_grants_deliver_every_sample_once_and_say_where_it_stood(
    counts: list[int], batch_size: int, grants: int, merge: bool
) -> None:
    size = sum(counts)
    starts = np.cumsum([0, *counts]).tolist()
    spans = [Span(start, count) for start, count in zip(starts, counts, strict=False)]
    loader = BatchLoader(list(range(size)), batch_size, 3, merge, collate_fn=list)
    for first in range(grants):
        loader.push(Grant(0, tuple(spans[first::grants])))
    seen: list[int] = []
    order = EpochOrder(size, 3, 0)
    while loader.pending_batches:
        batch = loader.next_batch(TIMEOUT_S)
        (part,) = batch.parts
        assert part.data == order.indices(batch.spans).tolist()
        assert len(part.data) == batch.samples <= batch_size + merge
        seen += part.data
    loader.close()
    assert sorted(seen) == list(range(size))
