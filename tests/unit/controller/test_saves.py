"""Checkpoints made out of states that come up a real bulk connection, read and sent down again."""

import errno
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.locking import SUFFIX
from flodl.checkpoint.reader import find
from flodl.checkpoint.writer import BundleWriter
from flodl.controller import saves as module
from flodl.controller import states
from flodl.controller.bulk import BulkHub
from flodl.controller.saves import Saves
from flodl.core.actions import OpenSave
from flodl.core.events import BundleRead, PlaceTried, SaveSettled, StateLanded, SumReturned
from flodl.core.position import Position, ResumePoint, SaveReason
from flodl.ids import RoundKey
from flodl.messages import CadenceSettings, Settings
from tests.unit.daemon.bulk_host import LAYOUT, LIMIT_S, Host

POINT = ResumePoint(
    Position(7, epoch=1, global_step=30, world_size=2),
    cadence=None,
    settings=Settings(dataset_size=100, batch_size=10, num_epochs=3, seed=3, cadence=CadenceSettings()),
)
VERSIONS = {"flodl": "0.1.0", "python": "3.11.7", "torch": "2.13.0"}
KEY = RoundKey(1, 2, 0)


def state_of(content: bytes) -> bytes:
    """A file as ranks write it, with one tensor."""
    note = {"format": 1, "state_dict": {"weight": "weight"}, "parameters": ["weight"]}
    entry = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    head = json.dumps({"__metadata__": {"format": "pt", "flodl": json.dumps(note)}, "weight": entry}).encode()
    return len(head).to_bytes(8, "little") + head + content


