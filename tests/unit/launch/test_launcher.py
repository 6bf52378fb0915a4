"""What a launch does before the run lives: what has to hold before hosts are changed, and a controller that does not
come to listen.
"""

import dataclasses
import socket
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from flodl.config.builder import local_cluster
from flodl.errors import DeadlineExceeded, FlodlError, HostUnreachable, PreflightError
from flodl.launch import launcher, rundir
from flodl.launch.launcher import LaunchOptions, local_request, start_controller
from flodl.launch.plan import RunSpec, plan
from flodl.launch.rundir import RunDir


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    return plan(local_cluster(1), local_request(LaunchOptions(("train.py",))))


def let_controller_be(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(launcher, "controller_argv", lambda *_: [sys.executable, "-S", "-c", code])


def ended(run: RunDir) -> tuple[object, object, str]:
    outcome = run.read_json("outcome.json") or {}
    return outcome.get("status"), outcome.get("exit_code"), str(outcome.get("message"))


def test_home_folder_is_told_as_the_working_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "me").symlink_to(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path / "me")
    request = local_request(LaunchOptions(("train.py",)))
    assert request.home == request.cwd == str(tmp_path.resolve())


def never() -> NoReturn:
    raise AssertionError("hosts were changed")


def test_port_of_somebody_else_is_found_before_the_project_is_copied(spec: RunSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=f"port {port} is taken"):
            start_controller(dataclasses.replace(spec, port=port), never)
    assert rundir.all_runs() == []


def test_address_of_another_machine_is_found_before_the_project_is_copied(spec: RunSpec) -> None:
    with pytest.raises(PreflightError, match="not an address of this machine"):
        start_controller(dataclasses.replace(spec, bind_host="192.0.2.77"), never)


def test_state_folder_that_takes_no_run_is_found_before_the_project_is_copied(spec: RunSpec) -> None:
    rundir.state_home().write_text("")
    with pytest.raises(PreflightError, match="FDL_STATE_HOME names another folder"):
        start_controller(spec, never)


def test_port_is_held_while_the_project_is_copied_and_a_launch_that_fails_then_leaves_no_run(spec: RunSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spec = dataclasses.replace(spec, port=port)

    def bring() -> NoReturn:
        with pytest.raises(PreflightError, match="is taken"):
            start_controller(dataclasses.replace(spec, run_id="another"), never)
        raise HostUnreachable("node-a", "connect", "refused", "see to it")

    with pytest.raises(HostUnreachable):
        start_controller(spec, bring)
    assert rundir.all_runs() == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_controller_that_dies_before_it_listens_leaves_an_outcome(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_controller_be(monkeypatch, "raise SystemExit('no such module')")
    with pytest.raises(FlodlError, match="ended with code 1 before it listened"):
        start_controller(spec)
    (run,) = rundir.all_runs()
    status, exit_code, message = ended(run)
    assert (status, exit_code) == ("failed", 1)
    assert message.startswith("the run did not start: the controller ended with code 1 before it listened; its log is")
    assert message.endswith("  | no such module")
    assert not (run.path / rundir.RESERVE_NAME).exists()


def test_controller_that_hangs_is_ended_and_leaves_an_outcome(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    let_controller_be(monkeypatch, "import signal; signal.pause()")
    monkeypatch.setattr(launcher, "CONTROLLER_START_S", 0.01)
    with pytest.raises(DeadlineExceeded):
        start_controller(spec)
    status, _, message = ended(rundir.all_runs()[0])
    assert status == "failed"
    assert "the controller was not ready within 0.01 s" in message


def test_controller_that_cannot_be_started_leaves_an_outcome(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "controller_argv", lambda *_: ["/no/such/python"])
    with pytest.raises(FileNotFoundError):
        start_controller(spec)
    assert ended(rundir.all_runs()[0])[:2] == ("failed", 1)


def test_interrupted_start_is_a_stop(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    let_controller_be(monkeypatch, "import signal; signal.pause()")
    monkeypatch.setattr(launcher, "_wait_for_controller", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_controller(spec)
    assert ended(rundir.all_runs()[0]) == ("stopped", 130, "interrupted before its controller listened")


def test_what_the_controller_has_written_itself_stays(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(rundir.state_home() / "runs" / spec.run_id)
    code = f"open({str(run.outcome_json)!r}, 'w').write('{{\"message\": \"its own words\"}}')"
    let_controller_be(monkeypatch, code)
    with pytest.raises(FlodlError):
        start_controller(spec)
    assert ended(run)[2] == "its own words"
