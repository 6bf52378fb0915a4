"""Solo's checkpoints: what lies in the outbox is saved off the training thread, and a dropped save leaves nothing."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.reader import find
from flodl.checkpoint.writer import BundleWriter
from flodl.core.actions import OpenSave
from flodl.core.events import BundleRead, PlaceTried, SaveSettled
from flodl.core.position import Position, ResumePoint, SaveReason
from flodl.messages import CadenceSettings, Mode, Settings, StateSent
from flodl.rank.solo_saves import COPY_BYTES, SoloSaves

CHOSEN = Settings(100, batch_size=8, num_epochs=3, seed=0, cadence=CadenceSettings(Mode.CPU_SYNC))
TRAINED = replace(CHOSEN, cadence=CadenceSettings(Mode.NCCL_CADENCE, anchor=100))
POINT = ResumePoint(Position(7, epoch=1), None, TRAINED)
DATA = os.urandom(COPY_BYTES + 5)


class Desk:
    """The saves of one run in ``folder``, and what they have told."""

    def __init__(self, folder: Path) -> None:
        self.stem = folder / "run"
        self.told: list[PlaceTried | SaveSettled | BundleRead] = []
        self.saves = SoloSaves(CHOSEN, folder, self.told.append)

    def order(self, transfer: int, stem: str = "run", point: ResumePoint = POINT, keep_last: int = 1) -> None:
        self.saves.open(OpenSave(transfer, "localhost", stem, SaveReason.CHECKPOINT, point, keep_last))

    def fill(self, transfer: int, data: bytes) -> None:
        os.pwrite(self.saves.outbox_fd, data, 0)
        self.saves.on_sent(StateSent(0, transfer, len(data), ""))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No part is complete before the event is set."""
    gate, part = threading.Event(), BundleWriter.part

    @contextmanager
    def slow(self: BundleWriter, suffix: str) -> Iterator[Any]:
        with part(self, suffix) as writer:
            yield writer
            gate.wait(60.0)

    monkeypatch.setattr(BundleWriter, "part", slow)
    yield gate
    gate.set()


def test_place_is_tried_and_nothing_stays(desk: Desk) -> None:
    (desk.stem.parent / "file").write_text("")
    with desk.saves:
        for stem in ("ckpts/run", "file/run", "."):
            desk.saves.try_place(stem)

    sound, taken, nameless = desk.told
    assert sound == PlaceTried("")
    assert taken == PlaceTried(
        f"save_path {desk.stem.parent}/file/run cannot be used: Not a directory: a folder on the way there is a file: "
        "save elsewhere"
    )
    assert isinstance(nameless, PlaceTried)
    assert nameless.error
    assert [path.name for path in desk.stem.parent.iterdir()] == ["file"]


def test_checkpoint_that_lies_there_is_told_unless_the_run_goes_on_from_it(desk: Desk) -> None:
    with desk.saves:
        desk.order(4)
        desk.fill(4, DATA)
        desk.saves.try_place("run")
        desk.saves.try_place("run", str(desk.stem))

    _, there, same = desk.told
    assert isinstance(there, PlaceTried)
    assert " epochs" in there.holds
    assert same == PlaceTried("")


def test_what_was_handed_over_is_saved_with_the_users_settings(desk: Desk) -> None:
    with desk.saves:
        desk.order(4)
        desk.fill(4, DATA)

    bundle = find(desk.stem)
    assert bundle.paths[".fdl"].read_bytes() == DATA
    assert bundle.meta.point == replace(POINT, settings=CHOSEN)
    assert desk.told == [SaveSettled(4, str(bundle.paths[".fdl"]), "")]


def test_states_that_are_no_checkpoints_and_states_that_are_not_there_are_left_alone(desk: Desk) -> None:
    with desk.saves:
        desk.order(4)
        desk.saves.on_sent(StateSent(0, 4, 0, "no memory"))
        desk.fill(5, DATA)

    assert (desk.told, list(desk.stem.parent.iterdir())) == ([], [])


def test_save_that_is_dropped_on_the_way_leaves_nothing_and_the_next_one_is_whole(
    desk: Desk, slow_disk: threading.Event
) -> None:
    with desk.saves:
        desk.order(1)
        desk.fill(1, DATA)
        desk.saves.drop(1)
        desk.order(2)
        desk.fill(2, DATA[::-1])
        slow_disk.set()

    assert find(desk.stem).paths[".fdl"].read_bytes() == DATA[::-1]
    assert [event.transfer for event in desk.told if isinstance(event, SaveSettled)] == [2]
    assert sorted(path.name for path in desk.stem.parent.iterdir()) == ["run.fdl", "run.meta.json"]


def test_newest_ones_stay(desk: Desk, wait_until: Callable[..., Any]) -> None:
    with desk.saves:
        for transfer in (1, 2, 3):
            desk.order(transfer, point=replace(POINT, position=Position(10, epoch=transfer)), keep_last=2)
            desk.fill(transfer, DATA[transfer:])
            wait_until(lambda count=transfer: len(desk.told) == count, 30.0, "the outbox is free again")

    kept = ("run", "run-e0002", "run-e0003")
    assert sorted(path.name for path in desk.stem.parent.iterdir()) == sorted(
        f"{name}{end}" for name in kept for end in (".fdl", ".meta.json")
    )
    assert [find(desk.stem.parent / name).paths[".fdl"].read_bytes() for name in kept] == [DATA[3:], DATA[2:], DATA[3:]]


def test_handing_over_does_not_wait_for_the_disk(desk: Desk, slow_disk: threading.Event) -> None:
    with desk.saves:
        desk.order(1)
        desk.fill(1, DATA)
        assert desk.told == []
        slow_disk.set()

    assert len(desk.told) == 1


def test_end_does_not_wait_for_ever(
    desk: Desk, slow_disk: threading.Event, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    monkeypatch.setattr("flodl.rank.solo_saves.CLOSE_S", 0.01)
    with desk.saves:
        desk.order(1)
        desk.fill(1, DATA)
    assert desk.told == []

    slow_disk.set()

    wait_until(lambda: desk.told, 30.0, "the thread goes on by itself")
    assert find(desk.stem).paths[".fdl"].read_bytes() == DATA


@pytest.mark.parametrize("stem", ["file/run", "..", "."])
def test_place_that_takes_nothing_is_told_and_the_next_save_goes_on(desk: Desk, stem: str) -> None:
    (desk.stem.parent / "file").write_text("")
    with desk.saves:
        desk.order(1, stem)
        desk.fill(1, DATA)
        desk.order(2)
        desk.fill(2, DATA)

    failed, saved = desk.told
    assert isinstance(failed, SaveSettled)
    assert (failed.transfer, failed.path, bool(failed.error)) == (1, "", True)
    assert saved == SaveSettled(2, str(Stem.of(desk.stem).plain(".fdl")), "")


def test_fault_of_ours_is_told_too(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(BundleWriter, "commit", fail)
    with desk.saves:
        desk.order(1)
        desk.fill(1, DATA)
        desk.saves.read("absent", TRAINED)

    assert desk.told[0] == SaveSettled(1, "", "planted")
    read = desk.told[1]
    assert isinstance(read, BundleRead)
    assert (read.point, read.error) == (
        None,
        f"there is no checkpoint {desk.stem.parent / 'absent'}: absent.meta.json does not exist",
    )
