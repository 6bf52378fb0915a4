"""Checkpoints of whole runs on this machine: what they cover, and that one of them is whole whatever happens.

What a checkpoint says is held against the round log by the independent witness (``checkpoint_faults``).
"""

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flodl.checkpoint.bundle import BundleMeta, Stem
from flodl.checkpoint.reader import find, read_meta
from flodl.core.position import SaveReason
from tests.bundles import weights, write_bundle
from tests.conftest import Figures
from tests.faulted import impatient_cluster
from tests.runs import CLEAN_S, END_S, ROOT, START_S, Fdl, Launched
from tests.witness import checkpoint_faults, witness_run

pytestmark = pytest.mark.timeout(240)

MODES = ["nccl_cadence", "cpu_cadence", "nccl_sync", "cpu_sync", "cpu_async"]
LONG_MODES = [MODES[0], *(pytest.param(mode, marks=pytest.mark.long) for mode in MODES[1:])]
THREE = ("--local", 3)
ASKED = ROOT / "tests" / "scripts" / "asked.py"
SIZE = 101
GRACE_S = 5.0
BALLAST_MB = 20
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a file system, or gives a folder away")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    return tmp_path / "ckpts" / "run"


def files(stem: Path) -> list[str]:
    return sorted(os.listdir(stem.parent)) if stem.parent.exists() else []


def versions(run: Launched) -> list[int]:
    """Of the checkpoints that the run says it has made."""
    return [event["fields"]["version"] for event in run.events("checkpoint")]


def failures(run: Launched) -> list[str]:
    return [event["detail"] for event in run.events("checkpoint_failed")]


# -------------------------------------------------------------------------------------------------- what is in them
@pytest.mark.parametrize("mode", LONG_MODES)
def test_checkpoints_say_what_is_merged_and_can_be_read_while_others_take_their_place(
    fdl: Fdl, stem: Path, mode: str
) -> None:
    run = fdl.job(
        options=THREE, mode=mode, size=SIZE, batch_size=4, epochs=10_000, step_ms=5, save="ckpts/run", every=1
    )
    seen: dict[str, BundleMeta] = {}

    def has_seen(count: int) -> bool:
        if (stem.parent / "run.meta.json").exists():
            meta = find(stem).meta
            seen[meta.save_id] = meta
        return len(seen) >= count

    fdl.wait_until(lambda: has_seen(4), START_S, run.story)
    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()

    has_seen(0)
    metas = list(seen.values())
    assert [meta.reason for meta in metas] == [SaveReason.CHECKPOINT] * (len(metas) - 1) + [
        SaveReason.GRACEFUL_SHUTDOWN
    ]
    assert [checkpoint_faults(meta.point.position, SIZE, run.folder) for meta in metas] == [[]] * len(metas)
    assert {meta.point.position.world_size for meta in metas} == {3}
    assert metas[-1].point.position.version == run.commits()[-1]["version"], "the last one holds all that is merged"
    assert failures(run) == []
    assert files(stem) == ["run.fdl", "run.meta.json"]


@pytest.mark.long
@pytest.mark.parametrize("mode", [MODES[0], MODES[1], MODES[4]])
def test_newest_checkpoints_stay_and_each_can_be_gone_on_from(fdl: Fdl, log: Path, stem: Path, mode: str) -> None:
    flags = {"mode": mode, "size": SIZE, "batch_size": 4, "step_ms": 80, "save": stem, "every": 1, "keep_last": 2}
    run = fdl.job(options=THREE, epochs=5, **flags)
    assert run.wait() == 0, run.story()
    assert failures(run) + run.events("checkpoint_not_kept") == []
    epochs = {name: find(stem.parent / name).meta.point.position.epoch for name in ("run", "run-e0004", "run-e0005")}
    assert epochs == {"run": 5, "run-e0004": 4, "run-e0005": 5}
    assert files(stem) == sorted(f"{name}{end}" for name in epochs for end in (".fdl", ".meta.json"))
    for name in epochs:
        position = find(stem.parent / name).meta.point.position
        assert checkpoint_faults(position, SIZE, run.folder) == []
        assert fdl.call("checkpoint", "show", str(stem.parent / name)).returncode == 0

    again = fdl.job(options=THREE, epochs=6, resume=stem.parent / "run-e0004", log=log, **flags)
    assert again.wait() == 0, again.story()
    assert files(stem) == sorted(
        f"{name}{end}" for name in ("run", "run-e0005", "run-e0006") for end in (".fdl", ".meta.json")
    )
    assert find(stem).meta.point.position.epoch == 6


