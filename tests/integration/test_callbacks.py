"""The script's functions behind an epoch in whole runs: once each, on one rank, with the consensus."""

import signal
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch

import flodl
from flodl.spec.state import load_state
from tests.runs import JOB, Fdl, Launched
from tests.witness import witness_run

pytestmark = pytest.mark.timeout(240)

THREE = ("--local", 3)
SIZE, EPOCHS = 103, 4
MODES = [
    "cpu_cadence",
    *(pytest.param(mode, marks=pytest.mark.long) for mode in ("cpu_async", "nccl_cadence", "cpu_sync")),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def calls(log: Path) -> dict[str, list[list[str]]]:
    """By rank: which function, behind which epoch, and what it saw."""
    return {
        path.stem.removeprefix("calls-"): [line.split() for line in path.read_text().splitlines()]
        for path in sorted(log.glob("calls-*.log"))
    }


def start(fdl: Fdl, log: Path, **flags: object) -> Launched:
    given: dict[str, object] = {"size": SIZE, "batch_size": 4, "epochs": EPOCHS, "step_ms": 5, "every": 2, "log": log}
    return fdl.job(options=THREE, callbacks=True, **{**given, **flags})


@pytest.mark.parametrize("mode", MODES)
def test_functions_run_once_behind_their_epochs_with_the_consensus(fdl: Fdl, log: Path, mode: str) -> None:
    run = start(fdl, log, mode=mode)

    assert run.wait() == 0, run.story()
    ((_, made),) = calls(log).items()
    assert Counter((kind, int(epoch)) for kind, epoch, _ in made) == Counter(
        [("epoch", epoch) for epoch in range(EPOCHS)] + [("checkpoint", 1), ("checkpoint", 3)]
    )
    final = load_state(run.folder / "final.safetensors", "")
    saved = load_state(log / "model-3.fdl", "")
    assert all(own.equal(other) for own, other in zip(final.params, saved.params, strict=True)), "it is the consensus"
    assert len({seen for kind, epoch, seen in made if epoch == "3"}) == 1
    assert set(safetensors.torch.load_file(log / "model-1.fdl")) == set(final.state_dict())
    assert witness_run(run.folder, log, size=SIZE, epochs=EPOCHS).faults == []
    run.wait_until_clean()


def test_function_that_raises_is_an_alert_and_training_goes_on(fdl: Fdl, log: Path) -> None:
    run = start(fdl, log, callback_fault="raise")

    assert run.wait() == 0, run.story()
    rank = (log / "struck").read_text()
    detail = f"epoch_fn failed on rank {rank} after epoch 2: ValueError: planted on rank {rank}"
    assert [event["detail"] for event in run.events("callback_failed")] == [detail]
    assert f"fdl: callback_failed: {detail}" in run.stdout
    assert "raise ValueError" in run.log(f"rank{rank}.stderr.log")
    assert witness_run(run.folder, log, size=SIZE, epochs=EPOCHS).faults == []
    run.wait_until_clean()


@pytest.mark.parametrize("mode", MODES)
def test_rank_that_is_killed_in_a_function_is_replaced_by_another(fdl: Fdl, log: Path, mode: str) -> None:
    run = start(fdl, log, mode=mode, callback_fault="kill")

    assert run.wait() == 0, run.story()
    struck = (log / "struck").read_text()
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert [(str(loss["rank"]), loss["signal"]) for loss in outcome["losses"]] == [(struck, signal.SIGKILL)]
    by_others = Counter(
        (kind, int(epoch)) for rank, made in calls(log).items() if rank != struck for kind, epoch, _ in made
    )
    assert by_others["epoch", 1] == 1
    assert by_others["checkpoint", 1] == by_others["checkpoint", 3] == 1
    assert witness_run(run.folder, log, size=SIZE, epochs=EPOCHS, lost=[int(struck)]).faults == []
    run.wait_until_clean()


def test_solo_calls_them_too(fdl: Fdl, log: Path) -> None:
    flags = ["--size", SIZE, "--batch-size", 4, "--epochs", EPOCHS, "--every", 2, "--log", log, "--callbacks"]
    done = fdl.python(JOB, *flags, "--callback-fault", "raise")

    assert done.returncode == 0, done.stderr
    assert "ValueError: planted on rank solo" in done.stderr
    assert [(kind, int(epoch)) for kind, epoch, _ in calls(log)["solo"]] == [
        ("epoch", 0), ("epoch", 1), ("checkpoint", 1), ("epoch", 2), ("epoch", 3), ("checkpoint", 3),
    ]  # fmt: skip
    assert isinstance(load_state(log / "model-3.fdl", ""), flodl.TrainedState)
