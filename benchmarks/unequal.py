"""Unequal ranks: what a cohort with one rank of a third of the others' speed makes of them.

    python benchmarks/unequal.py [MODE ...]

Three ranks whose steps sleep 50, 50 and 150 ms train a model that is cheap to average (tests/scripts/job.py). Two
figures count, both from the round log behind the first epoch: the slow rank's batches as a part of a fast one's (a
third is ideal), and the cohort's samples per second as a part of the sum of the ranks' solo rates, which are measured
in the same run of this script. The last line of output is a JSON object; the exit code is 1 when a figure is bad.
"""

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.launched import run_alone, run_locally  # noqa: E402  # found from the root

JOB = ROOT / "tests" / "scripts" / "job.py"
MODES = ("nccl_cadence", "cpu_cadence")
STEPS_MS = (50.0, 50.0, 150.0)
BATCH_SIZE = 8
SOLO_BATCHES = 40
LEAST_EFFICIENCY = 0.9
SLOW_SHARE = (0.25, 0.42)
"""Around a third: counts are whole batches, and a step is more than its sleep."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates in samples per second."""

    mode: str
    solo_rates: tuple[float, ...]
    cohort_rate: float
    efficiency: float
    slow_share: float

    @property
    def is_good(self) -> bool:
        """Both figures are within their limits."""
        return self.efficiency >= LEAST_EFFICIENCY and SLOW_SHARE[0] <= self.slow_share <= SLOW_SHARE[1]


def measure(mode: str, batches: int, epochs: int) -> Figures:
    """Measure one mode; epochs of ``batches`` batches, of which the first is the warm-up."""
    with tempfile.TemporaryDirectory(prefix="fdl-unequal-") as folder:
        solo = {step_ms: _solo_rate(Path(folder), step_ms) for step_ms in sorted(set(STEPS_MS))}
        rates = tuple(solo[step_ms] for step_ms in STEPS_MS)
        commits = _cohort(Path(folder), mode, batches, epochs)
    started_ms = next(commit["ts"] for commit in reversed(commits) if commit["epoch"] == 0)
    measured = [commit for commit in commits if commit["epoch"] > 0]
    samples: Counter[int] = Counter()
    for commit in measured:
        for rank, *_, count in commit["spans"]:
            samples[rank] += count
    cohort_rate = samples.total() / (measured[-1]["ts"] - started_ms) * 1e3
    slow_share = samples[2] / ((samples[0] + samples[1]) / 2)
    return Figures(mode, rates, cohort_rate, cohort_rate / sum(rates), slow_share)


def _solo_rate(folder: Path, step_ms: float) -> float:
    log = folder / f"solo-{step_ms:g}"
    log.mkdir()
    flags = ["--step-ms", f"{step_ms:g}", "--size", str(SOLO_BATCHES * BATCH_SIZE), "--epochs", "1"]
    run_alone(JOB, [*flags, "--batch-size", str(BATCH_SIZE), "--log", str(log)])
    (told,) = log.glob("joined-*.json")
    return float(json.loads(told.read_text())["steps_per_s"]) * BATCH_SIZE


def _cohort(folder: Path, mode: str, batches: int, epochs: int) -> list[dict[str, Any]]:
    flags = ["--mode", mode, "--step-ms", ",".join(f"{each:g}" for each in STEPS_MS), "--epochs", str(epochs)]
    flags += ["--size", str(batches * BATCH_SIZE), "--batch-size", str(BATCH_SIZE)]
    with (run_locally(folder, len(STEPS_MS), JOB, flags) / "events.jsonl").open() as file:
        records = [json.loads(line) for line in file]
    return [{**record["fields"], "ts": record["ts"]} for record in records if record["event"] == "commit"]


def main() -> int:
    """Measure the modes of the command line."""
    figures = [measure(mode, batches=400, epochs=4) for mode in sys.argv[1:] or MODES]
    for row in figures:
        print(f"{row.mode:14} efficiency {row.efficiency:.3f}, slow rank's share {row.slow_share:.3f}")
    print(json.dumps({row.mode: asdict(row) for row in figures}))
    return 0 if all(row.is_good for row in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
