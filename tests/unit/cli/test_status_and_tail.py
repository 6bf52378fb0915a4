"""Words for a snapshot and for log lines, and what is shown of a run that has ended."""

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from flodl.config.builder import local_cluster
from flodl.errors import ConfigError, PeerLost
from flodl.launch import rundir
from flodl.launch.document import dump
from flodl.launch.launcher import LaunchOptions, local_request
from flodl.launch.plan import plan
from flodl.launch.rundir import RunDir
from flodl.monitor.log_store import LogStore
from flodl_cli.commands.cmd_tail import parse_age, parse_ranks
from flodl_cli.main import cli
from flodl_cli.render import status_text
from tests.bundles import weights, write_bundle

STATE = {
    "schema": 1,
    "run_id": "20260101-000000-aaaa",
    "phase": "training",
    "mode": "cpu_cadence",
    "backend": "gloo",
    "version": 7,
    "epoch": 1,
    "num_epochs": 5,
    "samples_merged": 30,
    "epoch_samples": 100,
    "hosts": [{"host": "node-a", "state": "live", "ranks": [0, 1], "age_s": 0.4, "address": "10.0.0.2"}],
    "ranks": [
        {"rank": 0, "host": "node-a", "device": "cpu", "state": "live", "steps": 12, "rate": 103.77, "share": 0.75},
        {
            "rank": 1,
            "host": "node-a",
            "device": "cpu",
            "state": "suspect",
            "steps": 4,
            "share": 0.25,
            "reason": "silent 12 s",
        },
    ],
    "cadence": {"phase": "warmup", "anchor": 10, "counts": [10, 3]},
    "losses": [],
    "outcome": None,
}


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path))
    run = rundir.create("20260101-000000-aaaa")
    run.write("run.json", '{"name": "digits"}')
    run.write("state.json", json.dumps({**STATE, "phase": "ended"}))
    run.write("outcome.json", json.dumps({"status": "failed", "exit_code": 3, "message": "rank 1 failed"}))
    (run.logs / "rank0.stdout.log").write_bytes(b"one\ntwo\nthree\n")
    (run.logs / "rank10.stdout.log").write_bytes(b"ten\n")
    (run.logs / "rank1.stderr.log").write_bytes(b"bad \xff\xfe byte\n10%\r20%\r30%\nhalf")
    (run.logs / "head.stdout.log").write_bytes(b"from the head\n")
    return run


def fdl(*args: str) -> Result:
    result = CliRunner().invoke(cli, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_status_shows_hosts_ranks_rates_shares_and_reasons() -> None:
    text = status_text(STATE, "digits", io.StringIO())
    for words in (
        "training",
        "epoch 2/5",
        "30/100",
        "node-a",
        "10.0.0.2",
        "0,1",
        "103.8/s",
        "75.0%",
        "silent 12 s",
        "warmup",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"settled": False, "verdict": "suppress_growth"}, " not settled, verdict suppress_growth"),
        ({"settled": True, "verdict": "stable"}, " settled, verdict stable"),
        ({}, ""),
    ],
)
def test_status_tells_the_last_verdict_and_whether_the_anchor_has_settled(known: dict[str, object], line: str) -> None:
    state = {**STATE, "cadence": {"phase": "warmup", "anchor": 10, **known}}
    assert f"cadence warmup, anchor 10{line}" in status_text(state, "digits", io.StringIO()).splitlines()


def test_status_of_a_sync_mode_shows_no_anchor() -> None:
    state = {**STATE, "cadence": {"phase": "stable", "anchor": None, "settled": None, "verdict": "stable"}}
    assert "cadence stable, verdict stable" in status_text(state, "digits", io.StringIO()).splitlines()


def test_status_of_a_run_that_ends_says_why_and_whom_it_waits_for() -> None:
    state = {"run_id": "x", "phase": "ending", "message": "stopped by fdl stop", "waits_for": ["host a", "host b"]}
    told = "run x (n)  ending\nstopped by fdl stop\nwaiting for host a, host b"
    assert status_text(state, "n", io.StringIO()) == told
    gone = {**state, "vanished": {}}
    assert "waiting" not in status_text(gone, "n", io.StringIO())