# ---------------------------------------------------------------------------------------------------- lost ranks
@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        ("cpu_cadence", "written"),
        *(
            pytest.param(mode, moment, marks=pytest.mark.long)
            for mode, moment in itertools.product(MODES, ("asked", "writing", "written", "told"))
            if (mode, moment) != ("cpu_cadence", "written")
        ),
    ],
)
def test_rank_killed_while_it_gives_its_state_is_replaced(
    fdl: Fdl, log: Path, stem: Path, mode: str, moment: str
) -> None:
    flags = {"mode": mode, "size": 403, "batch_size": 4, "epochs": 5, "step_ms": 5, "save": stem, "every": 1}
    env = {"FLODL_TEST_ASKED": f"{moment} kill"}
    run = fdl.job(options=THREE, script=ASKED, env=env, log=log, ballast_mb=BALLAST_MB, **flags)

    assert run.wait() == 0, run.story()
    (struck,) = (int(path.name.removeprefix("struck-")) for path in log.glob("struck-*"))
    outcome = run.read("outcome.json")
    assert outcome is not None
    assert [(loss["rank"], loss["signal"]) for loss in outcome["losses"]] == [(struck, 9)]
    assert witness_run(run.folder, log, size=403, epochs=5, lost=[struck]).faults == []
    assert failures(run) == []
    position = find(stem).meta.point.position
    assert (position.epoch, position.covered, position.world_size) == (5, (), 2)
    assert checkpoint_faults(position, 403, run.folder) == []
    assert files(stem) == ["run.fdl", "run.meta.json"]
    run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_rank_stopped_while_it_gives_its_state_is_replaced(fdl: Fdl, log: Path, stem: Path, mode: str) -> None:
    flags = {"mode": mode, "size": 403, "batch_size": 4, "epochs": 5, "step_ms": 5, "save": stem, "every": 1}
    env = {"FLODL_TEST_ASKED": "writing stop"}
    where = impatient_cluster(fdl, 3, dead_s=5.0)
    run = fdl.job(options=where, script=ASKED, env=env, log=log, ballast_mb=BALLAST_MB, **flags)

    assert run.wait() == 0, run.story()
    (struck,) = (int(path.name.removeprefix("struck-")) for path in log.glob("struck-*"))
    assert witness_run(run.folder, log, size=403, epochs=5, lost=[struck]).faults == []
    assert failures(run) == []
    assert checkpoint_faults(find(stem).meta.point.position, 403, run.folder) == []
    run.wait_until_clean()


# ------------------------------------------------------------------------------------------------ a killed controller
@pytest.mark.parametrize("mode", LONG_MODES)
def test_controller_killed_in_a_save_leaves_one_whole_checkpoint(fdl: Fdl, stem: Path, mode: str) -> None:
    kill_controllers(fdl, stem, mode, kills=1, ranks=2)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mode", MODES)
def test_controller_killed_at_random_moments_of_saves_leaves_one_whole_checkpoint(
    fdl: Fdl, stem: Path, figures: Figures, mode: str
) -> None:
    stages = kill_controllers(fdl, stem, mode, kills=40, ranks=3)
    figures.update(stages)


def kill_controllers(fdl: Fdl, stem: Path, mode: str, kills: int, ranks: int) -> Counter[str]:
    """Each run goes on from what the one before has left. Returns how far the saves had come."""
    stages: Counter[str] = Counter()
    runs: list[Path] = []
    rng = random.Random(f"{mode} {kills}")
    for number in range(kills):
        resume = {"resume": stem} if number else {}
        flags = {"mode": mode, "size": SIZE, "batch_size": 4, "epochs": 10_000, "step_ms": 2, "save": stem, "every": 1}
        run = fdl.job(options=("--local", ranks), ballast_mb=BALLAST_MB, **flags, **resume)
        kill_in_a_save(run, stem, 1.1 * (number + rng.random()) / kills)
        run.wait_until_clean(GRACE_S + CLEAN_S)
        assert run.wait(END_S) == 1, run.story()
        stages[stage_of(stem)] += 1
        runs.append(run.folder)
        position = find(stem).meta.point.position
        assert position.version >= versions(run)[-1], "a checkpoint that was there is gone"
        assert checkpoint_faults(position, SIZE, *runs) == []
    return stages


