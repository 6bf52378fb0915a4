"""The daemon as a real process under its warden: ranks, their output, and every way in which it may end."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flodl.messages import (
    Beat,
    HostStopped,
    KillRank,
    PickPort,
    PortPicked,
    RankExited,
    StateSent,
    StopHost,
    StopRanks,
    StopWanted,
)
from tests.integration.daemon_desk import Desk, desk

SUSPECT_S = 10.0  # the silence that counts (docs/operations.md); the beats are due every second

SLEEP = "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n"
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
print("pid", os.getpid(), "pid", child.pid, flush=True)
time.sleep(600)
"""


def at(folder: Path, scenario: Callable[[Desk], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with desk(folder) as made:
            return await scenario(made)

    return asyncio.run(bounded())


async def pids(at_desk: Desk, rank: int = 0) -> list[int]:
    text = await at_desk.until_text("\n", rank)
    return [int(number) for number in re.findall(r"pid (\d+)", text)]


async def until_gone(*numbers: int) -> None:
    async with asyncio.timeout(30):
        while any(map(is_alive, numbers)):
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """It runs; an orphan that nobody reaps does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------------------------------------------------------ ranks
def test_ranks_know_their_place_and_their_end_is_told_after_their_words(tmp_path: Path) -> None:
    script = """
import json, os, sys
ticket = json.loads(os.environ["FLODL_ROLE"].removeprefix("rank:"))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FDL_RUN_ID", "OMP_NUM_THREADS",
         "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "FLODL_WARDEN_FD", "NOTIFY_SOCKET")
print(json.dumps([ticket, {name: os.environ.get(name) for name in names}, sys.stdin.read()]), end="")
sys.stderr.buffer.write(b"\\xff\\0\\r last words")
os._exit(3 + ticket["rank"])
"""

    async def scenario(at_desk: Desk) -> None:
        hello = await at_desk.start(script, ("cpu", "cpu"))
        assert [device.kind for device in hello.devices] == ["cpu", "cpu"]
        at_desk.spawn(2)
        exits = [await at_desk.until_said(RankExited, number) for number in (1, 2)]
        at_desk.send(StopHost("the end", 1.0))
        stopped = await at_desk.until_said(HostStopped)
        assert (stopped.host, stopped.reason) == ("node-a", "the end")
        assert await at_desk.end() == 0
        assert {(each.rank, each.code, each.signal, each.by_us) for each in exits} == {
            (0, 3, 0, False),
            (1, 4, 0, False),
        }
        for rank in range(2):
            ticket, env, stdin = json.loads(at_desk.text(rank))
            assert (ticket["rank"], ticket["slot"], ticket["slots"], stdin) == (rank, rank, 2, "")
            assert [env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [
                str(rank),
                str(rank),
                "2",
                "2",
            ]
            assert (env["FDL_RUN_ID"], env["CUDA_VISIBLE_DEVICES"], env["PYTHONUNBUFFERED"]) == ("run-1", "", "1")
            assert env["FLODL_WARDEN_FD"] is env["NOTIFY_SOCKET"] is None
            assert at_desk.output[rank, "stderr"] == b"\xff\0\r last words"

    at(tmp_path, scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"python": "/nowhere/python"}, "/nowhere/python"),
        ({"cwd": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"env": {"X": "a\0b"}}, "null byte"),
        ({"spool_dir": "/proc/nowhere"}, "/proc/nowhere"),
    ],
)
def test_a_rank_that_cannot_start_says_why_in_its_own_log(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(SLEEP, **changes)
        at_desk.spawn()
        ended = await at_desk.until_said(RankExited)
        assert (ended.code, ended.by_us) == (127, False)
        assert "flodl: rank 0 does not start on host node-a" in at_desk.text(0, "stderr")
        assert reason in at_desk.text(0, "stderr")
        at_desk.send(StopHost("enough", 1.0))
        assert await at_desk.end() == 0

    at(tmp_path, scenario)


def test_heartbeats_come_through_whatever_a_rank_prints(tmp_path: Path) -> None:
    script = "import sys\nfor _ in range(400):\n    sys.stdout.write('x' * 99_999 + '\\n')\n"  # 40 MB

    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(script)
        at_desk.spawn()
        await at_desk.until(lambda: len(at_desk.output.get((0, "stdout"), ())) == 40_000_000)
        await at_desk.until_said(RankExited)
        gaps = [b - a for a, b in zip(at_desk.heard_s, at_desk.heard_s[1:], strict=False)]
        assert max(gaps, default=0.0) < SUSPECT_S, sorted(gaps)[-5:]  # all of it may be printed between two beats

    at(tmp_path, scenario)


def test_a_rank_may_close_its_output_and_live(tmp_path: Path) -> None:
    script = "import os, time\nos.write(1, b'bye\\n')\nos.close(1)\nos.close(2)\ntime.sleep(600)\n"

    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(script)
        at_desk.spawn()
        await at_desk.until_text("bye")
        beats = len(at_desk.all_said(Beat))
        await at_desk.until_said(Beat, beats + 3)
        assert [rank.rank for rank in at_desk.all_said(Beat)[-1].ranks] == [0]
        at_desk.send(KillRank(0, "enough"))
        ended = await at_desk.until_said(RankExited)
        assert (ended.signal, ended.by_us) == (signal.SIGKILL, True)

    at(tmp_path, scenario)


def test_a_state_that_is_not_in_the_outbox_costs_the_rank_its_life(tmp_path: Path) -> None:
    script = """
import json, os, socket, time
from flodl.messages import DaemonToRank, StateSent
from flodl.runtime.blocking import BlockingFrames
ticket = json.loads(os.environ["FLODL_ROLE"].removeprefix("rank:"))
frames = BlockingFrames(socket.socket(fileno=ticket["control_fd"]), "daemon", DaemonToRank)
os.write(ticket["outbox_fd"], b"x" * 100)
frames.send(StateSent(0, 1, 101, ""))
time.sleep(600)
"""

    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(script)
        at_desk.spawn()
        await at_desk.until_said(StateSent)
        ended = await at_desk.until_said(RankExited)
        assert (ended.signal, ended.by_us) == (signal.SIGKILL, False)

    at(tmp_path, scenario)


def test_ranks_leave_no_descriptor_zombie_or_file_in_the_daemon(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start("print('x')\n", ("cpu",) * 8, spool_dir=str(tmp_path))
        _, daemon = at_desk.pids()
        await at_desk.until_said(Beat)  # its loop runs and holds all that it needs without ranks
        before = len(os.listdir(f"/proc/{daemon}/fd"))
        at_desk.spawn(8)
        await at_desk.until_said(RankExited, 8)
        async with asyncio.timeout(20):
            while len(os.listdir(f"/proc/{daemon}/fd")) > before:
                await asyncio.sleep(0.01)
        assert psutil.Process(daemon).children() == []
        assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.log", "script.py"]
        assert b"".join(at_desk.output[rank, "stdout"] for rank in range(8)) == b"x\n" * 8

    at(tmp_path, scenario)


# --------------------------------------------------------------------------------------------------------- plain runs
def test_output_of_a_rank_that_is_started_again_goes_on_behind_what_it_printed_before(tmp_path: Path) -> None:
    script = """
import os, sys
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(count * 3_000_000)
sys.stderr.write("words " + count)
"""

    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(script)
        for restart in range(3):
            at_desk.spawn(restart=restart)
            ended = await at_desk.until_said(RankExited, restart + 1)
            assert (ended.rank, ended.code, ended.by_us) == (0, 0, False)
        await at_desk.until(lambda: len(at_desk.output.get((0, "stdout"), ())) == 9_000_000)
        assert at_desk.text() == "".join(str(restart) * 3_000_000 for restart in range(3))
        assert await at_desk.until_text("words 2", stream="stderr") == "words 0words 1words 2"

    at(tmp_path, scenario)


def test_rank_of_a_plain_run_inherits_nothing_and_says_so_when_it_cannot_start_again(tmp_path: Path) -> None:
    script = """
import os, time
print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1], os.environ["FLODL_ROLE"])
while os.listdir("room"):
    time.sleep(0.01)