def test_bundle_of_a_damaged_run_is_made_all_the_same_and_says_what_cannot_be_probed(
    ended: RunDir, tmp_path: Path
) -> None:
    result = fdl("debug", "bundle", "-n", "2", "-o", str(tmp_path / "b.tar.gz"))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{tmp_path / 'b.tar.gz'}: ")
    assert "look through it before you share it" in result.stderr
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        assert f": {len(archive.getnames())} files, " in result.stdout
        probe = archive.extractfile(f"{ended.run_id}/probe.json")
        assert probe is not None
        assert json.loads(probe.read())["error"] == "RunSpec.schema: expected to be present"
        log = archive.extractfile(f"{ended.run_id}/logs/rank0.stdout.log")
        assert log is not None
        assert log.read() == b"two\nthree\n"


def test_status_of_a_run_that_waits_names_who_is_missing_and_why() -> None:
    absent = [
        {"host": "b", "stage": "auth", "reason": "permission denied"},
        {"host": "c", "stage": "join", "reason": "has not joined"},
    ]
    join = {"ranks": 1, "least": 2, "fails_in_s": 9.0}
    state = {"run_id": "x", "phase": "waiting", "join": join, "absent": absent, "waits_for": ["host b", "host c"]}
    assert status_text(state, "n", io.StringIO()).splitlines() == [
        "run x (n)  waiting: 1 of 2 ranks are there, it fails in 9.0s with fewer than 2",
        "",
        "missing hosts: 2",
        "  b: auth: permission denied",
        "  c: has not joined",
    ]


def test_status_of_a_plain_run_shows_ranks_and_uptimes_and_no_figure_that_nobody_knows() -> None:
    rank = {"rank": 0, "host": "a", "device": "cpu:0", "state": "live", "rss_bytes": 5, "uptime_s": 185.0}
    dead = {**rank, "rank": 1, "state": "dead", "uptime_s": 2.0, "reason": "ended by signal 9"}
    plain = {"restarts": 1, "max_restarts": 3, "uptime_s": 185.0}
    text = status_text({"run_id": "r", "phase": "running", "plain": plain, "ranks": [rank, dead]}, "ddp", io.StringIO())
    lines = text.splitlines()
    assert lines[:2] == ["run r (ddp)  running", "1 of 2 ranks alive  restart 1 of 3  up 3m05s"]
    assert lines[3].split() == ["RANK", "HOST", "DEVICE", "STATE", "UP", "WHY"]
    assert lines[5].split() == ["1", "a", "cpu:0", "dead", "2.0s", "ended", "by", "signal", "9"]


def test_status_copes_with_a_snapshot_of_which_little_is_known() -> None:
    little = {"run_id": "x", "phase": "waiting", "ranks": None, "hosts": "?"}
    assert status_text(little, "n", io.StringIO()) == "run x (n)  waiting"


def test_status_leaves_out_columns_without_values() -> None:
    lines = status_text(STATE, "digits", io.StringIO()).splitlines()
    assert lines[-3:] == [
        "RANK  HOST    DEVICE  STATE    STEPS  RATE     SHARE  WHY",
        "0     node-a  cpu     live     12     103.8/s  75.0%  –",
        "1     node-a  cpu     suspect  4      –        25.0%  silent 12 s",
    ]


def test_status_names_each_ranks_process() -> None:
    ranks = [{**STATE["ranks"][0], "pid": 4711}, STATE["ranks"][1]]  # type: ignore[index]
    lines = status_text({**STATE, "ranks": ranks}, "digits", io.StringIO()).splitlines()
    assert lines[-3:-1] == [
        "RANK  HOST    DEVICE  PID   STATE    STEPS  RATE     SHARE  WHY",
        "0     node-a  cpu     4711  live     12     103.8/s  75.0%  –",
    ]


