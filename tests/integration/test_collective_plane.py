"""The collective plane with real processes and real Gloo; the rendezvous table is served by the test."""

import signal
from collections.abc import Iterator

import pytest

from flodl.averaging.store_table import group_prefix
from tests.integration.gloo_cohort import LAYOUT, Cohort


@pytest.fixture(scope="module")
def running_cohort() -> Iterator[Cohort]:
    """Three peers that outlive a test: starting them takes longer than most tests."""
    cohort = Cohort(3)
    try:
        yield cohort
    finally:
        codes = cohort.close()
    assert codes == [0, 0, 0]


@pytest.fixture
def cohort(running_cohort: Cohort) -> Cohort:
    running_cohort.begin()
    return running_cohort


@pytest.fixture
def fresh_cohort() -> Iterator[Cohort]:
    cohort = Cohort(3)
    try:
        yield cohort
    finally:
        cohort.close()


def test_three_ranks_meet_at_the_table_hold_the_same_sum_and_end_cleanly(fresh_cohort: Cohort) -> None:
    cohort = fresh_cohort
    assert cohort.form([0, 1, 2], incarnation=1) == ["", "", ""]

    first = cohort.reduce([0, 1, 2])
    second = cohort.reduce([0, 1, 2])

    assert [sums[:3] for sums in first] == [([6.0], [6.0], [200])] * 3
    assert len({sums[3] for sums in first + second}) == 1
    assert cohort.close() == [0, 0, 0]


def test_without_raw_each_rank_keeps_its_own_bytes(cohort: Cohort) -> None:
    cohort.form([0, 1, 2], incarnation=1)

    assert [sums[2] for sums in cohort.reduce([0, 1, 2], include_raw=False)] == [[0]] * 3


def test_a_rank_alone_needs_no_group_and_holds_its_own_contribution(cohort: Cohort) -> None:
    assert cohort.form([1], incarnation=1) == [""]

    assert [sums[:3] for sums in cohort.reduce([1])] == [([2.0], [2.0], [0])]


def test_survivors_of_a_peer_killed_inside_a_reduce_form_again(fresh_cohort: Cohort) -> None:
    cohort = fresh_cohort
    cohort.form([0, 1, 2], incarnation=1)
    cohort.tell([0, 1], "reduce", LAYOUT, 1, True)
    cohort.expect([0, 1], "reducing")
    assert not cohort.has_report(0, "reduced")

    cohort.processes[2].kill()

    assert all(error for _, error in cohort.expect([0, 1], "reduced"))
    cohort.tell([0, 1], "abandon")
    cohort.expect([0, 1], "abandoned")
    parked = cohort.ask([0, 1], "parked")
    assert cohort.form([0, 1], incarnation=2) == ["", ""]
    assert [sums[:3] for sums in cohort.reduce([0, 1])] == [([3.0], [3.0], [200])] * 2
    assert cohort.ask([0, 1], "parked") == parked
    assert [(size, hard) for _, size, hard in parked] == [(LAYOUT.total_bytes, True)] * 2
    assert cohort.close() == [0, 0, -signal.SIGKILL]


def test_a_peer_that_wakes_up_after_it_was_given_up_touches_parked_buffers_only(cohort: Cohort) -> None:
    cohort.form([0, 1, 2], incarnation=1)
    cohort.processes[2].send_signal(signal.SIGSTOP)
    cohort.tell([2], "reduce", LAYOUT, 100, True)
    cohort.tell([0, 1], "reduce", LAYOUT, 1, True)
    cohort.expect([0, 1], "reducing")

    cohort.tell([0, 1], "abandon")
    cohort.expect([0, 1], "abandoned")
    assert cohort.form([0, 1], incarnation=2) == ["", ""]
    before = cohort.reduce([0, 1])
    cohort.processes[2].send_signal(signal.SIGCONT)
    cohort.expect([2], "reduced")

    assert [sums for (sums,) in cohort.ask([0, 1], "sums", LAYOUT)] == before
    assert cohort.reduce([0, 1]) == before
    assert not cohort.has_report(0, "reduced")
    assert [hard for _, _, hard in cohort.ask([0, 1], "parked")] == [True, True]


def test_clearing_the_prefix_ends_a_formation_whose_peer_never_came(cohort: Cohort) -> None:
    cohort.tell([0, 1], "form", 1, 0, [0, 1, 2], 20.0)
    cohort._pump(lambda: len(cohort.table._waiters) == 2, "two waiting ranks")

    cohort.deliver(cohort.table.clear_prefix(group_prefix(1, 0)))

    assert all("rendezvous" in error for _, error in cohort.expect([0, 1], "formed"))
    assert cohort.form([0, 1], incarnation=1, attempt=1) == ["", ""]
    assert [sums[0] for sums in cohort.reduce([0, 1])] == [[3.0]] * 2


def test_a_new_attempt_silences_the_one_before(cohort: Cohort) -> None:
    cohort.tell([0, 1], "form", 1, 0, [0, 1, 2], 20.0)
    cohort._pump(lambda: len(cohort.table._waiters) == 2, "two waiting ranks")

    cohort.tell([0, 1], "form", 1, 1, [0, 1], 20.0)

    assert cohort.expect([0, 1], "formed") == [((1, 1), "")] * 2
    cohort.deliver(cohort.table.clear_prefix(group_prefix(1, 0)))
    assert [sums[0] for sums in cohort.reduce([0, 1])] == [[3.0]] * 2
    assert not cohort.has_report(0, "formed")
