"""The leak check finds what a careless test leaves behind (run as a test session of its own)."""

import os
import signal
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def careless(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("FLODL_TEST_TIME_FACTOR", "0.1")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.mkdir("integration")
    return pytester


def run(pytester: pytest.Pytester, body: str) -> pytest.RunResult:
    (pytester.path / "integration" / "test_careless.py").write_text(body)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist", timeout=60)


def test_clean_test_passes(careless: pytest.Pytester) -> None:
    result = run(careless, "def test_clean(): pass\n")

    result.assert_outcomes(passed=1)


def test_orphan_in_a_session_of_its_own_is_found(careless: pytest.Pytester) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    spawn = f"import subprocess as s; print(s.Popen({sleeper}, start_new_session=True, stdout=-3, stderr=-3).pid)"
    result = run(
        careless,
        f"""
import pathlib, subprocess, sys
def test_leaves_an_orphan():
    out = subprocess.run([sys.executable, "-c", {spawn!r}], capture_output=True, text=True, check=True)
    pathlib.Path("orphan.pid").write_text(out.stdout)
""",
    )
    os.kill(int((careless.path / "orphan.pid").read_text()), signal.SIGKILL)

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind: process *time.sleep*"])


def test_thread_is_found(careless: pytest.Pytester) -> None:
    result = run(
        careless,
        """
import threading
def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, args=(5,), name="forgotten").start()
""",
    )

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind: thread forgotten*"])


def test_descriptors_are_found(careless: pytest.Pytester) -> None:
    result = run(
        careless,
        """
import os
kept = []
def test_leaves_files_open():
    kept.extend(os.open(__file__, os.O_RDONLY) for _ in range(5))
""",
    )

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind: descriptors *test_careless.py*"])
