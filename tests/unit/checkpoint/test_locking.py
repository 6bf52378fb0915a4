"""One writer at a time for a stem, and the lock goes with its holder."""

import errno
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.keeping import keep
from flodl.checkpoint.locking import StemLock
from flodl.checkpoint.reader import find
from flodl.checkpoint.writer import BundleWriter
from flodl.core.position import SaveReason
from flodl.errors import CheckpointError
from tests.unit.checkpoint.test_bundle import POINT, content_of, save

LIMIT_S = 30.0
SAVES = 50

HOLDER = """
import sys
from pathlib import Path
from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.locking import StemLock
StemLock(Stem(Path(sys.argv[1]), "run")).acquire()
print("held", flush=True)
sys.stdin.read()
"""

FORKER = """
import os
import signal
import sys
from pathlib import Path
from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.locking import StemLock
lock = StemLock(Stem(Path(sys.argv[1]), "run"))
lock.acquire()
if os.fork():
    signal.pause()
lock.release()
print("forked", flush=True)
sys.stdin.read()
print("over", flush=True)
"""


@pytest.fixture
def stem(tmp_path: Path) -> Stem:
    return Stem(tmp_path, "run")


def test_second_writer_is_refused_whatever_the_first_one_has_done_so_far(stem: Stem) -> None:
    save(stem.folder / "run", b"old")

    def refused() -> None:
        with pytest.raises(CheckpointError, match=rf"another run is saving to {stem} \(process {os.getpid()} on "):
            save(stem.folder / "run", b"second")
        assert content_of(find(stem.folder / "run")) in (b"old", b"first")

    with BundleWriter(stem) as first:
        refused()
        with first.part(".fdl") as part:
            part.write(b"first")
            refused()
        refused()
        first.commit(SaveReason.CHECKPOINT, POINT)
        refused()
    assert content_of(find(stem.folder / "run")) == b"first"
    save(stem.folder / "run", b"second")
    assert content_of(find(stem.folder / "run")) == b"second"
    assert sorted(os.listdir(stem.folder)) == ["run.fdl", "run.meta.json"]


def test_writers_side_by_side_never_spoil_a_checkpoint(stem: Stem) -> None:
    path = stem.folder / "run"
    save(path, b"0")

    def save_often(content: bytes) -> list[str]:
        told = []
        for _ in range(SAVES):
            try:
                save(path, content)
            except CheckpointError as error:
                told.append(str(error))
        return told

    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(save_often, content) for content in (b"1", b"22")]
        while not all(each.done() for each in writers):
            try:
                find(path)
            except CheckpointError as error:
                assert "is replaced while it is read; try again" in str(error)  # noqa: PT017  # nothing else may be
        told = [each for writer in writers for each in writer.result()]

    assert [each for each in told if f"another run is saving to {stem}" not in each] == []
    assert len(told) < 2 * SAVES
    assert content_of(find(path)) in (b"1", b"22")
    assert sorted(os.listdir(stem.folder)) == ["run.fdl", "run.meta.json"]


def test_lock_of_a_killed_process_is_free_and_its_file_goes_with_the_next_one(stem: Stem) -> None:
    command = [sys.executable, "-c", HOLDER, str(stem.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=rf"another run is saving to {stem} \(process {other.pid} on "):
            StemLock(stem).acquire()
        other.kill()
        other.wait(LIMIT_S)
    assert os.listdir(stem.folder) == ["run.fdl.lock"]

    with StemLock(stem):
        pass
    assert os.listdir(stem.folder) == []


def test_process_that_was_forked_from_a_killed_holder_holds_nothing(stem: Stem) -> None:
    command = [sys.executable, "-c", FORKER, str(stem.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"forked\n"  # it has let go of what it never had
        with pytest.raises(CheckpointError, match=rf"another run is saving to {stem} \(process {other.pid} on "):
            StemLock(stem).acquire()
        other.kill()
        other.wait(LIMIT_S)

        with StemLock(stem):
            pass

        other.stdin.close()
        assert other.stdout.read() == b"over\n", "the forked process was there until now"
    assert os.listdir(stem.folder) == []


def test_lock_that_is_released_is_free_whoever_has_its_descriptor(stem: Stem) -> None:
    lock = StemLock(stem)
    lock.acquire()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock._fd]):
        kept = stem.plain(".kept")
        os.link(stem.plain(".fdl.lock"), kept)
        lock.release()
        os.rename(kept, stem.plain(".fdl.lock"))  # the very file, as if it had not been removed
        with StemLock(stem):
            pass
    assert os.listdir(stem.folder) == []


def test_other_stems_of_the_folder_are_free(stem: Stem) -> None:
    with StemLock(stem), StemLock(Stem(stem.folder, "other")):
        assert sorted(os.listdir(stem.folder)) == ["other.fdl.lock", "run.fdl.lock"]


def test_lock_whose_file_somebody_has_removed_is_taken_anew(stem: Stem) -> None:
    lock = StemLock(stem)
    lock.acquire()
    os.unlink(stem.plain(".fdl.lock"))
    with StemLock(stem), pytest.raises(CheckpointError, match="another run is saving to"):
        lock.acquire()
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.release()
    assert os.listdir(stem.folder) == []


def test_disk_without_locks_keeps_nobody_out(stem: Stem, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with StemLock(stem):
        save(stem.folder / "run", b"weights")
    assert sorted(os.listdir(stem.folder)) == ["run.fdl", "run.meta.json"]


def test_what_is_no_file_of_ours_in_the_locks_place_is_told_and_left_alone(stem: Stem) -> None:
    stem.plain(".fdl.lock").mkdir()
    with pytest.raises(CheckpointError, match=r"run\.fdl\.lock is a folder; move it"):
        save(stem.folder / "run", b"weights")
    stem.plain(".fdl.lock").rmdir()
    os.mkfifo(stem.plain(".fdl.lock"))
    with pytest.raises(CheckpointError, match=r"run\.fdl\.lock is no regular file; move it"):
        save(stem.folder / "run", b"weights")
    assert os.listdir(stem.folder) == ["run.fdl.lock"]


def test_one_to_be_kept_where_another_run_saves_is_told(stem: Stem) -> None:
    save(stem.folder / "run", b"weights")
    assert keep(stem, 2) == ""
    with BundleWriter(Stem(stem.folder, "run-e0001")) as other:
        staged = other.stage(".fdl")
        assert f"another run is saving to {stem}-e0001" in keep(stem, 2)
        assert staged.exists()
