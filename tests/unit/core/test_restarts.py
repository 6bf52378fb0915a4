"""Which failure stops a start, and whether the ranks start again."""

import pytest

from flodl.core.actions import Failure
from flodl.core.ending import KIND_EXIT, KIND_HOST, KIND_SIGNAL, Ending
from flodl.core.restarts import MAX_PORT_TRIES, SIGABRT, Restarts

EXIT = Failure(KIND_EXIT, "a", 0, "exited with code 1", "", 1, 0)
KILLED = Failure(KIND_SIGNAL, "b", 1, "ended by signal 9", "", 137, 9)
ABORTED = Failure(KIND_SIGNAL, "b", 1, "ended by signal 6", "", 134, SIGABRT)
LOST = Failure(KIND_HOST, "b", -1, "silent for 30.0 s", "", 5, 0)


@pytest.mark.parametrize(
    ("first", "later", "kept"),
    [
        (EXIT, KILLED, KILLED),
        (EXIT, ABORTED, EXIT),
        (EXIT, LOST, EXIT),
        (LOST, KILLED, LOST),
        (ABORTED, KILLED, ABORTED),
    ],
)
def test_first_failure_is_the_cause_unless_a_death_explains_it(first: Failure, later: Failure, kept: Failure) -> None:
    restarts = Restarts(Ending(), 0)
    restarts.take(first)
    restarts.take(later)
    assert restarts.failure is kept


def test_restarts_are_counted_told_and_used_up() -> None:
    ending = Ending()
    restarts = Restarts(ending, 1)
    restarts.take(EXIT)
    note = restarts.judge(EXIT, 29000, was_taken=False)
    assert note is not None
    assert (note.event, note.detail) == ("restarting", "restart 1 of 1, after rank 0: exited with code 1")
    assert (restarts.failure, restarts.are_left, ending.losses) == (None, False, [EXIT])

    restarts.take(LOST)
    restarts.take(EXIT)
    assert restarts.judge(LOST, 29000, was_taken=False) is None
    restarts.give_up(LOST)
    assert (ending.message, ending.exit_code) == ("host b: silent for 30.0 s, after 1 restart", 5)
    assert ending.collateral == 1


def test_taken_ports_cost_no_restart_until_they_are_no_accident() -> None:
    ending = Ending()
    restarts = Restarts(ending, 1)
    for port in range(MAX_PORT_TRIES):
        note = restarts.judge(EXIT, port, was_taken=True)
        assert note is not None
        assert (note.event, note.fields) == ("port_taken", {"port": port})
    assert (restarts.count, ending.losses) == (0, [])
    for event in ("restarting", "port_taken"):
        again = restarts.judge(EXIT, 9, was_taken=True)
        assert again is not None
        assert again.event == event


def test_no_restart_follows_where_a_host_will_not_come_back() -> None:
    restarts = Restarts(Ending(), 5)
    assert restarts.are_left
    restarts.are_forbidden = True
    assert not restarts.are_left
    assert restarts.judge(EXIT, 29000, was_taken=False) is None
