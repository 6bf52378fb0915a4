"""What the examples say to somebody who mistypes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["digits", "transformer"])
def test_a_mode_that_there_is_not_is_answered_with_those_there_are(name: str) -> None:
    argv = [sys.executable, str(ROOT / f"examples/{name}.py"), "--mode", "nix"]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 2
    assert "cpu_async" in done.stderr
    assert "<Mode" not in done.stderr
