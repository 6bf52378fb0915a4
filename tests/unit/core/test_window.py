"""Who has come, and whether that is enough."""

from dataclasses import replace

import pytest

from flodl.core.window import Absence, JoinSettings, JoinWindow, StartRule, Verdict
from flodl.messages import Device, HostHello

OPENED_S = 1000.0
BY_HAND = "when fdl start says so"
FEWER = "it fails with fewer after 600 s"
SETTINGS = JoinSettings(("a", "b"), join_timeout_s=300.0, max_join_timeout_s=600.0)


def hello(host: str, devices: int = 1) -> HostHello:
    offered = tuple(Device("cpu", index) for index in range(devices))
    return HostHello(host, 1, host, "10.0.0.1", offered, 4, "3.11", "2.13", "0.1")


def a_window(**settings: object) -> JoinWindow:
    return JoinWindow(replace(SETTINGS, **settings), OPENED_S)  # type: ignore[arg-type]


def test_run_starts_when_the_whole_roster_has_joined() -> None:
    window = a_window()
    assert window.verdict(OPENED_S) is Verdict.WAIT
    window.join(hello("b", 2))
    assert window.verdict(OPENED_S) is Verdict.WAIT
    window.join(hello("a"))
    assert window.verdict(OPENED_S) is Verdict.START
    assert list(window.joined) == ["a", "b"]
    assert window.devices() == [("a", Device("cpu", 0)), ("b", Device("cpu", 0)), ("b", Device("cpu", 1))]


def test_ranks_of_the_cluster_file_order_the_devices() -> None:
    window = a_window(ranks={"a": (1,), "b": (0, 2)})
    window.join(hello("a"))
    window.join(hello("b", 2))
    assert window.devices() == [("b", Device("cpu", 0)), ("a", Device("cpu", 0)), ("b", Device("cpu", 1))]


def test_ranks_that_do_not_cover_the_devices_order_nothing() -> None:
    window = a_window(ranks={"a": (1,)})
    window.join(hello("a"))
    window.join(hello("b"))
    assert window.devices() == [("a", Device("cpu", 0)), ("b", Device("cpu", 0))]


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        (hello("c"), "host c is not in this run's roster (a, b), and join.elastic is false"),
        (hello("a"), "host a has already joined this run, from 10.0.0.1; another machine needs another name"),
        (hello("b", 0), "host b offers no device"),
        (hello("b", 2), "host b offers 2 devices for ranks [0]"),
        (hello("b", 1), ""),
    ],
)
def test_host_that_may_not_join_is_told_why(who: HostHello, reason: str) -> None:
    window = a_window(ranks={"b": (0,)}, is_elastic=False)
    window.join(hello("a"))
    assert (window.stranger(who.host) or window.misfit(who, is_waiting=True)) == reason


def test_ranks_have_their_numbers_only_before_the_start() -> None:
    assert a_window(ranks={"b": (0,)}).misfit(hello("b", 2), is_waiting=False) == ""


def test_target_of_ranks_starts_before_the_roster_is_complete() -> None:
    window = a_window(target_ranks=2)
    window.join(hello("a"))
    assert window.verdict(OPENED_S) is Verdict.WAIT
    window.leave("a", "reset")
    window.join(hello("b", 2))
    assert window.verdict(OPENED_S) is Verdict.START


def test_quorum_starts_when_the_join_timeout_has_passed() -> None:
    window = a_window(min_rank_start=2)
    window.join(hello("b", 2))
    assert window.next_deadline_s(OPENED_S) == OPENED_S + 300
    assert window.verdict(OPENED_S + 299.9) is Verdict.WAIT
    assert window.verdict(OPENED_S + 300) is Verdict.START


@pytest.mark.parametrize("least", [0, 2])
def test_too_few_fail_at_the_hard_limit(least: int) -> None:
    window = a_window(min_rank_start=least)
    window.join(hello("a"))
    assert window.verdict(OPENED_S + 300) is Verdict.WAIT
    assert window.next_deadline_s(OPENED_S + 300) == OPENED_S + 600
    assert window.verdict(OPENED_S + 599.9) is Verdict.WAIT
    assert window.verdict(OPENED_S + 600) is Verdict.FAIL


