"""Mutation testing: how many small changes of a module do its own fast tests notice?

    python benchmarks/mutation.py                     every target below
    python benchmarks/mutation.py pool wire           these
    python benchmarks/mutation.py flodl/ids.py --tests tests/unit/core/test_ids.py

Works on a copy of the tree, one target after another, with mutmut. A mutant that survives has to be explained in
``benchmarks/mutants.toml`` (it changes nothing that can be observed, say); the exit code is 1 while one is not, or
while fewer than ``MIN_KILLED`` of a target's mutants die. The last line of output is a JSON object with the figures.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REASONS = ROOT / "benchmarks" / "mutants.toml"
COPIED = ("flodl", "flodl_cli", "daemon", "tests", "README.md", "pyproject.toml")
MIN_KILLED = 0.85
TARGET_LIMIT_S = 3600
KILLED = frozenset({"killed", "timeout", "segfault", "caught by type check"})


@dataclass(frozen=True, slots=True)
class Target:
    """Source patterns to mutate, and the test files that must notice; both relative to the project."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]


TARGETS = (
    Target("elche", ("flodl/core/elche.py",), ("tests/unit/core/test_elche*.py", "tests/property/test_elche*.py")),
    Target(
        "guards",
        ("flodl/core/guards.py", "flodl/core/meta.py", "flodl/core/cadence.py"),
        ("tests/unit/core/test_guards.py", "tests/unit/core/test_meta.py", "tests/unit/core/test_cadence.py"),
    ),
    Target("pool", ("flodl/core/pool.py",), ("tests/unit/core/test_pool*.py", "tests/property/test_pool*.py")),
    Target("rounds", ("flodl/core/rounds.py",), ("tests/unit/core/test_rounds*.py", "tests/property/test_rounds*.py")),
    Target("wire", ("flodl/wire/*.py",), ("tests/unit/wire/test_*.py", "tests/property/test_wire*.py")),
)


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant that no test noticed, named by what it changes, so that the name outlives edits elsewhere."""

    module: str
    function: str
    was: str
    now: str

    def as_toml(self) -> str:
        """The entry for mutants.toml, less its reason."""
        fields = {"module": self.module, "function": self.function, "was": self.was, "now": self.now}
        return "\n".join(["[[survivor]]", *(f"{key} = {json.dumps(text)}" for key, text in fields.items())])


@dataclass(frozen=True, slots=True)
class Outcome:
    """One target's mutants by status, and those that survived."""

    target: str
    statuses: Counter[str]
    survivors: tuple[Survivor, ...]

    @property
    def mutants(self) -> int:
        """How many there were."""
        return self.statuses.total()

    @property
    def killed(self) -> int:
        """How many the tests noticed."""
        return sum(count for status, count in self.statuses.items() if status in KILLED)

    @property
    def ratio(self) -> float:
        """The part that the tests noticed, 0 to 1."""
        return self.killed / self.mutants if self.mutants else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(t.name for t in TARGETS)}, or a source path")
    parser.add_argument("--tests", nargs="+", default=(), help="test paths for a target given as a source path")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it (`mutmut browse` runs there)")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the copy goes on any end
    reasons = read_reasons(REASONS)
    outcomes = []
    for target in select(options.targets, tuple(options.tests)):
        print(f"== {target.name}: {', '.join(target.sources)}", flush=True)
        if options.keep:
            outcomes.append(mutate(target, options.keep / target.name))
            continue
        with tempfile.TemporaryDirectory(prefix="flodl-mutants-") as folder:
            outcomes.append(mutate(target, Path(folder) / target.name))
    return report(outcomes, reasons)


def select(names: list[str], tests: tuple[str, ...]) -> list[Target]:
    """The named targets; all of them without a name."""
    known = {target.name: target for target in TARGETS}
    if not names:
        return list(TARGETS)
    return [known[name] if name in known else Target(Path(name).stem, (name,), tests) for name in names]


