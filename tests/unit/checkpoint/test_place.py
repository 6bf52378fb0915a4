"""Whether a checkpoint can be written at a stem is found out beforehand, and nothing of the trial stays."""

import errno
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flodl.checkpoint import place as module
from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.locking import StemLock
from flodl.checkpoint.place import check_place
from flodl.checkpoint.reader import find
from flodl.errors import CheckpointError
from tests.unit.checkpoint.test_bundle import content_of, save


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        check_place(Stem.of(path))
    return str(raised.value)


@pytest.mark.parametrize("way", ["run", "ckpts/run", "ckpts/a/b/run"])
def test_place_that_takes_checkpoints_is_left_as_it_was(tmp_path: Path, way: str) -> None:
    check_place(Stem.of(tmp_path / way))
    assert everything(tmp_path) == []


def test_checkpoint_that_lies_there_stays(tmp_path: Path) -> None:
    save(tmp_path / "run", b"weights")
    before = everything(tmp_path)
    check_place(Stem.of(tmp_path / "run"))
    assert everything(tmp_path) == before
    assert content_of(find(tmp_path / "run")) == b"weights"


def test_checkpoint_that_lies_there_is_described_unless_the_run_goes_on_from_it(tmp_path: Path) -> None:
    stem = Stem(tmp_path, "run")
    assert check_place(stem, tmp_path / "run") == ""
    saved_at = datetime.fromtimestamp(save(tmp_path / "run", b"weights").saved_at_s, UTC)
    told = f"a checkpoint of {saved_at:%Y-%m-%d %H:%M} UTC, 1 of 3 epochs"
    assert check_place(stem) == told
    for other in ("gone", "", "x" * 300):
        assert check_place(stem, tmp_path / other) == told
    (tmp_path / "link").symlink_to(tmp_path)
    for same in ("run", "run.fdl", "link/run.meta.json"):
        assert check_place(stem, tmp_path / same) == ""


def test_place_where_another_run_saves_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    with StemLock(Stem(tmp_path, "run")):
        check_place(Stem(tmp_path, "run"))
        assert [path.name for path in everything(tmp_path)] == ["run.fdl.lock"]


def test_file_on_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for way in ("file/run", "file/a/run"):
        said = refused(tmp_path / way)
        assert said == (
            f"save_path {tmp_path / way} cannot be used: Not a directory: a folder on the way there is a file: save "
            "elsewhere"
        )
    assert everything(tmp_path) == [tmp_path / "file"]


def test_link_to_nothing_on_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert "the folder is not there, or not any more: create it, or save elsewhere" in refused(
        tmp_path / "link" / "run"
    )


def test_folder_that_nobody_can_make_is_told() -> None:
    said = refused(Path("/proc/ckpts/run"))
    assert said == (
        "save_path /proc/ckpts/run cannot be used: No such file or directory: the folder is not there, or not any "
        "more: create it, or save elsewhere"
    )


@pytest.mark.parametrize("way", ["{}/run", "missing/{}/run"])
def test_name_that_is_too_long_is_told(tmp_path: Path, way: str) -> None:
    assert "File name too long: take a shorter one" in refused(tmp_path / way.format("x" * 256))
    assert everything(tmp_path) == []


@pytest.mark.parametrize("way", ["run", "ckpts/run"])
@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("open", errno.EACCES, "Permission denied: you may not write there: save to a folder of your own"),
        ("open", errno.EROFS, "Read-only file system: it is mounted read-only: save elsewhere"),
        ("write", errno.ENOSPC, "No space left on device: free some space there, or save elsewhere"),
        (
            "fsync",
            errno.EDQUOT,
            "Disk quota exceeded: your quota there is used up: delete something, or save elsewhere",
        ),
    ],
)
def test_disk_that_takes_nothing_is_told_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, call: str, number: int, words: str
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(module.os, call, fail)
        said = refused(tmp_path / way)
    assert said == f"save_path {tmp_path / way} cannot be used: {words}"
    assert everything(tmp_path) == []


def test_save_of_another_run_may_sweep_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swept(fd: int) -> None:
        for path in tmp_path.iterdir():
            path.unlink()

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "fsync", swept)
        check_place(Stem.of(tmp_path / "run"))
    assert everything(tmp_path) == []


def test_what_is_no_checkpoints_in_a_files_place_is_told_and_left(tmp_path: Path) -> None:
    (tmp_path / "run.fdl").write_bytes(b"my own weights")
    assert "is there already and belongs to no checkpoint" in refused(tmp_path / "run")
    (tmp_path / "run.meta.json").write_text("no checkpoint's")
    assert "was not written by this flodl: it is not the meta file of a checkpoint" in refused(tmp_path / "run")
    (tmp_path / "run.meta.json").unlink()
    (tmp_path / "run.meta.json").symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link to" in refused(tmp_path / "run")
    assert (tmp_path / "run.fdl").read_bytes() == b"my own weights"
