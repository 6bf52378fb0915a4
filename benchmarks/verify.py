"""Everything that shows what flodl claims, in its long version, with one report.

    python benchmarks/verify.py                   all stages
    python benchmarks/verify.py tests mutation    these
    python benchmarks/verify.py --list

A stage is a command. Its exit code is the verdict: 0 passed, ``SKIPPED`` (77) cannot run here, anything else failed.
If the last line of its standard output is a JSON object, its entries are the stage's figures; a stage that skips says
why in ``{"skipped": "…"}``. To add a stage, add an entry to ``STAGES``.

Writes ``verify-report.json`` after every stage, so that an interrupted run has its part. Exits non-zero if a stage
failed, or skipped without a reason.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "verify-report.json"
SKIPPED = 77
KILL_GRACE_S = 30.0
TAIL_LINES = 40
PYTHON = sys.executable


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing to run. ``shows`` names the lines of the issue's "It is done when" that it stands for."""

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float
    env: Mapping[str, str] = field(default_factory=dict)


def _pytest(*arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "pytest", "-q", *arguments)


ENGINE_TESTS = ("synchronous", "overlap")
RUN_TESTS = (
    "local_run",
    "kill",
    "failures",
    "bad_input",
    "speed",
    "join",
    "managed",
    "callbacks",
    "preemption",
    "window",
)
PLAIN_TESTS = ("plain", "frameworks")
PHASE_TESTS = ("phases", "plane_agreement")
CHECKPOINT_TESTS = ("checkpoints", "resume", "solo_checkpoints")

STAGES = (
    Stage(
        "tests",
        "[1/9] 1, 8; [2/9] 3, 7: make test passes, with the float64 oracle (unit/averaging) and the flipped bit "
        "(core/test_disagreement, test_rank_shell)",
        ("make", "--no-print-directory", "test"),
        limit_s=1800,
    ),
    Stage(
        "long properties",
        "[1/9] 3, 8; [2/9] 3, 5, 7: many examples and seeds of invariants, exact coverage, the cadence's promises, the "
        "float64 oracle (test_averaging_props) and flipped bits (sim); [3/9] 1: random faults, each kind counted, and "
        "planted bugs found; 3, 4: stopped hosts and controllers (sim)",
        _pytest("-n", "2", "-m", "", "--timeout", "1800", "tests/property", "tests/sim"),
        limit_s=7200,
        env={"HYPOTHESIS_PROFILE": "verify", "FLODL_TEST_TIME_FACTOR": "20", "FLODL_FIGURES": "1"},
    ),
    Stage(
        "local runs",
        "[1/9] 2, 3, 5, 6, 7; [3/9] 7: whole runs on one machine: every mode, kill and failure, bad input, joins",
        _pytest("-m", "", "--timeout", "300", *(f"tests/integration/test_{name}.py" for name in RUN_TESTS)),
        limit_s=3600,
    ),
    Stage(
        "plain scripts",
        "[4/9] 6: scripts for torchrun run unchanged: DDP with kills, restarts and stops, and the loops of frameworks",
        _pytest("-m", "", "--timeout", "300", *(f"tests/integration/test_{name}.py" for name in PLAIN_TESTS)),
        limit_s=1800,
    ),
    Stage(
        "phases",
        "[2/9] 3 and the commit protocol: a peer killed, stopped or woken in every phase of a round on both planes",
        _pytest("-m", "", "--timeout", "300", *(f"tests/integration/test_{name}.py" for name in PHASE_TESTS)),
        limit_s=3600,
    ),
    Stage(
        "engine",
        "[2/9] 2, 6: sync modes give DistributedDataParallel's parameters; in cpu_async no step waits for a round",
        _pytest("-m", "", "--timeout", "300", *(f"tests/integration/test_{name}.py" for name in ENGINE_TESTS)),
        limit_s=900,
        env={"FLODL_FIGURES": "1"},
    ),
    Stage(
        "quality",
        "[2/9] 1, 8: both examples in every mode, exact coverage, equal bits, as good as solo at equal samples",
        (PYTHON, "benchmarks/quality.py"),
        limit_s=3600,
    ),
    Stage(
        "divergence",
        "[2/9] 4, 7: an injected divergence: vetoes, nudges, and no mode worse off than DistributedDataParallel",
        (PYTHON, "benchmarks/divergence.py"),
        limit_s=1800,
    ),
    Stage(
        "checkpoints",
        "[3/9] 5, 6, 8: saves killed at any moment, disks that fail, and runs that go on as if nothing had happened",
        _pytest("-m", "", "--timeout", "300", *(f"tests/integration/test_{name}.py" for name in CHECKPOINT_TESTS)),
        limit_s=2 * 3600,
        env={"FLODL_FIGURES": "1"},
    ),
    Stage(
        "silence",
        "[3/9] 3, 4: a rank frozen for good and a controller frozen for a minute, with the usual clocks, in every mode",
        _pytest("-m", "", "tests/integration/test_silence.py"),
        limit_s=3600,
    ),
    Stage(
        "reliability",
        "[3/9] 2: a rank killed in every mode and moment, and how soon the others step on, beside torchrun",
        (PYTHON, "benchmarks/reliability.py"),
        limit_s=3 * 3600,
    ),
    Stage(
        "two hosts",
        "[1/9] 2, 3, 5, 6; [2/9] zombies; [3/9] 3, 7: the same over ssh, with a pulled cable, every kind of host that "
        "fails, and hosts that come back; [4/9] 1: a real systemd runs the managed daemon's unit; 2, 3: ways in, and "
        "what is on the wire; 4: secrets that stand nowhere; 5: planted faults that probe finds; 7: kills on all hosts",
        _pytest("-m", "", "--timeout", "300", "tests/system"),
        limit_s=3600,
        env={"FLODL_FIGURES": "1"},
    ),
    Stage(
        "unequal ranks",
        "[1/9] 4: a third of the batches at a third of the speed, 0.9 of the solo rates together",
        (PYTHON, "benchmarks/unequal.py"),
        limit_s=900,
    ),
    Stage(
        "startup",
        "[1/9] 7: `fdl --help` within 150 ms, a daemon ready within 0.5 s",
        (PYTHON, "benchmarks/startup.py"),
        limit_s=300,
    ),
    Stage("mutation", "[1/9] 8: 85 % of the mutants die", (PYTHON, "benchmarks/mutation.py"), limit_s=4 * 3600),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a stage. ``verdict`` is passed, failed, skipped, or timed out."""

    stage: Stage
    verdict: str
    exit_code: int
    seconds: float
    figures: Mapping[str, Any]
    tail: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Passed, or skipped for a stated reason."""
        return self.verdict == "passed" or (self.verdict == "skipped" and bool(self.figures.get("skipped")))

    def as_json(self) -> dict[str, Any]:
        """The stage's part of the report."""
        row: dict[str, Any] = {
            "name": self.stage.name,
            "shows": self.stage.shows,
            "command": list(self.stage.command),
            "env": dict(self.stage.env),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 1),
            "figures": dict(self.figures),
        }
        if not self.is_good:
            row["tail"] = list(self.tail)
        return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="stage names; all without one")
    parser.add_argument("--list", action="store_true", help="name the stages and what each shows")
    parser.add_argument("--report", type=Path, default=REPORT, help="where to write the report")
    options = parser.parse_args()
    if options.list:
        for stage in STAGES:
            print(f"{stage.name:20} {stage.shows}")
        return 0
    unknown = set(options.stages) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))} (see --list)")

    chosen = [stage for stage in STAGES if not options.stages or stage.name in options.stages]
    header = describe_tree_and_machine()
    results: list[Result] = []
    for stage in chosen:
        print(f"\n=== {stage.name}: {stage.shows}\n$ {' '.join(stage.command)}", flush=True)
        results.append(run(stage))
        write_report(options.report, header, chosen, results)
    print_table(results, options.report)
    return 0 if all(result.is_good for result in results) else 1


