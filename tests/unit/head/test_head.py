"""The head against a real port: what it says, what becomes of what it hears, and how a run's end reaches join()."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flodl.errors import (
    CheckpointError,
    ConfigError,
    FlodlError,
    JoinRefused,
    PeerLost,
    RankFailed,
    TooFewRanks,
    UsageError,
)
from flodl.head.main import run_head
from flodl.messages import EpochReport, EvalReport, HeadReady, RunEnded, StopRequest
from flodl.spec import context
from flodl.spec.fingerprint import config_fingerprint
from flodl.spec.handle import TrainHandle
from flodl.spec.job import TrainingJob
from flodl.spec.knobs import resolve
from flodl.spec.metrics import EpochMetrics
from flodl.spec.state import StateInfo, dump_state
from flodl.spec.uncaught import MARK
from flodl.trainer.config import TrainerConfig

LIMIT_S = 30.0
ROOT = Path(__file__).parents[3]


def report(epoch: int) -> EpochReport:
    one = {"0": 1.0}
    return EpochReport(epoch, 0.5, 10.0, 8, epoch + 1, {}, one, {"0": 8}, one, one, {"0": 0})


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    hook, handler = sys.excepthook, signal.signal(signal.SIGINT, signal.default_int_handler)
    context.enter(context.Role.HEAD)
    yield
    context.leave()
    sys.excepthook = hook
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def job() -> TrainingJob:
    def never(*arguments: Any) -> Any:
        raise AssertionError("the head builds and trains nothing")

    config = TrainerConfig(torch.utils.data.TensorDataset(torch.zeros(8)), batch_size=2, num_epochs=3)
    return TrainingJob(never, never, never, resolve(config))


@pytest.fixture
def handle() -> TrainHandle:
    return TrainHandle()


def test_it_introduces_itself_with_what_it_knows(
    controller: Any, job: TrainingJob, handle: TrainHandle, wait_until: Callable[..., Any]
) -> None:
    run_head(controller.ticket, job, handle)

    wait_until(lambda: controller.heard, LIMIT_S, "the head speaks")
    assert controller.roles == ["head"]
    (ready,) = controller.heard
    assert ready == HeadReady(job.config.settings(), config_fingerprint(job.config))
    assert ready.fingerprint["dataset"] == "TensorDataset of 8 samples"


def test_results_reach_the_handle_and_the_state_ends_it(
    controller: Any, job: TrainingJob, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    evals: list[tuple[int, float]] = []
    handle = TrainHandle(eval_result_fn=lambda epoch, value: evals.append((epoch, value)))
    model = nn.Linear(2, 1)
    path = tmp_path / "state"
    path.write_bytes(dump_state(model, StateInfo(1, 9)))
    run_head(controller.ticket, job, handle)

    for message in (report(0), EvalReport(0, 0.75), report(1), RunEnded("stopped", "by hand", str(path), 2)):
        controller.say(message)
    state = handle.join(LIMIT_S)

    assert handle.poll_metrics() == [EpochMetrics.from_report(report(0)), EpochMetrics.from_report(report(1))]
    assert evals == [(0, 0.75)]
    assert (state.outcome, state.epochs, state.version) == ("stopped", 2, 9)
    assert torch.equal(state.params[0], model.weight)
    assert not controller.is_dropped.is_set()  # the controller knows by the connection how long the script goes on


@pytest.mark.parametrize(
    ("ended", "kind", "words"),
    [
        (RunEnded("failed", "rank 1 failed: ValueError: x", "", 0, 1), RankFailed, "rank 1 failed: ValueError: x"),
        (RunEnded("failed", "rank 1 failed", "/some/state", 0, 7), RankFailed, "rank 1 failed"),
        (RunEnded("stopped", "", "", 0, 130), RankFailed, "the run stopped without a trained state"),
        (RunEnded("failed", "not finite on every rank", "", 0, 5), TooFewRanks, "not finite on every rank"),
        (RunEnded("failed", "there is no checkpoint", "", 0, 6), CheckpointError, "there is no checkpoint"),
    ],
)
def test_a_run_without_a_result_is_an_error_of_join_in_one_line(
    controller: Any,
    job: TrainingJob,
    handle: TrainHandle,
    capsys: pytest.CaptureFixture[str],
    ended: RunEnded,
    kind: type[FlodlError],
    words: str,
) -> None:
    run_head(controller.ticket, job, handle)
    controller.say(ended)

    with pytest.raises(kind, match=words) as caught:
        handle.join(LIMIT_S)
    assert type(caught.value) is kind
    with pytest.raises(SystemExit) as ending:
        sys.excepthook(kind, caught.value, None)
    assert ending.value.code == kind.exit_code
    assert capsys.readouterr().err == f"flodl: {words}\n"
    sys.excepthook(ValueError, ValueError("the script's own"), None)
    assert "ValueError: the script's own" in capsys.readouterr().err


def test_a_controller_that_goes_away_ends_the_run(controller: Any, job: TrainingJob, handle: TrainHandle) -> None:
    run_head(controller.ticket, job, handle)
    controller.drop()

    with pytest.raises(PeerLost, match="the controller is gone"):
        handle.join(LIMIT_S)


def test_a_controller_that_goes_away_after_the_end_changes_nothing(
    controller: Any, job: TrainingJob, handle: TrainHandle, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    path.write_bytes(dump_state(nn.Linear(1, 1), StateInfo(1, 1)))
    run_head(controller.ticket, job, handle)
    controller.say(RunEnded("completed", "", str(path), 0))
    handle.join(LIMIT_S)
    controller.drop()

    assert controller.is_dropped.wait(LIMIT_S)
    assert handle.join(LIMIT_S).outcome == "completed"


def test_the_first_ctrl_c_asks_the_controller_to_stop(
    controller: Any, job: TrainingJob, handle: TrainHandle, wait_until: Callable[..., Any]
) -> None:
    run_head(controller.ticket, job, handle)
    wait_until(lambda: controller.heard, LIMIT_S, "the head speaks")

    os.kill(os.getpid(), signal.SIGINT)

    wait_until(lambda: len(controller.heard) == 2, LIMIT_S, "the stop arrives")
    assert controller.heard[1] == StopRequest("Ctrl-C in the script", abort=False, exit_code=130)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_schedulers_signal_asks_the_controller_to_stop_and_then_ends_the_script(
    controller: Any,
    job: TrainingJob,
    handle: TrainHandle,
    tmp_path: Path,
    wait_until: Callable[..., Any],
    number: signal.Signals,
    code: int,
) -> None:
    path = tmp_path / "state"
    path.write_bytes(dump_state(nn.Linear(1, 1), StateInfo(1, 1)))
    run_head(controller.ticket, job, handle)
    wait_until(lambda: controller.heard, LIMIT_S, "the head speaks")

    os.kill(os.getpid(), number)

    wait_until(lambda: len(controller.heard) == 2, LIMIT_S, "the stop arrives")
    assert controller.heard[1] == StopRequest(f"{number.name} in the script", abort=False, exit_code=code)
    controller.say(RunEnded("stopped", "", str(path), 0))
    with pytest.raises(SystemExit) as ended:
        handle.join(LIMIT_S)
    assert ended.value.code == code


def test_another_runs_token_is_refused(controller: Any, job: TrainingJob, handle: TrainHandle, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("00" * 32)
    run_head(controller.ticket, job, handle)

    with pytest.raises(JoinRefused):
        handle.join(LIMIT_S)


@pytest.mark.parametrize("content", [None, "no hex"])
def test_a_token_that_cannot_be_read_is_told_at_once(
    job: TrainingJob, handle: TrainHandle, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "other"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match="other"):
        run_head({"run_id": "run-1", "address": "127.0.0.1:1", "token_file": str(path)}, job, handle)


def test_cuda_before_trainer_run_is_refused(
    job: TrainingJob, handle: TrainHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    with pytest.raises(UsageError, match=r"flodl\.detect_gpus"):
        run_head({"run_id": "run-1", "address": "127.0.0.1:1", "token_file": "none"}, job, handle)


@pytest.mark.parametrize(("code", "shown"), [(7, 1), (5, 5)])
def test_an_uncaught_failure_of_the_run_ends_the_script_with_one_line_and_its_code(
    controller: Any, tmp_path: Path, deadline_factor: float, code: int, shown: int
) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent("""
        import torch, flodl
        from torch.utils.data import TensorDataset
        handle = flodl.Trainer.builder(lambda d: 1, lambda p: 1, lambda m, b: 1)
        handle = handle.dataset(TensorDataset(torch.zeros(8))).batch_size(2).num_epochs(1).run()
        handle.join()
        """)
    )
    ticket = "head:" + str(controller.ticket).replace("'", '"')
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLODL_ROLE": ticket}
    with subprocess.Popen([sys.executable, str(path)], stderr=subprocess.PIPE, text=True, env=environment) as process:
        controller.say(RunEnded("failed", "rank 1 failed: ValueError: planted", "", 0, code))
        _, err = process.communicate(timeout=LIMIT_S * deadline_factor)

    assert err == f"{MARK}flodl: rank 1 failed: ValueError: planted\n"  # fdl launch has said it
    assert process.returncode == shown
