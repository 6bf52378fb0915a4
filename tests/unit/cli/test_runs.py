"""The list of runs, and the words for a run that a shell completes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from flodl.errors import PeerLost
from flodl.launch import rundir
from flodl.launch.rundir import ControllerInfo, RunDir, process_started
from flodl_cli.main import cli


@pytest.fixture(autouse=True)
def _state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))


def make(run_id: str, name: str, outcome: str = "", live: bool = False) -> RunDir:
    run = rundir.create(run_id)
    run.write("run.json", json.dumps({"name": name, "created_s": time.time() - 60}))
    if live:
        run.announce(rundir.own_info("127.0.0.1", 1))
    if outcome:
        run.write("outcome.json", outcome)
        run.write("state.json", '{"lowest_loss": {"epoch": 1, "value": 0.25}}')
        os.utime(run.outcome_json, (1e9, 1e9))
    return run


def fdl(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def test_runs_are_listed_newest_first_with_how_they_ended() -> None:
    make("20260101-000000-aaaa", "old", '{"status": "completed", "exit_code": 0}')
    make("20260102-000000-bbbb", "new", live=True)
    (rundir.state_home() / "runs" / "20260103-000000-cccc").mkdir()
    lines = fdl("ps").output.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["RUN", "NAME", "STATE"],
        ["20260103-000000-cccc", "damaged"],
        ["20260102-000000-bbbb", "new", "starting"],
        ["20260101-000000-aaaa", "old", "done"],
    ]
    assert lines[-1].split()[3] == "0"
    assert lines[-1].endswith("0.25 (epoch 2)")


def test_overlong_names_do_not_widen_the_list() -> None:
    make("20260101-000000-aaaa", "n" * 5000)
    (rundir.state_home() / "runs" / ("r" * 250)).mkdir()
    lines = fdl("ps").output.splitlines()
    assert max(map(len, lines)) < 200
    assert lines[1].split()[0] == "r" * 63 + "…"
    assert lines[2].split()[1] == "n" * 63 + "…"
    assert "n" * 5000 in fdl("ps", "--json").output


def test_bundle_of_a_run_with_a_hostile_id_has_a_plain_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(make("20260101-000000-aaaa", "old").path, rundir.state_home() / "runs" / ("9\x1b[31m\n" + "ü" * 80))
    assert fdl("debug", "bundle").exit_code == 0
    assert [path.name for path in tmp_path.glob("fdl-debug-*")] == [f"fdl-debug-9__31m_{'_' * 57}.tar.gz"]


def test_live_run_is_listed_however_old_it_is() -> None:
    make("20250101-000000-aaaa", "live", live=True)
    for number in range(12):
        make(f"20260101-000000-{number:04x}", "past", '{"status": "failed", "exit_code": 3}')
    shown = [line.split()[0] for line in fdl("ps").output.splitlines()[1:]]
    assert (len(shown), shown[-1]) == (11, "20250101-000000-aaaa")
    assert len(fdl("ps", "-a").output.splitlines()) == 14
    assert len(fdl("ps", "-n", "2").output.splitlines()) == 3


def test_list_is_one_document_for_programs() -> None:
    make("20260101-000000-aaaa", "old", '{"status": "stopped", "exit_code": 143}')
    (run,) = json.loads(fdl("ps", "--json").output)
    assert (run["run_id"], run["name"], run["state"], run["exit_code"]) == (
        "20260101-000000-aaaa",
        "old",
        "stopped",
        143,
    )
    assert run["lowest_loss"] == {"epoch": 1, "value": 0.25}


def test_list_without_runs_says_how_to_start_one() -> None:
    result = fdl("ps")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "fdl launch" in result.stderr


@pytest.mark.parametrize(
    ("args", "incomplete", "words"),
    [
        (["stop"], "", ["20260102-000000-bbbb", "new"]),
        (["stop"], "n", ["new"]),
        (["attach"], "2026", ["20260102-000000-bbbb"]),
        (["drain", "host"], "", ["20260102-000000-bbbb", "new"]),
        (["status"], "20", ["20260102-000000-bbbb", "20260101-000000-aaaa"]),
        (["tail"], "o", ["old"]),
        (["debug", "bundle"], "o", ["old"]),
    ],
)
def test_shell_completes_runs_that_the_command_can_take(args: list[str], incomplete: str, words: list[str]) -> None:
    make("20260101-000000-aaaa", "old", '{"status": "completed", "exit_code": 0}')
    make("20260102-000000-bbbb", "new", live=True)
    completion = ShellComplete(cli, {}, "fdl", "_FDL_COMPLETE")
    assert [each.value for each in completion.get_completions(args, incomplete)] == words


def test_abort_ends_a_controller_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("20260101-000000-aaaa", "stuck")
    monkeypatch.setattr("flodl.launch.control.TIMEOUT_S", 0.2)
    code = (
        "import socket, sys\nsock = socket.create_server(('127.0.0.1', 0))\n"
        "print(sock.getsockname()[1], flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        port = int(controller.stdout.readline())
        started = process_started(controller.pid)
        assert started is not None
        run.announce(ControllerInfo(controller.pid, started, "127.0.0.1", port))
        refused = fdl("stop")
        assert "does not answer" in str(refused.exception)
        assert controller.poll() is None
        result = fdl("stop", "-x")
        assert controller.wait(10) == -signal.SIGKILL
    assert result.exit_code == 0, result.output
    assert "does not answer; ending it" in result.stderr


def test_attach_gives_up_where_nothing_answers_and_the_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flodl_cli.commands.cmd_attach.ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run = make("20260101-000000-aaaa", "mute")
    run.announce(rundir.own_info("127.0.0.1", port))
    result = fdl("attach")
    assert isinstance(result.exception, PeerLost)
    words = f"its process lives (pid {os.getpid()}), and nothing has answered for 0.5 s; to end it: fdl stop -x "
    assert str(result.exception).startswith(f"controller 127.0.0.1:{port}: ")
    assert str(result.exception).endswith(words + run.run_id)


def test_damaged_documents_stop_no_command(tmp_path: Path) -> None:
    deep, pipe = make("20260101-000000-aaaa", "deep"), make("20260102-000000-bbbb", "pipe")
    deep.write("run.json", "[" * 100_000)
    pipe.run_json.unlink()
    os.mkfifo(pipe.run_json)
    assert [line.split()[1] for line in fdl("ps").output.splitlines()[1:]] == ["damaged", "damaged"]
    for run in (deep, pipe):
        assert fdl("status", run.run_id).exit_code == 0
        assert "not live" in str(fdl("stop", run.run_id).exception)
        assert fdl("debug", "bundle", run.run_id, "-o", str(tmp_path / run.run_id)).exit_code == 0


@pytest.mark.parametrize("command", ["stop", "attach", "status", "tail"])
def test_empty_word_is_refused(command: str) -> None:
    make("20260101-000000-aaaa", "only", live=True)
    assert "names no run" in str(fdl(command, "").exception)


@pytest.mark.parametrize(
    ("args", "incomplete", "offered"),
    [
        (["launch"], "ml", [("file", "ml")]),
        (["launch", "train.py"], "da", [("file", "da")]),
        (["launch", "--resume"], "", [("plain", "20260101-000000-aaaa"), ("plain", "old")]),
        (["launch"], "--dry", [("plain", "--dry-run")]),
        (["probe"], "ml", [("file", "ml")]),
        (["checkpoint", "show"], "ck", [("file", "ck")]),
        (["drain"], "node", [("plain", "node-a")]),
        (["tail", "--host"], "", [("plain", "node-a"), ("plain", "b")]),
    ],
)
def test_shell_completes_files_hosts_and_runs_to_resume(
    args: list[str], incomplete: str, offered: list[tuple[str, str]]
) -> None:
    make("20260101-000000-aaaa", "old", '{"status": "completed", "exit_code": 0}')
    make("20260102-000000-bbbb", "new", live=True).write("state.json", '{"hosts": [{"host": "node-a"}, {"host": "b"}]}')
    found = ShellComplete(cli, {}, "fdl", "_FDL_COMPLETE").get_completions(args, incomplete)
    assert [(each.type, each.value) for each in found] == offered


def test_port_that_ones_own_run_has_is_given_back_by_its_end() -> None:
    make("20260102-000000-bbbb", "new", live=True)
    assert rundir.port_remedy(1) == "run 20260102-000000-bbbb (new) is live: fdl stop 20260102-000000-bbbb"
    assert rundir.port_remedy(2).startswith("stop that process, or ")
    assert rundir.port_remedy(0).startswith("stop that process, or ")
