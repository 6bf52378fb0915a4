"""Hosts that come to a run that trains, and leave it: real controllers, daemons and ranks on this machine."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import CLEAN_S, END_S, START_S, Fdl, Joined, Launched
from tests.witness import witness_run

pytestmark = pytest.mark.timeout(240)

SIZE = 1603
EPOCHS = 3
GRACE_S = 5.0
SCRIPT = """
import time, torch, flodl
from torch import nn
from torch.utils.data import TensorDataset

def step(model, batch):
    time.sleep(0.02)
    return model(batch[0]).square().mean()

if __name__ == "__main__":
    flodl.Trainer.builder(
        lambda device: nn.Linear(2, 1).to(device), lambda parameters: torch.optim.SGD(parameters, 0.1), step
    ).dataset(TensorDataset(torch.ones({size}, 2))).batch_size(4).num_epochs(10000).run().join()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def finite(fdl: Fdl, log: Path, epochs: int = EPOCHS, **flags: object) -> Launched:
    """About 400 batches an epoch, at 25 a second and rank."""
    run = fdl.job(step_ms=40, size=SIZE, batch_size=4, epochs=epochs, log=log, **flags)
    run.wait_for_training()
    return run


def outcome(run: Launched) -> dict[str, Any]:
    found = run.read("outcome.json")
    assert found is not None
    return found


def ranks(run: Launched) -> dict[int, dict[str, Any]]:
    return {rank["rank"]: rank for rank in (run.read("state.json") or {}).get("ranks", [])}


def wait_until_it_steps(fdl: Fdl, run: Launched, guest: Joined, rank: int = 2) -> None:
    """Return once what the rank has trained is merged."""
    guest.wait_for_text(f"rank {rank} takes part")
    fdl.wait_until(lambda: (ranks(run)[rank]["share"] or 0) > 0, START_S, guest.story)


def told(guest: Joined) -> list[str]:
    """What the command said of its stay, but for the moment in which a rank is ready: that may be too short to see."""
    return [line for line in guest.stdout.splitlines() if "is ready" not in line]


# ------------------------------------------------------------------------------------------------------ coming, staying
@pytest.mark.parametrize(
    "mode", ["cpu_cadence", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("cpu_async", "nccl_cadence"))]
)
def test_host_that_joins_trains_with_the_others_and_leaves_with_the_run(fdl: Fdl, log: Path, mode: str) -> None:
    run = finite(fdl, log, mode=mode)

    guest = fdl.join(run, run.run_id, "--devices", "cpu", "--host", "extra")
    wait_until_it_steps(fdl, run, guest)

    assert run.wait() == 0, run.story()
    assert guest.wait() == 0, guest.story()
    told_all = told(guest)
    assert told_all[:-1] == [f"joined run {run.run_id} as host extra: starting rank 2", "rank 2 takes part"]
    completed = f"host extra has left: run {run.run_id} completed"  # where its last look came in time to see that
    assert told_all[-1] in (completed, "host extra has left with the run")
    seen = witness_run(run.folder, log, size=SIZE, epochs=EPOCHS)
    assert (seen.faults, seen.samples, seen.ranks) == ([], EPOCHS * SIZE, [0, 1, 2])
    run.wait_until_clean()


def test_host_joins_from_another_folder_by_address_and_token(fdl: Fdl, log: Path, tmp_path: Path) -> None:
    """As from another machine: nothing of the run's directory is used, and the project is a copy."""
    run = fdl.job(step_ms=40, size=SIZE, batch_size=4, epochs=10_000)
    run.wait_for_training()
    copy, token = tmp_path / "copy", tmp_path / "run.token"
    copy.mkdir()
    token.touch(0o600)
    token.write_bytes((run.folder / "token").read_bytes())
    address, port = run.address

    guest = fdl.join(
        run, f"{address}:{port}", "--token-file", token, "--devices", "cpu,cpu", "--host", "far", "--path", copy
    )
    wait_until_it_steps(fdl, run, guest, rank=3)

    assert token.read_text() not in " ".join(run.leftovers())
    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    assert guest.wait() == 0, guest.story()
    assert told(guest)[-1] == f"host far has left: run {run.run_id} stopped: stopped by fdl stop"
    assert (tmp_path / "state" / "joins" / f"{run.run_id}-far.log").exists()
    run.wait_until_clean()