def test_status_in_a_pipe_is_never_cut_wrapped_or_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    why = "word " * 100 + "[bold] end"
    state = {**STATE, "phase": why, "ranks": [{**STATE["ranks"][1], "reason": why}]}  # type: ignore[index]
    text = status_text(state, "digits", io.StringIO())
    assert text.count(why) == 2
    assert "\x1b" not in text


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "style"), [("", "\x1b[33m"), ("1", "")])
def test_status_on_a_screen_fits_it_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, no_color: str, style: str
) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "70", "NO_COLOR": no_color}.items():
        monkeypatch.setenv(name, value)
    why = " ".join(f"word{number}" for number in range(30))
    state = {**STATE, "ranks": [{**STATE["ranks"][1], "reason": why}]}  # type: ignore[index]
    text = status_text(state, "digits", Screen())
    assert f"{style}suspect" in text
    plain = click.unstyle(text)
    assert all(word in plain for word in why.split())
    assert max(map(len, plain.splitlines())) <= 70
    assert (plain == text) == bool(no_color)


def test_status_of_an_ended_run_says_how_it_ended(ended: RunDir) -> None:
    assert "failed, exit code 3" in fdl("status").output
    assert json.loads(fdl("status", "digits", "--json").output)["outcome"]["exit_code"] == 3


def vanish(run: RunDir, at_s: float) -> None:
    """The controller was killed behind its last snapshot."""
    run.outcome_json.unlink()
    run.announce(rundir.ControllerInfo(2**22 + 1, 1, "127.0.0.1", 1))
    for path in (run.state_json, run.controller_json):
        if path.exists():
            os.utime(path, (at_s, at_s))


def test_status_of_a_run_whose_controller_is_gone_says_since_when(ended: RunDir) -> None:
    vanish(ended, time.time() - 7330.0)
    lines = fdl("status").output.splitlines()
    assert lines[0].endswith("(digits)  vanished")
    assert lines[1].startswith(f"its controller (pid {2**22 + 1}) is gone without a word; its last sign, and all ")
    assert lines[1].endswith(", 2h02m ago")
    assert lines[2].startswith("nothing to go on from: ")


def test_status_of_a_run_that_vanished_before_its_first_snapshot(ended: RunDir) -> None:
    ended.state_json.unlink()
    vanish(ended, 1234.0)
    state = json.loads(fdl("status", "--json").output)
    assert state["vanished"] == {"pid": 2**22 + 1, "as_of_s": 1234.0, "checkpoint": None}


def test_status_of_a_run_that_vanished_names_the_checkpoint_to_go_on_from(ended: RunDir, tmp_path: Path) -> None:
    request = local_request(LaunchOptions(("train.py",), name="digits"))
    ended.write("run.json", dump(replace(plan(local_cluster(2), request), created_s=1.0)))
    stem = tmp_path / "ckpts" / "run"
    write_bundle(stem, 100, weights())
    admitted = {"event": "admitted", "fields": {"save_path": str(stem), "resume_from": ""}}
    (ended.path / "events.jsonl").write_text(json.dumps(admitted) + "\n")
    vanish(ended, time.time())
    way = f"to go on from its last checkpoint, {stem}: fdl launch --resume {ended.run_id}"
    assert fdl("status").output.splitlines()[2] == way
    assert json.loads(fdl("status", "--json").output)["vanished"]["checkpoint"] == str(stem)


def test_status_tells_why_a_run_ended(ended: RunDir) -> None:
    lines = fdl("status").output.splitlines()
    assert lines[:2] == [f"run {ended.run_id} (digits)  failed, exit code 3", "rank 1 failed"]


def test_status_of_a_run_whose_controller_never_listened_is_no_start_that_lasts(ended: RunDir) -> None:
    for path in (ended.outcome_json, ended.state_json):
        path.unlink()
    ended.write("run.json", json.dumps({"name": "digits", "created_s": 1.0}))
    lines = fdl("status").output.splitlines()
    assert lines[0].endswith("(digits)  failed")
    assert lines[1].startswith("its controller does not listen, ")
    assert lines[1].endswith(f"its log is {ended.logs / 'controller.log'}")
    ended.write("run.json", "{}")  # its directory has just been made
    assert fdl("status").output == f"run {ended.run_id} ()  starting\n"