def mutate(target: Target, folder: Path) -> Outcome:
    """Run mutmut on a copy of the tree and read what became of each mutant."""
    tests = sorted(str(path.relative_to(ROOT)) for pattern in target.tests for path in ROOT.glob(pattern))
    if not tests:
        raise SystemExit(f"{target.name}: no test matches {', '.join(target.tests) or '(none given: use --tests)'}")
    copy_tree(folder, mutmut_table(target, tests))
    environment = os.environ | {"HYPOTHESIS_PROFILE": "mutation", "OMP_NUM_THREADS": "1"}
    with (folder / "mutmut.log").open("w") as log:
        done = subprocess.run(
            [str(Path(sys.executable).parent / "mutmut"), "run"],
            cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            timeout=TARGET_LIMIT_S, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        tail = (folder / "mutmut.log").read_text(errors="replace").replace("\r", "\n").splitlines()[-40:]
        raise SystemExit("\n".join([*tail, f"{target.name}: mutmut ended with {done.returncode}"]))
    return read_outcome(target, folder)


def mutmut_table(target: Target, tests: list[str]) -> str:
    """Mutmut's part of pyproject.toml (JSON's strings and arrays are TOML's)."""
    settings = {
        "source_paths": ["flodl"],
        "only_mutate": list(target.sources),
        "also_copy": [name for name in COPIED if name != "flodl"],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov"],
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join(["", "[tool.mutmut]", *lines, "use_git_change_detection = false", ""])


def copy_tree(folder: Path, extra_config: str) -> None:
    """What the tests of a pure module need, caches left behind."""
    folder.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, folder / name)
    with (folder / "pyproject.toml").open("a") as config:
        config.write(extra_config)


# Runs inside the copy, where mutmut finds its configuration.
_READ_RESULTS = """
import json
from mutmut.__main__ import SourceFileMutationData, walk_mutatable_files, get_diff_for_mutant, status_by_exit_code
from mutmut.utils.format_utils import orig_function_and_class_names_from_key as names_of
killed, rows = json.loads(input()), []
for path in walk_mutatable_files():
    data = SourceFileMutationData(path=path)
    data.load()
    for key, code in data.exit_code_by_key.items():
        status = status_by_exit_code[code]
        diff = "" if status in killed else get_diff_for_mutant(key, path=path)
        function, owner = names_of(key)
        rows.append([str(path), f"{owner}.{function}" if owner else function, status, diff])
print()
print(json.dumps(rows))
"""


def read_outcome(target: Target, folder: Path) -> Outcome:
    """Ask mutmut's own files what became of each mutant."""
    done = subprocess.run(
        [sys.executable, "-c", _READ_RESULTS],
        cwd=folder, input=json.dumps(sorted(KILLED)), capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    rows = json.loads(done.stdout.splitlines()[-1])
    survivors = [survivor_of(path, function, diff) for path, function, status, diff in rows if status not in KILLED]
    return Outcome(target.name, Counter(status for _, _, status, _ in rows), tuple(survivors))


def survivor_of(module: str, function: str, diff: str) -> Survivor:
    """Reduce a unified diff to the text that went and the text that came."""
    body = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@", "#"))]
    was = " ".join(line[1:].strip() for line in body if line.startswith("-"))
    now = " ".join(line[1:].strip() for line in body if line.startswith("+"))
    return Survivor(module, function, was, now)


def read_reasons(path: Path) -> dict[Survivor, str]:
    """Read mutants.toml; an entry without a reason explains nothing and is refused."""
    entries = tomllib.loads(path.read_text()).get("survivor", [])
    reasons = {}
    for entry in entries:
        reason = entry.pop("reason", "").strip()
        if not reason:
            raise SystemExit(f"{path}: no reason given for {entry}")
        reasons[Survivor(**entry)] = reason
    return reasons


def report(outcomes: list[Outcome], reasons: dict[Survivor, str]) -> int:
    """Print each target's figures, what is unexplained, and the JSON line; 0 when all is well."""
    unexplained = [s for outcome in outcomes for s in outcome.survivors if s not in reasons]
    for survivor in unexplained:
        print(f'\n{survivor.as_toml()}\nreason = ""')
    print()
    for outcome in outcomes:
        print(f"{outcome.target:10} {outcome.killed:5} of {outcome.mutants:5} killed  {outcome.ratio:6.1%}")
    figures = {
        "min_killed": MIN_KILLED,
        "targets": {
            outcome.target: {
                "mutants": outcome.mutants,
                "killed": outcome.killed,
                "ratio": round(outcome.ratio, 4),
                "statuses": dict(sorted(outcome.statuses.items())),
                "survivors": [
                    {"where": f"{s.module}:{s.function}", "was": s.was, "now": s.now, "reason": reasons.get(s)}
                    for s in outcome.survivors
                ],
            }
            for outcome in outcomes
        },
        "unexplained": len(unexplained),
    }
    print(json.dumps(figures))
    return 0 if not unexplained and all(outcome.ratio >= MIN_KILLED for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
