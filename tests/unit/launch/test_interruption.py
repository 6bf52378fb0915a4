"""Signals to a command of fdl: which are caught, and that handlers are put back."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flodl.launch import interruption, rundir
from flodl.launch.interruption import Interrupted
from flodl.launch.terminal import Terminal
from flodl.launch.viewer import Detached, Viewer

VIEWER = """
import os
from flodl.launch import rundir
from flodl.launch.terminal import Terminal
from flodl.launch.viewer import Viewer
mother = os.getppid()  # in the place of a controller that lives and does not answer
info = rundir.ControllerInfo(mother, rundir.process_started(mother), "127.0.0.1", 1)
Viewer(rundir.create("20260101-000000-aaaa"), info, Terminal()).watch()
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_hangup_that_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heard: list[int] = []
    with interruption.caught(SIGNALS, lambda number, _: heard.append(number)):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_interrupt_is_caught_even_where_a_shell_ignores_it_for_a_background_job() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.SIGINT in interruption.wanted(SIGNALS)


def test_handlers_are_put_back() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with interruption.caught(SIGNALS, lambda *_: None):
        pass
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_signal_before_a_run_is_there_is_raised_and_its_repetition_is_not() -> None:
    with interruption.raised("run x", bool):
        with pytest.raises(Interrupted, match="run x: ended by SIGTERM") as told:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert told.value.exit_code == 143


def test_later_signal_of_somebody_who_will_not_wait_is_raised_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "REPEAT_S", -1.0)
    with interruption.raised("run x", bool):
        for _ in range(2):
            with pytest.raises(Interrupted):
                signal.raise_signal(signal.SIGTERM)


def test_signal_ends_what_asyncio_runs_as_ctrl_c_does(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def spin(name: str) -> None:
        try:
            while True:
                await asyncio.sleep(0)
                signal.raise_signal(signal.SIGTERM)  # inside a task's step
        finally:
            ended.append(name)

    async def both() -> None:
        await asyncio.gather(spin("a"), spin("b"))

    with pytest.raises(Interrupted) as told, interruption.raised("run x", bool):
        asyncio.run(both())
    assert told.value.exit_code == 143
    assert sorted(ended) == ["a", "b"]
    gc.collect()
    assert caplog.text == ""


def test_signal_that_a_run_can_be_told_is_left_to_its_viewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with interruption.raised("run x", lambda: True) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        own = rundir.process_started(os.getpid())
        info = rundir.ControllerInfo(os.getpid(), own or 0, "127.0.0.1", 1)
        viewer = Viewer(rundir.create("20260101-000000-aaaa"), info, Terminal(), signals=signals)
        assert viewer.watch() == Detached(129)


def test_signal_waits_for_what_must_not_be_cut() -> None:
    done: list[str] = []

    def deed() -> None:
        with interruption.held():
            signal.raise_signal(signal.SIGUSR1)
            done.append("all")

    with interruption.raised("run x", bool), pytest.raises(Interrupted):
        deed()
    assert done == ["all"]


def mask(pid: int, name: str) -> set[int]:
    """Of a process's signals those that are ``SigCgt``, caught, or ``SigIgn``, ignored."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    bits = int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")), 16)
    return {number for number in range(1, 64) if bits >> (number - 1) & 1}


@pytest.mark.parametrize(
    "command",
    [
        ("-c", VIEWER),
        ("-m", "flodl_cli", "join", "ADDRESS", "--token-file", "token"),
        ("-m", "flodl_cli", "daemon", "run", "ADDRESS", "--token-file", "token"),
    ],
    ids=["viewer", "join", "keeper"],
)
def test_command_under_nohup_hears_no_hangup(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("00" * 32)
    Path("token").chmod(0o600)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what a child inherits
    with socket.create_server(("127.0.0.1", 0)) as mute:
        words = [word.replace("ADDRESS", f"127.0.0.1:{mute.getsockname()[1]}") for word in command]
        process = subprocess.Popen([sys.executable, *words], stdin=subprocess.DEVNULL)
        try:
            wait_until(lambda: signal.SIGTERM in mask(process.pid, "SigCgt"), 60, "its signals are caught")
            assert signal.SIGHUP in mask(process.pid, "SigIgn")
        finally:
            process.kill()
            process.wait(30)
