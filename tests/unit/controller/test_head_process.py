"""A head that is the controller's child: how it is ended."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import pytest

from flodl.config.builder import local_cluster
from flodl.controller import head as head_module
from flodl.controller.head import HeadProcess
from flodl.core.events import HeadExited, JobEvent
from flodl.launch.launcher import LaunchOptions, local_request
from flodl.launch.plan import plan
from flodl.monitor.log_store import LogStore
from flodl.runtime.processes import ProcessId

LIMIT_S = 60.0

SCRIPT = """
import os, signal, sys

def hear(number, frame):
    print("SIGTERM: stopping in order", flush=True)
    sys.exit(3)

signal.signal(signal.SIGTERM, hear)
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0))
print(os.getpid(), "is there", flush=True)
while True:
    signal.pause()
"""


class Stage:
    """A head whose script ends by SIGUSR1, as it would when it hears how the run has ended."""

    def __init__(self, folder: Path, wait_until: Callable[..., object]) -> None:
        self._logs, self._wait_until = folder / "logs", wait_until
        self._logs.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        self._token = folder / "token"

    @property
    def said(self) -> str:
        """All lines but for the script's pid."""
        path = self._logs / "head.stdout.log"
        return path.read_text().partition(" ")[2] if path.exists() else ""

    @property
    def pid(self) -> int:
        """Of the script."""
        return int((self._logs / "head.stdout.log").read_text().split()[0])

    def lives(self, act: Callable[[HeadProcess], Awaitable[object]]) -> list[JobEvent]:
        """What is posted when ``act`` happens to the head once its script runs."""

        async def body() -> list[JobEvent]:
            posted: list[JobEvent] = []
            logs = LogStore(self._logs)
            spec = plan(local_cluster(1), local_request(LaunchOptions(("train.py",))))
            head = HeadProcess(spec, "127.0.0.1:1", self._token, logs)
            living = asyncio.create_task(head.live(posted.append))
            await asyncio.to_thread(self._wait_until, lambda: "is there" in self.said, LIMIT_S, "the head")
            async with asyncio.timeout(LIMIT_S):
                await act(head)
                await living
            logs.close()
            return posted

        return asyncio.run(body())

    async def hear(self, doing: Coroutine[object, object, object]) -> None:
        """``doing`` has begun when the script hears how the run has ended."""
        task = asyncio.create_task(doing)
        await asyncio.sleep(0)
        os.kill(self.pid, signal.SIGUSR1)
        await task


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., object]) -> Stage:
    monkeypatch.chdir(tmp_path)
    return Stage(tmp_path, wait_until)


def test_head_that_was_told_leaves_without_a_signal(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "TOLD_S", LIMIT_S)
    assert stage.lives(lambda head: stage.hear(head.stop(LIMIT_S, is_told=True))) == [HeadExited(0, 0)]
    assert stage.said == "is there\n"


@pytest.mark.parametrize("is_told", [True, False])
def test_head_that_stays_gets_sigterm(stage: Stage, monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    monkeypatch.setattr(head_module, "TOLD_S", 0.01 if is_told else LIMIT_S)
    assert stage.lives(lambda head: head.stop(LIMIT_S, is_told=is_told)) == [HeadExited(3, 0)]
    assert stage.said.endswith("SIGTERM: stopping in order\n")


def test_head_of_a_run_that_is_aborted_is_killed_without_a_word(stage: Stage) -> None:
    assert stage.lives(lambda head: head.stop(0.0, is_told=True)) == [HeadExited(0, 9)]
    assert stage.said == "is there\n"


def test_head_that_works_is_waited_for_however_long_it_takes(stage: Stage) -> None:
    told: list[str] = []

    async def watch(head: HeadProcess) -> None:
        assert head.script == ProcessId.of(stage.pid)
        await stage.hear(head.watch(0.0, told.append))

    assert stage.lives(watch) == [HeadExited(0, 0)]
    assert told == []


def test_head_that_stands_still_is_ended_after_the_grace(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "LOOK_S", 0.01)
    told: list[str] = []

    async def watch(head: HeadProcess) -> None:
        os.kill(stage.pid, signal.SIGSTOP)
        await head.watch(0.05, told.append)

    assert stage.lives(watch) == [HeadExited(0, 9)]
    assert told == [f"the script in the head (pid {stage.pid}) was frozen by a signal for 0.05 s; it is not waited for"]
