"""What averaging costs: the examples, trained alone and in every mode over ranks of speeds 1 : 1 : 1/3.

    python benchmarks/quality.py [--task TASK ...] [--mode MODE ...] [--seeds N] [--write]

Each training sees the same samples: as many epochs, each sample once, whatever the mode. Each is judged twice: by
tests/witness.py (every sample merged exactly once per epoch, all ranks bit-identical after the final round), and by the
example's own measure on the held-out samples.

The figure that counts is, for each mode, how much worse it is than solo: the mean over the seeds of the difference
between two trainings of one seed. Its standard error is the standard deviation of those differences (n - 1) by the root
of their number. A mode is good when the mean is at most two standard errors. Nothing is tuned per mode: learning rate,
batch size and epochs are the example's, the cap on the window is the same for all. The sync modes deal the epoch by the
ranks' speeds (``partition_ratios``), as the others do by themselves: with equal shares the slow rank would train the
last two thirds of each epoch alone, and the run would end with what one rank alone has done.

``--write`` keeps the figures in docs/quality.json, from which the table in docs/engine.md is made. The last line of
output is a JSON object; the exit code is 1 when a mode or a run is bad.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.launched import run_alone, run_locally  # noqa: E402  # found from the root
from flodl.messages import Mode  # noqa: E402
from tests.witness import Testimony, witness_run, witness_solo  # noqa: E402

JOB = ROOT / "benchmarks" / "quality_job.py"
KEPT = ROOT / "docs" / "quality.json"
SOLO = "solo"
STEPS_MS = {"digits": (8.0, 8.0, 24.0), "transformer": (20.0, 20.0, 60.0)}
"""Far above what a step costs with three ranks on two cores, so that the speeds are 1 : 1 : 1/3 indeed: a rank that
ends its epoch alone makes the weights noisier."""
SEEDS = 5
ALLOWED_ERRORS = 2.0
EPOCHS = {"digits": 15, "transformer": 10}
BATCH_SIZE = {"digits": 32, "transformer": 16}
MEASURE = "digits: accuracy; transformer: bits per character, where less is better"
MAX_ANCHOR = 10
"""Local steps cost next to nothing here beside an averaging, so the window would grow to a large part of the run."""
HIGHER_IS_BETTER = {"digits": True, "transformer": False}


@dataclass(frozen=True, slots=True)
class Training:
    """One run. ``faults`` are the witness's."""

    task: str
    mode: str
    seed: int
    held_out: float
    rounds: int
    samples: int
    seconds: float
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One mode of one task. ``worse_by`` and ``standard_error`` are against solo, None for solo itself."""

    task: str
    mode: str
    mean: float
    deviation: float
    worse_by: float | None
    standard_error: float | None
    rounds: float
    is_good: bool


def train(task: str, mode: str, seed: int) -> Training:
    """Run one training to its end and look at what it left."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fdl-quality-") as folder:
        log = Path(folder) / "log"
        log.mkdir()
        flags = [task, "--seed", str(seed), "--log", str(log)]
        flags += ["--epochs", str(EPOCHS[task]), "--batch-size", str(BATCH_SIZE[task])]
        run = None if mode == SOLO else _launch(Path(folder), flags, mode, STEPS_MS[task])
        if run is None:
            run_alone(JOB, flags)
        (told,) = (json.loads(path.read_text()) for path in log.glob("joined-*.json"))
        seen = _witness(run, log, told["samples"], EPOCHS[task], seed)
    seconds = time.monotonic() - started_s
    return Training(task, mode, seed, told["held_out"], seen.rounds, seen.samples, seconds, tuple(seen.faults))


def _witness(run: Path | None, log: Path, samples: int, epochs: int, seed: int) -> Testimony:
    return witness_solo(log, samples, epochs) if run is None else witness_run(run, log, samples, epochs, seed)


def _launch(folder: Path, flags: Sequence[str], mode: str, steps_ms: Sequence[float]) -> Path:
    """The run's directory, once it has ended well."""
    speeds = ["--step-ms", ",".join(f"{each:g}" for each in steps_ms), "--max-anchor", str(MAX_ANCHOR)]
    return run_locally(folder, len(steps_ms), JOB, [*flags, "--mode", mode, *speeds])


def compare(task: str, mode: str, trainings: Sequence[Training], solo: Sequence[Training]) -> Row:
    """The row of one mode; both sequences are of the same seeds in the same order."""
    held_out = [each.held_out for each in trainings]
    mean, deviation = statistics.fmean(held_out), _deviation(held_out)
    is_whole = not any(each.faults for each in trainings)
    rounds = statistics.fmean(each.rounds for each in trainings)
    if mode == SOLO:
        return Row(task, mode, mean, deviation, None, None, rounds, is_whole)
    sign = 1.0 if HIGHER_IS_BETTER[task] else -1.0
    worse = [sign * (alone.held_out - each.held_out) for alone, each in zip(solo, trainings, strict=True)]
    worse_by, error = statistics.fmean(worse), _deviation(worse) / math.sqrt(len(worse))
    return Row(task, mode, mean, deviation, worse_by, error, rounds, is_whole and worse_by <= ALLOWED_ERRORS * error)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def measure(tasks: Sequence[str], modes: Sequence[str], seeds: Sequence[int]) -> tuple[list[Training], list[Row]]:
    """Train everything, seed by seed, so that a machine that grows busier meets all modes alike."""
    trainings = []
    for seed in seeds:
        for task in tasks:
            for mode in (SOLO, *modes):
                done = train(task, mode, seed)
                trainings.append(done)
                words = f"{task:12} {mode:13} seed {seed}: {done.held_out:.4f}, {done.rounds:4} rounds"
                print(f"{words}, {done.seconds:5.1f} s {'; '.join(done.faults)}", flush=True)
    rows = []
    for task in tasks:
        by_mode = {
            mode: [each for each in trainings if (each.task, each.mode) == (task, mode)] for mode in (SOLO, *modes)
        }
        rows += [compare(task, mode, by_mode[mode], by_mode[SOLO]) for mode in (SOLO, *modes)]
    return trainings, rows


def main() -> int:
    """Measure, print, and keep on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=list(EPOCHS), default=list(EPOCHS))
    parser.add_argument("--mode", nargs="+", choices=list(map(str, Mode)), default=list(map(str, Mode)))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {KEPT.relative_to(ROOT)}")
    options = parser.parse_args()
    trainings, rows = measure(options.task, options.mode, range(options.seeds))
    figures = {
        "seeds": options.seeds,
        "measure": MEASURE,
        "steps_ms": STEPS_MS,
        "epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
        "max_anchor": MAX_ANCHOR,
        "rows": [asdict(row) for row in rows],
    }
    if options.write:
        kept = {**figures, "trainings": [asdict(each) for each in trainings]}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    for row in rows:
        words = f"{row.task:12} {row.mode:13} {row.mean:.4f} ± {row.deviation:.4f}"
        against = "" if row.worse_by is None else f" worse by {row.worse_by:+.4f}, error {row.standard_error:.4f}"
        print(words + against + ("" if row.is_good else "  BAD"))
    print(json.dumps(figures))
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
