"""What is said of a host that joins, from the run's snapshots."""

from typing import Any

import pytest

from flodl.launch.presence import Presence

OTHER = {"rank": 0, "host": "boss", "state": "live", "reason": ""}


def state(*ranks: tuple[int, str, str], phase: str = "training", host: str = "alive", **more: Any) -> dict[str, Any]:
    mine = [{"rank": rank, "host": "me", "state": each, "reason": reason} for rank, each, reason in ranks]
    return {"phase": phase, "ranks": [OTHER, *mine], "hosts": [{"host": "me", "state": host}], **more}


@pytest.fixture
def presence() -> Presence:
    made = Presence("me", "run-1")
    assert made.look(state((1, "dead", "of an earlier stay"))) == []
    return made


def test_stay_is_told_once_from_the_arrival_to_the_run_s_end(presence: Presence) -> None:
    assert presence.look(state()) == []
    assert presence.look(state((2, "spawned", ""), (3, "spawned", ""))) == [
        "joined run run-1 as host me: starting rank 2, 3"
    ]
    assert presence.look(state((2, "ready", ""), (3, "spawned", ""))) == [
        "rank 2 is ready; it takes part from the next commit on"
    ]
    assert not presence.took_part
    assert presence.look(state((2, "live", ""), (3, "ready", "")))[0] == "rank 2 takes part"
    assert presence.look(state((2, "suspect", ""), (3, "live", ""))) == ["rank 3 takes part"]
    assert presence.look(state((2, "live", ""), (3, "live", ""))) == []
    assert presence.look(state((2, "finished", ""), (3, "dead", "ended"), phase="ending")) == []
    assert (presence.took_part, presence.refusals, presence.has_failed) == (True, [], False)
    assert presence.farewell() == "host me has left with the run"


def test_host_that_comes_before_the_start_is_told_what_the_run_waits_for(presence: Presence) -> None:
    waiting = {"ranks": 1, "least": 2, "fails_in_s": 60.0}
    assert presence.look(state(phase="waiting", join=waiting)) == [
        "host me is there; run run-1 is waiting: 1 of 2 ranks are there, it fails in 1m00s with fewer than 2"
    ]
    assert presence.look(state(phase="waiting", join=waiting)) == []
    assert presence.look(state((1, "spawned", ""), phase="staging")) == []
    assert presence.look(state((2, "ready", ""), phase="staging"))[-1] == "rank 2 is ready"


def test_start_that_fails_is_the_run_s_failure_and_no_refusal(presence: Presence) -> None:
    presence.look(state((2, "ready", ""), phase="staging"))
    ended = {"status": "failed"}
    assert presence.look(state((2, "dead", "stopped with the run"), phase="failed", outcome=ended, message="why")) == []
    assert (presence.refusals, presence.has_failed) == ([], True)
    assert presence.farewell() == "host me has left: run run-1 failed: why"


def test_rank_that_is_lost_is_told(presence: Presence) -> None:
    presence.look(state((2, "live", "")))
    assert presence.look(state((2, "dead", "ended by signal 9"))) == ["rank 2 is lost: ended by signal 9"]
    assert presence.refusals == []


def test_host_whose_ranks_are_all_lost_says_why_it_has_left(presence: Presence) -> None:
    presence.look(state((2, "live", ""), (3, "live", "")))
    presence.look(state((2, "dead", "ended by signal 9"), (3, "live", "")))
    assert presence.lost == ""
    presence.look(state((2, "dead", "ended by signal 9"), (3, "dead", "ValueError: boom")))
    assert presence.lost == "rank 2: ended by signal 9; rank 3: ValueError: boom"
    presence.look(state(phase="ended", outcome={"status": "completed"}))
    assert presence.lost == ""


def test_rank_that_is_sent_away_is_told_with_the_reason(presence: Presence) -> None:
    presence.look(state((2, "spawned", "")))
    assert presence.look(state((2, "dead", "other model"))) == ["rank 2 does not take part: other model"]
    assert presence.look(state((2, "dead", "other model"))) == []
    assert (presence.refusals, presence.took_part) == (["rank 2: other model"], False)


@pytest.mark.parametrize(
    "leaving",
    [
        state((2, "live", ""), host="draining"),
        state((2, "finished", "")),
        state((2, "dead", "its host is drained")),
    ],
)
def test_drained_host_leaves_in_order(presence: Presence, leaving: dict[str, Any]) -> None:
    presence.look(state((2, "ready", "")))
    presence.look(leaving)
    assert presence.refusals == []
    assert presence.farewell() == "host me has left in order; the run goes on"


def test_drain_is_announced_once(presence: Presence) -> None:
    presence.look(state((2, "live", "")))
    leaving = state((2, "live", ""), host="draining")
    assert presence.look(leaving) == ["host me leaves at the next commit, without loss"]
    assert presence.look(leaving) == []


@pytest.mark.parametrize(
    "last",
    [
        {"ending": "failed", "message": "rank 0 failed", "outcome": None},
        {"ending": None, "message": "rank 0 failed", "outcome": {"status": "failed"}},
    ],
)
def test_run_that_failed_is_told_with_its_reason(presence: Presence, last: dict[str, Any]) -> None:
    presence.look(state((2, "live", "")))
    presence.look(state((2, "finished", ""), phase="ending", **last))
    assert presence.has_failed
    assert presence.farewell() == "host me has left: run run-1 failed: rank 0 failed"