def test_tail_of_an_ended_run_without_index_reads_its_files_and_says_so(ended: RunDir) -> None:
    result = fdl("tail", "--since", "5m")
    assert result.stderr == (
        f"fdl: {ended.logs / 'index'} is missing; without it one log follows the other, and -n counts in each; "
        "--since is left out\n"
    )
    lines = result.stdout.splitlines()
    assert lines[0] == "head: from the head"
    assert lines[1:4] == ["node-a:0: one", "node-a:0: two", "node-a:0: three"]
    assert "node-a:1: bad \\xff\\xfe byte" in lines
    assert "node-a:1: 30%" in lines
    assert lines[-1] == ":10: ten"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["-n", "1", "--rank", "0"], ["node-a:0: three"]),
        (["--rank", "0", "--no-prefix"], ["one", "two", "three"]),
        (["--no-prefix", "--grep", "head"], ["from the head"]),
        (["--stream", "stderr", "--grep", "hal+f"], ["node-a:1: half"]),
        (["--host", "node-a", "--rank", "0-9", "-n", "1", "--stream", "stdout"], ["node-a:0: three"]),
        (["-n", "0"], []),
    ],
)
def test_tail_selects(ended: RunDir, args: list[str], expected: list[str]) -> None:
    assert fdl("tail", *args).stdout.splitlines() == expected


