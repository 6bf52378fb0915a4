"""A rank is killed: when do the others take their next step, and is everything still right at the end?

    python benchmarks/reliability.py [--repeats N] [--modes MODE ...] [--moments MOMENT ...] [--no-torchrun] [--write]

Three local ranks with steps of 20 ms, in every mode; one is killed (SIGKILL) in the middle of a step, in a reduction,
while it gives its state for a checkpoint, or as the one that evaluates (tests/scripts/struck.py). Of each run:

- ``next_s``: from the kill until every survivor has begun another step (the slowest of them);
- ``pause_s``: the longest time without a step that a survivor had behind the kill;
- the faults that the independent witness found (tests/witness.py): every sample of every epoch merged exactly once, all
  ranks ended with the same weights, and those are what ``join()`` returned.

The same for `torchrun` with its fastest settings, which starts all workers anew from what they have saved. A row is
good when the median of ``next_s`` is at most one second and the witness found nothing. The last line of output is a
JSON object; the exit code is 1 when a row is bad. ``--write`` keeps it in docs/reliability.json, from which
``docs/generate_tables.py`` makes the table of docs/reliability.md.
"""

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.launched import LIMIT_S, TIME_FACTOR, directory_of, launch_command, launch_env  # noqa: E402  # from root
from tests.witness import witness_run  # noqa: E402  # found from the root

STRUCK = ROOT / "tests" / "scripts" / "struck.py"
TORCHRUN_JOB = ROOT / "benchmarks" / "torchrun_job.py"
KEPT = ROOT / "docs" / "reliability.json"
MODES = ("nccl_cadence", "cpu_cadence", "nccl_sync", "cpu_sync", "cpu_async")
MOMENTS = ("step", "reduce", "save", "callback")
RANKS = 3
STEP_MS = 20.0
SIZE, BATCH_SIZE, EPOCHS = 1603, 8, 3
AFTERMATH_S = 5.0
"""Behind the kill, in which the longest pause counts."""

MOST_S = 1.0
SAVE_EVERY = 20
TORCHRUN_STEPS = 60
TORCHRUN_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """One mode and moment, or torchrun. Seconds; None where no step came within the limit."""

    what: str
    next_s: tuple[float | None, ...]
    pause_s: tuple[float | None, ...]
    steps_redone: tuple[int, ...]
    faults: tuple[str, ...]

    @property
    def median_s(self) -> float:
        """Of ``next_s``, in which a step that never came is infinite."""
        return statistics.median(float("inf") if each is None else each for each in self.next_s)

    @property
    def is_good(self) -> bool:
        """Within the limit, and nothing lost."""
        return self.median_s <= MOST_S and not self.faults

    def __str__(self) -> str:
        came = [each for each in self.next_s if each is not None]
        paused = [each for each in self.pause_s if each is not None]
        return (
            f"{self.what:24} next step: median {self.median_s:.3f} s, most {max(came, default=0):.3f} s, "
            f"{len(came)} of {len(self.next_s)}; longest pause: median {statistics.median(paused or [0]):.3f} s, "
            f"most {max(paused, default=0):.3f} s; steps done again: {max(self.steps_redone, default=0)} at most"
            + "".join(f"\n  {fault}" for fault in self.faults)
        )


# --------------------------------------------------------------------------------------------------------------- flodl
def survive(mode: str, moment: str) -> tuple[float | None, float | None, list[str]]:
    """One run: ``next_s``, ``pause_s`` and what is wrong."""
    with tempfile.TemporaryDirectory(prefix="fdl-reliability-") as name:
        folder, log = Path(name), Path(name) / "log"
        log.mkdir()
        flags: dict[str, object] = {"mode": mode, "step-ms": STEP_MS, "size": SIZE, "batch-size": BATCH_SIZE}
        flags |= {"epochs": EPOCHS, "max-anchor": 10, "log": log}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))] + ["--note-steps"]
        match moment:
            case "save":
                words += ["--save", str(folder / "saved"), "--every", "1", "--ballast-mb", "20"]
            case "callback":
                words.append("--evaluate")
            case _:
                pass
        command = launch_command(RANKS, STRUCK, words)
        env = os.environ | launch_env(folder) | {"FLODL_TEST_STRUCK": moment}
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S * TIME_FACTOR,
            check=False,
        )
        run = directory_of(folder, done.stderr)
        struck = list(log.glob("struck-*"))
        if done.returncode or run is None or len(struck) != 1:
            return None, None, [f"ended with {done.returncode}, {len(struck)} struck: {done.stderr[-1500:]}"]
        killed_s, victim = float(struck[0].read_text()), int(struck[0].name.removeprefix("struck-"))
        waits = [_waits(log / f"steps-{rank}.log", killed_s) for rank in range(RANKS) if rank != victim]
        faults = witness_run(run, log, SIZE, EPOCHS, lost=[victim]).faults
        nexts = [each for each, _ in waits if each is not None]
        return (max(nexts) if len(nexts) == len(waits) else None), max(pause for _, pause in waits), faults