# ----------------------------------------------------------------------------------------------------- leaving in order
@pytest.mark.parametrize("how", ["drain", pytest.param("interrupt", marks=pytest.mark.long)])
def test_host_that_leaves_in_order_loses_nothing(fdl: Fdl, log: Path, how: str) -> None:
    run = finite(fdl, log)
    guest = fdl.join(run, "--devices", "cpu", "--host", "extra")
    wait_until_it_steps(fdl, run, guest)

    if how == "drain":
        assert fdl.call("drain", "extra", timeout_s=END_S).returncode == 0
    else:
        guest.process.send_signal(signal.SIGINT)

    assert guest.wait() == 0, guest.story()
    assert told(guest)[-1] == "host extra has left in order; the run goes on"
    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, size=SIZE, epochs=EPOCHS, lost=[2])
    assert (seen.faults, seen.samples) == ([], EPOCHS * SIZE)
    assert outcome(run)["losses"] == []
    run.wait_until_clean()


@pytest.mark.long
def test_host_of_the_launch_may_leave_to_one_that_joined(fdl: Fdl, log: Path) -> None:
    run = finite(fdl, log)
    guest = fdl.join(run, "--devices", "cpu", "--host", "extra")
    wait_until_it_steps(fdl, run, guest)

    assert fdl.call("drain", "localhost", timeout_s=END_S).returncode == 0

    assert run.wait(2 * END_S) == 0, run.story()
    assert guest.wait() == 0, guest.story()
    seen = witness_run(run.folder, log, size=SIZE, epochs=EPOCHS, lost=[0, 1])
    assert (seen.faults, seen.samples) == ([], EPOCHS * SIZE)
    assert outcome(run)["losses"] == []
    run.wait_until_clean()


# ------------------------------------------------------------------------------------------------------ leaving at once
@pytest.mark.long
def test_killed_daemon_of_a_host_that_joined_costs_the_run_nothing_but_that_host(fdl: Fdl, log: Path) -> None:
    run = finite(fdl, log)
    guest = fdl.join(run, "--devices", "cpu", "--host", "extra")
    wait_until_it_steps(fdl, run, guest)

    os.kill(guest.daemon_pid(), signal.SIGKILL)

    assert guest.wait() == 1, guest.story()
    assert "its daemon ended by SIGKILL; the run goes on without it" in guest.stderr
    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, size=SIZE, epochs=EPOCHS, lost=[2])
    assert (seen.faults, seen.samples) == ([], EPOCHS * SIZE)
    run.wait_until_clean()


@pytest.mark.parametrize("how", [pytest.param("signalled twice", marks=pytest.mark.long), "killed"])
def test_daemon_ends_with_its_command(fdl: Fdl, how: str) -> None:
    run = fdl.job(step_ms=500, size=SIZE, batch_size=4, epochs=10_000, anchor=10, min_anchor=10)
    run.wait_for_training()
    guest = fdl.join(run, "--devices", "cpu", "--host", "extra")
    guest.wait_for_text("rank 2 takes part")
    daemon = guest.daemon_pid()

    if how == "killed":
        guest.process.kill()
    else:
        guest.process.send_signal(signal.SIGTERM)
        guest.wait_for_text("leaving in order at the next commit")
        guest.process.send_signal(signal.SIGTERM)
        assert guest.wait() == 143, guest.story()

    fdl.wait_until(lambda: not psutil.pid_exists(daemon), GRACE_S + CLEAN_S, guest.story)
    fdl.wait_until(lambda: ranks(run)[2]["state"] == "dead", END_S, guest.story)
    assert run.is_live
    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)
    run.wait_until_clean()