class Yard:
    """A controller's saves in the folder of a head, and one host that sends states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: queue.Queue[PlaceTried | SaveSettled | BundleRead] = queue.Queue()
        self.hub = BulkHub()
        self.saves = Saves(self.hub, str(folder), folder / "run", self.events.put)
        self.host = Host(self.hub, "a", 1.0)

    def open(self, transfer: int, stem: str = "ckpts/run", epoch: int = 1, keep_last: int = 1) -> None:
        point = replace(POINT, position=replace(POINT.position, epoch=epoch))
        self.saves.open(OpenSave(transfer, "a", stem, SaveReason.CHECKPOINT, point, keep_last), VERSIONS)

    def save(
        self, transfer: int, data: bytes, stem: str = "ckpts/run", **order: int
    ) -> PlaceTried | SaveSettled | BundleRead:
        self.open(transfer, stem, **order)
        self.host.send(transfer, data)
        return self.next_event()

    def next_event(self) -> PlaceTried | SaveSettled | BundleRead:
        return self.events.get(timeout=LIMIT_S)

    def files(self, folder: str = "ckpts") -> list[str]:
        """All but the lock, which is held until the end."""
        there = os.listdir(self.folder / folder) if (self.folder / folder).exists() else []
        return sorted(name for name in there if not name.endswith(SUFFIX))

    def sum_works(self) -> bool:
        self.hub.open_sum(KEY, ("a",), LAYOUT)
        self.host.link.stream_sum(KEY, LAYOUT)
        return self.host.events.get(timeout=LIMIT_S) == SumReturned(KEY)

    def until_idle(self) -> None:
        """All that was asked of the disk so far is done."""
        is_idle = threading.Event()
        self.saves._submit(is_idle.set)
        assert is_idle.wait(LIMIT_S)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path)
    yield made
    made.hub.close()
    made.saves.close()
    made.host.close()


# --------------------------------------------------------------------------------------------------------------- place
def test_place_below_the_heads_folder_is_tried_and_nothing_stays(yard: Yard) -> None:
    yard.saves.try_place("ckpts/run")
    assert yard.next_event() == PlaceTried("")
    assert os.listdir(yard.folder) == []
    (yard.folder / "ckpts").write_text("")
    yard.saves.try_place("ckpts/run")
    assert yard.next_event() == PlaceTried(
        f"save_path {yard.folder}/ckpts/run cannot be used: Not a directory: a folder on the way there is a file: save "
        "elsewhere"
    )


def test_checkpoint_that_lies_there_is_told_unless_the_run_goes_on_from_it(yard: Yard) -> None:
    yard.save(1, b"weights")
    yard.saves.try_place("ckpts/run")
    told = yard.next_event()
    assert isinstance(told, PlaceTried)
    assert told.holds.endswith("UTC, 1 of 3 epochs")
    yard.saves.try_place("ckpts/run", f"{yard.folder}/ckpts/run.fdl")
    assert yard.next_event() == PlaceTried("")


def test_fault_of_ours_in_the_trial_is_told_too(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stem: Stem, resume_from: None) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(module, "check_place", fail)
    yard.saves.try_place("ckpts/run")
    assert yard.next_event() == PlaceTried("planted")


# --------------------------------------------------------------------------------------------------------------- saves
def test_state_that_comes_up_is_a_checkpoint_below_the_heads_folder(yard: Yard) -> None:
    data = os.urandom((2 << 20) + 5)
    assert yard.save(1, data) == SaveSettled(1, str(yard.folder / "ckpts" / "run.fdl"), "")
    bundle = find(yard.folder / "ckpts" / "run")
    assert bundle.paths[".fdl"].read_bytes() == data
    assert (bundle.meta.reason, bundle.meta.point) == (SaveReason.CHECKPOINT, POINT)
    assert bundle.meta.versions == VERSIONS
    assert yard.files() == ["run.fdl", "run.meta.json"]


def test_absolute_stem_is_where_it_says(yard: Yard, tmp_path: Path) -> None:
    stem = str(tmp_path / "elsewhere" / "run")
    assert yard.save(1, b"x", stem) == SaveSettled(1, f"{stem}.fdl", "")


def test_next_save_takes_the_place_of_the_one_before(yard: Yard) -> None:
    yard.save(1, b"old")
    yard.save(2, b"new")
    assert find(yard.folder / "ckpts" / "run").paths[".fdl"].read_bytes() == b"new"
    assert yard.files() == ["run.fdl", "run.meta.json"]


def test_newest_ones_stay_and_one_that_a_killed_run_did_not_keep_is_kept_first(yard: Yard) -> None:
    yard.save(1, b"1", epoch=1)
    for epoch in (2, 3):
        assert yard.save(epoch, b"%d" % epoch, epoch=epoch, keep_last=2) == SaveSettled(
            epoch, str(yard.folder / "ckpts" / "run.fdl"), ""
        )
        stems = [f"run-e{number:04d}" for number in (epoch - 1, epoch)]
        assert yard.files() == sorted(f"{name}{end}" for name in ["run", *stems] for end in (".fdl", ".meta.json"))
        assert [find(yard.folder / "ckpts" / name).paths[".fdl"].read_bytes() for name in stems] == [
            b"%d" % (epoch - 1),
            b"%d" % epoch,
        ]


def test_one_that_cannot_be_kept_is_a_warning(yard: Yard) -> None:
    yard.save(1, b"x", "ckpts/run-e0001")
    settled = yard.save(2, b"new", epoch=1, keep_last=2)
    assert isinstance(settled, SaveSettled)
    assert (settled.path, settled.error) == (str(yard.folder / "ckpts" / "run.fdl"), "")
    assert "run-e0001 is another checkpoint and is left alone" in settled.warning


def test_second_run_at_the_same_stem_is_told_and_touches_nothing_until_the_first_has_ended(
    yard: Yard, tmp_path: Path
) -> None:
    yard.save(1, b"first")
    other = Yard(tmp_path)
    try:
        for transfer in (1, 2):
            refused = other.save(transfer, b"second")
            assert isinstance(refused, SaveSettled)
            assert f"another run is saving to {tmp_path}/ckpts/run (process {os.getpid()} on " in refused.error
            yard.save(transfer + 1, b"first")
            assert find(tmp_path / "ckpts" / "run").paths[".fdl"].read_bytes() == b"first"
        yard.saves.close()
        assert os.path.exists(other.save(3, b"second").path)
    finally:
        other.hub.close()
        other.saves.close()
        other.host.close()
    assert find(tmp_path / "ckpts" / "run").paths[".fdl"].read_bytes() == b"second"
    assert sorted(os.listdir(tmp_path / "ckpts")) == ["run.fdl", "run.meta.json"]


def test_state_may_come_before_its_folder_is_ready(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    may_open, enter = threading.Event(), BundleWriter.__enter__

    def slow(writer: BundleWriter) -> BundleWriter:
        assert may_open.wait(LIMIT_S)
        return enter(writer)

    monkeypatch.setattr(BundleWriter, "__enter__", slow)
    yard.open(1)
    yard.host.send(1, b"x" * (2 << 20))
    assert yard.events.empty()
    may_open.set()
    assert yard.next_event() == SaveSettled(1, str(yard.folder / "ckpts" / "run.fdl"), "")


def test_folder_that_is_not_ready_in_time_is_told_and_sums_go_on(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    may_open, enter = threading.Event(), BundleWriter.__enter__

    def slow(writer: BundleWriter) -> BundleWriter:
        assert may_open.wait(LIMIT_S)
        return enter(writer)

    monkeypatch.setattr(BundleWriter, "__enter__", slow)
    monkeypatch.setattr(module, "OPENING_S", 0.01)
    yard.open(1)
    yard.host.send(1, b"x")
    wait_until(lambda: yard.hub.expected("a", 1) is None, LIMIT_S, "the end of the wait")
    assert yard.sum_works()
    may_open.set()
    settled = yard.next_event()
    assert isinstance(settled, SaveSettled)
    assert "the folder was not ready within 0.01 s" in settled.error
    assert yard.files() == []


@pytest.mark.parametrize(
    ("stem", "words"),
    [("file/run", "File exists"), ("ckpts/..", "names no checkpoint"), (".", "is a folder")],
)
def test_stem_that_cannot_be_is_told_and_its_state_is_read_past(yard: Yard, stem: str, words: str) -> None:
    (yard.folder / "file").write_text("")
    settled = yard.save(1, b"x" * (2 << 20), stem)
    assert isinstance(settled, SaveSettled)
    assert settled.path == ""
    assert words in settled.error
    assert yard.sum_works()


def test_full_disk_is_told_with_a_remedy_and_the_checkpoint_before_is_intact(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    yard.save(1, b"old")
    yard.open(2)
    yard.until_idle()
    with monkeypatch.context() as patched:
        patched.setattr(states.os, "fsync", fail)
        yard.host.send(2, b"new")
        settled = yard.next_event()
    assert settled == SaveSettled(
        2,
        "",
        f"{yard.folder}/ckpts/run: the checkpoint cannot be written: No space left on device: free some space "
        "there, or save elsewhere; the checkpoint before is intact",
    )
    assert find(yard.folder / "ckpts" / "run").paths[".fdl"].read_bytes() == b"old"
    assert yard.files() == ["run.fdl", "run.meta.json"]


def test_fault_of_our_own_is_an_error_of_that_save_only(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patched:
        patched.setattr(BundleWriter, "commit", fail)
        assert yard.save(1, b"x") == SaveSettled(1, "", "boom")
    assert yard.files() == []
    assert yard.save(2, b"x") == SaveSettled(2, str(yard.folder / "ckpts" / "run.fdl"), "")


# --------------------------------------------------------------------------------------------------------------- drops
def test_save_that_is_dropped_leaves_nothing_and_is_not_settled(yard: Yard) -> None:
    yard.open(1)
    yard.until_idle()
    assert len(yard.files()) == 1
    yard.saves.drop(1)
    yard.saves.drop(1)
    yard.host.send(1, b"late")
    assert yard.save(2, b"next") == SaveSettled(2, str(yard.folder / "ckpts" / "run.fdl"), "")
    assert yard.files() == ["run.fdl", "run.meta.json"]


def test_save_that_is_dropped_before_it_is_open_holds_up_nobody(yard: Yard, wait_until: Callable[..., Any]) -> None:
    may_go_on = threading.Event()
    yard.saves._submit(lambda: may_go_on.wait(LIMIT_S) and None)
    yard.open(1)
    yard.host.send(1, b"x")
    wait_until(lambda: not yard.host.link._states, LIMIT_S, "the state's departure")
    yard.saves.drop(1)
    assert yard.sum_works()
    may_go_on.set()
    yard.until_idle()
    assert yard.files() == []
    assert yard.events.empty()


@pytest.mark.parametrize("call", ["adopt", "commit"])
def test_save_that_is_dropped_while_it_is_committed_is_not_settled(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    is_there, may_go_on, real = threading.Event(), threading.Event(), getattr(BundleWriter, call)

    def slow(*arguments: Any) -> Any:
        is_there.set()
        assert may_go_on.wait(LIMIT_S)
        return real(*arguments)

    monkeypatch.setattr(BundleWriter, call, slow)
    yard.open(1)
    yard.host.send(1, b"x")
    assert is_there.wait(LIMIT_S)
    yard.saves.drop(1)
    may_go_on.set()
    yard.until_idle()
    assert yard.events.empty()


def test_run_that_ends_takes_back_what_is_not_settled(yard: Yard, wait_until: Callable[..., Any]) -> None:
    yard.open(1)
    yard.until_idle()
    yard.saves.close()
    assert yard.files() == []
    assert not any(thread.name == "saves" and thread.is_alive() for thread in threading.enumerate())


# ------------------------------------------------------------------------------------------------------------- reading
def test_checkpoint_is_read_and_sent_as_it_was_then(yard: Yard) -> None:
    data = state_of(os.urandom(3 << 20))
    yard.save(1, data)
    yard.saves.read("ckpts/run")
    assert yard.next_event() == BundleRead(str(yard.folder / "ckpts" / "run.fdl"), POINT, "")
    yard.save(2, b"another")
    yard.saves.send(3, ("a",))
    assert yard.host.events.get(timeout=LIMIT_S) == StateLanded(3)
    assert yard.host.received == data


@pytest.mark.parametrize("stem", ["ckpts/run", "ckpts", "."])
def test_checkpoint_that_is_not_there_is_told(yard: Yard, stem: str) -> None:
    (yard.folder / "ckpts").mkdir()
    yard.saves.read(stem)
    read = yard.next_event()
    assert isinstance(read, BundleRead)
    assert read.point is None
    assert "no checkpoint" in read.error or "is a folder" in read.error


def test_checkpoint_that_is_damaged_is_told(yard: Yard) -> None:
    yard.save(1, state_of(b"weights"))
    (yard.folder / "ckpts" / "run.fdl").write_bytes(state_of(b"Weights"))
    yard.saves.read("ckpts/run")
    read = yard.next_event()
    assert isinstance(read, BundleRead)
    assert read.point is None
    assert "damaged" in read.error


def test_nothing_is_sent_that_was_not_read(yard: Yard) -> None:
    yard.saves.send(1, ("a",))
    yard.until_idle()
    assert yard.sum_works()


def test_no_descriptor_of_a_checkpoint_is_left(yard: Yard) -> None:
    yard.save(1, state_of(b"weights"))
    yard.saves.read(Stem.of(yard.folder / "ckpts" / "run").meta.name)  # not there: below the folder
    yard.saves.read("ckpts/run")
    yard.next_event()
    yard.next_event()
    assert any("ckpts/run.fdl" in path for path in _open_files())
    yard.saves.close()
    assert not any("ckpts/run.fdl" in path for path in _open_files())


def _open_files() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
