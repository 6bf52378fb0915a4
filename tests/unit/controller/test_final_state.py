"""The final state: whichever comes first, the state or the wish for it, it ends up where join() finds it."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flodl.controller.final_state import NAME, FinalState
from flodl.controller.states import Arrived
from flodl.core import actions as act
from flodl.core import events as ev

WANTED = act.ReceiveState("node-a", 2, 7, 3)


class Bulk:
    """Keeps what is expected; ``send`` is a bulk thread with a state that has come."""

    def __init__(self) -> None:
        self.on_arrived: Callable[[Arrived], None] | None = None
        self.place: Callable[[], Path] | None = None

    def expect(
        self, _transfer: int, _host: str, place: Callable[[], Path], on_arrived: Any, *, or_memory: bool
    ) -> None:
        assert or_memory
        self.place, self.on_arrived = place, on_arrived

    async def send(self, arrived: Arrived) -> None:
        assert self.on_arrived is not None
        await asyncio.to_thread(self.on_arrived, arrived)
        await asyncio.sleep(0)


def arrived(path: Path | None, size_bytes: int = 3, error: OSError | None = None, memory_fd: int = -1) -> Arrived:
    return Arrived(7, "node-a", size_bytes, path, "", error, memory_fd)


def told(
    folder: Path, made: Callable[[Bulk], Arrived], *, is_wanted_first: bool
) -> tuple[list[ev.StateStored], list[str]]:
    events: list[ev.StateStored] = []
    notes: list[str] = []

    async def scenario() -> None:
        bulk = Bulk()
        final = FinalState(bulk, folder, events.append, lambda note: notes.append(note.event))  # type: ignore[arg-type]
        final.expect("node-a", 7)
        if is_wanted_first:
            final.want(WANTED)
        await bulk.send(made(bulk))
        if not is_wanted_first:
            assert not events
            final.want(WANTED)
        final.close()

    asyncio.run(scenario())
    return events, notes


def whole(bulk: Bulk) -> Arrived:
    assert bulk.place is not None
    path = bulk.place()
    path.write_bytes(b"abc")
    return arrived(path)


@pytest.mark.parametrize("is_wanted_first", [True, False])
def test_state_takes_its_place(tmp_path: Path, is_wanted_first: bool) -> None:
    events, notes = told(tmp_path, whole, is_wanted_first=is_wanted_first)
    assert events == [ev.StateStored(str(tmp_path / NAME), "")]
    assert notes == []
    assert [each.name for each in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == b"abc"


def test_state_of_another_size_is_refused_and_removed(tmp_path: Path) -> None:
    events, _ = told(tmp_path, lambda bulk: replace(whole(bulk), size_bytes=2), is_wanted_first=True)
    assert events == [ev.StateStored("", "rank 2 sent 2 bytes, announced 3")]
    assert list(tmp_path.iterdir()) == []


def test_state_that_no_disk_takes_stays_in_memory_until_the_end(tmp_path: Path) -> None:
    fd = os.memfd_create("state")
    path = Path(f"/proc/{os.getpid()}/fd/{fd}")
    full = OSError(28, "No space left on device")
    events, notes = told(tmp_path, lambda _: arrived(path, error=full, memory_fd=fd), is_wanted_first=True)
    assert events == [ev.StateStored(str(path), "")]
    assert notes == ["state_in_memory"]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_state_that_is_lost_says_why(tmp_path: Path) -> None:
    error = OSError(5, "Input/output error")
    events, _ = told(tmp_path, lambda _: arrived(None, error=error), is_wanted_first=False)
    assert events == [ev.StateStored("", f"{tmp_path}: Input/output error (3 bytes)")]


def test_place_that_cannot_be_taken_is_told(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    events, _ = told(tmp_path, whole, is_wanted_first=True)
    assert events == [ev.StateStored("", f"{tmp_path / NAME}: Is a directory")]
