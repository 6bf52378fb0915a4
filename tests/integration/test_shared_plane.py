"""The CPU plane on one host with real processes: slots, slices and the result in one memfd."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flodl.averaging.shared import SharedPlane
from flodl.messages import Layout

PEER = Path(__file__).with_name("shared_peer.py")
ROOT = PEER.parents[2]
LAYOUT = Layout(f32_count=100_003, f64_count=1_001, raw_bytes=77)
DEADLINE_S = 30.0


class Host:
    """Three ranks around one memfd; the test plays the daemon."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("plane")
        self.plane = SharedPlane(self.fd, size)
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            mine, theirs = socket.socketpair()
            command = [sys.executable, str(PEER), str(theirs.fileno()), str(rank), str(self.fd), str(size)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno(), self.fd], env=environment))
            theirs.close()
            self.pipes.append(Connection(mine.detach()))

    def tell(self, rank: int, *command: Any) -> None:
        self.pipes[rank].send(command)

    def answers(self, ranks: list[int]) -> list[Any]:
        for rank in ranks:
            assert self.pipes[rank].poll(DEADLINE_S), f"rank {rank} does not answer"
        return [self.pipes[rank].recv() for rank in ranks]

    def reduce(self, ranks: list[int], layout: Layout) -> list[Any]:
        """Rank r contributes r + 1; returns what each rank reads as the result."""
        for rank in ranks:
            self.tell(rank, "write", layout, rank + 1)
        self.answers(ranks)
        for index, rank in enumerate(ranks):
            self.tell(rank, "slice", layout, index, len(ranks), tuple(ranks))
        self.answers(ranks)
        for rank in ranks:
            self.tell(rank, "sums", layout)
        return self.answers(ranks)

    def close(self) -> list[int]:
        for pipe in self.pipes:
            pipe.close()
        try:
            return [process.wait(DEADLINE_S) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
            os.close(self.fd)


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
