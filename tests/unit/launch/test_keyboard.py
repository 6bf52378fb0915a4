"""Keys on a terminal, under a small shell with job control: what they do, and that the terminal gets its modes back."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flodl.launch.keyboard import Keyboard

LIMIT_S = 30.0

SHELL = """
import fcntl, os, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
job = subprocess.Popen([sys.executable, "-c", sys.argv[1]], process_group=0)
os.tcsetpgrp(0, job.pid)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
_, status = os.waitpid(job.pid, os.WUNTRACED)
while os.WIFSTOPPED(status):
    os.tcsetpgrp(0, os.getpgrp())
    print("shell: stopped", flush=True)
    if sys.stdin.readline() == "fg\\n":
        os.tcsetpgrp(0, job.pid)
    os.killpg(job.pid, signal.SIGCONT)
    _, status = os.waitpid(job.pid, os.WUNTRACED)
print("shell: ended", os.waitstatus_to_exitcode(status), flush=True)
"""

VIEWER = """
import os
from flodl.launch import rundir
from flodl.launch.terminal import Terminal
from flodl.launch.viewer import Viewer
shell = os.getppid()  # in the place of a controller that lives and does not answer
info = rundir.ControllerInfo(shell, rundir.process_started(shell), "127.0.0.1", 1)
print(Viewer(rundir.create("20260101-000000-aaaa"), info, Terminal(), lambda: None).watch())
"""


class Window:
    """A terminal with a shell in it that runs the viewer, as a person sees and uses it."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int, limit_s: float) -> None:
        self._process, self._master, self._limit_s = process, master, limit_s
        self._text = b""

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, pattern: str) -> str:
        """What was shown up to ``pattern``; the next wait starts behind it."""
        limit_s = time.monotonic() + self._limit_s
        while (found := re.search(pattern.encode(), self._text)) is None:
            assert time.monotonic() < limit_s, f"no {pattern!r} in {self._text!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self._text += os.read(self._master, 4096)
        shown, self._text = self._text[: found.end()], self._text[found.end() :]
        return shown.decode()

    @property
    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._master)

    @property
    def echoes(self) -> bool:
        return bool(self.modes[3] & termios.ECHO)


@pytest.fixture
def window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_factor: float) -> Iterator[Window]:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    command = [sys.executable, "-c", SHELL, VIEWER]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    yield Window(process, master, LIMIT_S * deadline_factor)
    os.close(master)
    process.kill()
    process.wait(LIMIT_S)


def test_d_detaches(window: Window) -> None:
    before = window.modes
    window.wait_for("d detaches")
    assert not window.echoes
    window.type(b"d")
    shown = window.wait_for("shell: ended 0")
    assert "detached; run 20260101-000000-aaaa goes on" in shown
    assert "Detached(exit_code=0)" in shown
    assert window.modes == before


def test_first_interrupt_stops_in_order_and_d_may_follow(window: Window) -> None:
    before = window.modes
    window.wait_for("d detaches")
    window.type(b"\x03")
    window.wait_for("stopping in order; press Ctrl-C again to end it at once, d to leave it to itself")
    window.type(b"d")
    window.wait_for("stops by itself.*\\s+.*Detached\\(exit_code=0\\)")
    window.wait_for("shell: ended 0")
    assert window.modes == before


def test_quit_signal_leaves_a_usable_terminal(window: Window) -> None:
    before = window.modes
    window.wait_for("d detaches")
    window.type(b"\x1c")
    window.wait_for(f"shell: ended -{signal.SIGQUIT}")
    assert window.modes == before


def test_terminal_is_usable_while_the_viewer_is_stopped(window: Window, wait_until: Callable[..., Any]) -> None:
    window.wait_for("d detaches")
    window.type(b"\x1a")
    window.wait_for("shell: stopped")
    assert window.echoes
    window.type(b"fg\n")
    wait_until(lambda: not window.echoes, LIMIT_S, "keys are read again")
    window.type(b"d")
    window.wait_for("shell: ended 0")


def test_without_a_terminal_there_are_no_keys() -> None:
    before = signal.getsignal(signal.SIGTSTP)
    with open(os.devnull) as nothing, Keyboard(nothing.fileno()) as keys:
        assert not keys.is_attentive
        assert not keys.pressed(b"d")
        assert signal.getsignal(signal.SIGTSTP) == before


def test_terminal_in_whose_foreground_we_are_not_is_left_alone() -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    with Keyboard(slave) as keys:
        os.write(master, b"d\n")
        assert not keys.pressed(b"d")
        assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)