def test_host_that_failed_is_not_waited_for() -> None:
    absence = Absence("b", "auth", "permission denied", "add your key")
    for least, verdict in ((0, Verdict.FAIL), (1, Verdict.START), (2, Verdict.FAIL)):
        window = a_window(min_rank_start=least)
        window.fail(absence)
        assert window.verdict(OPENED_S) is Verdict.WAIT
        window.join(hello("a"))
        assert window.verdict(OPENED_S) is verdict
        assert window.absences() == (absence,)


def test_failure_of_a_host_that_has_joined_means_nothing() -> None:
    window = a_window()
    window.join(hello("a"))
    window.fail(Absence("a", "start", "the ssh session ended", ""))
    window.join(hello("b"))
    assert window.verdict(OPENED_S) is Verdict.START
    assert window.absences() == ()


def test_host_that_left_may_come_back() -> None:
    window = a_window()
    window.join(hello("a"))
    window.join(hello("b"))
    window.leave("b", "connection lost")
    assert window.absences() == (Absence("b", "join", "connection lost", "see the host's daemon log"),)
    assert window.verdict(OPENED_S) is Verdict.FAIL
    window.join(hello("b"))
    assert window.verdict(OPENED_S) is Verdict.START


def test_leaving_without_having_joined_is_an_absence() -> None:
    window = a_window()
    window.leave("a", "connection lost")
    assert [absence.reason for absence in window.absences()] == ["connection lost", "has not joined"]


def test_refused_host_of_the_roster_is_named_as_absent() -> None:
    window = a_window()
    window.join(hello("a"))
    for host in ("a", "b", "c"):
        window.refuse(host, "no device")
    assert [(absence.host, absence.reason) for absence in window.absences()] == [("b", "refused: no device")]


