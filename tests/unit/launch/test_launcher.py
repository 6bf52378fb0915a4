"""What a launch does before the run lives: what has to hold before hosts are changed, and a controller that does not
come to listen.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

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


def test_start_that_is_interrupted_before_it_says_what_was_launched_leaves_nothing(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_controller(spec)
    assert rundir.all_runs() == []


LAUNCH = """
import sys
from flodl.launch import launcher, preflight
from flodl_cli.main import main
launcher.controller_argv = lambda *_: [sys.executable, "-S", "-c", "import signal; signal.pause()", "mute-controller"]
if sys.argv[1] == "preflight":
    preflight.check_hosts = lambda _: (print("preflight", flush=True), __import__("signal").pause())
main(["launch", "--local", "1", "train.py"])
"""


@pytest.fixture
def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_factor: float
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs ``fdl launch`` to its end; it gets a signal once a condition on its output holds."""
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text("")

    def launch(number: signal.Signals, where: str, is_due: Callable[[], Any], wait_until: Callable[..., Any]) -> Any:
        pipe, files = subprocess.PIPE, (tmp_path / "out", tmp_path / "err")
        with files[0].open("wb") as out, files[1].open("wb") as err:
            command = [sys.executable, "-c", LAUNCH, where]
            process = subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=out, stderr=err)
        try:
            wait_until(is_due, 60, files[1].read_text)
            os.kill(process.pid, number)
            code = process.wait(60 * deadline_factor)
        finally:
            process.kill()
            process.communicate()
        return subprocess.CompletedProcess(command, code, *(file.read_text() for file in files))

    return launch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signal_before_the_controller_listens_ends_the_run_and_says_so(
    number: signal.Signals, launched: Callable[..., Any], tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    def controllers() -> list[str]:
        marks = [str(tmp_path / "state").encode(), b"\0mute-controller\0"]
        found = [each.name for each in Path("/proc").iterdir() if each.name.isdigit()]
        return [pid for pid in found if marks[1] in of(pid, "cmdline") and marks[0] in of(pid, "environ")]

    done = launched(number, "controller", controllers, wait_until)

    (run,) = rundir.all_runs()
    words = f"run {run.run_id}: ended by {number.name} before its controller listened"
    assert (done.returncode, ended(run)) == (128 + number, ("stopped", 128 + number, words))
    assert f"fdl: {words}\n" in done.stderr
    assert controllers() == []


def test_signal_while_hosts_are_asked_ends_the_launch_and_leaves_nothing(
    launched: Callable[..., Any], tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    done = launched(signal.SIGTERM, "preflight", lambda: "preflight" in (tmp_path / "out").read_text(), wait_until)
    assert done.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM before its controller listened" in done.stderr
    assert rundir.all_runs() == []


def of(pid: str, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # gone
