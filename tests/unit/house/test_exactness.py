"""benchmarks/exactness.py: what is measured of an average's error."""

import pytest
import torch

from benchmarks.exactness import Figures, average, measure, row


def test_average_is_weighted_by_samples() -> None:
    result = average([torch.tensor([1.0, 8.0]), torch.tensor([5.0, 0.0])], [3, 1])
    assert result.tolist() == [2.0, 6.0]


@pytest.mark.parametrize("ranks", [2, 5])
def test_errors_stay_below_what_is_proven_and_repeat(ranks: int) -> None:
    figures = measure(ranks, elements=2000, repeats=2)
    assert figures.elements == 4000
    assert 0 < figures.worst_of_value <= figures.worst_of_contribution
    assert figures.share_of_contribution <= figures.share_of_value <= 1
    assert figures.is_as_proven
    assert measure(ranks, elements=2000, repeats=2) == figures


def test_error_that_reaches_the_bound_is_not_as_proven() -> None:
    assert not Figures(2, 1, 0.0, 3.0, 0.0, 3.0).is_as_proven


def test_row_has_shares_and_worst_errors() -> None:
    assert row(Figures(2, 1, 0.99465, 1.712, 0.936, 2.97)) == "| 2 | 99.4650% | 1.71 | 93.60% | 2.97 |"