def test_absences_name_who_never_came_in_roster_order() -> None:
    window = a_window(roster=("x", "a", "b"))
    window.join(hello("a"))
    window.fail(Absence("b", "resolve", "no such host", ""))
    assert [(absence.host, absence.stage, absence.reason) for absence in window.absences()] == [
        ("x", "join", "has not joined"), ("b", "resolve", "no such host"),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------------- walk-ins
def test_host_of_no_roster_counts_where_the_run_is_elastic() -> None:
    window = a_window(roster=("a",), min_rank_start=3)
    assert window.stranger("x") == ""
    window.join(hello("x", 2))
    assert window.verdict(OPENED_S) is Verdict.WAIT
    window.join(hello("a"))
    assert window.verdict(OPENED_S) is Verdict.START
    assert [host for host, _ in window.devices()] == ["a", "x", "x"], "walk-ins come last"
    assert (window.is_guest("x"), window.is_guest("a")) == (True, False)


def test_roster_that_is_empty_waits_for_walk_ins() -> None:
    window = a_window(roster=(), min_rank_start=2)
    assert window.verdict(OPENED_S) is Verdict.WAIT
    window.join(hello("x"))
    assert (window.verdict(OPENED_S), window.absences()) == (Verdict.WAIT, ())
    window.leave("x", "connection lost")
    assert window.absences() == ()
    window.join(hello("y", 2))
    assert window.verdict(OPENED_S) is Verdict.START


def test_walk_ins_come_behind_the_ranks_of_the_cluster_file() -> None:
    window = a_window(ranks={"a": (1,), "b": (0,)})
    for host in ("x", "a", "b"):
        window.join(hello(host))
    assert [host for host, _ in window.devices()] == ["b", "a", "x"]
    assert window.tally() == "2 of 2 hosts are there, and 1 more"


def test_whole_roster_waits_for_the_target_as_long_as_somebody_may_come() -> None:
    for is_elastic, verdict in ((True, Verdict.WAIT), (False, Verdict.START)):
        window = a_window(roster=("a",), min_rank_start=1, target_ranks=2, is_elastic=is_elastic)
        window.join(hello("a"))
        assert window.verdict(OPENED_S) is verdict
        assert window.verdict(OPENED_S + 300) is Verdict.START


def test_whole_roster_of_a_closed_world_that_is_too_small_fails_at_once() -> None:
    window = a_window(roster=("a",), min_rank_start=2, is_elastic=False)
    window.join(hello("a"))
    assert window.verdict(OPENED_S) is Verdict.FAIL


# ------------------------------------------------------------------------------------------------ who closes the window
def test_manual_start_is_held_until_a_person_says_so() -> None:
    window = a_window(start=StartRule.MANUAL, min_rank_start=1, target_ranks=1)
    assert window.next_deadline_s(OPENED_S) == OPENED_S + 600
    window.join(hello("a"))
    assert window.verdict(OPENED_S + 9999) is Verdict.WAIT
    assert window.next_deadline_s(OPENED_S + 600) is None
    assert window.fire_refusal() == ""
    window.fire()
    assert window.verdict(OPENED_S + 9999) is Verdict.START


def test_manual_start_is_not_given_up_for_a_host_that_fails_but_at_the_hard_limit() -> None:
    window = a_window(start=StartRule.MANUAL)
    for host in ("a", "b"):
        window.fail(Absence(host, "auth", "permission denied", ""))
    assert window.verdict(OPENED_S + 599) is Verdict.WAIT
    assert window.verdict(OPENED_S + 600) is Verdict.FAIL


def test_hybrid_start_takes_whichever_comes_first() -> None:
    settings = {"start": StartRule.HYBRID, "min_rank_start": 1}
    window = a_window(**settings)
    window.join(hello("a"))
    assert window.verdict(OPENED_S) is Verdict.WAIT
    assert window.verdict(OPENED_S + 300) is Verdict.START
    window.fire()
    assert window.verdict(OPENED_S) is Verdict.START
    whole = a_window(**settings)
    whole.join(hello("a"))
    whole.join(hello("b"))
    assert whole.verdict(OPENED_S) is Verdict.START


def test_person_who_may_not_start_is_told_why_and_who_is_missing() -> None:
    assert a_window().fire_refusal() == "it is not held: join.start is auto, and it starts by itself"
    window = a_window(start=StartRule.MANUAL)
    window.fail(Absence("b", "auth", "permission denied", "add your key"))
    assert window.fire_refusal() == (
        "too few ranks: 0 of 2 hosts are there; missing: a (has not joined), b (auth: permission denied)"
    )
    empty = a_window(roster=(), start=StartRule.MANUAL, min_rank_start=2)
    empty.join(hello("x"))
    assert empty.fire_refusal() == "too few ranks: 1 of 2 ranks are there"


@pytest.mark.parametrize(
    ("settings", "terms"),
    [
        ({}, ""),
        ({"roster": (), "min_rank_start": 2}, "it starts with 2 ranks; it fails with fewer after 600 s"),
        ({"target_ranks": 3}, "it starts with 3 ranks; it fails with fewer after 600 s"),
        (
            {"min_rank_start": 2},
            "it starts with all hosts or with 2 ranks after 300 s; it fails with fewer after 600 s",
        ),
        (
            {"start": StartRule.HYBRID, "min_rank_start": 2, "target_ranks": 3},
            f"it starts with 3 ranks or with 2 ranks after 300 s or {BY_HAND}, with 2 ranks at least; {FEWER}",
        ),
        (
            {"start": StartRule.MANUAL},
            f"it starts {BY_HAND}, with all hosts at least; {FEWER}",
        ),
    ],
)
def test_terms_are_told_where_somebody_has_set_them(settings: dict[str, object], terms: str) -> None:
    assert a_window(**settings).terms() == terms


# ------------------------------------------------------------------------------------------------------ managed hosts
def test_managed_host_is_waited_for_whatever_became_of_it() -> None:
    window = a_window(managed=frozenset("b"))
    window.join(hello("a"))
    assert window.absences()[0].reason == "is managed, and has not dialled in"
    window.refuse("b", "no device")
    assert window.verdict(OPENED_S + 599) is Verdict.WAIT
    assert window.absences()[0].reason == "refused: no device"
    window.join(hello("b"))
    assert window.verdict(OPENED_S) is Verdict.START
    window.leave("b", "reset")
    assert window.verdict(OPENED_S + 600) is Verdict.FAIL
