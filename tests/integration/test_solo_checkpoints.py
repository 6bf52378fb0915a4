"""Solo saves and goes on as a cluster does: the same files, the same words, and the bits of a run that went on."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import flodl
from flodl.checkpoint.bundle import BundleMeta, Stem
from flodl.checkpoint.reader import Bundle, find
from flodl.checkpoint.writer import BundleWriter
from flodl.core.position import SaveReason
from flodl.errors import CheckpointError, RankFailed
from flodl_cli.main import cli
from tests.runs import END_S, START_S, Fdl

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
SIZE, BATCH, EPOCHS = 97, 8, 4
BATCHES = 12
"""Of an epoch: the last sample joins the batch before it, for the model has batch norm."""


class Points:
    """Points of two classes, each with its index."""

    def __init__(self, size: int = SIZE) -> None:
        generator = torch.Generator().manual_seed(0)
        self.y = torch.arange(size) % 2
        self.x = torch.randn(size, 2, generator=generator) + self.y[:, None]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def build_model(device: torch.device) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)


class Step:
    """A training step that notes what it trains; ``meanwhile`` is called with the number of steps done before."""

    def __init__(self, meanwhile: Callable[[int], None] = lambda step: None) -> None:
        self.indices: list[int] = []
        self.steps = 0
        self._meanwhile = meanwhile

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._meanwhile(self.steps)
        self.steps += 1
        x, y, indices = batch
        self.indices += indices.tolist()
        return nn.functional.cross_entropy(model(x), y)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)


def step_lr(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.8)


def run(step: Step | None = None, optimizer: Any = sgd, build: Any = build_model, **knobs: Any) -> Any:
    given = {"batch_size": BATCH, "num_epochs": EPOCHS, **knobs}
    config = flodl.TrainerConfig(given.pop("dataset", Points()), **given)
    return flodl.Trainer.run(build, optimizer, step or Step(), config)


def fail(step: int) -> None:
    if step == 2 * BATCHES:
        raise ValueError("planted")


def assert_same(state: flodl.TrainedState, other: flodl.TrainedState) -> None:
    ours, theirs = state.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def rewrite(stem: Path, change: Callable[[BundleMeta], BundleMeta]) -> None:
    """Another meta file beside the same tensors."""
    bundle = find(stem)
    with BundleWriter(Stem.of(stem)) as writer:
        with writer.part(".fdl") as part:
            part.write(bundle.paths[".fdl"].read_bytes())
        changed = change(bundle.meta)
        writer.commit(changed.reason, changed.point)


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    return tmp_path / "ckpts" / "run"


@pytest.fixture
def complete(stem: Path) -> flodl.TrainedState:
    """What a whole run leaves at ``stem``."""
    state: flodl.TrainedState = run(save_path=stem).join(LIMIT_S)
    return state


# ---------------------------------------------------------------------------------------- as if it had not been broken
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("schedule", [None, one_cycle, step_lr])
def test_resumed_run_ends_with_the_bits_of_one_that_went_on(stem: Path, optimizer: Any, schedule: Any) -> None:
    knobs = {"optimizer": optimizer, "scheduler_fn": schedule}
    whole = run(**knobs).join(LIMIT_S)
    with pytest.raises(ValueError, match="planted"):
        run(Step(fail), save_path=stem, checkpoint_at_epoch=2, **knobs).join(LIMIT_S)
    epochs: list[int] = []

    resumed = run(save_path=stem, resume_from=stem, metrics_fn=lambda m: epochs.append(m.epoch), **knobs).join(LIMIT_S)

    assert_same(resumed, whole)
    assert (epochs, resumed.epochs, resumed.outcome) == ([2, 3], EPOCHS, "completed")
    position = find(stem).meta.point.position
    assert (position.epoch, position.covered, position.global_step) == (EPOCHS, (), EPOCHS * BATCHES)


def test_other_rate_of_the_script_is_told_once(stem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(num_epochs=2, save_path=stem).join(LIMIT_S)
    capsys.readouterr()

    run(optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), resume_from=stem).join(LIMIT_S)

    told = [line for line in capsys.readouterr().err.splitlines() if "resume_from keeps" in line]
    assert told == ["flodl: warning: resume_from keeps the optimizer's lr 0.05 (the script asks for 0.01)"]


def test_more_epochs_go_on_for_longer(stem: Path) -> None:
    run(num_epochs=2, save_path=stem).join(LIMIT_S)

    assert_same(run(resume_from=stem).join(LIMIT_S), run().join(LIMIT_S))


# ------------------------------------------------------------------------------------------------------------- Ctrl-C
@pytest.fixture
def ctrl_c(wait_until: Callable[..., Any]) -> Iterator[Callable[[], None]]:
    """Presses it, and returns once the script has noticed."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        wait_until(lambda: signal.getsignal(signal.SIGINT) is signal.default_int_handler, LIMIT_S, "the handler")

    yield press
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_saves_and_what_is_left_of_the_epoch_is_trained_once(
    stem: Path, ctrl_c: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    size = 4003
    first = Step(lambda step: ctrl_c() if step == 20 else None)
    stopped = run(first, dataset=Points(size), num_epochs=2, save_path=stem).join(LIMIT_S)
    meta = find(stem).meta
    second = Step()
    resumed = run(second, dataset=Points(size), num_epochs=2, resume_from=stem).join(LIMIT_S)

    assert (stopped.outcome, stopped.epochs) == ("stopped", 0)
    assert (meta.reason, meta.point.position.epoch) == (SaveReason.GRACEFUL_SHUTDOWN, 0)
    assert 20 <= first.steps < size // BATCH
    assert sum(span.count for part in meta.point.position.covered for span in part.spans) == len(first.indices)
    assert meta.point.position.global_step == first.steps
    assert Counter(first.indices + second.indices) == dict.fromkeys(range(size), 2)
    assert_same(resumed, run(dataset=Points(size), num_epochs=2).join(LIMIT_S))
    told = capsys.readouterr().err
    assert f"flodl: version {meta.point.position.version} is saved: {stem}.fdl (GracefulShutdown)\n" in told
    assert f"flodl: resuming from {stem}.fdl: version {meta.point.position.version}, epoch 1 of 2\n" in told


def test_ctrl_c_ends_a_run_that_is_still_reading(
    stem: Path, complete: flodl.TrainedState, ctrl_c: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(path: Path) -> Bundle:
        ctrl_c()
        gate.wait(LIMIT_S)
        return find(path)

    monkeypatch.setattr("flodl.rank.solo_saves.find", slow)

    with pytest.raises(RankFailed, match=r"stopped by Ctrl-C"):
        run(resume_from=stem).join(LIMIT_S / 2)
    gate.set()


# ---------------------------------------------------------------------------------------------------------- the files
def test_checkpoint_says_what_the_user_chose_and_verifies(stem: Path, complete: flodl.TrainedState) -> None:
    elche = flodl.ElCheConfig.cpu_cadence().anchor(5)
    run(save_path=stem, elche=elche).join(LIMIT_S)

    verified = CliRunner().invoke(cli, ["checkpoint", "verify", str(stem)])

    assert (verified.exit_code, "every byte as it was written" in verified.output) == (0, True)
    assert sorted(os.listdir(stem.parent)) == ["run.fdl", "run.meta.json"]
    meta = find(stem).meta
    assert meta.point.settings.cadence == elche.settings()
    assert (meta.point.cadence, meta.reason, meta.point.position.world_size) == (None, SaveReason.CHECKPOINT, 1)
    assert meta.versions.keys() == {"flodl", "python", "torch"}


def test_relative_stem_counts_from_the_folder_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stem: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def leave(device: torch.device) -> nn.Module:
        os.chdir(tmp_path / "elsewhere")
        return build_model(device)

    run(save_path="ckpts/run", build=leave).join(LIMIT_S)
    assert find(stem).meta.point.position.epoch == EPOCHS

    monkeypatch.chdir(tmp_path)
    assert run(resume_from="ckpts/run.fdl", build=leave).join(LIMIT_S).epochs == EPOCHS


def test_weights_that_the_script_saves_do_not_take_the_place_of_the_runs_checkpoint(
    stem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(epoch: int, worker: flodl.Worker) -> None:
        flodl.save_checkpoint(worker.model, stem)

    run(save_path=stem, checkpoint_at_epoch=2, epoch_fn=save).join(LIMIT_S)

    assert find(stem).meta.point.position.epoch == EPOCHS
    told = [line for line in capsys.readouterr().err.splitlines() if "CheckpointError: " in line]
    assert len(told) >= EPOCHS
    assert told[0].endswith(f"{stem}.fdl is where this run saves its checkpoints (save_path); choose another name")


def test_nothing_left_to_do_trains_nothing(
    stem: Path, complete: flodl.TrainedState, capsys: pytest.CaptureFixture[str]
) -> None:
    step, before = Step(), find(stem).meta

    again = run(step, save_path=stem, resume_from=stem).join(LIMIT_S)

    assert_same(again, complete)
    assert (again.outcome, again.epochs, step.steps) == ("completed", EPOCHS, 0)
    assert f"flodl: nothing left to do: all {EPOCHS} epochs are in {stem} already\n" in capsys.readouterr().err
    assert find(stem).meta == before


# --------------------------------------------------------------------------------------------------- what is refused
def refused(step: Step | None = None, **knobs: Any) -> str:
    step = step or Step()
    with pytest.raises(CheckpointError) as raised:
        run(step, **knobs).join(LIMIT_S)
    assert step.steps == 0
    return str(raised.value)


def test_damaged_checkpoint_is_refused(stem: Path, complete: flodl.TrainedState) -> None:
    path = stem.with_suffix(".fdl")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    assert refused(resume_from=stem).startswith(f"{path} is damaged: its SHA-256 is ")
    assert refused(resume_from=f"{stem}3").startswith(f"there is no checkpoint {stem}3: run3.meta.json does not exist")


def test_other_model_or_optimizer_is_refused(stem: Path, complete: flodl.TrainedState) -> None:
    def wider(device: torch.device) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))

    assert refused(resume_from=stem, build=wider).startswith(
        f"rank 0 cannot load {stem}: CheckpointError: 0.weight is float32 [8, 2] in the saved state, and float32 [9, 2]"
    )
    assert "the optimizer is SGD in the saved state, and Adam in" in refused(resume_from=stem, optimizer=adam)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch_size": 4}, "batch_size (8 at the save, 4 now)"),
        ({"elche": flodl.ElCheConfig.cpu_async()}, "mode (nccl_cadence at the save, cpu_async now)"),
    ],
)
def test_other_batch_size_or_mode_goes_on_with_reshape_only(stem: Path, changed: Any, words: str) -> None:
    run(num_epochs=2, save_path=stem).join(LIMIT_S)
    step = Step()

    assert refused(resume_from=stem, **changed) == (
        f"{stem}.fdl does not fit this run: {words}: to go on all the same, resume with reshape=True"
    )
    assert run(step, resume_from=stem, reshape=True, **changed).join(LIMIT_S).epochs == EPOCHS
    assert Counter(step.indices) == dict.fromkeys(range(SIZE), 2)


