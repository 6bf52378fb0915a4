"""A part that somebody else writes belongs to its bundle once it is adopted, and to nobody before."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.writer import BundleWriter
from flodl.errors import CheckpointError

CONTENT = b"weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_staged_file_is_new_empty_and_as_public_as_any_other(tmp_path: Path) -> None:
    os.umask(umask := os.umask(0o022))  # the only way to read it
    with BundleWriter(Stem.of(tmp_path / "run")) as bundle:
        path = bundle.stage(".fdl")

        assert path.read_bytes() == b""
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
        assert path.name not in ("run.fdl", "run.meta.json")
        with pytest.raises(CheckpointError, match="File exists"):
            bundle.stage(".fdl")


def test_part_that_was_not_adopted_is_taken_back(tmp_path: Path) -> None:
    with BundleWriter(Stem.of(tmp_path / "run")) as bundle:
        bundle.stage(".fdl").write_bytes(CONTENT)

    assert os.listdir(tmp_path) == []


def test_adopted_part_is_one_of_the_bundle(tmp_path: Path) -> None:
    with BundleWriter(Stem.of(tmp_path / "run")) as bundle:
        bundle.stage(".fdl").write_bytes(CONTENT)
        bundle.adopt(".fdl", len(CONTENT), SHA256)
        (part,) = bundle._parts

    assert (part.suffix, part.size_bytes, part.sha256) == (".fdl", len(CONTENT), SHA256)


@pytest.mark.parametrize("size_bytes", [0, len(CONTENT) - 1, len(CONTENT) + 1])
def test_part_that_is_not_as_long_as_was_said_is_not_adopted(tmp_path: Path, size_bytes: int) -> None:
    with BundleWriter(Stem.of(tmp_path / "run")) as bundle:
        bundle.stage(".fdl").write_bytes(CONTENT)
        with pytest.raises(CheckpointError, match="has 7 bytes"):
            bundle.adopt(".fdl", size_bytes, SHA256)


def test_part_that_is_gone_is_not_adopted(tmp_path: Path) -> None:
    with BundleWriter(Stem.of(tmp_path / "run")) as bundle:
        bundle.stage(".fdl").unlink()
        with pytest.raises(CheckpointError, match="No such file"):
            bundle.adopt(".fdl", len(CONTENT), SHA256)


def test_failure_names_the_checkpoint_the_reason_the_remedy_and_what_is_left(tmp_path: Path) -> None:
    bundle = BundleWriter(Stem.of(tmp_path / "run"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert str(bundle.failure(full)) == (
        f"{tmp_path}/run: the checkpoint cannot be written: No space left on device: "
        "free some space there, or save elsewhere"
    )
    (tmp_path / "run.meta.json").write_text("{}")
    assert str(bundle.failure(full)).endswith("; the checkpoint before is intact")
