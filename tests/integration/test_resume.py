"""Runs that go on from a checkpoint do what the run that was never broken off would have done; what does not fit is
refused before anybody trains.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flodl.checkpoint.bundle import BundleMeta
from flodl.checkpoint.reader import find
from flodl.core.elche import Phase
from flodl.core.position import SaveReason
from tests.bundles import weights, write_bundle
from tests.conftest import Figures
from tests.runs import CLEAN_S, END_S, ROOT, START_S, Fdl, Launched
from tests.witness import checkpoint_faults, witness_run

pytestmark = pytest.mark.timeout(240)

MODES = ["nccl_cadence", "cpu_cadence", "nccl_sync", "cpu_sync", "cpu_async"]
EXAMPLES = ROOT / "tests" / "scripts" / "examples.py"
SIZE, BATCH = 4003, 8
GRACE_S = 5.0
EPOCHS = 2
STRIDE = 3
"""Batches of all ranks while one does a step, about; a rank runs ahead of what is merged when a stop cuts windows."""
SEVERAL = 8
"""Versions behind which the cadence is Stable: five calibrations."""
TOLERANCE = 0.02
"""Of the first window's loss: every rank has its own moments of Adam, and one rank's are saved."""


@dataclass
class Part:
    """One run of several that go on from each other, with its notes."""

    run: Launched
    log: Path

    @property
    def folders(self) -> tuple[Path, Path]:
        return self.run.folder, self.log

    def scheduled(self, rank: int) -> list[int]:
        """How often the scheduler had been stepped at each step of the rank; from its learning rate."""
        rates = (self.log / f"rates-{rank}.log").read_text().split()
        return [round(1e-2 / float(rate)) - 1 for rate in rates]


@dataclass
class Story:
    """The parts of one training, in the folder of the command line; its checkpoint is ``ckpts/run``."""

    fdl: Fdl
    mode: str = "cpu_cadence"

    @property
    def stem(self) -> Path:
        return self.fdl.folder / "ckpts" / "run"

    @property
    def meta(self) -> BundleMeta:
        return find(self.stem).meta

    def begin(self, ranks: int = 3, **flags: Any) -> Part:
        log = self.fdl.folder / f"log-{len(self.fdl.launched)}"
        log.mkdir()
        common = {"mode": self.mode, "batch_size": BATCH, "anchor": 4, "max_anchor": 16, "decay": True}
        mine = {"size": SIZE, "epochs": EPOCHS, "note_rates": True, "log": log, **common, **flags}
        return Part(self.fdl.job(options=("--local", ranks), **mine), log)

    def stop_midway(self) -> Part:
        """Three ranks, stopped in the middle of the first epoch."""
        part = self.begin(save=self.stem, step_ms=8)
        part.run.wait_for_training(SEVERAL)
        assert self.fdl.call("stop", timeout_s=END_S).returncode == 0
        assert part.run.wait(END_S) == 143, part.run.story()
        position = self.meta.point.position
        assert self.meta.reason is SaveReason.GRACEFUL_SHUTDOWN
        assert (position.epoch, position.version) == (0, part.run.commits()[-1]["version"])
        assert checkpoint_faults(position, SIZE, part.run.folder) == []
        return part

    def resume(self, ranks: int = 3, **flags: Any) -> Part:
        return self.begin(ranks, resume=self.stem, **flags)


# --------------------------------------------------------------------------------------------------------- going on
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "nccl_cadence" else pytest.mark.long) for mode in MODES]
)
def test_run_stopped_in_an_epoch_goes_on_with_what_is_left_of_it(fdl: Fdl, mode: str) -> None:
    story = Story(fdl, mode)
    first = story.stop_midway()
    point = story.meta.point

    second = story.resume()

    assert second.run.wait() == 0, second.run.story()
    seen = witness_run(*second.folders, size=SIZE, epochs=EPOCHS, before=[first.folders])
    assert (seen.faults, seen.samples, seen.ranks) == ([], EPOCHS * SIZE, [0, 1, 2])
    merged = sum(span.count for part in point.position.covered for span in part.spans) // BATCH
    furthest = max(first.scheduled(rank)[-1] for rank in range(3)) + 2 * STRIDE
    for rank in range(3):
        assert merged <= second.scheduled(rank)[0] <= max(merged, furthest), "the schedule goes on where it was"
        assert [each.scheduled(rank) for each in (first, second)] == [
            sorted(each.scheduled(rank)) for each in (first, second)
        ]
    if not mode.endswith("sync"):
        assert point.cadence is not None
        fields = second.run.events("cadence")[0]["fields"]
        assert fields["anchor"] == point.cadence.elche.anchor
        assert Phase[fields["phase"].upper()] >= Phase.STABLE
    second.run.wait_until_clean()


# --------------------------------------------------------------------------------------- as if it had not been broken
@pytest.mark.parametrize("mode", ["nccl_cadence", pytest.param("cpu_cadence", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("task", "seed"),
    [
        ("digits", 0),
        *(
            pytest.param(task, seed, marks=pytest.mark.long)
            for task in ("digits", "transformer")
            for seed in range(3)
            if (task, seed) != ("digits", 0)
        ),
    ],
)
def test_first_window_after_a_resume_has_the_loss_of_the_run_that_went_on(
    fdl: Fdl, figures: Figures, mode: str, task: str, seed: int
) -> None:
    """All ranks' windows have one length, so that both train the same samples in them."""
    stem = fdl.folder / "ckpts" / "run"
    splits, epoch = (2, 3) if task == "digits" else (8, 4)  # behind a part of a pass: in the middle of the data
    flags = {"task": task, "seed": seed, "mode": mode, "splits": splits}

    went_on = launch_example(fdl, save=stem, at_epoch=epoch, step_ms=5, **flags)
    went_on.run.wait_for_event("checkpoint")
    point = find(stem).meta.point
    version = point.position.version
    went_on.run.wait_for_training(version + 2)
    abort(fdl, went_on)
    resumed = launch_example(fdl, resume=stem, step_ms=5, **flags)
    resumed.run.wait_for_training(version + 2)
    abort(fdl, resumed)

    assert find(stem).meta.point == point, "an abort saves nothing"
    assert spans_of(resumed, version + 1) == spans_of(went_on, version + 1), "other samples"
    theirs, ours = (steps_of_window(each, version + 1) for each in (went_on, resumed))
    assert [rate for _, rate in ours] == pytest.approx([rate for _, rate in theirs])
    before, after = (sum(loss for loss, _ in steps) / len(steps) for steps in (theirs, ours))
    figures["relative_difference"] = abs(after / before - 1)
    assert abs(after / before - 1) <= TOLERANCE, (before, after)
    assert Phase[resumed.run.events("cadence")[0]["fields"]["phase"].upper()] >= Phase.STABLE


