"""Pool: every sample is free, leased, trained or merged, and exactly one of these."""

import pytest

from flodl.core.pool import Pool, PoolSnapshot
from flodl.core.spans import SpanSet
from flodl.errors import CoverageError, InvariantViolation
from flodl.ids import Grant, Span


def test_new_pool_is_free() -> None:
    pool = Pool(pass_index=3, size=100, batch_size=10, merge_single_tail=False)
    assert (pool.pass_index, pool.size) == (3, 100)
    assert (pool.free_samples, pool.free_batches, pool.remaining_batches) == (100, 10, 10)
    assert (pool.unmerged, pool.is_complete, pool.merged_spans) == (100, False, ())
    pool.check()


def test_pool_without_samples_is_complete() -> None:
    pool = Pool(pass_index=0, size=0, batch_size=4, merge_single_tail=False)
    assert pool.is_complete
    assert pool.lease(0, 1) is None
    pool.check()


def test_pool_of_one_sample_has_one_batch() -> None:
    pool = Pool(pass_index=0, size=1, batch_size=4, merge_single_tail=True)
    assert pool.lease(0, 1) == Grant(0, (Span(0, 1),))
    pool.check()


def test_leases_follow_the_order_of_the_epoch() -> None:
    pool = Pool(pass_index=2, size=100, batch_size=10, merge_single_tail=False)
    assert pool.lease(0, 3) == Grant(2, (Span(0, 30),))
    assert pool.lease(1, 1) == Grant(2, (Span(30, 10),))
    assert (pool.leased_samples(0), pool.leased_samples(1), pool.free_samples) == (30, 10, 60)
    assert (pool.held_batches(0), pool.held_batches(1), pool.remaining_batches) == (3, 1, 10)
    pool.check()


@pytest.mark.parametrize("batches", [0, -1])
def test_nothing_is_leased_when_nothing_is_asked(batches: int) -> None:
    pool = Pool(pass_index=0, size=100, batch_size=10, merge_single_tail=False)
    assert pool.lease(0, batches) is None
    assert pool.free_samples == 100


def test_nothing_is_leased_when_nothing_is_free() -> None:
    pool = Pool(pass_index=0, size=10, batch_size=10, merge_single_tail=False)
    pool.lease(0, 1)
    assert pool.lease(1, 1) is None
    assert pool.free_batches == 0


def test_last_grant_ends_with_the_short_batch() -> None:
    pool = Pool(pass_index=0, size=23, batch_size=10, merge_single_tail=False)
    pool.lease(0, 1)
    assert pool.lease(1, 5) == Grant(0, (Span(10, 13),))
    assert pool.held_batches(1) == 2


def test_single_sample_joins_the_last_batch() -> None:
    pool = Pool(pass_index=0, size=21, batch_size=10, merge_single_tail=True)
    assert pool.free_batches == 2
    assert pool.lease(0, 1) == Grant(0, (Span(0, 10),))
    assert pool.lease(1, 1) == Grant(0, (Span(10, 11),))
    assert pool.held_batches(1) == 1
    pool.check()


def test_single_sample_is_a_batch_of_its_own_by_default() -> None:
    pool = Pool(pass_index=0, size=21, batch_size=10, merge_single_tail=False)
    assert pool.lease(0, 2) == Grant(0, (Span(0, 20),))
    assert pool.lease(1, 1) == Grant(0, (Span(20, 1),))


def test_unknown_rank_has_nothing() -> None:
    pool = Pool(pass_index=0, size=10, batch_size=10, merge_single_tail=False)
    assert (pool.leased_samples(7), pool.held_batches(7), pool.trained_samples(7)) == (0, 0, 0)
    assert (pool.merge(7), pool.untrain(7), pool.reclaim(7)) == ((), 0, 0)
    pool.train(7, 0)
    pool.check()


def test_training_spends_grants_in_order() -> None:
    pool = Pool(pass_index=0, size=100, batch_size=10, merge_single_tail=False)
    pool.lease(0, 2)
    pool.lease(1, 2)
    pool.lease(0, 2)
    pool.train(0, 30)
    assert (pool.trained_samples(0), pool.leased_samples(0), pool.held_batches(0)) == (30, 10, 1)
    assert pool.remaining_batches == 7
    pool.check()
    assert pool.merge(0) == (Span(0, 20), Span(40, 10))


def test_training_may_spend_many_grants_at_once() -> None:
    pool = Pool(pass_index=0, size=100, batch_size=10, merge_single_tail=False)
    for _ in range(5):
        pool.lease(0, 1)
    pool.train(0, 40)
    assert (pool.trained_samples(0), pool.held_batches(0)) == (40, 1)
    pool.check()


