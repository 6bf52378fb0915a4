"""A bundle on disk is the old one or the new one, whatever happens in between, and says what is wrong with it."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flodl.checkpoint import writer
from flodl.checkpoint.bundle import BundleMeta, Stem
from flodl.checkpoint.reader import Bundle, find, look
from flodl.checkpoint.writer import BundleWriter
from flodl.core.position import Covered, Position, ResumePoint, SaveReason
from flodl.errors import CheckpointError
from flodl.ids import Span
from flodl.messages import CadenceSettings, Settings
from tests.unit.checkpoint.kills import Killed, Operations

POINT = ResumePoint(
    Position(7, epoch=1, covered=(Covered(1, (Span(0, 40), Span(80, 8))),), global_step=30, world_size=3),
    cadence=None,
    settings=Settings(dataset_size=100, batch_size=10, num_epochs=3, seed=3, cadence=CadenceSettings()),
)


def save(path: Path, content: bytes, *suffixes: str, version: int = 7) -> BundleMeta:
    with BundleWriter(Stem.of(path)) as bundle:
        for suffix in suffixes or (".fdl",):
            with bundle.part(suffix) as part:
                part.write(content[: len(content) // 2])
                part.write(content[len(content) // 2 :])
        point = replace(POINT, position=replace(POINT.position, version=version))
        return bundle.commit(SaveReason.CHECKPOINT, point, {"flodl": "0.1.0"})


def content_of(bundle: Bundle, suffix: str = ".fdl") -> bytes:
    return bundle.paths[suffix].read_bytes()


# ---------------------------------------------------------------------------------------------------- there and back
@pytest.mark.parametrize("ending", ["", ".fdl", ".meta.json"])
def test_bundle_is_found_by_its_stem_with_or_without_an_ending(tmp_path: Path, ending: str) -> None:
    save(tmp_path / "new" / "run", b"weights", ".fdl", ".config.json")

    bundle = find(tmp_path / "new" / f"run{ending}")

    assert (content_of(bundle), content_of(bundle, ".config.json")) == (b"weights", b"weights")
    assert (bundle.meta.reason, bundle.meta.point) == (SaveReason.CHECKPOINT, POINT)
    assert bundle.meta.versions == {"flodl": "0.1.0"}
    assert look(tmp_path / "new" / "run") == bundle
    assert sorted(os.listdir(tmp_path / "new")) == ["run.config.json", "run.fdl", "run.meta.json"]


def test_part_that_only_the_bundle_before_had_goes(tmp_path: Path) -> None:
    save(tmp_path / "run", b"one", ".fdl", ".config.json")
    save(tmp_path / "run", b"two", ".fdl")

    assert sorted(os.listdir(tmp_path)) == ["run.fdl", "run.meta.json"]


def test_file_of_the_users_that_no_bundle_names_stays(tmp_path: Path) -> None:
    (tmp_path / "run.config.json").write_text("mine")
    save(tmp_path / "run", b"one")
    save(tmp_path / "run", b"two")

    assert (tmp_path / "run.config.json").read_text() == "mine"


def test_point_that_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    save(tmp_path / "run", b"old")

    with pytest.raises(CheckpointError, match=r"position\.version is -1, expected a whole number of at least 0"):
        save(tmp_path / "run", b"new", version=-1)

    assert content_of(find(tmp_path / "run")) == b"old"
    assert sorted(os.listdir(tmp_path)) == ["run.fdl", "run.meta.json"]


def test_writer_that_does_not_commit_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "run", b"old")
    before = sorted(os.listdir(tmp_path))

    def break_off() -> None:
        with BundleWriter(Stem.of(tmp_path / "run")) as bundle, bundle.part(".fdl") as part:
            part.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()

    assert sorted(os.listdir(tmp_path)) == before
    assert content_of(find(tmp_path / "run")) == b"old"


# ------------------------------------------------------------------------------------------------- killed at any moment
LEAST_OPERATIONS = 15


@pytest.mark.parametrize("suffixes", [(".fdl",), (".fdl", ".config.json")])
def test_kill_at_any_file_operation_leaves_the_old_bundle_or_the_new_one(
    tmp_path: Path, suffixes: tuple[str, ...], operations: Operations
) -> None:
    seen, at, was_killed = set(), 0, True
    while was_killed:
        at += 1
        operations.left = operations.NEVER
        save(tmp_path / "run", b"old bytes", ".fdl", ".config.json")
        operations.left = at
        try:
            save(tmp_path / "run", b"new bytes", *suffixes, version=8)
            was_killed = False
        except Killed:
            was_killed = True
        bundle = find(tmp_path / "run")
        is_new = bundle.meta.point.position.version == 8
        contents = {content_of(bundle, part.suffix) for part in bundle.meta.parts}
        assert contents == {b"new bytes" if is_new else b"old bytes"}
        seen.add(is_new)
        operations.left = operations.NEVER
        save(tmp_path / "run", b"next")  # and whatever was left is swept
        assert sorted(os.listdir(tmp_path)) == ["run.fdl", "run.meta.json"]
    assert at > LEAST_OPERATIONS
    assert seen == {True, False}


# ------------------------------------------------------------------------------------------------------- what is wrong
def test_damage_is_named(tmp_path: Path) -> None:
    save(tmp_path / "run", b"weights")
    (tmp_path / "run.fdl").write_bytes(b"wEights")
    with pytest.raises(CheckpointError, match=r"run\.fdl is damaged: its SHA-256 is"):
        find(tmp_path / "run")
    assert look(tmp_path / "run").paths == {".fdl": tmp_path / "run.fdl"}
    (tmp_path / "run.fdl").write_bytes(b"we")
    with pytest.raises(CheckpointError, match=r"run\.fdl is damaged: it has 2 bytes, expected 7"):
        find(tmp_path / "run")
    (tmp_path / "run.fdl").unlink()
    with pytest.raises(CheckpointError, match=r"run\.fdl is missing; run\.meta\.json says that it belongs there"):
        find(tmp_path / "run")


@pytest.mark.parametrize("name", ["run.meta.json", "run.fdl"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a pipe or a device"),
        (os.mkdir, "a folder"),
        (lambda path: os.symlink("/dev/zero", path), "a pipe or a device"),
    ],
    ids=["pipe", "folder", "device"],
)
def test_what_is_no_file_is_named_and_not_read(
    tmp_path: Path, name: str, make: Callable[[Path], None], kind: str
) -> None:
    save(tmp_path / "run", b"weights")
    (tmp_path / name).unlink()
    make(tmp_path / name)

    for read in (find, look):
        with pytest.raises(CheckpointError, match=rf"{name} is {kind}, expected a file"):
            read(tmp_path / "run")
    if name == "run.meta.json":
        with pytest.raises(CheckpointError, match=rf"{name} is (a symbolic link|{kind})"):
            save(tmp_path / "run", b"next")


def test_part_of_another_size_is_not_read(tmp_path: Path) -> None:
    save(tmp_path / "run", b"weights")
    os.truncate(tmp_path / "run.fdl", 1 << 40)

    with pytest.raises(CheckpointError, match=r"run\.fdl is damaged: it has 1099511627776 bytes, expected 7"):
        find(tmp_path / "run")


def test_absent_checkpoint_names_its_neighbours(tmp_path: Path) -> None:
    save(tmp_path / "run43", b"weights")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*run42: .* there is run43$"):
        find(tmp_path / "run42")
    with pytest.raises(CheckpointError, match=r"nowhere cannot be read: No such file"):
        find(tmp_path / "nowhere" / "run")


@pytest.mark.parametrize("text", ["", "[1]", "{}", "no json", "\ud800"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.meta.json").write_text(text, errors="surrogatepass")
    with pytest.raises(CheckpointError, match="is not the meta file of a checkpoint"):
        find(tmp_path / "run")


@pytest.mark.parametrize("path", ["", "/", ".", "..", ".fdl", ".meta.json"])
def test_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match=r"names no checkpoint|is a folder"):
        Stem.of(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run\0", "holds a character that no file's name can have"),
        ("a\0/run", "holds a character that no file's name can have"),
        ("\ud800", "holds a character that no file's name can have"),
        ("x" * 231, "names a file with 231 bytes in its name; it may have at most 230"),
    ],
)
def test_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str, message: str) -> None:
    for use in (find, look, Stem.of):
        with pytest.raises(CheckpointError, match=message):
            use(tmp_path / name)


def test_longest_name_is_saved_and_found_and_a_longer_folder_told(tmp_path: Path) -> None:
    save(tmp_path / ("x" * 230), b"weights", ".fdl", ".config.json")
    assert content_of(find(tmp_path / ("x" * 230))) == b"weights"

    with pytest.raises(CheckpointError, match="cannot be written: File name too long: take a shorter one"):
        save(tmp_path / ("x" * 256) / "run", b"weights")
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        find(tmp_path / ("x" * 256) / "run")


def test_folder_is_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder; name a checkpoint in it, such as .*/run"):
        Stem.of(tmp_path)


@pytest.mark.parametrize("name", ["run.fdl", "run.meta.json", "run.config.json"])
def test_symbolic_link_as_target_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"is a symbolic link to .*elsewhere; save to that place itself"):
        save(tmp_path / "run", b"weights")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe or a device"), (os.mkdir, "a folder")])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_no_file_in_the_place_of_a_part_is_refused_before_anything_is_written(
    tmp_path: Path, make: Callable[[Path], None], kind: str, is_first: bool
) -> None:
    if not is_first:
        save(tmp_path / "run", b"old")
        (tmp_path / "run.fdl").unlink()
    make(tmp_path / "run.fdl")
    before = sorted(os.listdir(tmp_path))

    with pytest.raises(CheckpointError, match=rf"run\.fdl is {kind}; move it, or take another save_path"):
        save(tmp_path / "run", b"weights")
    assert sorted(os.listdir(tmp_path)) == before


def test_weights_that_no_checkpoint_names_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run.fdl").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match=r"run\.fdl is there already and .* move it, or take another save_path"):
        save(tmp_path / "run", b"weights")
    assert os.listdir(tmp_path) == ["run.fdl"]
    assert (tmp_path / "run.fdl").read_bytes() == b"precious"

    (tmp_path / "run.fdl").rename(tmp_path / "mine.fdl")
    save(tmp_path / "run", b"weights")
    assert content_of(find(tmp_path / "run")) == b"weights"


def test_folder_behind_a_link_is_as_good_as_any(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(tmp_path / "link" / "run", b"weights")
    assert content_of(find(tmp_path / "real" / "run")) == b"weights"


def test_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "ckpts").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: File exists: a folder on the way there is a file"):
        save(tmp_path / "ckpts" / "run", b"weights")


def test_folder_that_is_deleted_while_saving_is_told(tmp_path: Path) -> None:
    with BundleWriter(Stem.of(tmp_path / "ckpts" / "run")) as bundle:
        with bundle.part(".fdl") as part:
            part.write(b"weights")
        shutil.rmtree(tmp_path / "ckpts")
        with pytest.raises(
            CheckpointError, match="No such file or directory: the folder is not there, or not any more: create it"
        ):
            bundle.commit(SaveReason.CHECKPOINT, POINT)


def test_save_counts_once_its_meta_file_is_there_whatever_fails_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename_no_part(source: Path, target: Path) -> None:
        if target.name.endswith(".fdl"):
            raise OSError(errno.ENOSPC, "no space")
        os.rename(source, target)

    fake = {name: getattr(os, name) for name in dir(os)} | {"rename": rename_no_part}
    monkeypatch.setattr(writer, "os", SimpleNamespace(**fake))
    meta = save(tmp_path / "run", b"weights")

    assert find(tmp_path / "run").paths == {".fdl": tmp_path / f"run.{meta.save_id}.fdl"}


def test_reader_begins_again_when_a_save_is_committed_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flodl.checkpoint import reader

    save(tmp_path / "run", b"old")
    real, calls = reader.read_meta, []

    def read_then_save(stem: Stem) -> BundleMeta:
        meta = real(stem)
        calls.append(meta)
        if len(calls) == 1:
            save(tmp_path / "run", b"new")
        return meta

    monkeypatch.setattr(reader, "read_meta", read_then_save)
    assert content_of(find(tmp_path / "run")) == b"new"
    assert len(calls) == 2