def launch_example(fdl: Fdl, **flags: Any) -> Part:
    log = fdl.folder / f"log-{len(fdl.launched)}"
    log.mkdir()
    return Part(fdl.job(options=("--local", 3), script=EXAMPLES, log=log, **flags), log)


def abort(fdl: Fdl, part: Part) -> None:
    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    assert part.run.wait(END_S) == 143, part.run.story()
    part.run.wait_until_clean()


def spans_of(part: Part, version: int) -> list[list[int]]:
    (spans,) = (fields["spans"] for fields in part.run.commits() if fields["version"] == version)
    return sorted(spans)


def steps_of_window(part: Part, version: int) -> list[tuple[float, float]]:
    """Loss and learning rate of each step behind ``version``, rank by rank."""
    found = []
    for rank in range(3):
        counts = {fields["version"]: dict(fields["counts"])[rank] for fields in part.run.commits()}
        start = sum(count for earlier, count in counts.items() if earlier < version)
        lines = (part.log / f"steps-{rank}.log").read_text().splitlines()[start : start + counts[version]]
        found += [(float(loss), float(rate)) for loss, rate in map(str.split, lines)]
    return found


# ------------------------------------------------------------------------------------------------------- other ranks
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "cpu_cadence" else pytest.mark.long) for mode in MODES]
)
def test_fewer_ranks_go_on_only_with_reshape_and_then_rightly(fdl: Fdl, mode: str) -> None:
    story = Story(fdl, mode)
    first = story.stop_midway()

    refused = story.resume(ranks=2)
    assert refused.run.wait() != 0, refused.run.story()
    assert "ranks (3 at the save, 2 now): to go on all the same, resume with reshape=True" in refused.run.stderr
    assert_nobody_trained(refused)

    second = story.resume(ranks=2, reshape=True)
    assert second.run.wait() == 0, second.run.story()
    seen = witness_run(*second.folders, size=SIZE, epochs=EPOCHS, before=[first.folders])
    assert (seen.faults, seen.samples, seen.ranks) == ([], EPOCHS * SIZE, [0, 1])
    if not mode.endswith("sync"):
        assert second.run.events("cadence")[0]["fields"]["phase"] == "warmup", "the first window was Probe's"
    second.run.wait_until_clean()


