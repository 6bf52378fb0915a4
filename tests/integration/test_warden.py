"""The warden with real processes: it passes signals and statuses on and leaves nothing of its child's tree."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

Wait = Callable[[Callable[[], Any], float, Any], Any]

WARDEN = Path(__file__).parents[2] / "daemon" / "flodl_daemon" / "warden.py"

# Each writes its pid to a file and stays: in its own session; detached twice; without any environment.
DEEP_TREE = """
import os, subprocess, sys, time
from pathlib import Path
here = Path(sys.argv[1])
stay = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
def start(name, env=None):
    return subprocess.Popen([sys.executable, "-c", stay, str(here / name)], start_new_session=True, env=env)
start("setsid")
start("bare", env={})
subprocess.run(["bash", "-c", f"setsid {sys.executable} -c \\"{stay}\\" {here}/twice & exit 0"])
while len([f for f in here.iterdir() if f.stat().st_size]) < 3:
    time.sleep(0.005)
(here / "ready").write_text(str(os.getpid()))
LEADER
"""


class Warden:
    """A running warden and the folder in which its child leaves pids."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self.process = process
        self.folder = folder

    def pid_in(self, name: str) -> int:
        file = self.folder / name
        return int(file.read_text() or 0) if file.exists() else 0

    def alive(self) -> list[int]:
        pids = [self.pid_in(file.name) for file in self.folder.iterdir()]
        return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Warden]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(leader: str, *options: str, **popen: Any) -> Warden:
        child = [sys.executable, "-c", DEEP_TREE.replace("LEADER", leader), str(tmp_path)]
        argv = [sys.executable, "-I", str(WARDEN), *options, "--", *child]
        started.append(subprocess.Popen(argv, **popen))
        return Warden(started[-1], tmp_path)

    yield run
    for process in started:
        process.kill()
        process.wait(10)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()


def test_killed_child_leaves_no_descendant(start: Callable[..., Warden], wait_until: Wait) -> None:
    warden = start("time.sleep(100)")
    wait_until(lambda: warden.pid_in("ready"), 10, "the tree stands")

    os.kill(warden.pid_in("ready"), signal.SIGKILL)

    assert warden.process.wait(10) == -signal.SIGKILL
    assert warden.alive() == []


@pytest.mark.parametrize("code", [0, 3, 125])
def test_exit_code_is_the_childs_and_the_rest_is_ended(start: Callable[..., Warden], code: int) -> None:
    warden = start(f"sys.exit({code})")

    assert warden.process.wait(20) == code
    assert warden.alive() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signal_is_passed_on_and_its_effect_shown(
    start: Callable[..., Warden], wait_until: Wait, number: signal.Signals
) -> None:
    warden = start(f"import signal; signal.signal({number}, signal.SIG_DFL); (here / 'armed').touch(); time.sleep(100)")
    wait_until((warden.folder / "armed").exists, 10, "the child waits for the signal")

    warden.process.send_signal(number)

    assert warden.process.wait(10) == -number
    assert warden.alive() == []


def test_warden_outlives_a_child_that_takes_its_time_to_stop(start: Callable[..., Warden], wait_until: Wait) -> None:
    warden = start(
        """
import signal
signal.signal(signal.SIGTERM, lambda *_: (here / "stopping").write_text("0"))
(here / "armed").write_text("0")
while not (here / "go").exists(): time.sleep(0.005)
sys.exit(9)
"""
    )
    wait_until((warden.folder / "armed").exists, 10, "the child handles TERM")

    warden.process.terminate()
    wait_until((warden.folder / "stopping").exists, 10, "TERM arrived")
    still_there = warden.process.poll()
    (warden.folder / "go").write_text("0")

    assert still_there is None
    assert warden.process.wait(10) == 9


@pytest.mark.parametrize("channel", ["pipe", "stdin"])
def test_lost_parent_means_term(start: Callable[..., Warden], wait_until: Wait, channel: str) -> None:
    reader, writer = os.pipe()
    if channel == "pipe":
        warden = start("time.sleep(100)", "--parent-fd", str(reader), pass_fds=(reader,))
    else:
        warden = start("assert sys.stdin.readline() == 'token\\n'; time.sleep(100)", "--parent-fd", "0", stdin=reader)
    os.close(reader)
    os.write(writer, b"token\nnever read by the warden")
    wait_until(lambda: warden.pid_in("ready"), 10, "the tree stands")

    os.close(writer)

    assert warden.process.wait(10) == -signal.SIGTERM
    assert warden.alive() == []


def test_lost_parent_means_kill_after_the_grace(start: Callable[..., Warden], wait_until: Wait) -> None:
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); (here / 'deaf').touch(); time.sleep(100)"
    warden = start(ignore, "--parent-fd", "0", "--grace", "0.2", stdin=subprocess.PIPE)
    wait_until((warden.folder / "deaf").exists, 10, "the child ignores TERM")

    assert warden.process.stdin is not None
    warden.process.stdin.close()

    assert warden.process.wait(10) == -signal.SIGKILL
    assert warden.alive() == []


def test_child_sees_the_end_of_a_killed_warden(start: Callable[..., Warden], wait_until: Wait) -> None:
    warden = start(
        """
os.read(int(os.environ["FLODL_WARDEN_FD"]), 1)
import signal
for name in ("setsid", "bare", "twice"): os.kill(int((here / name).read_text()), signal.SIGKILL)
"""
    )
    wait_until(lambda: warden.pid_in("ready"), 10, "the tree stands")

    warden.process.kill()

    wait_until(lambda: not warden.alive(), 10, lambda: f"still there: {warden.alive()}")


def test_stdio_belongs_to_the_child(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            str(WARDEN),
            "--",
            "bash",
            "-c",
            "read line; echo out $line; echo err >&2; ps -o sid= $$",
        ],
        input="in\n",
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )

    assert done.stdout.startswith("out in\n")
    assert int(done.stdout.split()[2]) != os.getsid(0)
    assert done.stderr == "err\n"


def test_wrong_use_and_missing_program_say_so() -> None:
    usage = subprocess.run([sys.executable, str(WARDEN), "ls"], capture_output=True, text=True, timeout=20, check=False)
    missing = subprocess.run(
        [sys.executable, str(WARDEN), "--", "/no/such/program"], capture_output=True, text=True, timeout=20, check=False
    )

    assert (usage.returncode, missing.returncode) == (1, 1)
    assert "usage: warden" in usage.stderr
    assert "cannot start /no/such/program: No such file" in missing.stderr


def test_warden_is_small_and_needs_nothing_but_the_standard_library() -> None:
    loaded = subprocess.run(
        [sys.executable, "-I", "-X", "importtime", str(WARDEN), "--", "true"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stderr

    assert len(WARDEN.read_text().splitlines()) <= 100
    assert " flodl\n" not in loaded
    assert " subprocess\n" not in loaded
