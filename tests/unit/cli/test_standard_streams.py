"""Output that cannot be written, and streams that are closed: as supervisors, pagers and full disks leave them."""

import os
import subprocess
import sys

import pytest

COMMANDS = pytest.mark.parametrize("command", ["ps --json", "--help"])


def shell(words: str, **popen: int) -> "subprocess.CompletedProcess[str]":
    """Run ``fdl`` as a shell does, redirections included."""
    text = f'exec "$0" -m flodl_cli {words}'
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
    return subprocess.run(["sh", "-c", text, sys.executable], text=True, timeout=60, check=False, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(autouse=True)
def _no_runs(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path))


@COMMANDS
def test_full_disk_is_said_in_one_line(command: str) -> None:
    done = shell(f"{command} >/dev/full")
    assert (done.returncode, done.stderr) == (1, "fdl: stdout: No space left on device\n")


@COMMANDS
def test_reader_that_is_gone_ends_it_silently_with_141(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = shell(command, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", ["ps 2>/dev/full", "stop nix 2>&-", "ps >&-", "ps <&-", "ps <&- >&- 2>&-"])
def test_command_ends_as_ever_where_nobody_hears_it(words: str) -> None:
    done = shell(words)
    assert done.returncode == (2 if "stop" in words else 0)
    assert "Traceback" not in done.stderr


def test_closed_streams_leave_no_number_for_anything_else() -> None:
    code = (
        "import os; from flodl.launch.standard_streams import open_closed; open_closed();"
        "assert os.open(os.devnull, os.O_RDONLY) > 2; print('lost'); assert os.get_inheritable(1)"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, code], timeout=60, check=False)
    assert done.returncode == 0
