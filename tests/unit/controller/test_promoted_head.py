"""A head that is not the controller's child: when it counts as gone."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

import pytest

from flodl.controller.head import PromotedHead
from flodl.core.events import HeadExited, JobEvent

LIMIT_S = 30.0


@pytest.fixture
def script() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def exits(pid: int, is_told: bool, act: Callable[[PromotedHead], Awaitable[object]]) -> list[JobEvent]:
    """What is posted when ``act`` happens to the head of this ``pid``."""

    async def body() -> list[JobEvent]:
        head, posted = PromotedHead(pid, lambda: is_told), list[JobEvent]()
        async with asyncio.timeout(LIMIT_S):
            living = asyncio.create_task(head.live(posted.append))
            await act(head)
            await living
        return posted

    return asyncio.run(body())


async def disconnect(head: PromotedHead) -> None:
    head.disconnected()


@pytest.mark.parametrize(("is_told", "code"), [(True, 0), (False, 1)])
def test_head_that_leaves_before_it_is_told_has_failed(
    script: "subprocess.Popen[bytes]", is_told: bool, code: int
) -> None:
    assert exits(script.pid, is_told, disconnect) == [HeadExited(code, 0)]


def test_head_that_dies_before_it_ever_connects_is_noticed(script: "subprocess.Popen[bytes]") -> None:
    async def die(_head: PromotedHead) -> None:
        script.kill()

    assert exits(script.pid, False, die) == [HeadExited(1, 0)]


def test_head_that_stands_still_is_not_waited_for_and_not_ended(script: "subprocess.Popen[bytes]") -> None:
    told: list[str] = []

    async def watch(head: PromotedHead) -> None:
        script.send_signal(signal.SIGSTOP)
        await head.watch(0.0, told.append)

    assert exits(script.pid, True, watch) == [HeadExited(0, 0)]
    assert script.poll() is None
    assert told == [f"the script in the head (pid {script.pid}) was frozen by a signal for 0 s; it is not waited for"]


def test_head_that_leaves_while_it_is_watched_has_left(script: "subprocess.Popen[bytes]") -> None:
    async def watch(head: PromotedHead) -> None:
        assert head.script is not None
        watching = asyncio.create_task(head.watch(0.0, pytest.fail))
        await asyncio.sleep(0)
        script.kill()
        await watching

    assert exits(script.pid, True, watch) == [HeadExited(0, 0)]


def test_head_that_goes_on_after_a_failed_run_is_not_waited_for(script: "subprocess.Popen[bytes]") -> None:
    assert exits(script.pid, True, lambda head: head.stop(0.01, is_told=True)) == [HeadExited(0, 0)]
    assert script.poll() is None
