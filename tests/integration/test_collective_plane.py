"""The collective plane with real processes and real Gloo; the rendezvous table is served by the test."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from flodl.averaging.store_table import StoreTable, group_prefix
from flodl.messages import Layout

PEER = Path(__file__).with_name("collective_peer.py")
ROOT = PEER.parents[2]
LAYOUT = Layout(f32_count=2_000_003, f64_count=1_001, raw_bytes=77)
DEADLINE_S = 30.0


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
        self.tell([0, 1, 2], "abandon")
        self.expect([0, 1, 2], "abandoned")
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


@pytest.fixture(scope="module")
def running_cohort() -> Iterator[Cohort]:
    """Three peers that outlive a test: starting them takes longer than most tests."""
    cohort = Cohort(3)
    try:
        yield cohort
    finally:
        codes = cohort.close()
    assert codes == [0, 0, 0]


@pytest.fixture
def cohort(running_cohort: Cohort) -> Cohort:
    running_cohort.begin()
    return running_cohort


@pytest.fixture
def fresh_cohort() -> Iterator[Cohort]:
    cohort = Cohort(3)
    try:
        yield cohort
    finally:
        cohort.close()


def test_three_ranks_meet_at_the_table_hold_the_same_sum_and_end_cleanly(fresh_cohort: Cohort) -> None:
    cohort = fresh_cohort
    assert cohort.form([0, 1, 2], incarnation=1) == ["", "", ""]

    first = cohort.reduce([0, 1, 2])
    second = cohort.reduce([0, 1, 2])

    assert [sums[:3] for sums in first] == [([6.0], [6.0], [200])] * 3
    assert len({sums[3] for sums in first + second}) == 1
    assert cohort.close() == [0, 0, 0]


def test_without_raw_each_rank_keeps_its_own_bytes(cohort: Cohort) -> None:
    cohort.form([0, 1, 2], incarnation=1)

    assert [sums[2] for sums in cohort.reduce([0, 1, 2], include_raw=False)] == [[0]] * 3


def test_a_rank_alone_needs_no_group_and_holds_its_own_contribution(cohort: Cohort) -> None:
    assert cohort.form([1], incarnation=1) == [""]

    assert [sums[:3] for sums in cohort.reduce([1])] == [([2.0], [2.0], [0])]


def test_survivors_of_a_peer_killed_inside_a_reduce_form_again(fresh_cohort: Cohort) -> None:
    cohort = fresh_cohort
    cohort.form([0, 1, 2], incarnation=1)
    cohort.tell([0, 1], "reduce", LAYOUT, 1, True)
    cohort.expect([0, 1], "reducing")
    assert not cohort.has_report(0, "reduced")

    cohort.processes[2].kill()

    assert all(error for _, error in cohort.expect([0, 1], "reduced"))
    cohort.tell([0, 1], "abandon")
    cohort.expect([0, 1], "abandoned")
    parked = cohort.ask([0, 1], "parked")
    assert cohort.form([0, 1], incarnation=2) == ["", ""]
    assert [sums[:3] for sums in cohort.reduce([0, 1])] == [([3.0], [3.0], [200])] * 2
    assert cohort.ask([0, 1], "parked") == parked
    assert [(size, hard) for _, size, hard in parked] == [(LAYOUT.total_bytes, True)] * 2
    assert cohort.close() == [0, 0, -signal.SIGKILL]


def test_a_peer_that_wakes_up_after_it_was_given_up_touches_parked_buffers_only(cohort: Cohort) -> None:
    cohort.form([0, 1, 2], incarnation=1)
    cohort.processes[2].send_signal(signal.SIGSTOP)
    cohort.tell([2], "reduce", LAYOUT, 100, True)
    cohort.tell([0, 1], "reduce", LAYOUT, 1, True)
    cohort.expect([0, 1], "reducing")

    cohort.tell([0, 1], "abandon")
    cohort.expect([0, 1], "abandoned")
    assert cohort.form([0, 1], incarnation=2) == ["", ""]
    before = cohort.reduce([0, 1])
    cohort.processes[2].send_signal(signal.SIGCONT)
    cohort.expect([2], "reduced")

    assert [sums for (sums,) in cohort.ask([0, 1], "sums", LAYOUT)] == before
    assert cohort.reduce([0, 1]) == before
    assert not cohort.has_report(0, "reduced")
    assert [hard for _, _, hard in cohort.ask([0, 1], "parked")] == [True, True]


def test_clearing_the_prefix_ends_a_formation_whose_peer_never_came(cohort: Cohort) -> None:
    cohort.tell([0, 1], "form", 1, 0, [0, 1, 2], 20.0)
    cohort._pump(lambda: len(cohort.table._waiters) == 2, "two waiting ranks")

    cohort.deliver(cohort.table.clear_prefix(group_prefix(1, 0)))

    assert all("rendezvous" in error for _, error in cohort.expect([0, 1], "formed"))
    assert cohort.form([0, 1], incarnation=1, attempt=1) == ["", ""]
    assert [sums[0] for sums in cohort.reduce([0, 1])] == [[3.0]] * 2


def test_a_new_attempt_silences_the_one_before(cohort: Cohort) -> None:
    cohort.tell([0, 1], "form", 1, 0, [0, 1, 2], 20.0)
    cohort._pump(lambda: len(cohort.table._waiters) == 2, "two waiting ranks")

    cohort.tell([0, 1], "form", 1, 1, [0, 1], 20.0)

    assert cohort.expect([0, 1], "formed") == [((1, 1), "")] * 2
    cohort.deliver(cohort.table.clear_prefix(group_prefix(1, 0)))
    assert [sums[0] for sums in cohort.reduce([0, 1])] == [[3.0]] * 2
    assert not cohort.has_report(0, "formed")
