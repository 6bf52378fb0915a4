"""Ranks of the collective plane as real processes with real Gloo; the test serves the rendezvous table."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from flodl.averaging.store_table import StoreTable
from flodl.messages import Layout

PEER = Path(__file__).with_name("collective_peer.py")
ROOT = PEER.parents[2]
LAYOUT = Layout(f32_count=2_000_003, f64_count=1_001, raw_bytes=77)
DEADLINE_S = 60.0
"""Four interpreters that import torch, on a machine that does other things."""


class Cohort:
    """Peers, their reports, and the controller's rendezvous table between them."""

    def __init__(self, size: int) -> None:
        self.table = StoreTable()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        self.reports: list[list[tuple[Any, ...]]] = [[] for _ in range(size)]
        for rank in range(size):
            mine, theirs = socket.socketpair()
            command = [sys.executable, str(PEER), str(theirs.fileno()), str(rank)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))
            theirs.close()
            self.pipes.append(Connection(mine.detach()))

    def begin(self) -> None:
        """Leave the test before behind: no group, no reports, an empty table."""
        ranks = list(range(len(self.processes)))
        self.tell(ranks, "abandon")
        self.expect(ranks, "abandoned")
        self.reports = [[] for _ in self.processes]
        self.table = StoreTable()

    def tell(self, ranks: list[int], *command: Any) -> None:
        for rank in ranks:
            self.pipes[rank].send(command)

    def expect(self, ranks: list[int], word: str) -> list[tuple[Any, ...]]:
        """The next report ``word`` of each rank, without the word."""
        self._pump(lambda: all(any(r[0] == word for r in self.reports[rank]) for rank in ranks), f"{word} of {ranks}")
        return [self._take(rank, word)[1:] for rank in ranks]

    def ask(self, ranks: list[int], word: str, *arguments: Any) -> list[tuple[Any, ...]]:
        self.tell(ranks, word, *arguments)
        return self.expect(ranks, word)

    def form(self, ranks: list[int], incarnation: int, attempt: int = 0) -> list[str]:
        self.tell(ranks, "form", incarnation, attempt, ranks, 20.0)
        return [error for _, error in self.expect(ranks, "formed")]

    def reduce(self, ranks: list[int], layout: Layout = LAYOUT, include_raw: bool = True) -> list[Any]:
        """One all-reduce in which rank r contributes r + 1; returns what each holds afterwards."""
        for rank in ranks:
            self.tell([rank], "reduce", layout, rank + 1, include_raw)
        assert [error for _, error in self.expect(ranks, "reduced")] == [""] * len(ranks)
        return [sums for (sums,) in self.ask(ranks, "sums", layout)]

    def sum_images(self, images: list[bytes], layout: Layout) -> list[bytes]:
        """One all-reduce of whole images, of rank 0, 1, …; returns what each rank holds afterwards."""
        ranks = list(range(len(images)))
        for rank, image in enumerate(images):
            self.tell([rank], "contribute", layout, image, True)
        assert [error for _, error in self.expect(ranks, "reduced")] == [""] * len(ranks)
        return [image for (image,) in self.ask(ranks, "image", layout)]

    def has_report(self, rank: int, word: str) -> bool:
        return any(report[0] == word for report in self.reports[rank])

    def deliver(self, replies: list[Any]) -> None:
        for rank, reply in replies:
            self.tell([rank], "store_reply", reply)

    def close(self) -> list[int]:
        """End all peers by EOF; returns their exit codes."""
        for pipe in self.pipes:
            pipe.close()
        with suppress(ProcessLookupError):
            for process in self.processes:
                process.send_signal(signal.SIGCONT)
        try:
            return [process.wait(DEADLINE_S) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def _take(self, rank: int, word: str) -> tuple[Any, ...]:
        index = next(i for i, report in enumerate(self.reports[rank]) if report[0] == word)
        return self.reports[rank].pop(index)

    def _pump(self, is_done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_done():
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {what} within {DEADLINE_S} s; reports: {self.reports}"
            for pipe in wait(self._open_pipes(), left_s):
                self._read(self.pipes.index(pipe))  # type: ignore[arg-type]

    def _open_pipes(self) -> list[Connection]:
        return [p for p, process in zip(self.pipes, self.processes, strict=True) if process.poll() is None]

    def _read(self, rank: int) -> None:
        try:
            report = self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].wait(DEADLINE_S)
            return
        if report[0] == "store":
            self.deliver(self.table.handle(rank, report[1], time.monotonic()))
        else:
            self.reports[rank].append(report)