def test_training_to_the_end_of_a_grant_leaves_the_next_one_whole() -> None:
    pool = Pool(pass_index=0, size=43, batch_size=10, merge_single_tail=False)
    pool.lease(0, 2)
    pool.lease(0, 3)
    pool.train(0, 20)
    assert (pool.held_batches(0), pool.leased_samples(0)) == (3, 23)
    pool.train(0, 23)
    assert (pool.held_batches(0), pool.leased_samples(0), pool.remaining_batches) == (0, 0, 0)
    pool.check()


@pytest.mark.parametrize("samples", [21, -1])
def test_training_of_what_is_not_leased_is_refused(samples: int) -> None:
    pool = Pool(pass_index=4, size=100, batch_size=10, merge_single_tail=False)
    pool.lease(3, 2)
    with pytest.raises(CoverageError, match=f"pass 4: rank 3 trained {samples} samples, but has leased 20"):
        pool.train(3, samples)
    assert pool.leased_samples(3) == 20
    pool.check()


@pytest.mark.parametrize("samples", [1, 9, 15, 25, 43])
def test_training_that_ends_inside_a_batch_is_refused_and_changes_nothing(samples: int) -> None:
    pool = Pool(pass_index=4, size=44, batch_size=10, merge_single_tail=False)
    pool.lease(3, 2)
    pool.lease(3, 3)
    with pytest.raises(CoverageError, match=f"pass 4: rank 3 trained {samples} samples, which ends inside a batch"):
        pool.train(3, samples)
    assert (pool.leased_samples(3), pool.trained_samples(3), pool.held_batches(3)) == (44, 0, 5)
    pool.check()


def test_joined_single_sample_is_not_cut_off_its_batch() -> None:
    pool = Pool(pass_index=0, size=21, batch_size=10, merge_single_tail=True)
    pool.lease(0, 2)
    pool.train(0, 10)
    with pytest.raises(CoverageError, match="inside a batch"):
        pool.train(0, 10)
    pool.train(0, 11)
    assert pool.held_batches(0) == 0


def test_merge_is_final_and_empties_the_trained() -> None:
    pool = Pool(pass_index=0, size=40, batch_size=10, merge_single_tail=False)
    pool.lease(0, 1)
    pool.lease(1, 1)
    pool.train(0, 10)
    pool.train(1, 10)
    assert pool.merge(1) == (Span(10, 10),)
    assert pool.merged_spans == (Span(10, 10),)
    assert pool.merge(0) == (Span(0, 10),)
    assert pool.merge(0) == ()
    assert (pool.merged_spans, pool.unmerged, pool.trained_samples(0)) == ((Span(0, 20),), 20, 0)
    pool.check()


def test_epoch_is_complete_when_all_is_merged() -> None:
    pool = Pool(pass_index=0, size=15, batch_size=10, merge_single_tail=False)
    pool.lease(0, 2)
    pool.train(0, 15)
    assert not pool.is_complete
    pool.merge(0)
    assert pool.is_complete
    assert (pool.unmerged, pool.remaining_batches) == (0, 0)
    pool.check()


def test_untrained_samples_are_free_again_and_leases_stay() -> None:
    pool = Pool(pass_index=0, size=50, batch_size=10, merge_single_tail=False)
    pool.lease(0, 3)
    pool.train(0, 20)
    assert pool.untrain(0) == 20
    assert (pool.trained_samples(0), pool.leased_samples(0), pool.free_samples) == (0, 10, 40)
    assert pool.remaining_batches == 5
    pool.check()
    assert pool.lease(1, 3) == Grant(0, (Span(0, 20), Span(30, 10)))


def test_dead_rank_returns_unmerged_spans() -> None:
    pool = Pool(pass_index=0, size=100, batch_size=10, merge_single_tail=False)
    pool.lease(0, 2)
    pool.lease(1, 2)
    pool.lease(0, 2)
    pool.train(0, 20)
    pool.merge(0)
    pool.lease(0, 1)
    pool.train(0, 10)
    assert pool.reclaim(0) == 30
    assert (pool.leased_samples(0), pool.trained_samples(0), pool.held_batches(0)) == (0, 0, 0)
    assert (pool.free_samples, pool.remaining_batches, pool.merged_spans) == (60, 8, (Span(0, 20),))
    assert pool.reclaim(0) == 0
    pool.check()


def test_reclaimed_spans_are_leased_first_and_in_order() -> None:
    pool = Pool(pass_index=0, size=100, batch_size=10, merge_single_tail=False)
    pool.lease(0, 1)
    pool.lease(1, 1)
    pool.lease(2, 1)
    pool.reclaim(2)
    pool.reclaim(0)
    assert pool.lease(1, 3) == Grant(0, (Span(0, 10), Span(20, 20)))
    pool.check()