def kill_in_a_save(run: Launched, stem: Path, moment: float) -> None:
    """Kill the controller when so much of a save's time has passed: 0 is its beginning, 1 where the first one ended."""
    run.wait_for_event("checkpoint")
    pid, first = run.pid_of("controller"), run.events("checkpoint")[0]
    began_ms = max(each["ts"] for each in run.commits() if each["version"] == first["fields"]["version"])
    spin_until(lambda: not staged(stem), run)
    spin_until(lambda: bool(staged(stem)), run)
    due_s = time.monotonic() + moment * (first["ts"] - began_ms) / 1e3
    spin_until(lambda: time.monotonic() >= due_s, run)
    os.kill(pid, signal.SIGKILL)


def spin_until(predicate: Callable[[], bool], run: Launched) -> None:
    """To the fraction of a millisecond."""
    limit_s = time.monotonic() + START_S
    while not predicate():
        assert time.monotonic() < limit_s, run.story()


def staged(stem: Path) -> list[str]:
    """Files of a save that is not settled."""
    return [name for name in files(stem) if name not in ("run.fdl", "run.meta.json", "run.fdl.lock")]


def stage_of(stem: Path) -> str:
    """How far a save had come that was broken off."""
    left, meta = staged(stem), read_meta(Stem.of(stem))
    if not left:
        return "between two saves"
    if any(meta.save_id in name for name in left):
        return "committed"
    if any(name.endswith(".meta.json") for name in left):
        return "committing"
    return "received" if (stem.parent / left[0]).stat().st_size > BALLAST_MB << 20 else "receiving"


# ------------------------------------------------------------------------------------------------ a hostile disk
@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "flodl-test", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: Path, how: str) -> bool:
    """False while a file is open for writing there."""
    done = subprocess.run(["mount", "-o", f"remount,{how}", folder], capture_output=True, check=False)
    return done.returncode == 0


def finite(fdl: Fdl, log: Path, stem: Path, **more: Any) -> Launched:
    """Five epochs with a checkpoint behind each."""
    flags = {"size": SIZE, "batch_size": 4, "epochs": 5, "step_ms": 5, "save": stem, "every": 1, "log": log}
    return fdl.job(options=THREE, **flags, **more)


def assert_trained_but_not_saved(run: Launched, log: Path, words: str) -> None:
    """The run has done its work, has told of every save, and ends with what became of the last one."""
    assert run.wait() == 1, run.story()
    faults = witness_run(run.folder, log, size=SIZE, epochs=5).faults
    assert [fault for fault in faults if not fault.startswith("join()")] == []  # it says that the run has failed
    told = failures(run)
    assert told, run.story()
    assert [words in each for each in told] == [True] * len(told), told
    assert run.stdout.count("fdl: checkpoint_failed: ") == len(told)
    assert f"first failure: {told[-1]}" in run.stderr, run.story()
    assert (run.folder / "final.safetensors").exists(), "the weights are kept"
    run.wait_until_clean()


def assert_refused(run: Launched, words: str) -> None:
    """Nobody has trained, and nothing is left."""
    assert run.wait() == 6, run.story()
    assert words in run.stderr, run.story()
    assert run.commits() == []
    run.wait_until_clean()


@needs_root
def test_full_disk_leaves_the_checkpoint_before(fdl: Fdl, log: Path, mounted: Path) -> None:
    stem = mounted / "run"
    run = finite(fdl, log, stem, ballast_mb=3)

    assert_trained_but_not_saved(
        run,
        log,
        f"{stem}: the checkpoint cannot be written: No space left on device: free some space there, or save elsewhere; "
        "the checkpoint before is intact",
    )
    assert versions(run) == [find(stem).meta.point.position.version]
    assert checkpoint_faults(find(stem).meta.point.position, SIZE, run.folder) == []
    assert files(stem) == ["run.fdl", "run.meta.json"]


