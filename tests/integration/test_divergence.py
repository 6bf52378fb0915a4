"""One rank's learning rate is suddenly twenty times as large: guards and meta-controller shorten the window."""

import pytest

from benchmarks.divergence import cases, ddp_is_finite, measure

pytestmark = pytest.mark.timeout(300)

IN_CI = ("nccl_cadence", "trend")


@pytest.mark.parametrize(
    ("mode", "guard"), [pytest.param(*case, marks=() if case == IN_CI else pytest.mark.long) for case in cases()]
)
def test_injected_divergence_is_answered(mode: str, guard: str) -> None:
    figures = measure(mode, guard)

    assert figures.is_good, figures


@pytest.mark.long
def test_distributed_data_parallel_survives_the_same_injection() -> None:
    assert ddp_is_finite()
