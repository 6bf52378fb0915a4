"""A script that was started by itself, with a cluster in its code: it becomes the head of a run, and leaves nothing."""

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.runs import LAUNCH_MARK, ROOT, Fdl, Launched

pytestmark = pytest.mark.timeout(240)

SCRIPT = ROOT / "tests" / "scripts" / "promoted.py"


class Script(Launched):
    """``python script.py`` in the place of ``fdl launch script.py``."""

    def start(self, env: Mapping[str, str]) -> None:
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *self._arguments],
                env={**env, LAUNCH_MARK: self._mark.partition("=")[2]},
                cwd=self._fdl.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def start(fdl: Fdl, port: int, step_ms: int) -> Script:
    run = Script(fdl, fdl.folder / "script", [str(port), str(step_ms)], (), fdl.folder)
    run.start(fdl.env)
    fdl.launched.append(run)
    return run


def test_script_trains_on_its_cluster_and_prints_its_result_once(fdl: Fdl, port: int) -> None:
    run = start(fdl, port, step_ms=0)

    assert run.wait() == 0, run.story()
    assert run.stdout.count("result: completed after 2 epoch(s), head: True") == 1
    assert {rank for rank in (0, 1) if f"localhost:{rank}: rank {rank} takes a step" in run.stdout} == {0, 1}
    assert run.stdout.count("fdl: epoch ") == 2
    run.wait_until_clean()
    assert run.wait_for_end()["status"] == "completed"


def test_interrupt_stops_the_run_and_join_returns_what_is_trained(fdl: Fdl, port: int) -> None:
    run = start(fdl, port, step_ms=1000)
    run.wait_for_training(version=0)

    run.kill("launcher", number=signal.SIGINT)

    assert run.wait() == 0, run.story()
    assert run.stdout.count("result: stopped") == 1
    run.wait_until_clean()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_schedulers_signal_stops_the_run_and_join_ends_the_script(
    fdl: Fdl, port: int, number: signal.Signals, code: int
) -> None:
    run = start(fdl, port, step_ms=1000)
    run.wait_for_training(version=0)

    run.kill("launcher", number=number)

    assert run.wait() == code, run.story()
    assert f"flodl: {number.name}: stopping in order" in run.stderr
    assert ("result:" in run.stdout, "Traceback" in run.stderr) == (False, False)
    outcome = run.wait_for_end()
    assert (outcome["status"], outcome["exit_code"], outcome["message"]) == (
        "stopped",
        code,
        f"stopped by {number.name} in the script",
    )
    run.wait_until_clean()


def test_killed_script_takes_its_run_along(fdl: Fdl, port: int) -> None:
    run = start(fdl, port, step_ms=1000)
    run.wait_for_training(version=0)

    run.kill("launcher")

    assert run.wait() == -signal.SIGKILL
    assert run.wait_for_end()["failure"]["kind"] == "head"
    run.wait_until_clean()
