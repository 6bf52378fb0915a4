"""state.json, from the first moment to the last."""

import json

from flodl.core.actions import Record
from flodl.core.events import DrainAsked, HeadExited, HostDropped, HostFailed
from flodl.core.view import SCHEMA, snapshot
from flodl.core.window import StartRule
from flodl.messages import (
    Beat,
    HostStopped,
    Mode,
    RankBeat,
    RankExited,
    RankFinished,
    StateSent,
    StopRanks,
    WindowDone,
)
from tests.unit.core.cohort import Cohort, hello
from tests.unit.core.test_plain import Plain


def test_run_that_waits_for_hosts_has_a_view() -> None:
    cohort = Cohort()
    cohort.post(HostFailed("b", "auth", "permission denied", "add your key"))
    view = snapshot(cohort.core, 1.0)
    assert (view["schema"], view["phase"], view["mode"], view["model_bytes"]) == (SCHEMA, "waiting", None, None)
    assert view["absent"] == [
        {"host": "a", "stage": "join", "reason": "has not joined"},
        {"host": "b", "stage": "auth", "reason": "permission denied"},
    ]
    assert (view["hosts"], view["ranks"]) == ([], [])
    assert "version" not in view


def test_open_window_is_seen_with_what_it_waits_for_and_how_long() -> None:
    cohort = Cohort(min_rank_start=2, target_ranks=4)
    cohort.say(hello("a"), "a")
    view = snapshot(cohort.core, 100.0)
    assert view["join"] == {
        "start": "auto", "is_held": False, "has_least": False, "ranks": 1, "least": 2, "target": 4,
        "closes_in_s": 200.0, "fails_in_s": 500.0,
    }  # fmt: skip
    assert view["waits_for"] == ["host b"]
    held = Cohort(start=StartRule.MANUAL).join()
    assert snapshot(held.core, 700.0)["join"] == {
        "start": "manual", "is_held": True, "has_least": True, "ranks": 3, "least": None, "target": None,
        "closes_in_s": None, "fails_in_s": 0.0,
    }  # fmt: skip


def test_run_whose_ranks_start_is_seen_to_wait_for_them_then_for_the_head() -> None:
    cohort = Cohort().join()
    cohort.say(cohort.ready(0))
    assert (snapshot(cohort.core, 1.0)["join"], snapshot(cohort.core, 1.0)["waits_for"]) == (
        None,
        ["rank 1 on b", "rank 2 on b"],
    )
    for rank in (1, 2):
        cohort.say(cohort.ready(rank))
    assert snapshot(cohort.core, 1.0)["waits_for"] == ["the head"]


def test_lowest_loss_and_last_evaluation_are_seen_with_their_epochs() -> None:
    cohort = Cohort(eval_samples=2, num_epochs=2).get_ready()
    view = snapshot(cohort.core, 9.0)
    assert view["lowest_loss"]["value"] == min(
        action.fields["loss"] for action in cohort.actions if isinstance(action, Record) and action.event == "epoch"
    )
    assert view["last_eval"]["epoch"] == 1


def test_training_is_seen_with_hosts_ranks_and_cadence() -> None:
    cohort = Cohort(Mode.CPU_CADENCE, dataset_size=600).train_until(WindowDone)
    cohort.say(Beat("b", (RankBeat(1, True, 0, 7, 4096, 77), RankBeat(2, True, 0, 7, 0))), "b")
    view = snapshot(cohort.core, 3.0)
    json.dumps(view)
    assert (view["phase"], view["mode"], view["backend"], view["num_epochs"]) == ("training", "cpu_cadence", "gloo", 2)
    assert (view["version"], view["epoch"], view["samples_merged"], view["callback_rank"]) == (0, 0, 0, 0)
    assert view["cadence"] == {
        "phase": "probe", "anchor": 10, "counts": {"0": 10, "1": 10, "2": 10},
        "divergence": None, "verdict": "stable", "settled": False,
    }  # fmt: skip
    assert view["hosts"][1] == {
        "host": "b", "state": "alive", "ranks": [1, 2], "age_s": 2.0, "tunnelled": False,
        "address": "10.0.0.1", "python": "3.11", "torch": "2.13", "cores": 4,
    }  # fmt: skip
    assert view["ranks"][1] == {
        "rank": 1, "host": "b", "device": "cpu:0", "device_name": "", "state": "live", "reason": "",
        "steps": 7, "pid": 77, "rss_bytes": 4096, "rate": None, "share": None, "loss": None, "count": 10,
    }  # fmt: skip
    assert (view["ranks"][0]["pid"], view["ranks"][2]["pid"]) == (None, None), "not measured yet"


def test_sync_mode_has_counts_but_no_anchor() -> None:
    cohort = Cohort(Mode.CPU_SYNC, dataset_size=600).train_until(WindowDone)
    cadence = snapshot(cohort.core, 3.0)["cadence"]
    assert (cadence["anchor"], cadence["settled"], cadence["counts"]) == (None, None, {"0": 1, "1": 1, "2": 1})


