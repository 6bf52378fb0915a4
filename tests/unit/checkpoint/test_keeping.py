"""The newest checkpoints stay under stems of their own, whatever happens, and nobody else's file is touched."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flodl.checkpoint import keeping, writer
from flodl.checkpoint.bundle import BundleMeta, Stem
from flodl.checkpoint.keeping import keep
from flodl.checkpoint.reader import find
from flodl.checkpoint.writer import BundleWriter
from flodl.core.position import Position, ResumePoint, SaveReason
from flodl.errors import CheckpointError
from flodl.messages import CadenceSettings, Settings
from tests.unit.checkpoint.kills import Killed, Operations

SETTINGS = Settings(dataset_size=100, batch_size=10, num_epochs=30, seed=3, cadence=CadenceSettings())
LEAST_OPERATIONS = 30


@pytest.fixture
def stem(tmp_path: Path) -> Stem:
    return Stem(tmp_path, "run")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is for a writer; a second later each time that somebody looks."""
    now_s = [1_800_000_000.0]

    def time() -> float:
        now_s[0] += 1.0
        return now_s[0]

    monkeypatch.setattr(writer, "time", SimpleNamespace(time=time))
    return now_s


@pytest.fixture(autouse=True)
def _never_twice_the_same_time(clock: list[float]) -> None:
    """File systems are quicker than clocks."""


def save(stem: Stem, epoch: int, reason: SaveReason = SaveReason.CHECKPOINT, suffixes: Any = (".fdl",)) -> BundleMeta:
    """The checkpoint after ``epoch``, not kept yet; its files hold the epoch's number."""
    with BundleWriter(stem) as bundle:
        for suffix in suffixes:
            with bundle.part(suffix) as part:
                part.write(b"%d" % epoch)
        return bundle.commit(reason, ResumePoint(Position(epoch * 10, epoch=epoch), None, SETTINGS), {"flodl": "0.1.0"})


def save_and_keep(stem: Stem, epoch: int, count: int, reason: SaveReason = SaveReason.CHECKPOINT) -> None:
    save(stem, epoch, reason)
    assert keep(stem, count) == ""


def names(stem: Stem) -> list[str]:
    return sorted(os.listdir(stem.folder))


def epoch_of(stem: Stem) -> int:
    """What a whole checkpoint says and holds."""
    bundle = find(str(stem))
    contents = {path.read_bytes() for path in bundle.paths.values()}
    assert contents == {b"%d" % bundle.meta.point.position.epoch}
    return bundle.meta.point.position.epoch


def kept(stem: Stem, *epochs: int) -> list[str]:
    """The files of a stem and of what is kept for it."""
    stems = ["run", *(f"run-e{epoch:04d}" for epoch in epochs)]
    return sorted(f"{name}{suffix}" for name in stems for suffix in (".fdl", ".meta.json"))


# ------------------------------------------------------------------------------------------------------- what is kept
def test_one_checkpoint_is_the_stem_itself(stem: Stem) -> None:
    for epoch in (1, 2):
        save_and_keep(stem, epoch, 1)
    assert names(stem) == ["run.fdl", "run.meta.json"]


def test_newest_ones_stay_under_stems_of_their_own_and_take_no_room(stem: Stem) -> None:
    for epoch in range(1, 6):
        save_and_keep(stem, epoch, 3)

    assert names(stem) == kept(stem, 3, 4, 5)
    assert epoch_of(stem) == 5
    assert [epoch_of(Stem(stem.folder, f"run-e000{epoch}")) for epoch in (3, 4, 5)] == [3, 4, 5]
    assert os.path.samefile(stem.plain(".fdl"), stem.folder / "run-e0005.fdl")
    own = find(str(stem)).meta
    assert (find(stem.folder / "run-e0005").meta.kept_of, own.kept_of) == ("run", "")
    assert find(stem.folder / "run-e0005").meta.versions == own.versions


def test_checkpoint_of_a_stop_does_not_take_the_place_of_an_epochs(stem: Stem) -> None:
    save_and_keep(stem, 2, 3)
    save_and_keep(stem, 2, 3, SaveReason.GRACEFUL_SHUTDOWN)
    assert [name for name in names(stem) if name.endswith(".fdl")] == [
        "run-e0002-v000020.fdl",
        "run-e0002.fdl",
        "run.fdl",
    ]


def test_run_that_went_back_keeps_what_is_newer_by_time(stem: Stem) -> None:
    for epoch in (1, 2, 3, 2):
        save_and_keep(stem, epoch, 2)
    assert names(stem) == kept(stem, 2, 3)


def test_newest_stays_whatever_the_clock_says(stem: Stem, clock: list[float]) -> None:
    for epoch in (1, 2):
        save_and_keep(stem, epoch, 2)
    clock[0] -= 1e6
    save_and_keep(stem, 3, 2)
    assert names(stem) == kept(stem, 2, 3)


def test_twice_is_as_good_as_once(stem: Stem) -> None:
    save_and_keep(stem, 1, 2)
    before = [os.stat(stem.folder / name) for name in names(stem)]
    assert keep(stem, 2) == ""
    assert [os.stat(stem.folder / name) for name in names(stem)] == before


def test_nothing_is_kept_where_nothing_is_saved(stem: Stem) -> None:
    assert keep(stem, 3) == ""
    assert names(stem) == []


def test_all_parts_are_kept(stem: Stem) -> None:
    save(stem, 1, suffixes=(".fdl", ".config.json"))
    assert keep(stem, 2) == ""
    assert set(find(stem.folder / "run-e0001").paths) == {".fdl", ".config.json"}
    for epoch in (2, 3):
        save_and_keep(stem, epoch, 2)
    assert names(stem) == kept(stem, 2, 3)


