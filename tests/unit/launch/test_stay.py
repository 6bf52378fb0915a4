"""How a managed daemon waits, and when the daemon that serves a run counts as standing still."""

import pytest

from flodl.launch.stay import FIRST_PAUSE_S, LONGEST_PAUSE_S, STARTUP_S, Pulse, pause_s


def test_pauses_double_up_to_a_limit() -> None:
    assert [pause_s(failures, luck=0.0) for failures in (1, 2, 3, 4, 5, 6, 10_000)] == [0.5, 1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize("failures", [1, 6])
def test_luck_takes_up_to_half_of_a_pause_off(failures: int) -> None:
    full = FIRST_PAUSE_S if failures == 1 else LONGEST_PAUSE_S
    assert (pause_s(failures, 1.0), pause_s(failures, 0.5)) == (full / 2, full * 3 / 4)


def test_daemon_has_time_until_its_first_beat() -> None:
    pulse = Pulse(100.0, heartbeat_s=1.0, watchdog_s=30.0)
    assert pulse.is_moving(100.0 + STARTUP_S - 0.1)
    assert not pulse.is_moving(100.0 + STARTUP_S)
    assert (pulse.ranks, pulse.has_served) == (None, False)


@pytest.mark.parametrize(("heartbeat_s", "watchdog_s", "limit_s"), [(1.0, 30.0, 15.0), (9.0, 30.0, 27.0)])
def test_daemon_that_beats_no_more_stands_still(heartbeat_s: float, watchdog_s: float, limit_s: float) -> None:
    pulse = Pulse(100.0, heartbeat_s, watchdog_s)
    pulse.beat(2, 200.0)
    assert pulse.is_moving(200.0 + limit_s - 0.1)
    assert not pulse.is_moving(200.0 + limit_s)
    pulse.beat(2, 300.0)
    assert pulse.is_moving(300.0)


def test_pulse_says_when_the_number_of_ranks_changes_and_whether_any_ran() -> None:
    pulse = Pulse(0.0, 1.0, 30.0)
    assert [pulse.beat(ranks, 1.0) for ranks in (0, 0)] == [True, False]
    assert not pulse.has_served
    assert [pulse.beat(ranks, 1.0) for ranks in (2, 2, 0)] == [True, False, True]
    assert (pulse.ranks, pulse.has_served) == (0, True)