def run(stage: Stage) -> Result:
    """Run one stage in a session of its own, its output passed through, and ended with its whole group."""
    started_s = time.monotonic()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    process = subprocess.Popen(
        stage.command,
        cwd=ROOT,
        env=os.environ | stage.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_pass_through, args=(process.stdout, tail), daemon=True)
    reader.start()
    is_late = False
    try:
        process.wait(timeout=stage.limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        _end_group(process)
    reader.join(timeout=KILL_GRACE_S)
    verdict = "timed out" if is_late else {0: "passed", SKIPPED: "skipped"}.get(process.returncode, "failed")
    seconds = time.monotonic() - started_s
    return Result(stage, verdict, process.returncode, seconds, figures_in(tail), tuple(tail))


def _pass_through(stream: IO[str], tail: deque[str]) -> None:
    for line in stream:
        sys.stdout.write(line)
        sys.stdout.flush()
        tail.append(line.rstrip("\n"))


def _end_group(process: subprocess.Popen[str]) -> None:
    """End what is left of the stage's process group; nothing is, when it ended by itself in good order."""
    for number, grace_s in ((signal.SIGTERM, KILL_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=grace_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def figures_in(tail: deque[str]) -> dict[str, Any]:
    """The JSON object of the last line that has any text; nothing if it is something else."""
    last = next((line for line in reversed(tail) if line.strip()), "")
    if not last.startswith("{"):
        return {"last_line": last}
    try:
        figures = json.loads(last)
    except ValueError:
        return {"last_line": last}
    return figures if isinstance(figures, dict) else {"last_line": last}


def describe_tree_and_machine() -> dict[str, Any]:
    """What was measured, on what."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("flodl", "torch", "numpy", "asyncssh", "pytest", "mutmut")},
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write_report(path: Path, header: Mapping[str, Any], chosen: list[Stage], results: list[Result]) -> None:
    """Replace the report; ``complete`` says whether every stage has been run and none was left out."""
    report = {
        **header,
        "complete": len(results) == len(STAGES),
        "passed": len(results) == len(chosen) and all(result.is_good for result in results),
        "stages": [result.as_json() for result in results],
    }
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    scratch.replace(path)


def print_table(results: list[Result], report: Path) -> None:
    print("\n=== report")
    for result in results:
        print(f"{result.verdict:10} {result.seconds:8.1f} s  {result.stage.name:20} {result.stage.shows}")
    print(f"written to {report}")


if __name__ == "__main__":
    sys.exit(main())