@pytest.mark.parametrize(
    "args", [["--rank", "7"], ["--host", "elsewhere"], ["--host", "elsewhere", "--rank", "0", "-f"]]
)
def test_tail_of_what_the_run_does_not_have_says_what_there_is(ended: RunDir, args: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--rank and --host choose; there are node-a: rank 0, 1$") as refused:
        fdl("tail", *args)
    assert refused.value.exit_code == 2


def test_tail_of_a_run_without_ranks_may_choose_any(ended: RunDir) -> None:
    ended.write("state.json", json.dumps({**STATE, "phase": "waiting", "ranks": []}))
    assert fdl("tail", "--rank", "7").stdout == ""


def test_tail_gives_one_object_per_line_on_request(ended: RunDir) -> None:
    lines = [json.loads(line) for line in fdl("tail", "--json", "--rank", "1").stdout.splitlines()]
    assert {line["stream"] for line in lines} == {"stderr"}


@pytest.mark.parametrize(("text", "ranks"), [(("0,2-5",), {0, 2, 3, 4, 5}), (("1", "3"), {1, 3}), ((), None)])
def test_rank_lists_are_read(text: tuple[str, ...], ranks: set[int] | None) -> None:
    assert parse_ranks(text) == ranks


@pytest.fixture
def ordered(ended: RunDir, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Two ranks that print in turns, a second apart."""
    for path in ended.logs.glob("*.log"):
        path.unlink()
    store = LogStore(ended.logs)
    offsets = dict.fromkeys((0, 1), 0)
    for second, (rank, data) in enumerate([(0, b"a\n"), (1, b"b\n"), (0, b"c\nd"), (1, b"e\n"), (0, b"!\nhalf")]):
        monkeypatch.setattr("flodl.monitor.log_store.time.time", lambda second=second: 1_700_000_000.0 + second)
        store.append(rank, "stdout", offsets[rank], data)
        offsets[rank] += len(data)
    monkeypatch.undo()
    monkeypatch.setenv("FDL_STATE_HOME", str(ended.path.parents[1]))
    store.close()
    return ended


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        ([], ["a", "b", "c", "e", "d!", "half"]),
        (["-n", "3"], ["e", "d!", "half"]),
        (["-n", "0"], []),
        (["-n", "2", "--rank", "1"], ["b", "e"]),
        (["--rank", "0", "--stream", "stderr"], []),
    ],
)
def test_tail_of_an_ended_run_keeps_the_order_of_arrival(ordered: RunDir, args: list[str], texts: list[str]) -> None:
    result = fdl("tail", "--no-prefix", *args)
    assert (result.stdout.splitlines(), result.stderr) == (texts, "")


def test_tail_of_an_ended_run_knows_when_each_line_came(ordered: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flodl_cli.commands.cmd_tail.time.time", lambda: 1_700_000_013.0)
    lines = [json.loads(line) for line in fdl("tail", "--json", "--since", "10s").stdout.splitlines()]
    assert [(line["ts"] - 1_700_000_000_000, line["host"], line["text"]) for line in lines] == [
        (3000, "node-a", "e"),
        (4000, "node-a", "d!"),
        (4000, "node-a", "half"),
    ]


@pytest.mark.parametrize("damage", ["shorter", "garbage", "more in a log", "a log is gone"])
def test_tail_with_a_damaged_index_falls_back_to_the_files(ordered: RunDir, damage: str) -> None:
    index, log = ordered.logs / "index", ordered.logs / "rank1.stdout.log"
    match damage:
        case "shorter":
            index.write_bytes(index.read_bytes()[:-7])
        case "garbage":
            index.write_bytes(b"\xff" * 100)
        case "more in a log":
            log.write_bytes(log.read_bytes() + b"f\n")
        case _:
            log.unlink()
    result = fdl("tail", "--rank", "0", "--no-prefix")
    assert result.stdout.splitlines() == ["a", "c", "d!", "half"]
    assert "is " in result.stderr
    assert "one log follows the other" in result.stderr


@pytest.mark.parametrize("text", ["", "a", "5-2", "-1", "1-", "99999999999"])
def test_what_is_no_rank_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rank"):
        parse_ranks((text,))


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("5m", 300), ("1.5h", 5400), ("1d", 86400), ("10s", 10)])
def test_ages_are_read(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5w", "-5m"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--since"):
        parse_age(text)


def test_bad_pattern_is_refused(ended: RunDir) -> None:
    with pytest.raises(ConfigError, match="--grep"):
        fdl("tail", "--grep", "(")


@pytest.mark.parametrize(
    "report",
    [
        {"hosts": 7, "ranks": 7},
        {"hosts": [{"host": "a\ud800", "age_s": 10**400}], "ranks": [{"rank": None, "host": 10**400}]},
        {"message": "a\ud800", "losses": 7, "failure": {"losses": 7}},
    ],
)
@pytest.mark.parametrize(
    "args", [["status"], ["status", "--json"], ["tail"], ["tail", "--host", "node-a"], ["debug", "bundle"], ["ps"]]
)
def test_damaged_reports_stop_no_command(
    ended: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], report: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    ended.write("run.json", json.dumps({"name": "digits\ud800", "hosts": [{"name": "a\ud800"}]}))
    for name in ("state.json", "outcome.json"):
        ended.write(name, json.dumps(report))
    result = fdl(*args)
    assert result.exit_code == 0
    assert "\ud800".encode("utf-8", "surrogatepass") not in result.stdout_bytes


def test_output_that_the_terminal_cannot_hold_is_escaped(ended: RunDir) -> None:
    (ended.logs / "head.stdout.log").write_text("é漢\n")
    code = "import sys; from flodl_cli.main import main; main(sys.argv[1:])"
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    shown = subprocess.run(
        [sys.executable, "-c", code, "tail", "-n1", "--no-prefix"],
        check=True,
        env=environ,
        capture_output=True,
        timeout=60,
    )
    assert b"\xe9\\u6f22\n" in shown.stdout


def test_status_at_an_address_where_nobody_answers_says_what_to_check(ended: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerLost) as caught:
        fdl("status", "--addr", f"127.0.0.1:{port}")
    assert str(caught.value) == (
        f"controller 127.0.0.1:{port}: Connection refused\n"
        f"  check address and port: fdl status {ended.run_id} without --addr, on its machine, knows them"
    )
