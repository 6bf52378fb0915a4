"""SharedPlane in one process: what it refuses, and that a view outlives growth."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from flodl.averaging.shared import SharedPlane
from flodl.messages import Layout

SMALL, LARGE = Layout(16, 0, 0), Layout(5000, 10, 10)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("plane")
    yield fd
    os.close(fd)


@pytest.mark.parametrize("slots", [(), (0, 0), (0, 3), (-1,)])
def test_impossible_slots_are_refused(fd: int, slots: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot reduce slots"):
        SharedPlane(fd, 3, 0).reduce_slice(SMALL, 0, 1, slots)


def test_a_slot_beyond_the_block_is_refused(fd: int) -> None:
    with pytest.raises(ValueError, match="slot 3 of 3"):
        SharedPlane(fd, 3, 3)


def test_the_daemon_has_no_slot_to_write(fd: int) -> None:
    with pytest.raises(ValueError, match="no slot of its own"):
        SharedPlane(fd, 3).contribution(SMALL)


def test_slots_are_added_in_their_own_order_whatever_the_caller_says(fd: int) -> None:
    planes = [SharedPlane(fd, 3, slot) for slot in range(3)]
    for plane, value in zip(planes, (1e8, -1e8, 1.0), strict=True):
        np.frombuffer(plane.contribution(SMALL), np.float32)[:] = value

    planes[1].reduce_slice(SMALL, 0, 1, (2, 1, 0))

    assert np.frombuffer(planes[0].result(SMALL), np.float32).tolist() == [1.0] * 16


def test_a_view_stays_valid_when_the_block_grows(fd: int) -> None:
    plane = SharedPlane(fd, 1, 0)
    view = plane.result(SMALL)
    view[0] = 7

    plane.contribution(LARGE)

    assert view[0] == 7
    assert plane.result(LARGE)[0] == 7