def test_disk_without_hard_links_gets_copies(stem: Stem, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    fake = {name: getattr(os, name) for name in dir(os)} | {"link": link}
    monkeypatch.setattr(keeping, "os", SimpleNamespace(**fake))
    for epoch in (1, 2, 3):
        save_and_keep(stem, epoch, 2)
    assert names(stem) == kept(stem, 2, 3)
    assert not os.path.samefile(stem.plain(".fdl"), stem.folder / "run-e0003.fdl")
    assert epoch_of(Stem(stem.folder, "run-e0003")) == 3


# --------------------------------------------------------------------------------------------- what is somebody else's
def test_files_of_others_are_never_touched(stem: Stem) -> None:
    others = [
        "run-e0001.safetensors", "run-e0001.txt", "run-e1.fdl", "run-e0002.fdl", "run-e0000.abcdef012345.fdl",
        "run-e0000.meta.json", "run-e0000.abcdef012345.meta.json", "run2-e0001.fdl", "run-e0001-best.fdl",
    ]  # fmt: skip
    for name in others:
        (stem.folder / name).write_text("mine")
    save(Stem(stem.folder, "run-e0009"), 9)
    old = names(stem)

    for epoch in range(3, 8):
        save_and_keep(stem, epoch, 2)

    assert set(names(stem)) == {*old, *kept(stem, 6, 7)}
    assert {(stem.folder / name).read_text() for name in others} == {"mine"}
    assert epoch_of(Stem(stem.folder, "run-e0009")) == 9


def test_pipe_in_the_place_of_a_checkpoint_is_not_waited_for(stem: Stem) -> None:
    for epoch in (1, 3):
        os.mkfifo(stem.folder / f"run-e{epoch:04d}.meta.json")
    save_and_keep(stem, 2, 2)
    save(stem, 3)

    assert "run-e0003.meta.json is a pipe or a device, expected a file" in keep(stem, 2)
    assert epoch_of(stem) == 3


def test_checkpoint_of_somebody_else_in_the_place_is_told_and_left(stem: Stem) -> None:
    save(Stem(stem.folder, "run-e0002"), 9)
    save_and_keep(stem, 1, 2)
    save(stem, 2)
    assert keep(stem, 2) == (
        f"{stem.folder}/run-e0002 is another checkpoint and is left alone: move it away, or save elsewhere"
    )
    assert epoch_of(Stem(stem.folder, "run-e0002")) == 9
    assert epoch_of(stem) == 2


def test_weights_in_the_place_are_told_and_left(stem: Stem) -> None:
    (stem.folder / "run-e0002.fdl").write_text("mine")
    save(stem, 2)
    assert "run-e0002.fdl belongs to no checkpoint and is left alone" in keep(stem, 2)
    assert (stem.folder / "run-e0002.fdl").read_text() == "mine"


def test_disk_that_takes_nothing_is_told(stem: Stem, monkeypatch: pytest.MonkeyPatch) -> None:
    save_and_keep(stem, 1, 2)
    save_and_keep(stem, 2, 2)
    save(stem, 3)

    def rename(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    fake = {name: getattr(os, name) for name in dir(os)} | {"rename": rename}
    monkeypatch.setattr(keeping, "os", SimpleNamespace(**fake))
    assert keep(stem, 2) == (
        f"{stem}: older checkpoints cannot be kept in order: Read-only file system: it is mounted read-only: "
        "save elsewhere"
    )


# ------------------------------------------------------------------------------------------------- killed at any moment
@pytest.mark.parametrize("has_links", [True, False])
def test_kill_at_any_file_operation_leaves_whole_checkpoints_and_as_many_as_asked(
    stem: Stem, operations: Operations, has_links: bool
) -> None:
    operations.has_links = has_links
    seen: set[int] = set()
    at, was_killed = 0, True
    while was_killed:
        at += 1
        for epoch in (1, 2):
            save_and_keep(stem, epoch, 2)
        (stem.folder / "run-e0007.fdl").write_text("mine")
        operations.left = at
        try:
            keep(stem, 2)
            save(stem, 3)
            keep(stem, 2)
            was_killed = False
        except Killed:
            was_killed = True
        operations.left = operations.NEVER
        newest = epoch_of(stem)
        seen.add(newest)
        whole = [
            epoch_of(Stem(stem.folder, name))
            for name in ("run-e0001", "run-e0002", "run-e0003")
            if is_there(stem, name)
        ]
        assert {newest, *whole} >= {newest, newest - 1}, "what was there before is there still"
        assert len(whole) >= 2
        keep(stem, 2)
        save_and_keep(stem, 4, 2)  # and whatever was left is swept
        assert names(stem) == sorted([*kept(stem, 2 if newest == 2 else 3, 4), "run-e0007.fdl"])
        for name in names(stem):
            os.unlink(stem.folder / name)
    assert at > LEAST_OPERATIONS
    assert seen == {2, 3}


def is_there(stem: Stem, name: str) -> bool:
    return (stem.folder / f"{name}.meta.json").exists()


def test_meta_file_says_for_whom_it_is_kept(stem: Stem) -> None:
    meta = replace(save(stem, 1), kept_of="run")
    assert BundleMeta.from_json(meta.to_json(), "it") == meta
    with pytest.raises(CheckpointError, match="kept_of is 7, expected a text"):
        BundleMeta.from_json(meta.to_json().replace('"kept_of": "run"', '"kept_of": 7'), "it")
