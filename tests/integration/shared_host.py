"""Ranks of the CPU plane as real processes around one memfd; the test plays the daemon."""

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flodl.averaging.shared import SharedPlane
from flodl.messages import Layout

PEER = Path(__file__).with_name("shared_peer.py")
ROOT = PEER.parents[2]
DEADLINE_S = 30.0


class Host:
    """``size`` ranks; see the module docstring."""

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
        self._sum_slices(ranks, layout)
        for rank in ranks:
            self.tell(rank, "sums", layout)
        return self.answers(ranks)

    def sum_images(self, images: list[bytes], layout: Layout) -> list[bytes]:
        """One reduction of whole images, of rank 0, 1, …; returns what each rank reads as the result."""
        ranks = list(range(len(images)))
        for rank, image in enumerate(images):
            self.tell(rank, "contribute", layout, image)
        self.answers(ranks)
        self._sum_slices(ranks, layout)
        for rank in ranks:
            self.tell(rank, "image", layout)
        return self.answers(ranks)

    def _sum_slices(self, ranks: list[int], layout: Layout) -> None:
        for index, rank in enumerate(ranks):
            self.tell(rank, "slice", layout, index, len(ranks), tuple(ranks))
        self.answers(ranks)

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
