"""Deadlines in the time in which the process ran."""

import pytest

from flodl.core.running_time import RunningTime


def test_time_in_which_the_process_stood_still_is_left_out() -> None:
    time = RunningTime()
    time.stand_still(4.0)
    time.stand_still(1.0)
    assert time.running_s(107.0) == 102.0
    assert time.earliest_s([110.0, None, 104.0]) == 109.0


def test_without_a_deadline_nothing_is_due() -> None:
    assert RunningTime().earliest_s([]) is None
    assert RunningTime().earliest_s([None]) is None


@pytest.mark.parametrize("gap_s", [0.1, 0.3, 1e-9, 12345.678])
def test_deadline_is_reached_at_the_time_that_is_said_for_it(gap_s: float) -> None:
    time = RunningTime()
    time.stand_still(gap_s)
    for tenths in range(1, 1000):
        at_s = time.earliest_s([tenths / 10])
        assert at_s is not None
        assert time.running_s(at_s) >= tenths / 10