def test_last_windows_suspects_and_losses_are_seen() -> None:
    cohort = Cohort(Mode.CPU_CADENCE, dataset_size=600).train_until(WindowDone)
    waiting, cohort.waiting = cohort.waiting, []
    for _, answer in waiting:
        answer()
    for at_s in range(2, 12):
        cohort.now_s = float(at_s)
        cohort.say(Beat("a", (RankBeat(0, True, 1000 * (at_s - 1), 9, 1),)), "a")
    cohort.post(HostDropped("b", "reset"))
    view = snapshot(cohort.core, 11.0)
    assert [rank["state"] for rank in view["ranks"]] == ["suspect", "dead", "dead"]
    assert view["ranks"][0]["rate"] == 200.0
    assert view["ranks"][2]["reason"] == "connection lost: reset"
    assert view["losses"] == [{"host": "b", "rank": -1, "error": "connection lost: reset"}]
    assert view["hosts"][1]["state"] == "gone"
    assert view["ending"] is None


def test_how_a_run_ends_is_seen_before_it_has_ended() -> None:
    cohort = Cohort(Mode.CPU_CADENCE, dataset_size=600).train_until(WindowDone)
    cohort.stop()
    view = snapshot(cohort.core, 1.0)
    assert (view["phase"], view["ending"]) == ("training", "stopped")


def test_whom_a_run_that_ends_waits_for_is_seen() -> None:
    cohort = Cohort(Mode.CPU_CADENCE, dataset_size=600).train_until(WindowDone)
    assert snapshot(cohort.core, 1.0)["waits_for"] == []
    cohort.held |= {StateSent, HostStopped, HeadExited, RankFinished, RankExited}
    cohort.stop()
    assert snapshot(cohort.core, 1.0)["waits_for"] == ["rank 0 on a", "rank 1 on b", "rank 2 on b"]
    seen = []
    for held in (WindowDone, StateSent, RankFinished, HostStopped):
        cohort.release(held)
        seen.append(snapshot(cohort.core, 1.0)["waits_for"])
    assert seen == [["rank 0 on a"], ["rank 0 on a", "rank 1 on b", "rank 2 on b"], ["host a", "host b"], ["the head"]]


def test_host_that_leaves_and_one_that_came_later_are_seen() -> None:
    cohort = Cohort(Mode.CPU_CADENCE, dataset_size=600).train_until(WindowDone)
    cohort.say(hello("c"), "c")
    cohort.post(DrainAsked("a", "fdl drain"))
    view = snapshot(cohort.core, 1.0)
    assert [(host["host"], host["state"]) for host in view["hosts"]] == [
        ("a", "draining"), ("b", "alive"), ("c", "alive"),
    ]  # fmt: skip
    assert (view["hosts"][2]["ranks"], view["hosts"][2]["cores"]) == ([3], 4)


def test_plain_run_has_ranks_and_uptimes_and_no_figures_of_an_engine() -> None:
    run = Plain(max_restarts=2).run()
    run.say(Beat("b", (RankBeat(1, False, 3, 0, 4096, 77), RankBeat(2, False, 3, 0, 4096, 78, True))), "b")
    run.now_s = 4.0
    run.exit(0)
    view = snapshot(run.core, 6.0)
    json.dumps(view)
    assert (view["schema"], view["phase"]) == (SCHEMA, "running")
    assert view["plain"] == {"restarts": 0, "max_restarts": 2, "uptime_s": 5.0}
    frozen = "stopped by a signal; on its host, kill -CONT 78 lets it go on"
    assert (view["ranks"][2]["state"], view["ranks"][2]["reason"]) == ("frozen", frozen)
    assert view["ranks"][:2] == [
        {
            "rank": 0, "host": "a", "device": "cpu:0", "device_name": "", "state": "finished", "reason": "",
            "pid": None, "rss_bytes": None, "uptime_s": 3.0,
        },
        {
            "rank": 1, "host": "b", "device": "cpu:0", "device_name": "", "state": "live", "reason": "",
            "pid": 77, "rss_bytes": 4096, "uptime_s": 5.0,
        },
    ]  # fmt: skip
    assert [(host["host"], host["state"], host["ranks"]) for host in view["hosts"]] == [
        ("a", "alive", [0]),
        ("b", "alive", [1, 2]),
    ]
    assert (view["absent"], view["losses"], view["ending"], view["message"]) == ([], [], None, "")
    assert not {"version", "cadence", "num_epochs", "mode"} & set(view)


def test_whom_a_plain_run_waits_for_is_seen_while_it_starts_stops_or_gathers() -> None:
    run = Plain(max_restarts=1)
    seen = [snapshot(run.core, run.now_s)["waits_for"]]
    run.run().held.add(StopRanks)
    seen.append(snapshot(run.core, run.now_s)["waits_for"])
    run.post(HostDropped("b", "eof"))
    seen.append(snapshot(run.core, run.now_s)["waits_for"])
    run.exit(0, by_us=True)
    seen.append(snapshot(run.core, run.now_s)["waits_for"])
    assert seen == [["host a", "host b"], [], ["rank 0 on a"], ["host b"]]