def test_batch_of_a_grant_may_cross_a_gap() -> None:
    pool = Pool(pass_index=0, size=25, batch_size=10, merge_single_tail=False)
    pool.lease(0, 1)
    pool.lease(1, 1)
    pool.lease(2, 1)
    pool.reclaim(0)
    pool.reclaim(2)
    pool.lease(3, 2)
    pool.train(3, 10)
    assert pool.held_batches(3) == 1
    pool.train(3, 5)
    assert pool.merge(3) == (Span(0, 10), Span(20, 5))


def test_rank_may_lease_after_a_reclaim() -> None:
    pool = Pool(pass_index=0, size=20, batch_size=10, merge_single_tail=False)
    pool.lease(0, 1)
    pool.reclaim(0)
    assert pool.lease(0, 1) == Grant(0, (Span(0, 10),))


def test_huge_epoch_with_many_ranks_costs_spans_not_samples() -> None:
    pool = Pool(pass_index=0, size=10**9 + 1, batch_size=64, merge_single_tail=True)
    for rank in range(2000):
        pool.lease(rank, 1000)
        pool.train(rank, 64_000)
        pool.merge(rank)
    assert pool.merged_spans == (Span(0, 128_000_000),)
    assert pool.remaining_batches == 13_625_000
    pool.check()


def test_snapshot_is_plain_and_omits_zeros() -> None:
    pool = Pool(pass_index=6, size=70, batch_size=10, merge_single_tail=False)
    pool.lease(2, 1)
    pool.lease(1, 2)
    pool.lease(0, 2)
    pool.train(0, 20)
    pool.train(1, 10)
    pool.train(2, 10)
    pool.merge(0)
    assert pool.snapshot() == PoolSnapshot(
        pass_index=6, size=70, free_samples=20, leased={1: 10}, trained={1: 10, 2: 10}, merged=(Span(30, 20),)
    )


def test_check_names_a_lost_sample() -> None:
    pool = Pool(pass_index=5, size=20, batch_size=10, merge_single_tail=False)
    pool._free.take(10)
    with pytest.raises(InvariantViolation, match=r"pass 5: \(Span\(start=10, count=10\),\) is not all of 20 samples"):
        pool.check()


def test_check_names_a_sample_of_an_empty_epoch() -> None:
    pool = Pool(pass_index=5, size=0, batch_size=10, merge_single_tail=False)
    pool._free.add(Span(0, 1))
    with pytest.raises(InvariantViolation, match="is not all of 0 samples"):
        pool.check()


@pytest.mark.parametrize("state", ["merged", "trained", "leased"])
def test_check_names_a_doubled_sample(state: str) -> None:
    pool = Pool(pass_index=5, size=20, batch_size=10, merge_single_tail=False)
    pool.lease(0, 1)
    sets = {"merged": pool._merged, "trained": pool._holdings[0].trained, "leased": pool._holdings[0].grants[0]}
    sets[state].add(Span(12, 3))
    with pytest.raises(InvariantViolation, match=r"Span\(start=12, count=3\) overlaps"):
        pool.check()


@pytest.mark.parametrize("total", ["leased_samples", "batches"])
def test_check_names_a_wrong_total_of_a_rank(total: str) -> None:
    pool = Pool(pass_index=5, size=20, batch_size=10, merge_single_tail=False)
    pool.lease(3, 2)
    setattr(pool._holdings[3], total, 5)
    with pytest.raises(InvariantViolation, match="pass 5: rank 3 holds 20 samples, 2 batches"):
        pool.check()


def test_check_names_a_wrong_total_of_all() -> None:
    pool = Pool(pass_index=5, size=20, batch_size=10, merge_single_tail=False)
    pool.lease(3, 1)
    pool._held_batches = 2
    with pytest.raises(InvariantViolation, match="pass 5: ranks hold 1 batches, counted 2"):
        pool.check()


def test_check_accepts_grants_of_many_spans() -> None:
    pool = Pool(pass_index=5, size=30, batch_size=10, merge_single_tail=False)
    pool._free.take(30)
    pool._free = SpanSet([Span(0, 15), Span(20, 10)])
    pool._merged.add(Span(15, 5))
    pool.lease(0, 3)
    pool.check()


def test_samples_of_an_earlier_run_are_merged_and_the_others_are_dealt() -> None:
    pool = Pool(0, 10, 2, merge_single_tail=False)
    pool.cover([Span(0, 4), Span(6, 2)])
    assert (pool.unmerged, pool.remaining_batches, pool.merged_spans) == (4, 2, (Span(0, 4), Span(6, 2)))
    assert pool.lease(0, 9) == Grant(0, (Span(4, 2), Span(8, 2)))
    pool.check()


@pytest.mark.parametrize("spans", [[Span(8, 3)], [Span(0, 2), Span(1, 1)], [Span(0, 0)]])
def test_what_is_not_free_cannot_be_of_an_earlier_run(spans: list[Span]) -> None:
    pool = Pool(0, 10, 2, merge_single_tail=False)
    with pytest.raises(CoverageError, match="cannot be merged already"):
        pool.cover(spans)
