"""Process trees with real processes: all of a tree ends, nothing else does, and nobody's exit status is stolen."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flodl.errors import DeadlineExceeded
from flodl.runtime import processes
from flodl.runtime.processes import ExitStatus, ProcessTree

MARK = f"test-{uuid.uuid4().hex}:1"
"""Processes of one mark end together, so each test process has its own."""

# A child in the session, a child in its own session, and one that detached twice; each writes its pid to a file.
TREE = """
import os, subprocess, sys, time
from pathlib import Path
here = Path(sys.argv[1])
stay = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", stay, str(here / "same")])
subprocess.Popen([sys.executable, "-c", stay, str(here / "setsid")], start_new_session=True)
subprocess.run(["bash", "-c", f"setsid {sys.executable} -c \\"{stay}\\" {here}/twice & exit 0"])
while len([f for f in here.iterdir() if f.stat().st_size]) < 3:
    time.sleep(0.005)
(here / "leader").write_text(str(os.getpid()))
"""
STAY = TREE + "time.sleep(100)\n"


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def pids(folder: Path) -> list[int]:
    return sorted(int(file.read_text()) for file in folder.iterdir() if file.read_text())


def running(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


async def until(predicate: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not predicate():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def planted(argv: list[str], mark: str = MARK, **options: Any) -> AsyncIterator[ProcessTree]:
    """A tree that is gone when the test is over, however it ends."""
    tree = ProcessTree.spawn(argv, mark=mark, **{"stdout": subprocess.DEVNULL, **options})
    try:
        yield tree
    finally:
        await tree.kill_tree()
        tree.close_pipes()


@pytest.mark.parametrize("shell", [False, True], ids=["direct", "bash-wrapped"])
def test_kill_tree_ends_every_descendant(tmp_path: Path, shell: bool) -> None:
    argv = python(STAY, str(tmp_path))

    async def scenario() -> ExitStatus:
        async with planted(["bash", "-c", '"$@"; exit 1', "bash", *argv] if shell else argv) as tree:
            await until((tmp_path / "leader").exists)
            return await tree.kill_tree()

    status = asyncio.run(scenario())

    assert status == ExitStatus(0, signal.SIGKILL)
    assert len(pids(tmp_path)) == 4
    assert running(pids(tmp_path)) == []


def test_killed_leader_leaves_orphans_that_kill_tree_finds(tmp_path: Path) -> None:
    async def scenario() -> tuple[ExitStatus, list[int], list[int]]:
        async with planted(python(STAY, str(tmp_path))) as tree:
            await until((tmp_path / "leader").exists)
            os.kill(tree.pid, signal.SIGKILL)
            status, orphans = await tree.wait(), running(pids(tmp_path))
            await tree.kill_tree()
            return status, orphans, running(pids(tmp_path))

    status, orphans, left = asyncio.run(scenario())

    assert status == ExitStatus(0, signal.SIGKILL)
    assert len(orphans) == 3
    assert left == []


def test_member_that_shed_every_sign_of_the_tree_is_remembered(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys, time
p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True, env={})
open(sys.argv[1], "w").write(str(p.pid))
time.sleep(100)
"""

    async def scenario() -> list[int]:
        async with planted(python(code, str(tmp_path / "bare"))) as tree:
            await until(lambda: len(tree.members()) == 2 and pids(tmp_path))
            os.kill(tree.pid, signal.SIGKILL)
            await tree.wait()
            await tree.kill_tree()
            return running(pids(tmp_path))

    assert asyncio.run(scenario()) == []


def test_other_trees_and_bystanders_live_on() -> None:
    stay = python("import time; time.sleep(100)")

    async def scenario() -> list[bool]:
        bystander = await asyncio.create_subprocess_exec(*stay, start_new_session=True)
        async with planted(stay) as tree, planted(stay, mark=f"{MARK}1") as neighbour:
            await tree.kill_tree()
            alive = [tree.identity.is_alive, neighbour.identity.is_alive, bystander.returncode is None]
        bystander.kill()
        return [*alive, await bystander.wait() == -signal.SIGKILL]

    assert asyncio.run(scenario()) == [False, True, True, True]


def test_terminate_reaches_the_leader_alone(tmp_path: Path) -> None:
    async def scenario() -> tuple[ExitStatus, list[int]]:
        async with planted(python(STAY, str(tmp_path))) as tree:
            await until((tmp_path / "leader").exists)
            tree.terminate()
            return await tree.wait(), running(pids(tmp_path))

    status, left = asyncio.run(scenario())

    assert status == ExitStatus(0, signal.SIGTERM)
    assert len(left) == 3