def test_what_would_lose_track_of_samples_is_refused_even_so(stem: Path, complete: flodl.TrainedState) -> None:
    said = refused(resume_from=stem, reshape=True, seed=3)

    assert "seed (0 at the save, 3 now): which samples are trained would not be known any more" in said


def test_checkpoint_of_several_ranks_goes_on_with_reshape_only(stem: Path, complete: flodl.TrainedState) -> None:
    def of_three(meta: BundleMeta) -> BundleMeta:
        return replace(meta, point=replace(meta.point, position=replace(meta.point.position, world_size=3)))

    rewrite(stem, of_three)

    assert "ranks (3 at the save, 1 now): to go on all the same, resume with" in refused(resume_from=stem, num_epochs=6)
    assert run(resume_from=stem, reshape=True, num_epochs=6).join(LIMIT_S).epochs == 6


def test_place_that_takes_nothing_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "ckpts").write_text("")
    stem = tmp_path / "ckpts" / "run"

    assert refused(save_path=stem) == (
        f"save_path {stem} cannot be used: Not a directory: a folder on the way there is a file: save elsewhere"
    )


# --------------------------------------------------------------------------------------------- disks that take nothing
def test_disk_that_takes_nothing_is_told_of_every_time_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stem = tmp_path / "ckpts" / "run"
    step = Step(lambda step: None if step else (tmp_path / "ckpts").write_text(""))

    with pytest.raises(RankFailed) as raised:
        run(step, save_path=stem, checkpoint_every=1).join(LIMIT_S)

    said = str(raised.value)
    assert said.startswith("version ")
    assert said.endswith(
        f" could not be saved: {stem}: the checkpoint cannot be written: File exists: a folder on the way there is a "
        "file: save elsewhere"
    )
    assert step.steps == EPOCHS * BATCHES
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told[-1] == f"checkpoint_failed: {said}"
    assert 1 < len(told) <= EPOCHS


