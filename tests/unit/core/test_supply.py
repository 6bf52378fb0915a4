"""The run's samples over epochs, splits and the asynchronous mode's boundaries."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.core.position import Covered, Position
from flodl.core.supply import Merged, Supply
from flodl.errors import CoverageError, InvariantViolation
from flodl.ids import Grant, Span
from flodl.messages import CadenceSettings, Mode, Settings

SETTINGS = Settings(10, 4, 2, 0, CadenceSettings(Mode.CPU_CADENCE))
STREAMING = replace(SETTINGS, cadence=CadenceSettings(Mode.CPU_ASYNC))


def finish(supply: Supply, rank: int = 0) -> None:
    """Train and merge all that can be leased now."""
    leased = sum(grant.samples for grant in supply.lease(rank, 100))
    supply.train(rank, leased)
    supply.merge(rank)


def test_lockstep_epoch_opens_when_the_one_before_is_complete() -> None:
    supply = Supply(SETTINGS, merge_single_tail=False)
    assert supply.lease(0, 9) == (Grant(0, (Span(0, 10),)),)
    assert (supply.remaining_batches, supply.held_batches(0), supply.lease(1, 1)) == (3, 3, ())
    supply.train(0, 10)
    assert (supply.epoch_merged, supply.epoch_size, supply.close_epochs()) == (0, 10, ())
    assert supply.merge(0) == (Merged(0, 0, Span(0, 10)),)
    assert supply.close_epochs() == (0,)
    assert supply.lease(1, 1) == (Grant(1, (Span(0, 4),)),)


def test_nothing_is_left_behind_the_last_epoch() -> None:
    supply = Supply(SETTINGS, merge_single_tail=False)
    for epoch in range(2):
        assert not supply.is_exhausted
        finish(supply)
        assert supply.close_epochs() == (epoch,)
    assert supply.is_exhausted
    assert (supply.epoch, supply.epoch_merged, supply.epoch_size, supply.merged_samples) == (2, 0, 0, 20)


def test_streaming_rank_crosses_the_boundary_of_an_epoch() -> None:
    supply = Supply(STREAMING, merge_single_tail=False)
    assert supply.remaining_batches == 6
    assert supply.lease(0, 4) == (Grant(0, (Span(0, 10),)), Grant(1, (Span(0, 4),)))
    supply.train(0, 14)
    assert supply.merge(0) == (Merged(0, 0, Span(0, 10)), Merged(1, 1, Span(0, 4)))
    assert supply.close_epochs() == (0,)
    assert (supply.epoch, supply.epoch_merged, supply.remaining_batches) == (1, 4, 2)
    assert not supply.is_last_dealt
    finish(supply)
    assert supply.is_last_dealt
    assert supply.close_epochs() == (1,)


def test_what_a_lost_rank_had_of_an_older_epoch_is_dealt_first() -> None:
    supply = Supply(STREAMING, merge_single_tail=False)
    supply.lease(0, 1)
    supply.lease(1, 3)
    supply.reclaim(0)
    assert supply.lease(1, 2) == (Grant(0, (Span(0, 4),)), Grant(1, (Span(4, 4),)))
    supply.train(1, 10)
    assert supply.held_batches(1) == 2
    supply.check()
    supply.train(1, 8)
    assert supply.merge(1) == (Merged(0, 0, Span(0, 10)), Merged(1, 1, Span(0, 8)))


def test_untrained_samples_are_free_again_and_leases_stay() -> None:
    supply = Supply(SETTINGS, merge_single_tail=False)
    supply.lease(0, 2)
    supply.train(0, 4)
    supply.untrain(0)
    assert supply.lease(1, 9) == (Grant(0, (Span(0, 4), Span(8, 2))),)
    assert supply.held_batches(0) == 1


@pytest.mark.parametrize("samples", [9, -1])
def test_more_than_was_leased_is_refused(samples: int) -> None:
    supply = Supply(SETTINGS, merge_single_tail=False)
    supply.lease(0, 2)
    with pytest.raises(CoverageError, match=rf"epoch 0: rank 0 trained {samples} samples, but has leased 8"):
        supply.train(0, samples)


def test_splits_of_a_pass_are_whole_batches_of_one_order() -> None:
    supply = Supply(replace(SETTINGS, num_epochs=2, epoch_splits=2), merge_single_tail=False)
    assert (supply.epochs, supply.epoch_batches) == (4, 1)
    seen = []
    while not supply.is_exhausted:
        (grant,) = supply.lease(0, 9)
        seen.append(grant)
        supply.train(0, grant.samples)
        supply.merge(0)
        supply.close_epochs()
    assert seen == [Grant(p, (Span(start, count),)) for p in (0, 1) for start, count in ((0, 4), (4, 6))]


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_splits_are_disjoint_and_jointly_complete(size: int, batch: int, splits: int, merge_single_tail: bool) -> None:
    settings = replace(SETTINGS, dataset_size=size, batch_size=batch, num_epochs=1, epoch_splits=splits)
    spans = [Supply(settings, merge_single_tail).span(epoch) for epoch in range(splits)]
    assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert (spans[0].start, spans[-1].stop) == (0, size)


def test_check_names_leases_that_contradict_the_pools() -> None:
    supply = Supply(SETTINGS, merge_single_tail=False)
    supply.lease(0, 1)
    supply._leases[0][0].samples = 3
    with pytest.raises(InvariantViolation, match="rank 0 has leases of 3 samples, and 4 in the pools"):
        supply.check()


def test_run_goes_on_where_a_position_says() -> None:
    supply = Supply(SETTINGS, False, Position(epoch=1, covered=(Covered(1, (Span(4, 4),)),)))
    assert (supply.epoch, supply.merged_samples, supply.epoch_merged, supply.remaining_batches) == (1, 14, 4, 2)
    assert supply.covered == (Covered(1, (Span(4, 4),)),)
    finish(supply)
    assert supply.close_epochs() == (1,)
    assert supply.is_exhausted


@pytest.mark.parametrize("epoch", [2, 7])
def test_run_that_is_complete_has_nothing_left(epoch: int) -> None:
    supply = Supply(SETTINGS, False, Position(epoch=epoch))
    assert (supply.is_exhausted, supply.merged_samples, supply.lease(0, 1), supply.covered) == (True, 20, (), ())


@pytest.mark.parametrize("epoch", [0, 2])
def test_epoch_that_is_complete_or_not_there_is_not_covered_in_part(epoch: int) -> None:
    with pytest.raises(CoverageError, match=f"epoch {epoch} is covered in part, but 1 of 2 are done"):
        Supply(SETTINGS, False, Position(epoch=1, covered=(Covered(epoch, (Span(0, 4),)),)))