# ------------------------------------------------------------------------------------------------- nothing left to do
def test_run_whose_checkpoint_is_complete_has_nothing_left_to_do(fdl: Fdl) -> None:
    story = Story(fdl)
    first = story.begin(save=story.stem, size=101)
    assert first.run.wait() == 0, first.run.story()

    second = story.resume(size=101)

    assert second.run.wait() == 0, second.run.story()
    assert f"nothing left to do: all {EPOCHS} epochs are in {story.stem} already" in second.run.stderr
    assert [part_digest(each) for each in (first, second)] == [part_digest(first)] * 2
    assert read_nothing(second)
    second.run.wait_until_clean()


def part_digest(part: Part) -> str:
    (path,) = part.log.glob("joined-*")
    return str(json.loads(path.read_text())["sha256"])


def read_nothing(part: Part) -> bool:
    return all(not path.stat().st_size for path in part.log.glob("reads-*.log"))


def assert_nobody_trained(part: Part) -> None:
    assert part.run.commits() == []
    assert read_nothing(part)
    part.run.wait_until_clean()


# ----------------------------------------------------------------------------------------------------------- damage
def flip_a_bit(stem: Path) -> str:
    path = stem.with_suffix(".fdl")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return f"{path} is damaged: its SHA-256 is "


def cut_off(stem: Path) -> str:
    path = stem.with_suffix(".fdl")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    return f"{path} is damaged: it has {len(data) - 1} bytes, expected {len(data)}"


def delete_tensors(stem: Path) -> str:
    stem.with_suffix(".fdl").unlink()
    return f"{stem.with_suffix('.fdl')} is missing; run.meta.json says that it belongs there"


def delete_all(stem: Path) -> str:
    shutil.rmtree(stem.parent)
    return f"{stem.parent} cannot be read: No such file or directory"


def put_rust_file(stem: Path) -> str:
    stem.with_suffix(".meta.json").unlink()
    stem.with_suffix(".fdl").write_bytes(RUST)
    return f"{stem.with_suffix('.fdl')} was not written by this flodl: it is no safetensors file. A .fdl of the Rust"


def name_rust_file(stem: Path) -> str:
    write_bundle(stem, SIZE, RUST)
    return f"{stem.with_suffix('.fdl')} was not written by this flodl: it is no safetensors file. A .fdl of the Rust"


def put_pickle(stem: Path) -> str:
    path = stem.with_suffix(".meta.json")
    path.write_bytes(pickle.dumps(Touch(stem.parent / "executed")))
    return f"{path} was not written by this flodl: it is not the meta file of a checkpoint"


def put_pickled_tensors(stem: Path) -> str:
    write_bundle(stem, SIZE, pickle.dumps(Touch(stem.parent / "executed")))
    return f"{stem.with_suffix('.fdl')} was not written by this flodl: it is no safetensors file"


