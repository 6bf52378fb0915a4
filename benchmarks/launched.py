"""Trainings as a user starts them, for the benchmarks: over local ranks with ``fdl launch``, or alone.

Each has a folder of its own, in which the run keeps its state. One thread per process, so that ranks on few cores do
not fight over them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FDL = Path(sys.executable).parent / "fdl"
LIMIT_S = 300.0
TIME_FACTOR = float(os.environ.get("FLODL_TEST_TIME_FACTOR", "1"))
_STARTED = re.compile(r"^fdl: run (\S+) ", re.MULTILINE)


def run_locally(folder: Path, ranks: int, script: Path, flags: Sequence[str]) -> Path:
    """Train over so many ranks to the end.

    Returns:
        The run's directory.

    Raises:
        RuntimeError: the run did not end well; with all that it said.
    """
    found = directory_of(folder, _run(launch_command(ranks, script, flags), launch_env(folder)))
    assert found is not None, "fdl launch named no run"
    return found


def run_alone(script: Path, flags: Sequence[str]) -> None:
    """Train in one process, without ``fdl``, to the end. Raises as ``run_locally``."""
    _run([sys.executable, str(script), *flags], {"FLODL_SOLO": "1", "OMP_NUM_THREADS": "1"})


def launch_command(ranks: int, script: Path, flags: Sequence[str]) -> list[str]:
    """What a user types."""
    return [str(FDL), "launch", "--local", str(ranks), str(script), *flags]


def launch_env(folder: Path) -> dict[str, str]:
    """What the launch needs beside the environment of this process."""
    return {"FDL_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}


def directory_of(folder: Path, said: str) -> Path | None:
    """The directory of the run that ``fdl launch`` named in ``said``; None before it has."""
    named = _STARTED.search(said)
    return folder / "state" / "runs" / named[1] if named else None


def _run(command: Sequence[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(
        command,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S * TIME_FACTOR,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stderr
