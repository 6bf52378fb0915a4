"""What a list of runs says of each: how it stands or ended, from its directory alone."""

import json
import os
import time
from pathlib import Path

import pytest

from flodl.launch import rundir
from flodl.launch.registry import RunSummary, summaries, summary
from flodl.launch.rundir import RunDir

CREATED_S = 1_000_000.0


@pytest.fixture(autouse=True)
def _state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))


def make(run_id: str, live: bool = False, **documents: object) -> RunDir:
    run = rundir.create(run_id)
    run.write("run.json", json.dumps({"name": "train", "created_s": CREATED_S}))
    if live:
        run.announce(rundir.own_info("127.0.0.1", 1))
    for name, document in documents.items():
        run.write(f"{name}.json", json.dumps(document))
    return run


def test_live_run_shows_its_phase_and_how_long_it_has_taken() -> None:
    seen = summary(make("a", live=True, state={"phase": "training", "lowest_loss": None}), CREATED_S + 60)
    assert seen == RunSummary("a", "train", "training", True, None, CREATED_S, 60.0, None, None)


@pytest.mark.parametrize(("status", "code", "state"), [("completed", 0, "done"), ("stopped", 143, "stopped")])
def test_ended_run_shows_how_it_ended_and_what_it_measured(status: str, code: int, state: str) -> None:
    metrics = {"lowest_loss": {"epoch": 3, "value": 0.5}, "last_eval": {"epoch": 4, "value": "NaN"}}
    run = make("a", outcome={"status": status, "exit_code": code}, state=metrics)
    os.utime(run.outcome_json, (CREATED_S + 90, CREATED_S + 90))
    seen = summary(run, CREATED_S + 9999)
    assert (seen.state, seen.exit_code, seen.duration_s, seen.is_live) == (state, code, 90.0, False)
    assert (seen.lowest_loss, seen.last_eval) == ({"epoch": 3, "value": 0.5}, None)


def test_run_whose_controller_is_gone_has_vanished_at_its_last_sign() -> None:
    run = make("a", live=True, state={})
    info = run.controller()
    assert info is not None
    run.write("controller.json", json.dumps({"pid": info.pid, "started": 1, "address": "::1", "port": 1}))
    os.utime(run.state_json, (CREATED_S + 30, CREATED_S + 30))
    seen = summary(run, CREATED_S + 9999)
    assert (seen.state, seen.exit_code, seen.duration_s) == ("vanished", None, 30.0)


@pytest.mark.parametrize(("age_s", "state"), [(1, "starting"), (9999, "failed")])
def test_run_without_a_controller_starts_or_has_failed(age_s: float, state: str) -> None:
    seen = summary(make("a"), CREATED_S + age_s)
    assert (seen.state, seen.duration_s) == (state, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"name": "x"}',
        '{"created_s": "yesterday"}',
        '{"created_s": -1e308}',
        '{"created_s": NaN}',
        '{"created_s": Infinity}',
        '{"created_s": 1%s}' % ("0" * 400),
        "[" * 100_000,
    ],
    ids=range(10),
)
def test_directory_that_does_not_say_what_was_launched_is_shown_as_damaged(text: str) -> None:
    run = make("a")
    run.write("run.json", text)
    assert [(each.run_id, each.state) for each in summaries(rundir.all_runs())] == [("a", "damaged")]


def test_list_of_the_latest_is_quick_among_thousands(deadline_factor: float) -> None:
    folder = rundir.state_home() / "runs"
    for number in range(2_000):
        path = folder / f"20260101-000000-{number:04x}"
        path.mkdir(parents=True)
        (path / "outcome.json").write_text('{"status": "completed", "exit_code": 0}')
        os.utime(path / "outcome.json", (CREATED_S, CREATED_S))
    live = make("20250101-000000-0000", live=True)

    began_s = time.perf_counter()
    shown = summaries([*rundir.all_runs()[:10], *rundir.live_runs()])
    took_s = time.perf_counter() - began_s

    assert [each.state for each in shown] == ["damaged"] * 10 + ["starting"]
    assert shown[-1].run_id == live.run_id
    assert took_s < 1.0 * deadline_factor


def test_figure_that_is_no_number_is_left_out() -> None:
    run = make("a", outcome={"status": "completed", "exit_code": 0}, state={"lowest_loss": {"value": 10**400}})
    assert summary(run, CREATED_S).lowest_loss is None