def _waits(path: Path, killed_s: float) -> tuple[float | None, float]:
    """From the kill to the next step's begin, and the longest time between two steps from there on."""
    steps = [tuple(float(word) for word in line.split()) for line in path.read_text().splitlines()]
    later = [begun for begun, _ in steps if begun > killed_s]
    gaps = [
        after[0] - max(before[1], killed_s)
        for before, after in itertools.pairwise(steps)
        if killed_s < after[0] and before[1] < killed_s + AFTERMATH_S
    ]
    return (later[0] - killed_s if later else None), max(gaps, default=0.0)


# ------------------------------------------------------------------------------------------------------------ torchrun
def restart() -> tuple[float | None, int]:
    """One run under torchrun: from the kill to the next step of a worker, and how many steps were done again."""
    with (
        tempfile.TemporaryDirectory(prefix="fdl-reliability-") as name,
        socket.create_server(("127.0.0.1", 0)) as probe,
    ):
        folder, port = Path(name), probe.getsockname()[1]
        probe.close()
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={RANKS}"]
        command += ["--max-restarts=10", "--monitor-interval=0.1", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint=127.0.0.1:{port}", str(TORCHRUN_JOB), str(folder), str(STEP_MS), str(SAVE_EVERY)]
        with subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                _until(lambda: len(_steps(folder)) >= TORCHRUN_STEPS, LIMIT_S * TIME_FACTOR)
                os.kill(int((folder / f"pid-{RANKS - 1}").read_text()), signal.SIGKILL)
                killed_s, old = time.monotonic(), _steps(folder)[-1]
                try:
                    _until(lambda: _steps(folder)[-1].pid != old.pid, TORCHRUN_LIMIT_S * TIME_FACTOR)
                except TimeoutError:
                    return None, 0
                generation = [step for step in _steps(folder) if step.pid != old.pid]
                newest = max(step.number for step in _steps(folder) if step.pid == old.pid)
                return generation[0].ended_s - killed_s, max(0, newest + 1 - generation[0].number)
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(LIMIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


class _Step(NamedTuple):
    """A step of rank 0, of one generation of workers."""

    number: int
    ended_s: float
    pid: int


def _steps(folder: Path) -> list[_Step]:
    path = folder / "steps-0.log"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    cut = [line.split() for line in lines if line.endswith("\n")]
    return [_Step(int(number), float(ended_s), int(pid)) for number, ended_s, pid in cut]


def _until(predicate: Callable[[], Any], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not predicate():
        if time.monotonic() > end_s:
            raise TimeoutError
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------- main
def measure(mode: str, moment: str, repeats: int) -> Row:
    """So many runs of one mode, with a kill in one moment."""
    seen = [survive(mode, moment) for _ in range(repeats)]
    faults = tuple(fault for *_, found in seen for fault in found)
    return Row(f"{mode} {moment}", tuple(each[0] for each in seen), tuple(each[1] for each in seen), (), faults)


def measure_torchrun(repeats: int) -> Row:
    """The baseline; its pause is the time to the next step, for all workers stand still."""
    seen = [restart() for _ in range(repeats)]
    waits = tuple(wait for wait, _ in seen)
    return Row("torchrun", waits, waits, tuple(steps for _, steps in seen), ())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--moments", nargs="*", default=MOMENTS)
    parser.add_argument("--no-torchrun", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(arguments)
    rows = [] if args.no_torchrun else [measure_torchrun(args.repeats)]
    for row in rows:
        print(row, flush=True)
    bad = False
    for mode, moment in itertools.product(args.modes, args.moments):
        row = measure(mode, moment, args.repeats)
        print(row, flush=True)
        rows.append(row)
        bad = bad or not row.is_good
    figures = {row.what: {**asdict(row), "median_s": row.median_s} for row in rows}
    if args.write:
        KEPT.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