@pytest.mark.parametrize("has_pidfd", [True, False], ids=["pidfd", "thread"])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", ExitStatus(0, 0)),
        ("raise SystemExit(77)", ExitStatus(77, 0)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", ExitStatus(0, signal.SIGABRT)),
    ],
)
def test_exit_status_tells_code_from_signal(
    monkeypatch: pytest.MonkeyPatch, code: str, expected: ExitStatus, has_pidfd: bool
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    async def scenario() -> list[ExitStatus | None]:
        if not has_pidfd:
            monkeypatch.setattr(processes.os, "pidfd_open", refuse)
        tree = ProcessTree.spawn(python(code), mark=MARK, stdout=2, stderr=subprocess.DEVNULL)
        early = tree.exit_status
        return [early, await tree.wait(), tree.exit_status, await tree.kill_tree(), await tree.kill_tree()]

    assert asyncio.run(scenario()) == [None, expected, expected, expected, expected]


def test_child_gets_null_stdin_pipes_mark_and_descriptors(tmp_path: Path) -> None:
    code = "import os, sys; os.write(int(sys.argv[1]), b'memory'); print([sys.stdin.read(), os.environ, os.getcwd()])"

    async def scenario() -> tuple[bytes, bytes, ExitStatus]:
        memory = processes.create_memfd("outbox")
        argv = python(code, str(memory))
        options = {"env": {"ONLY": "this"}, "cwd": str(tmp_path), "pass_fds": [memory], "stdout": subprocess.PIPE}
        async with planted(argv, **options) as tree:
            status = await tree.wait()
            assert tree.stdout_fd is not None
            out = os.read(tree.stdout_fd, 65536)
        content = os.pread(memory, 100, 0)
        os.close(memory)
        return out, content, status

    out, content, status = asyncio.run(scenario())

    assert status == ExitStatus(0, 0)
    assert content == b"memory"
    assert out.startswith(f"['', environ({{'ONLY': 'this', 'FLODL_RUN_MARK': '{MARK}'".encode())
    assert str(tmp_path).encode() in out


@pytest.mark.parametrize("argv", [["/no/such/program"], ["/etc/passwd"]])
def test_program_that_cannot_start_leaves_no_descriptor(argv: list[str]) -> None:
    async def scenario() -> tuple[int, int]:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match=argv[0]):
            ProcessTree.spawn(argv, mark=MARK)
        return before, len(os.listdir("/proc/self/fd"))

    before, after = asyncio.run(scenario())

    assert after == before


def test_chain_of_forks_is_ended(tmp_path: Path) -> None:
    # it hops slower than /proc is scanned, and ends by itself: a storm that outran the killer would outlive the tests
    code = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
end_s = time.monotonic() + 30
while time.monotonic() < end_s:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.2)
"""

    async def scenario() -> list[processes.ProcessId]:
        parent = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]]);"
        argv = python(parent + "time.sleep(100)", code, str(tmp_path / "storm"))
        async with planted(argv) as tree:
            await until((tmp_path / "storm").exists)
            await tree.kill_tree()
            return tree.members()

    assert asyncio.run(scenario()) == []


def test_tree_that_does_not_go_in_time_is_an_error_that_names_it() -> None:
    async def scenario() -> str:
        async with planted(python("import time; time.sleep(100)")) as tree:
            with pytest.raises(DeadlineExceeded) as error:
                await tree.kill_tree(deadline_s=-1)
            return str(error.value).replace(str(tree.pid), "PID")

    assert asyncio.run(scenario()) == f"process tree {MARK}: pids PID are still there after SIGKILL"


def as_subreaper(scenario: str) -> str:
    """Run in a process of its own, so that this one never becomes a subreaper."""
    code = f"""
import asyncio, os, subprocess, sys, time
from flodl.runtime.processes import *
MARK = {MARK!r}
async def scenario():
{scenario}
become_subreaper()
asyncio.run(scenario())
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reaper_takes_adopted_orphans_and_no_status_of_asyncio() -> None:
    out = as_subreaper("""
    reaper = OrphanReaper()
    slow = "import os, subprocess; subprocess.Popen(['sleep', '0.2'], start_new_session=True); os._exit(0)"
    parents = [await asyncio.create_subprocess_exec(sys.executable, "-c", slow) for _ in range(10)]
    mine = [await asyncio.create_subprocess_exec("bash", "-c", f"exit {n}") for n in range(20)]
    tree = ProcessTree.spawn(["bash", "-c", "exit 9"], mark=MARK, stdout=2)
    reaped, deadline = [], time.monotonic() + 20
    await tree.wait()
    while len(reaped) < 10 and time.monotonic() < deadline:
        reaped += reaper.sweep([tree.pid])
        await asyncio.sleep(0.02)
    print(len(reaped), [await process.wait() for process in mine] == list(range(20)), await tree.kill_tree())
""")

    assert out == "10 True ExitStatus(code=9, signal=0)\n"


def test_kill_tree_of_a_subreaper_leaves_no_zombie() -> None:
    out = as_subreaper("""
    tree = ProcessTree.spawn(["bash", "-c", "for i in 1 2 3; do (setsid sleep 100 &); done; sleep 100"], mark=MARK)
    while len(tree.members()) < 4:
        await asyncio.sleep(0.01)
    await tree.kill_tree()
    tree.close_pipes()
    children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
    print([children, len(os.listdir("/proc/self/fd"))])
""")

    assert out.startswith("['', ")
