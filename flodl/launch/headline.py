"""How a run ended, for a person: the first failure with its last lines, what followed from it, what was tolerated."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flodl.core.counted import counted
from flodl.core.ending import EXIT_TOO_FEW_RANKS, KIND_EXIT, KIND_HOST
from flodl.launch.last_words import error_of
from flodl.launch.progress import is_shown
from flodl.launch.rundir import RunDir
from flodl.spec.words import printable

LAST_LINES: Final = 40
MAX_TAIL_BYTES: Final = 1 << 18
ECHO_BYTES: Final = 1 << 14
"""Of each other log; there may be a thousand."""

PLAIN_HINT: Final = "a script that trains by itself, as under torchrun: fdl launch --plain"
_NO_TRAINER: Final = "without flodl.Trainer.run(...)"
_NEXT_HOST: Final = re.compile(r"\n(?=host [^\s:]+: )")
"""Between the hosts that a start was without (``core.startup``)."""

_BY_ITSELF: Final = re.compile(
    rf"{re.escape(_NO_TRAINER)}|environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set"
)
"""How a script ends that never calls flodl, and what torch.distributed says where no torchrun has started it."""


def describe_outcome(run: RunDir, outcome: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """The lines to print under a run's end.

    Args:
        run: its directory, whose logs are read.
        outcome: outcome.json (``flodl.core.actions.Outcome``).
        state: the last state.json, for devices and totals; may be empty.
    """
    status = str(outcome.get("status", "failed"))
    failure = outcome.get("failure")
    lines = [f"run {run.run_id} {status}" + _message(outcome)]
    if isinstance(failure, dict):
        lines += _first_failure(run, failure, state)
    lines += _rest(outcome)
    return lines


def log_path(run: RunDir, failure: Mapping[str, Any]) -> Path:
    """The log that tells most about ``failure``."""
    rank = failure.get("rank", -1)
    if isinstance(rank, int) and rank >= 0 and failure.get("kind") != KIND_HOST:
        return run.logs / f"rank{rank}.stderr.log"
    if failure.get("kind") == "head":
        return run.logs / "head.stderr.log"
    return run.logs / f"daemon-{failure.get('host', '')}.log"


def last_lines(path: Path, count: int = LAST_LINES, max_bytes: int = MAX_TAIL_BYTES) -> list[str]:
    """The last lines of a log, undecodable bytes escaped; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except OSError:
        return []
    lines = data.decode("utf-8", "backslashreplace").split("\n")
    return [line.rsplit("\r", 1)[-1] for line in (lines[:-1] if lines[-1] == "" else lines)][-count:]


def _message(outcome: Mapping[str, Any]) -> str:
    """What the first failure does not say again; of a message that lists it, the line above it."""
    message, failure = printable(str(outcome.get("message", ""))), outcome.get("failure")
    if isinstance(failure, dict) and _what(failure) in message:
        heading = message.partition(_what(failure))[0]
        message = heading.rstrip() if heading.endswith("\n") else ""
    return f": {message}" if message else ""


def _first_failure(run: RunDir, failure: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    who, what = _who(failure, state), _what(failure)
    path = log_path(run, failure)
    printed = _shown_lines(path)
    if failure.get("kind") == "head" and not failure.get("signal") and _NO_TRAINER not in what:
        said_last = (line for line in reversed(printed) if line.strip() and not line[0].isspace())
        what = printable(next(said_last, what))  # the script's own words say more than its exit code
    if failure.get("kind") == KIND_EXIT and (raised := error_of(printed)):
        what = f"{what}: {printable(raised)}"
    missing = _NEXT_HOST.split(what) if failure.get("kind") == KIND_HOST else [what]
    if len(missing) > 1:
        lines = [f"{len(missing)} hosts are missing:", *missing]
    else:
        lines = [f"first failure: {what if not who or what.startswith(f'{who}: ') else f'{who}: {what}'}"]
    if _BY_ITSELF.search(what) and (run.read_json("run.json") or {}).get("plain") is None:
        lines.append(f"  {PLAIN_HINT}")
    said = printed or str(failure.get("traceback", "")).splitlines()[-LAST_LINES:]
    if said:
        lines += [
            f"last lines of {_source(path)}:",
            *(f"  | {line}" for line in said),
        ]
    lines += _echoes(run, path, printed)
    if printed:
        lines.append(f"full log: {path}")
    return lines


def _echoes(run: RunDir, path: Path, printed: list[str]) -> list[str]:
    """From how many more processes the same error came; a misuse comes from all of them."""
    error = error_of(printed)
    if not error or path.name.startswith("daemon-"):
        return []
    logs = [each for each in run.logs.glob("*.stderr.log") if each != path]
    alike = [each for each in logs if error_of(_shown_lines(each, ECHO_BYTES)) == error]
    head = ["the head"] if any(each.name.startswith("head.") for each in alike) else []
    ranks = len(alike) - len(head)
    named = ([counted(ranks, "more rank")] if ranks else []) + head
    return [f"the same came from {' and '.join(named)}"] if named else []


def _shown_lines(path: Path, max_bytes: int = MAX_TAIL_BYTES) -> list[str]:
    return [line for line in last_lines(path, max_bytes, max_bytes) if is_shown(line)][-LAST_LINES:]


def _source(path: Path) -> str:
    if not path.exists():
        return "the traceback"
    return "the daemon's log" if path.name.startswith("daemon-") else "its stderr"


def _who(failure: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    rank, host = failure.get("rank", -1), str(failure.get("host", ""))
    if isinstance(rank, int) and rank >= 0:
        device = next((str(each.get("device", "")) for each in _ranks(state) if each.get("rank") == rank), "")
        return f"rank {rank} on {host}" + (f" ({device})" if device else "")
    if failure.get("kind") == "head":
        return "the head (your script on this machine)"
    return f"host {host}" if host else ""


def _what(failure: Mapping[str, Any]) -> str:
    return printable(str(failure.get("error", "")).strip() or str(failure.get("kind", "unknown")))


def _rest(outcome: Mapping[str, Any]) -> list[str]:
    lines = []
    collateral, losses = outcome.get("collateral", 0), outcome.get("losses") or []
    if collateral:
        lines.append(f"{counted(collateral, 'more failure')} only followed from it")
    if losses:
        named = ", ".join(_who(loss, {}) for loss in losses[:8] if isinstance(loss, dict))
        # Where no rank is left, or max_failure has ended the run, nothing was tolerated: these ended it.
        is_ended_by_loss = outcome.get("status") == "failed" or outcome.get("exit_code") == EXIT_TOO_FEW_RANKS
        fate = "came before it" if is_ended_by_loss else "was tolerated" if len(losses) == 1 else "were tolerated"
        lines.append(f"{counted(len(losses), 'loss')} {fate}: {named}")
    return lines


def _ranks(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    ranks = state.get("ranks")
    return [each for each in ranks if isinstance(each, dict)] if isinstance(ranks, list) else []
