"""The exit code of a script that an error of flodl ends, and what it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flodl.spec.uncaught import MARK

SCRIPT = """\
import sys
from flodl.spec.context import record_scalar
from flodl.spec.uncaught import exit_with_own_code

{before}
exit_with_own_code()

def step():
    record_scalar("loss", 1.0)

def train():
    {body}

train()
"""
CAUGHT = """\
own = {"__name__": "flodl.rank.main", "sys": sys}
exec('''
def caught(step):
    try:
        step()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
''', own)
caught = own["caught"]
"""
"""A function of flodl's that shows an error itself, as a rank does."""


def run(
    folder: Path, body: str, before: str = "", role: str = "taken:1", wants_traceback: str = ""
) -> tuple[int, list[str]]:
    """The exit code, and what stands on stderr."""
    path = folder / "train.py"
    path.write_text(SCRIPT.format(before=before, body=body))
    env = {name: value for name, value in os.environ.items() if name != "FLODL_ROLE"}
    env |= {"FLODL_ROLE": role} if role else {}
    env |= {"FDL_TRACEBACK": wants_traceback}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("body", ["step()", "caught(step)"])
def test_under_fdl_message_and_own_places_come_first_and_the_whole_traceback_is_marked(
    tmp_path: Path, body: str
) -> None:
    code, lines = run(tmp_path, body, CAUGHT)

    shown = [line for line in lines if not line.startswith(MARK)]
    assert code == 2
    assert shown[:2] == [
        "flodl.errors.UsageError: there is no run in this process; call record_scalar inside train_step",
        "  in your script, most recent call last:",
    ]
    assert [line.strip() for line in shown[3::2]] == ["train()", body, 'record_scalar("loss", 1.0)']
    assert lines[: len(shown)] == shown
    assert lines[len(shown)] == f"{MARK}Traceback (most recent call last):"
    assert any("context.py" in line for line in lines[len(shown) :])


def test_without_fdl_message_and_own_places_are_all(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "step()", role="")

    assert code == 2
    assert lines[0].startswith("flodl.errors.UsageError: there is no run in this process")
    assert [line.strip() for line in lines[3::2]] == ["train()", "step()", 'record_scalar("loss", 1.0)']
    assert lines[-1] == "FDL_TRACEBACK=1 shows the whole traceback"


@pytest.mark.parametrize(
    ("body", "before", "role", "wants_traceback"),
    [
        ("raise KeyError(1)", "", "taken:1", ""),
        ("raise KeyError(1)", "", "", ""),
        ("raise flodl.errors.CheckpointError('no') from KeyError(1)", "import flodl.errors", "", ""),
        ("step()", "", "", "1"),
        ("step()", "sys.excepthook = lambda *told: sys.__excepthook__(*told)", "taken:1", ""),
        ("step()", "sys.excepthook = lambda *told: sys.__excepthook__(*told)", "", ""),
    ],
)
def test_other_errors_and_other_places_keep_the_traceback(
    tmp_path: Path, body: str, before: str, role: str, wants_traceback: str
) -> None:
    _, lines = run(tmp_path, body, before, role, wants_traceback)

    assert "Traceback (most recent call last):" in lines
    assert MARK not in "".join(lines)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("flodl.errors.ConfigError('no')", 2),
        ("flodl.errors.RankFailed('no')", 1),
        ("flodl.errors.CheckpointError('no')", 6),
        ("flodl.errors.PeerLost('no')", 1),
        ("KeyError(1)", 1),
    ],
)
def test_uncaught_error_ends_the_script_with_its_own_code(raised: str, code: int) -> None:
    script = (
        "import atexit, flodl.errors\n"
        "from flodl.spec.uncaught import exit_with_own_code\n"
        "exit_with_own_code(); exit_with_own_code()\n"
        "atexit.register(print, 'atexit')\n"
        f"raise {raised}\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (code, "atexit\n")
    first = (
        "Traceback (most recent call last):"
        if raised.startswith(("Key", "flodl.errors.Peer"))
        else raised.replace("('no')", ": no")
    )
    assert done.stderr.splitlines()[0] == first
    assert done.stderr.count("no\n") + done.stderr.count("KeyError: 1") == 1