def leave_the_folder(stem: Path) -> str:
    edit(stem, lambda meta: meta["parts"][0].update(suffix="/../../secret"))
    return "run.meta.json is damaged: parts[0].suffix is '/../../secret'"


def cover_too_much(stem: Path) -> str:
    edit(stem, lambda meta: meta["position"].update(covered=[{"epoch": 1, "spans": [{"start": 0, "count": 10**15}]}]))
    return f"expected spans in order, apart, and within {SIZE} samples"


def cover_too_often(stem: Path) -> str:
    spans = [{"start": 2 * place, "count": 1} for place in range(200_000)]
    edit(stem, lambda meta: meta["position"].update(covered=[{"epoch": 1, "spans": spans}]))
    return "run.meta.json is damaged: position.covered does not fit, expected at most 131072 spans"


def nest(stem: Path) -> str:
    path = stem.with_suffix(".meta.json")
    path.write_text("[" * (1 << 20))
    return f"{path} was not written by this flodl: it is not the meta file of a checkpoint"


def come_from_the_future(stem: Path) -> str:
    edit(stem, lambda meta: meta.update(format=99))
    return "has format 99, this flodl reads up to 1; upgrade flodl"


def hold_other_tensors(stem: Path) -> str:
    """Whole in itself; only a rank can see that it is of another model."""
    return f"cannot load {stem}: "


DAMAGES: list[Callable[[Path], str]] = [
    flip_a_bit,
    cut_off,
    delete_tensors,
    delete_all,
    put_rust_file,
    name_rust_file,
    put_pickle,
    put_pickled_tensors,
    leave_the_folder,
    cover_too_much,
    cover_too_often,
    nest,
    come_from_the_future,
    hold_other_tensors,
]
RUST = b"FDLC\x01\x00\x00\x00" + bytes(64)


class Touch:
    """Whoever unpickles it leaves a trace."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


def edit(stem: Path, change: Callable[[Any], None]) -> None:
    path = stem.with_suffix(".meta.json")
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "damage",
    [pytest.param(each, marks=[] if each is flip_a_bit else pytest.mark.long, id=each.__name__) for each in DAMAGES],
)
def test_checkpoint_that_cannot_be_trusted_is_refused_before_anybody_trains(
    fdl: Fdl, damage: Callable[[Path], str]
) -> None:
    story = Story(fdl)
    write_bundle(story.stem, SIZE, weights())
    words = damage(story.stem)

    part = story.resume(reshape=True)

    assert part.run.wait() != 0, part.run.story()
    assert words in part.run.stderr, part.run.story()
    assert_nobody_trained(part)
    assert not (story.stem.parent / "executed").exists()


# ------------------------------------------------------------------------------------------------ a controller's death
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "cpu_cadence" else pytest.mark.long) for mode in MODES]
)
def test_run_whose_controller_was_killed_is_launched_again_from_its_last_checkpoint(fdl: Fdl, mode: str) -> None:
    flags = {"mode": mode, "size": 403, "batch_size": 4, "epochs": 12, "step_ms": 5, "save": "ckpts/run", "every": 1}
    first = fdl.job(options=("--local", 3), **flags)
    first.wait_for_training()
    fdl.wait_until(lambda: first.events("checkpoint"), START_S, first.story)

    first.kill("controller")

    assert first.wait(END_S) == 1, first.story()
    assert f"fdl launch --resume {first.run_id}" in first.stderr
    first.wait_until_clean(GRACE_S + CLEAN_S)
    second = fdl.launch("--stop-timeout", 5, "--resume", first.run_id)
    assert second.wait() == 0, second.story()
    position = find(fdl.folder / "ckpts" / "run").meta.point.position
    assert (position.epoch, position.covered) == (12, ())
    assert checkpoint_faults(position, 403, first.folder, second.folder) == []
    second.wait_until_clean()