def test_failed_save_leaves_the_checkpoint_before(stem: Path, complete: flodl.TrainedState) -> None:
    before = find(stem).meta
    target = stem.parent / "elsewhere"

    def move(step: int) -> None:
        if not step:
            stem.with_suffix(".fdl").rename(target)
            stem.with_suffix(".fdl").symlink_to(target)

    with pytest.raises(RankFailed, match=f"is a symbolic link to {target}; save to that place itself"):
        run(Step(move), save_path=stem).join(LIMIT_S)

    assert find(stem).meta == before


def test_disk_that_hangs_is_given_up(stem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, step = threading.Event(), Step()
    enter = BundleWriter.__enter__

    def hang(self: BundleWriter) -> BundleWriter:
        gate.wait(LIMIT_S)
        return enter(self)

    monkeypatch.setattr(BundleWriter, "__enter__", hang)
    monkeypatch.setattr("flodl.core.saving.SAVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("flodl.rank.solo_saves.CLOSE_S", 0.1)

    with pytest.raises(RankFailed, match="could not be saved: rank 0: did not deliver within 0"):
        run(step, save_path=stem).join(LIMIT_S)

    assert step.steps == EPOCHS * BATCHES
    gate.set()


# ------------------------------------------------------------------------------------------- in processes of their own
SCRIPT = """
    import sys
    import torch
    from torch import nn
    import flodl

    class Points:
        def __len__(self): return 101
        def __getitem__(self, index): return torch.tensor([index % 7, 1.0])

    def step(model, batch):
        return model(batch).square().mean()

    def build(device):
        torch.manual_seed(1)
        return nn.Linear(2, 1).to(device)

    flags = dict(each.split("=") for each in sys.argv[1:])
    run = flodl.Trainer.builder(build, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), step)
    run = run.dataset(Points()).batch_size(4).num_epochs(int(flags["epochs"])).elche(flodl.ElCheConfig.cpu_cadence())
    run = run.outer_optimizer(flodl.SlowMomentum()).save_path("ckpts/run")
    if "resume" in flags:
        run = run.resume_from("ckpts/run", reshape="reshape" in flags)
    if __name__ == "__main__":
        print(run.run().join().epochs)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_missing_checkpoint_ends_the_script_with_its_own_code(script: Path, deadline_factor: float) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLODL_SOLO": "1"}
    command = [sys.executable, script, "epochs=2", "resume=1"]

    done = subprocess.run(
        command,
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S * deadline_factor,
        check=False,
    )

    assert (done.returncode, done.stdout) == (6, ""), done.stderr
    assert f"CheckpointError: {script.parent / 'ckpts'} cannot be read: No such file or directory" in done.stderr


def test_solo_and_cluster_go_on_from_each_other(fdl: Fdl, script: Path) -> None:
    stem = fdl.folder / "ckpts" / "run"
    fdl.env["FLODL_SOLO"] = "1"

    alone = fdl.python(script, "epochs=1")
    assert (alone.returncode, alone.stdout) == (0, "1\n"), alone.stderr
    two = fdl.launch("--local", 2, script, "epochs=2", "resume=1", "reshape=1")
    assert two.wait(START_S + END_S) == 0, two.story()
    position = find(stem).meta.point.position
    assert (position.epoch, position.world_size) == (2, 2)
    again = fdl.python(script, "epochs=3", "resume=1", "reshape=1")
    assert (again.returncode, again.stdout) == (0, "3\n"), again.stderr
    one = fdl.launch("--local", 1, script, "epochs=4", "resume=1")

    assert one.wait(START_S + END_S) == 0, one.story()
    assert find(stem).meta.point.position.epoch == 4
    one.wait_until_clean()
