"""benchmarks/quality.py: what is compared, and when a mode is good."""

import math

import pytest

from benchmarks.quality import Training, compare


def trainings(task: str, held_out: list[float], faults: tuple[str, ...] = ()) -> list[Training]:
    return [Training(task, "nccl_sync", seed, value, 10, 100, 1.0, faults) for seed, value in enumerate(held_out)]


def test_difference_is_taken_seed_by_seed() -> None:
    solo, mode = trainings("transformer", [2.0, 3.0, 4.0]), trainings("transformer", [2.1, 3.1, 4.4])

    row = compare("transformer", "nccl_sync", mode, solo)

    assert row.worse_by == pytest.approx(0.2)
    assert row.standard_error == pytest.approx(math.sqrt(0.03) / math.sqrt(3))
    assert row.is_good


@pytest.mark.parametrize(("task", "is_good"), [("digits", True), ("transformer", False)])
def test_more_is_better_for_accuracy_and_worse_for_bits(task: str, is_good: bool) -> None:
    solo, mode = trainings(task, [0.5, 0.5, 0.6]), trainings(task, [0.9, 0.9, 1.0])

    assert compare(task, "nccl_sync", mode, solo).is_good is is_good


def test_run_that_merged_a_sample_twice_is_not_good_however_well_it_does() -> None:
    solo, mode = (
        trainings("digits", [0.5, 0.6]),
        trainings("digits", [0.9, 0.9], faults=("epoch 0: more than once [7]",)),
    )

    assert not compare("digits", "nccl_sync", mode, solo).is_good