@needs_root
def test_join_returns_the_state_that_the_disk_of_the_run_does_not_take(fdl: Fdl, log: Path, mounted: Path) -> None:
    fdl.env["FDL_STATE_HOME"] = str(mounted)
    run = fdl.job(options=THREE, size=SIZE, batch_size=4, epochs=2, step_ms=5, model_mb=5, log=log)

    assert run.wait() == 0, run.story()
    assert witness_run(run.folder, log, size=SIZE, epochs=2).faults == []
    (told,) = run.events("state_in_memory")
    assert f"{run.folder}: No space left on device" in told["detail"]
    assert not [path.name for path in run.folder.rglob("*") if path.match(".state-*") or path.match("final.*")]
    run.wait_until_clean()


@pytest.mark.long
@needs_root
def test_disk_that_is_read_only_for_a_while_costs_the_checkpoints_of_that_while(fdl: Fdl, mounted: Path) -> None:
    stem = mounted / "run"
    run = fdl.job(options=THREE, size=SIZE, batch_size=4, epochs=10_000, step_ms=5, save=stem, every=1)
    run.wait_for_event("checkpoint")

    fdl.wait_until(lambda: remount(mounted, "ro"), START_S, "a moment without a save")
    run.wait_for_event("checkpoint_failed")
    old = find(stem)
    assert failures(run)[0].endswith(
        f"{stem}: the checkpoint cannot be written: Read-only file system: it is mounted read-only: save elsewhere; "
        "the checkpoint before is intact"
    )
    assert remount(mounted, "rw")
    fdl.wait_until(lambda: find(stem).meta.save_id != old.meta.save_id, START_S, run.story)

    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    assert checkpoint_faults(find(stem).meta.point.position, SIZE, run.folder) == []
    run.wait_until_clean()


@needs_root
def test_read_only_disk_is_refused_before_anybody_trains(fdl: Fdl, log: Path, mounted: Path) -> None:
    stem = mounted / "run"
    old = write_bundle(stem, SIZE, weights())
    assert remount(mounted, "ro")

    run = finite(fdl, log, stem)

    assert_refused(
        run, f"save_path {stem} cannot be used: Read-only file system: it is mounted read-only: save elsewhere"
    )
    assert find(stem).meta == old


@pytest.mark.long
@pytest.mark.parametrize("name", ["run.fdl", "run.meta.json"])
def test_symbolic_link_in_the_place_of_a_file_is_refused_and_left(fdl: Fdl, log: Path, stem: Path, name: str) -> None:
    old = write_bundle(stem, SIZE, weights())
    target = stem.parent.parent / "elsewhere"
    (stem.parent / name).rename(target)
    (stem.parent / name).symlink_to(target)

    run = finite(fdl, log, stem)

    assert_refused(run, f"{stem.parent / name} is a symbolic link to {target}; save to that place itself")
    assert find(stem).meta == old
    assert (stem.parent / name).is_symlink()


@pytest.mark.long
@needs_root
def test_folder_of_somebody_else_is_refused_and_left(fdl: Fdl, log: Path, stem: Path) -> None:
    """Without its privileges root is somebody else, too, for a folder of nobody's."""
    old = write_bundle(stem, SIZE, weights())
    for path in (stem.parent, *stem.parent.iterdir()):
        os.chown(path, NOBODY, NOBODY)

    run = finite(fdl, log, stem, under=("setpriv", "--bounding-set", "-all", "--inh-caps", "-all"))

    assert_refused(run, "Permission denied: you may not write there: save to a folder of your own")
    assert find(stem).meta == old


@pytest.mark.long
def test_folder_that_is_deleted_is_made_again(fdl: Fdl, stem: Path) -> None:
    run = fdl.job(options=THREE, size=SIZE, batch_size=4, epochs=10_000, step_ms=5, save=stem, every=1, ballast_mb=20)
    run.wait_for_event("checkpoint")

    def is_told() -> bool:
        if staged(stem):
            shutil.rmtree(stem.parent, ignore_errors=True)
        return bool(failures(run))

    fdl.wait_until(is_told, START_S, run.story)
    assert "the folder is not there, or not any more: create it, or save elsewhere" in failures(run)[0]
    before = versions(run)
    fdl.wait_until(lambda: len(versions(run)) > len(before), START_S, run.story)

    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    assert checkpoint_faults(find(stem).meta.point.position, SIZE, run.folder) == []
    run.wait_until_clean()
