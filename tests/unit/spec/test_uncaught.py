"""The exit code of a script that an error of flodl ends."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("raised", "code"),
    [("flodl.errors.ConfigError('no')", 2), ("flodl.errors.RankFailed('no')", 1), ("KeyError(1)", 1)],
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
    assert done.stderr.startswith("Traceback")
    assert done.stderr.count("Traceback") == 1