# ------------------------------------------------------------------------------------------------------------- refusals
def test_host_that_does_not_fit_is_told_why(fdl: Fdl, tmp_path: Path) -> None:
    run = fdl.job(step_ms=40, size=SIZE, batch_size=4, epochs=10_000)
    run.wait_for_training()
    wrong = tmp_path / "wrong.token"
    wrong.touch(0o600)
    wrong.write_text("00" * 32)
    address, port = run.address
    by_address = (f"{address}:{port}", "--devices", "cpu", "--token-file")

    for arguments, code, words in [
        (["--devices", "cpu", "--host", "localhost"], 4, "host localhost has already joined this run"),
        (["--devices", "7"], 3, "no GPU 7"),
        (["--devices", "cpu", "--path", tmp_path / "gone"], 2, "gone"),
        ([*by_address, wrong], 4, "the controller's proof is wrong: it holds another token"),
        ([*by_address, run.folder / "state.json"], 2, "not a token"),
        (["127.0.0.1:1", "--devices", "cpu", "--token-file", wrong], 4, "connect"),
    ]:
        done = fdl.call("join", *map(str, arguments))
        assert (done.returncode, words in done.stderr) == (code, True), (arguments, done.stderr)
    (refused,) = run.events("peer_refused")
    assert "the controller's proof is wrong: it holds another token (ours is another run's" in refused["detail"]
    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)


def test_host_with_another_training_is_sent_away_and_told_what_differs(fdl: Fdl, tmp_path: Path) -> None:
    for name, size in (("here", 400), ("there", 401)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT.format(size=size))
    run = fdl.launch("--local", 1, "train.py", folder=tmp_path / "here")
    run.wait_for_training()

    guest = fdl.join(run, "--devices", "cpu", "--host", "extra", "--path", tmp_path / "there")

    assert guest.wait() == 4, guest.story()
    differs = "rank 0 on localhost and rank 1 on extra do not agree on: dataset_size (400 against 401)"
    assert f"host extra cannot take part: rank 1: {differs}" in guest.stderr
    fdl.wait_until(lambda: [each["state"] for each in ranks(run).values()] == ["live", "dead"], START_S, guest.story)
    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)
    run.wait_until_clean()


def test_host_whose_script_fails_is_shown_what_it_said_last(fdl: Fdl, tmp_path: Path) -> None:
    for name, line in (("here", ""), ("there", 'raise ValueError("broken here")')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(line + SCRIPT.format(size=400))
    run = fdl.launch("--local", 1, "train.py", folder=tmp_path / "here")
    run.wait_for_training()

    guest = fdl.join(run, "--devices", "cpu", "--host", "extra", "--path", tmp_path / "there")

    assert guest.wait() == 4, guest.story()
    assert "host extra cannot take part: rank 1: exited with code 1" in guest.stderr
    assert "\nlast lines of rank 1's stderr:\n  | " in guest.stderr
    assert guest.stderr.rstrip().endswith("  | ValueError: broken here")
    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)
    run.wait_until_clean()


@pytest.mark.long
def test_host_whose_last_rank_is_lost_leaves_and_may_join_again(fdl: Fdl, log: Path) -> None:
    run = finite(fdl, log)
    guest = fdl.join(run, "--devices", "cpu", "--host", "extra")
    wait_until_it_steps(fdl, run, guest)

    run.kill("rank2")

    assert guest.wait() == 1, guest.story()
    assert "host extra has left, every rank of it is lost; the run goes on: rank 2: ended by signal 9" in guest.stderr
    assert run.events("host_lost") == []
    again = fdl.join(run, "--devices", "cpu", "--host", "extra")
    again.wait_for_text("rank 3 takes part")
    assert run.wait() == 0, run.story()
    assert again.wait() == 0, again.story()
    seen = witness_run(run.folder, log, size=SIZE, epochs=EPOCHS, lost=[2])
    assert (seen.faults, seen.samples) == ([], EPOCHS * SIZE)
    run.wait_until_clean()
