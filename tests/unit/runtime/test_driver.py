"""The driver loop: order, deadlines, stalls, bounds and errors, around a small core that writes down what it hears."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import InvariantViolation
from flodl.runtime.clock import Clock, MonotonicClock
from flodl.runtime.driver import Driver

Wait = Callable[[Callable[[], Any], float, Any], Any]


class DiaryCore:
    """Answers each event with the actions it was told to give; its deadline is set by the test."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers
        self.heard: list[str] = []
        self.deadline_s: float | None = None

    def handle(self, event: str, now_s: float) -> list[str]:
        self.heard.append(event)
        if event == "tick":
            self.deadline_s = None
        return self.answers.get(event, [])

    def next_deadline_s(self) -> float | None:
        return self.deadline_s


class JumpingClock:
    """The monotonic clock plus what a test adds, as after SIGCONT."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def now_s(self) -> float:
        return MonotonicClock().now_s() + self.added_s


class Stage:
    """A driver around a diary core; the action ``stop`` ends it, ``raise`` fails, others are written down."""

    def __init__(self, clock: Clock | None = None, queue_events: int = 100, **answers: list[str]) -> None:
        self.core = DiaryCore({"end": ["stop"], **answers})
        self.done: list[str] = []
        self.driver: Driver[str, str] = Driver(
            self.core, self.execute, clock or MonotonicClock(), lambda: "tick", lambda s: f"stall {s:.0f}", queue_events
        )

    def execute(self, action: str) -> None:
        self.done.append(action)
        if action == "stop":
            self.driver.stop()
        elif action == "raise":
            raise ValueError("from an action")
        elif action.startswith("post "):
            self.driver.post(action[5:])

    async def run(self, *events: str) -> None:
        for event in events:
            self.driver.post(event)
        async with asyncio.timeout(20):
            await self.driver.run()


def test_events_and_actions_keep_their_order() -> None:
    stage = Stage(first=["a", "b"], second=["c", "post end"], third=["d"])

    asyncio.run(stage.run("first", "second", "third"))

    assert stage.core.heard == ["first", "second", "third", "end"]
    assert stage.done == ["a", "b", "c", "post end", "d", "stop"]


def test_actions_behind_a_stop_are_still_executed_and_events_are_not() -> None:
    stage = Stage(last=["stop", "close the books"])

    asyncio.run(stage.run("last", "never heard"))

    assert stage.done == ["stop", "close the books"]
    assert stage.core.heard == ["last"]


def test_tick_comes_at_the_deadline() -> None:
    stage = Stage(tick=["post end"])
    clock = MonotonicClock()
    stage.core.deadline_s = due_s = clock.now_s() + 0.05

    asyncio.run(stage.run())

    assert stage.core.heard == ["tick", "end"]
    assert clock.now_s() >= due_s


def test_deadline_is_armed_anew_after_every_event() -> None:
    stage = Stage(tick=["stop"])
    stage.core.deadline_s = MonotonicClock().now_s() + 1000

    async def scenario() -> None:
        running = asyncio.create_task(stage.run("first"))
        while not stage.core.heard:
            await asyncio.sleep(0)
        stage.core.deadline_s = 0.0
        stage.driver.post("second")
        await running

    asyncio.run(scenario())

    assert stage.core.heard == ["first", "second", "tick"]


def test_tick_is_not_starved_by_events_nor_events_by_ticks() -> None:
    stage = Stage()

    def always_due() -> float:
        return 0.0

    stage.core.next_deadline_s = always_due  # type: ignore[method-assign]
    asyncio.run(stage.run("a", "b", "end"))

    assert stage.core.heard == ["tick", "a", "tick", "b", "tick", "end"]


def test_stall_is_heard_before_what_waited_meanwhile() -> None:
    clock = JumpingClock()
    stage = Stage(clock)

    async def scenario() -> None:
        running = asyncio.create_task(stage.run("first"))
        while not stage.core.heard:
            await asyncio.sleep(0)
        clock.added_s = 45
        stage.driver.post("beat")
        stage.driver.post("end")
        await running

    asyncio.run(scenario())

    assert stage.core.heard == ["first", "stall 45", "beat", "end"]
    assert stage.driver.longest_gap_s >= 45


def test_stall_noticed_while_idle_waits_for_the_next_event() -> None:
    clock = JumpingClock()
    stage = Stage(clock)

    async def scenario() -> None:
        running = asyncio.create_task(stage.run())
        await asyncio.sleep(0)
        clock.added_s = 30
        async with asyncio.timeout(10):
            while stage.driver.longest_gap_s < 30:
                await asyncio.sleep(0.01)
        stage.driver.post("end")
        await running

    asyncio.run(scenario())

    assert stage.core.heard == ["stall 30", "end"]


def test_stopped_process_reports_the_stall_first(tmp_path: Path, wait_until: Wait) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.driver import Driver
class Core:
    deadline_s = 0.0
    def handle(self, event, now_s):
        self.deadline_s = None
        print(event if isinstance(event, str) else f"stall {event > 1.2}", flush=True)
        return [event]
    def next_deadline_s(self): return self.deadline_s
async def main():
    driver = Driver(Core(), lambda a: driver.stop() if a == "word" else None, MonotonicClock(), lambda: "tick", float)
    asyncio.get_running_loop().add_reader(0, lambda: (sys.stdin.readline(), driver.post("word"))[1])
    await driver.run()
asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "tick\n"
    os.kill(process.pid, signal.SIGSTOP)
    stopped_s = MonotonicClock().now_s()
    process.stdin.write("hello\n")
    process.stdin.flush()
    wait_until(lambda: MonotonicClock().now_s() > stopped_s + 1.6, 10, "the process has been stopped for a while")
    os.kill(process.pid, signal.SIGCONT)

    lines = process.communicate(timeout=60)[0].splitlines()

    assert lines[0] == "stall True"
    assert lines[-1] == "word"


@pytest.mark.parametrize("flaw", ["core", "action"])
def test_errors_reach_the_owner(flaw: str) -> None:
    stage = Stage(**({"bad": ["raise"]} if flaw == "action" else {}))
    if flaw == "core":
        stage.core.answers = None  # type: ignore[assignment]

    with pytest.raises(ValueError if flaw == "action" else AttributeError):
        asyncio.run(stage.run("bad"))


def test_overflow_is_an_error_and_not_a_silent_loss() -> None:
    stage = Stage(queue_events=3)

    with pytest.raises(InvariantViolation, match="more than 3 events"):
        asyncio.run(stage.run("a", "b", "c", "d"))


def test_put_waits_for_room() -> None:
    stage = Stage(queue_events=2)

    async def scenario() -> None:
        running = asyncio.create_task(stage.run())
        for event in [*"abcdefgh", "end"]:
            await stage.driver.put(event)
        await running

    asyncio.run(scenario())

    assert stage.core.heard == [*"abcdefgh", "end"]


def test_events_from_threads_arrive() -> None:
    stage = Stage()

    async def scenario() -> None:
        running = asyncio.create_task(stage.run("first"))
        while not stage.core.heard:
            await asyncio.sleep(0)
        thread = threading.Thread(target=stage.driver.post_threadsafe, args=("end",))
        thread.start()
        await running
        thread.join()

    asyncio.run(scenario())
    stage.driver.post_threadsafe("nobody hears this")

    assert stage.core.heard == ["first", "end"]


def test_event_from_a_thread_before_the_loop_is_an_error() -> None:
    with pytest.raises(InvariantViolation, match="before the loop"):
        Stage().driver.post_threadsafe("early")


def test_cancelling_ends_the_loop_and_its_pulse() -> None:
    stage = Stage()

    async def scenario() -> int:
        running = asyncio.create_task(stage.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1
