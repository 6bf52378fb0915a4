"""The CPU plane on one host with real processes: slots, slices and the result in one memfd."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from flodl.messages import Layout
from tests.integration.shared_host import Host

LAYOUT = Layout(f32_count=100_003, f64_count=1_001, raw_bytes=77)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(3)
    yield host
    assert host.close() == [0, 0, 0]


def test_three_ranks_and_the_daemon_read_the_same_sum(host: Host) -> None:
    sums = host.reduce([0, 1, 2], LAYOUT)

    assert [s[:3] for s in sums] == [([6.0], [6.0], [200])] * 3
    assert len({s[3] for s in sums}) == 1
    view = np.frombuffer(host.plane.result(LAYOUT), np.float32, LAYOUT.f32_count)
    assert set(view.tolist()) == {6.0}


def test_slots_of_ranks_that_are_out_do_not_enter_the_sum(host: Host) -> None:
    host.reduce([0, 1, 2], LAYOUT)

    assert [s[:3] for s in host.reduce([0, 2], LAYOUT)] == [([4.0], [4.0], [200])] * 2


def test_what_the_daemon_writes_back_is_what_the_ranks_read(host: Host) -> None:
    host.reduce([0, 1, 2], LAYOUT)
    np.frombuffer(host.plane.result(LAYOUT), np.uint8)[: LAYOUT.f32_count * 4].view(np.float32)[:] = 9.0

    for rank in range(3):
        host.tell(rank, "sums", LAYOUT)

    assert [s[0] for s in host.answers([0, 1, 2])] == [[9.0]] * 3


def test_a_larger_layout_grows_the_block_under_everyone(host: Host) -> None:
    host.reduce([0, 1, 2], Layout(10, 0, 0))

    assert [s[:3] for s in host.reduce([0, 1, 2], LAYOUT)] == [([6.0], [6.0], [200])] * 3
    assert os.fstat(host.fd).st_size == 4 * LAYOUT.total_bytes