os.rmdir("room")
"""

    async def scenario(at_desk: Desk) -> None:
        (tmp_path / "room").mkdir()
        await at_desk.start(script, spool_dir=str(tmp_path / "room"))
        at_desk.spawn(restart=0)
        await at_desk.until_said(RankExited)
        assert at_desk.text() == "[0, 1, 2] plain\n"
        for restart in (1, 2):
            at_desk.spawn(restart=restart)
            assert (await at_desk.until_said(RankExited, restart + 1)).code == 127
        assert at_desk.text(stream="stderr").count("flodl: rank 0 does not start on host node-a") == 2

    at(tmp_path, scenario)


def test_ranks_are_stopped_with_all_that_they_started_and_the_daemon_serves_on(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(STUBBORN, ("cpu", "cpu"))
        at_desk.spawn(2, restart=0)
        numbers = [pid for rank in range(2) for pid in await pids(at_desk, rank)]
        at_desk.send(StopRanks("rank 1 failed", 0.3))
        ends = [await at_desk.until_said(RankExited, count) for count in (1, 2)]
        assert {(end.signal, end.by_us) for end in ends} == {(signal.SIGKILL, True)}
        await until_gone(*numbers)
        before = len(at_desk.text())
        at_desk.spawn(2, restart=1)
        await at_desk.until(lambda: len(at_desk.text()) > before)
        at_desk.send(StopHost("enough", 0.3))
        assert await at_desk.end() == 0

    at(tmp_path, scenario)


def test_port_is_picked_on_demand(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(SLEEP)
        at_desk.send(PickPort(1, "127.0.0.1"))
        picked = await at_desk.until_said(PortPicked)
        assert (picked.host, picked.start, picked.address, picked.was_taken) == ("node-a", 1, "127.0.0.1", False)
        at_desk.send(PickPort(2, ""))
        assert (await at_desk.until_said(PortPicked, 2)).port not in (0, picked.port)

    at(tmp_path, scenario)


# ------------------------------------------------------------------------------------------------------------- ends
def test_a_stop_reaches_ranks_that_have_only_just_been_spawned(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(SLEEP, ("cpu", "cpu"))
        started_s = time.monotonic()
        at_desk.spawn(2)
        at_desk.send(StopHost("at once", 60.0))
        assert await at_desk.end() == 0
        assert time.monotonic() - started_s < 30
        assert [each.by_us for each in at_desk.all_said(RankExited)] == [True, True]

    at(tmp_path, scenario)


def test_a_stop_kills_the_stubborn_and_their_sessions_after_the_grace(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(STUBBORN)
        at_desk.spawn()
        numbers = await pids(at_desk)
        at_desk.send(StopHost("enough", 0.5))
        assert await at_desk.end() == 0
        await until_gone(*numbers)
        assert at_desk.all_said(RankExited)[0].signal == signal.SIGKILL

    at(tmp_path, scenario)


def test_sighup_stops_in_order(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(SLEEP)
        at_desk.spawn()
        numbers = await pids(at_desk)
        os.kill(at_desk.pids()[0], signal.SIGHUP)
        stopped = await at_desk.until_said(HostStopped)
        assert "SIGHUP" in stopped.reason
        assert await at_desk.end() == 0
        await until_gone(*numbers)

    at(tmp_path, scenario)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_of_a_scheduler_is_passed_on_and_the_daemon_serves_on(tmp_path: Path, number: signal.Signals) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(SLEEP)
        at_desk.spawn()
        numbers = await pids(at_desk)
        os.kill(at_desk.pids()[0], number)
        wanted = await at_desk.until_said(StopWanted)
        assert (wanted.rank, wanted.signal) == (-1, number)
        assert at_desk.all_said(RankExited) == []
        at_desk.send(StopHost("enough", 0.5))
        assert await at_desk.end() == 0
        await until_gone(*numbers)

    at(tmp_path, scenario)


def test_a_controller_that_is_gone_ends_the_ranks_at_once(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(SLEEP, on_disconnect_s=600.0)
        at_desk.spawn()
        numbers = await pids(at_desk)
        assert at_desk.stream is not None
        at_desk.stream.abort()
        assert await at_desk.end() == 1
        await until_gone(*numbers)
        log = (tmp_path / "daemon.log").read_text()
        assert log.count("the controller is gone") == 2, log  # once when it is noticed, once as the reason to leave

    at(tmp_path, scenario)


def test_a_silent_controller_ends_the_ranks_in_time(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        at_desk.answers_beats = False
        await at_desk.start(SLEEP, on_disconnect_s=2.0)
        at_desk.spawn()
        numbers = await pids(at_desk)
        assert await at_desk.end() == 1
        await until_gone(*numbers)
        assert "silent for 2 s" in (tmp_path / "daemon.log").read_text()

    at(tmp_path, scenario)


def test_a_lost_bulk_connection_ends_the_host(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(SLEEP)
        at_desk.spawn()
        await pids(at_desk)
        assert at_desk.bulk is not None
        at_desk.bulk.close()
        assert await at_desk.end() == 1
        assert "bulk connection" in (tmp_path / "daemon.log").read_text()

    at(tmp_path, scenario)


@pytest.mark.parametrize("victim", [0, 1], ids=["warden", "daemon"])
def test_kill_9_leaves_nothing_of_the_host(tmp_path: Path, victim: int) -> None:
    async def scenario(at_desk: Desk) -> None:
        await at_desk.start(STUBBORN)
        at_desk.spawn()
        numbers = await pids(at_desk)
        both = at_desk.pids()
        os.kill(both[victim], signal.SIGKILL)
        await at_desk.end()
        await until_gone(*both, *numbers)

    at(tmp_path, scenario)


def test_a_refused_daemon_gives_up_for_good(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        starting = asyncio.create_task(at_desk.start(SLEEP, secret="00" * 32))
        while at_desk.daemon is None:
            await asyncio.sleep(0.01)
        assert await at_desk.end() == 2
        starting.cancel()
        assert "controller" in (tmp_path / "daemon.log").read_text()

    at(tmp_path, scenario)


def test_daemon_that_still_looks_for_its_controller_ends_with_its_warden(tmp_path: Path) -> None:
    async def scenario(at_desk: Desk) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and never answers
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            starting = asyncio.create_task(at_desk.start(SLEEP, controllers=(address,)))
            mute.setblocking(False)
            connection, _ = await asyncio.get_running_loop().sock_accept(mute)
            with connection:
                while at_desk.daemon is None:
                    await asyncio.sleep(0.01)
                warden, daemon = at_desk.pids()
                os.kill(warden, signal.SIGKILL)
                await until_gone(warden, daemon)
            starting.cancel()
        assert "its warden has ended" in (tmp_path / "daemon.log").read_text()

    at(tmp_path, scenario)
