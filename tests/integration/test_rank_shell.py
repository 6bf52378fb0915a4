"""Real rank processes under the real cores: how they train, fail, hear and end."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flodl.core.actions import Severity
from flodl.messages import EpochReport, RankAlive, RankError, RankFinished, RankHello, RankReady, WindowDone
from flodl.spec.state import load_state
from tests.integration.one_host import ROOT, OneHost

JOB = ROOT / "tests" / "scripts" / "job.py"
SIZE, EPOCHS = 120, 2


@pytest.fixture
def play(tmp_path: Path, deadline_factor: float) -> Any:
    def make(ranks: int, *arguments: str) -> OneHost:
        common = ["--size", str(SIZE), "--epochs", str(EPOCHS), "--log", str(tmp_path)]
        return OneHost(ranks, [str(JOB), *common, *arguments], tmp_path, deadline_factor)

    return make


def reads(folder: Path) -> Counter[str]:
    return Counter(line for path in folder.glob("reads-*.log") for line in path.read_text().split())


def merged(host: OneHost) -> int:
    return sum(report.samples for report in host.head if isinstance(report, EpochReport))


@pytest.mark.parametrize("mode", ["cpu_cadence", "nccl_cadence", "cpu_sync", "nccl_sync", "cpu_async"])
def test_two_ranks_train_every_sample_once_and_end_with_the_same_weights(play: Any, tmp_path: Path, mode: str) -> None:
    host: OneHost = play(2, "--mode", mode)

    outcome = host.run()

    assert (outcome.status, outcome.exit_code) == ("completed", 0), outcome
    assert [rank.code for rank in host.ranks.values()] == [0, 0]
    assert reads(tmp_path) == {str(index): EPOCHS for index in range(SIZE)}
    assert merged(host) == SIZE * EPOCHS
    finals = [(tmp_path / f"final-{rank}.json").read_text() for rank in (0, 1)]
    assert finals[0] == finals[1]
    state = load_state(host.state, "completed")
    assert sum(tensor.numel() for tensor in state.params) == 4 * 16 + 16 + 16 + 16 + 16 + 1


@pytest.mark.parametrize(
    ("mode", "outer"),
    [
        ("cpu_cadence", "NesterovMomentum"),
        ("nccl_cadence", "NesterovMomentum"),
        ("cpu_sync", "SlowMomentum"),
        ("nccl_cadence", "SlowMomentum"),
        ("cpu_cadence", "SignOfMean"),
        ("cpu_async", "NesterovMomentum"),
    ],
)
def test_three_ranks_with_an_outer_optimizer_end_with_the_same_bits(
    play: Any, tmp_path: Path, mode: str, outer: str
) -> None:
    host: OneHost = play(3, "--mode", mode, "--outer", outer)

    outcome = host.run()

    assert (outcome.status, merged(host)) == ("completed", SIZE * EPOCHS), outcome
    finals = {(tmp_path / f"final-{rank}.json").read_text() for rank in (0, 1, 2)}
    assert len(finals) == 1
    assert not [record for record in host.records if record.event == "round_failed"]


def test_a_rank_says_hello_first_and_finished_last(play: Any) -> None:
    host: OneHost = play(1)

    host.run()

    said = [message for message in host.ranks[0].said if not isinstance(message, RankAlive)]
    assert isinstance(said[0], RankHello)
    assert said[0].pid == host.ranks[0].process.pid
    assert isinstance(said[1], RankReady)
    assert isinstance(said[-1], RankFinished)
    assert said[1].merge_single_tail  # the model has batch norm
    assert set(said[1].fingerprint) == {
        "model", "optimizer", "scheduler", "parameters", "buffers", "dataset", "outer_optimizer", "script",
    }  # fmt: skip


def test_it_beats_while_its_step_takes_long(play: Any) -> None:
    host: OneHost = play(1, "--epochs", "1", "--batch-size", "60", "--step-ms", "2500")

    assert host.run().exit_code == 0

    beats = [message.steps for message in host.ranks[0].said if isinstance(message, RankAlive)]
    assert beats.count(0) + beats.count(1) >= 4
    assert beats == sorted(beats)


def test_an_exception_in_a_step_is_told_with_its_traceback_before_the_process_ends(play: Any) -> None:
    host: OneHost = play(2, "--mode", "nccl_cadence", "--fault", "raise", "--fault-rank", "1")

    outcome = host.run()

    assert host.ranks[1].code == 1
    (told,) = [message for message in host.ranks[1].said if isinstance(message, RankError)]
    assert told.error == "ValueError: planted on rank 1"
    assert "raise_value_error" in told.traceback
    assert "ValueError: planted on rank 1" in host.ranks[1].stderr()
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.failure is not None
    assert outcome.failure.rank == 1


def test_an_exception_in_build_model_is_told_too(play: Any) -> None:
    host: OneHost = play(1, "--broken-model")

    assert host.run().status == "failed"
    (told,) = [message for message in host.ranks[0].said if isinstance(message, RankError)]
    assert told.error == "RuntimeError: planted in build_model"


def test_the_scripts_own_exit_code_is_kept(play: Any) -> None:
    host: OneHost = play(1, "--fault", "exit-3", "--fault-rank", "0")

    assert host.run().exit_code == 3
    assert not [message for message in host.ranks[0].said if isinstance(message, RankError)]


def test_ctrl_c_reaches_no_rank(play: Any) -> None:
    host: OneHost = play(1)
    host.watch = lambda rank, message: (
        os.kill(host.ranks[rank].process.pid, signal.SIGINT) if isinstance(message, WindowDone) else None
    )

    assert host.run().exit_code == 0


def test_a_rank_ends_at_once_when_its_daemon_is_gone(play: Any, wait_until: Any) -> None:
    host: OneHost = play(1, "--step-ms", "20", "--epochs", "50")
    gone: list[int] = []

    def cut(rank: int, message: object) -> None:
        if isinstance(message, WindowDone):
            host.ranks[rank].frames.close()
            gone.append(rank)

    host.watch = cut
    host.run()

    assert gone
    assert host.ranks[0].code == 1
    assert "flodl: rank 0: the host's daemon is gone" in host.ranks[0].stderr()


@pytest.mark.parametrize("mode", ["cpu_cadence", "nccl_cadence"])
def test_the_survivors_of_a_kill_finish_and_leave_in_order(play: Any, tmp_path: Path, mode: str) -> None:
    host: OneHost = play(3, "--mode", mode, "--fault", "kill", "--fault-rank", "2", "--step-ms", "5")

    outcome = host.run()

    assert (outcome.status, outcome.exit_code, len(outcome.losses)) == ("completed", 0, 1)
    assert [host.ranks[rank].code for rank in (0, 1, 2)] == [0, 0, -9]
    assert merged(host) == SIZE * EPOCHS
    assert (tmp_path / "final-0.json").read_text() == (tmp_path / "final-1.json").read_text()


# ------------------------------------------------------------------------------------------------------- flipped bits
@pytest.mark.parametrize("mode", ["cpu_cadence", "nccl_cadence"])
@pytest.mark.parametrize("outer", ["OuterAvg", "NesterovMomentum"])
def test_a_flipped_bit_is_named_with_rank_and_parameter_and_the_round_redone(
    play: Any, tmp_path: Path, mode: str, outer: str
) -> None:
    fault = ["--fault", "flip", "--fault-rank", "1", "--fault-step", "1"]
    host: OneHost = play(3, "--mode", mode, "--outer", outer, *fault)

    outcome = host.run()

    assert (outcome.status, outcome.losses, merged(host)) == ("completed", (), SIZE * EPOCHS)
    alerts = [record for record in host.records if record.severity is Severity.CRITICAL]
    assert [alert.event for alert in alerts] == ["digest_mismatch", "digest_difference"]
    version = alerts[0].fields["version"]
    assert alerts[0].detail == f"round {version}: rank 1 holds another consensus than the others"
    assert alerts[1].detail.startswith(f"round {version}: rank 1 differs from rank 0 in 0.bias (")
    commits = [record.fields["version"] for record in host.records if record.event == "commit"]
    assert commits == list(range(len(commits)))
    assert len({(tmp_path / f"final-{rank}.json").read_text() for rank in (0, 1, 2)}) == 1


@pytest.mark.parametrize("mode", ["cpu_cadence", "nccl_cadence"])
def test_a_rank_whose_memory_keeps_flipping_bits_is_lost_and_the_run_goes_on(
    play: Any, tmp_path: Path, mode: str
) -> None:
    host: OneHost = play(3, "--mode", mode, "--fault", "flip-on", "--fault-rank", "1", "--fault-step", "1")

    outcome = host.run()

    assert (outcome.status, [loss.rank for loss in outcome.losses]) == ("completed", [1])
    assert host.ranks[1].code == -9
    assert merged(host) == SIZE * EPOCHS
    assert (tmp_path / "final-0.json").read_text() == (tmp_path / "final-2.json").read_text()
