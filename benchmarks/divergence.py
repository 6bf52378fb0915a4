"""A divergence injected into a settled run: what the convergence guards and the meta-controller make of it.

    python benchmarks/divergence.py

tests/scripts/diverging.py trains over three local ranks. Once the anchor has been at least four times its initial value
for ten rounds, the learning rate of one rank becomes 20 times as large. Rounds count from the first one whose window
has such a step in it. Demanded, in each cadence mode: ``MsfGuard().with_nudge(n=1)`` cuts the anchor within 2 rounds;
the default guard vetoes growth within 4, and the meta-controller cuts the anchor at the K-th veto in a row (K by phase:
5, 3, 2); in every mode the trained parameters are finite, as they are when torch's DistributedDataParallel trains with
the same injection. A run without any guard shows what the guards are for; nothing is demanded of it.

The last line of output is a JSON object; the exit code is 1 when a demand is not met.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.launched import TIME_FACTOR, directory_of, launch_command, launch_env  # noqa: E402  # found from the root
from flodl.core.elche import Phase  # noqa: E402
from flodl.core.meta import RULES  # noqa: E402
from flodl.messages import Mode  # noqa: E402

JOB = ROOT / "tests" / "scripts" / "diverging.py"
RANKS = 3
SICK_RANK = 1
INITIAL_ANCHOR = 4
SETTLED = 4
"""Times the initial anchor."""
SETTLED_ROUNDS = 10
TARGET, ASYNC_TARGET = 0.05, 0.01
"""Of overhead. A round that trains on costs an asynchronous rank next to nothing: it needs a stricter one to grow."""
LIMIT_S = 120.0
POLL_S = 0.01
NUDGE_WITHIN, VETO_WITHIN = 2, 4
DDP_STEPS, DDP_INJECT_AT = 2000, 1000


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Rounds are counted from the injection, the first one is 1; None: it did not happen.

    ``vetoes_to_nudge`` is how many objections in a row the meta-controller took, ``expected_vetoes`` what its rule says
    for the phase. ``alarms_before`` counts objections before the injection.
    """

    mode: str
    guard: str
    anchor: int | None = None
    veto_round: int | None = None
    nudge_round: int | None = None
    vetoes_to_nudge: int | None = None
    expected_vetoes: int | None = None
    growths_vetoed: int = 0
    alarms_before: int = 0
    divergences: tuple[float, ...] = ()
    anchors: tuple[int, ...] = ()
    is_finite: bool = False

    @property
    def is_good(self) -> bool:
        """What is demanded of this mode and guard."""
        if self.guard == "none":
            return True
        if Mode(self.mode).is_sync:
            return self.is_finite
        if self.guard == "msf":
            return self.is_finite and self.nudge_round is not None and self.nudge_round <= NUDGE_WITHIN
        is_vetoed = self.veto_round is not None and self.veto_round <= VETO_WITHIN
        is_nudged = self.vetoes_to_nudge is not None and self.vetoes_to_nudge == self.expected_vetoes
        return self.is_finite and is_vetoed and is_nudged


def measure(mode: str, guard: str) -> Figures:
    """Run once, inject when the anchor has settled, and read the event log."""
    with tempfile.TemporaryDirectory(prefix="fdl-divergence-") as name:
        folder = Path(name)
        flags = ["--trigger", str(folder / "trigger"), "--log", str(folder), "--mode", mode, "--guard", guard]
        flags += ["--overhead-target", str(ASYNC_TARGET if Mode(mode).is_async else TARGET)]
        flags += ["--anchor", str(INITIAL_ANCHOR), *(["--no-meta"] if guard == "none" else [])]
        command, env = launch_command(RANKS, JOB, flags), os.environ | launch_env(folder)
        with (folder / "said").open("w") as said:
            launcher = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            _inject(folder, launcher, mode)
            launcher.wait(LIMIT_S * TIME_FACTOR)
        finally:
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait(LIMIT_S)
        return _judge(mode, guard, _events(folder), folder)


def ddp_is_finite() -> bool:
    """Whether DistributedDataParallel survives the same injection."""
    with tempfile.TemporaryDirectory(prefix="fdl-divergence-") as folder:
        command = [sys.executable, str(JOB), "--ddp", "--log", folder, "--trigger", f"{folder}/trigger"]
        command += ["--step-ms", "0", "--steps", str(DDP_STEPS), "--inject-at", str(DDP_INJECT_AT)]
        base = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
        base |= {"PYTHONPATH": str(ROOT)}
        peers = [subprocess.Popen(command, env=base | {"RANK": str(rank)}) for rank in range(RANKS)]
        try:
            codes = [peer.wait(LIMIT_S * TIME_FACTOR) for peer in peers]
        finally:
            for peer in peers:
                peer.kill()
                peer.wait(LIMIT_S)
        assert codes == [0] * RANKS, codes
        assert (Path(folder) / "injected.json").exists()
        return _is_finite(Path(folder))


def _inject(folder: Path, launcher: subprocess.Popen[bytes], mode: str) -> None:
    """Wait until the cadence has settled, then tell the ranks its anchor."""
    deadline_s = time.monotonic() + LIMIT_S * TIME_FACTOR
    while True:
        events = _events(folder)
        anchors = [each["committed_anchor"] for each in events.get("cadence", ())]
        if Mode(mode).is_sync:
            anchors = [1] * len(events.get("commit", ()))
        recent = anchors[-SETTLED_ROUNDS:]
        least = 1 if Mode(mode).is_sync else SETTLED * INITIAL_ANCHOR
        if len(recent) == SETTLED_ROUNDS and min(recent) >= least:
            scratch = folder / "trigger.new"
            scratch.write_text(str(recent[-1]))
            scratch.rename(folder / "trigger")
            return
        if launcher.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{mode}: the anchor did not settle: {anchors}\n{(folder / 'said').read_text()}")
        time.sleep(POLL_S)


def _events(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The fields of every event so far, by kind, in order."""
    run = directory_of(folder, (folder / "said").read_text())
    log = None if run is None else run / "events.jsonl"
    found: dict[str, list[dict[str, Any]]] = {}
    for line in log.read_text().splitlines(keepends=True) if log is not None and log.is_file() else ():
        if line.endswith("\n"):
            record = json.loads(line)
            found.setdefault(record["event"], []).append(record["fields"])
    return found


def _judge(mode: str, guard: str, events: dict[str, list[dict[str, Any]]], folder: Path) -> Figures:
    first = _first_sick_version(events["commit"], folder)
    before = [each for each in events.get("cadence", ()) if each["version"] < first]
    rounds = [each for each in events.get("cadence", ()) if each["version"] >= first]
    verdicts = [each["verdict"] for each in rounds]
    veto = _place(verdict == "suppress_growth" for verdict in verdicts)
    nudge = _place(each["committed_anchor"] < each["anchor"] and each["verdict"] == "nudge_down" for each in rounds)
    by_meta = _place(bool(each["nudge"]) for each in rounds)
    due = _nudge_due(rounds)
    vetoes = None if veto is None or by_meta is None else by_meta - veto + 1
    return Figures(
        mode,
        guard,
        anchor=before[-1]["committed_anchor"] if before else None,
        veto_round=veto,
        nudge_round=nudge,
        vetoes_to_nudge=vetoes,
        expected_vetoes=None if veto is None or due is None else due - veto + 1,
        growths_vetoed=sum(each["version"] >= first for each in events.get("growth_vetoed", ())),
        alarms_before=sum(each["verdict"] != "stable" for each in before),
        divergences=tuple(each["divergence"] for each in rounds[:10]),
        anchors=tuple(each["committed_anchor"] for each in rounds[:10]),
        is_finite=_is_finite(folder),
    )


def _nudge_due(rounds: Sequence[dict[str, Any]]) -> int | None:
    """In which round the objections in a row are first as many as its phase takes."""
    objections = 0
    for number, each in enumerate(rounds, start=1):
        objections = objections + 1 if each["verdict"] == "suppress_growth" else 0
        if objections >= RULES[Phase[each["phase"].upper()]].objections:
            return number
    return None


def _place(matches: Any) -> int | None:
    """The number of the first match, from 1."""
    return next((number for number, matched in enumerate(matches, start=1) if matched), None)


def _first_sick_version(commits: Sequence[dict[str, Any]], folder: Path) -> int:
    """The first version with a step of the sick rank's new learning rate in it."""
    healthy_steps = json.loads((folder / "injected.json").read_text())["steps"]
    done = 0
    for commit in commits:
        done += dict(commit["counts"])[SICK_RANK]
        if done > healthy_steps:
            return int(commit["version"])
    raise RuntimeError("the injection was too late: no round followed it")


def _is_finite(folder: Path) -> bool:
    told = [json.loads(path.read_text()) for path in folder.glob("ended-*.json")]
    return bool(told) and all(each["is_finite"] for each in told)


def cases() -> list[tuple[str, str]]:
    """Every mode with the default guard, the cadence modes with MsfGuard, and one run without any."""
    windows = [str(mode) for mode in Mode if not mode.is_sync]
    return [*((str(mode), "trend") for mode in Mode), *((mode, "msf") for mode in windows), (windows[0], "none")]


def main() -> int:
    """Measure every case."""
    is_ddp_finite = ddp_is_finite()
    print(f"DistributedDataParallel: {'finite' if is_ddp_finite else 'not finite'}", flush=True)
    rows = []
    for mode, guard in cases():
        row = measure(mode, guard)
        rows.append(row)
        words = f"{mode:13} {guard:6} anchor {row.anchor}, veto in round {row.veto_round}, nudge in {row.nudge_round}"
        words += f", by the meta-controller after {row.vetoes_to_nudge} vetoes of {row.expected_vetoes}"
        print(words + f", {'finite' if row.is_finite else 'NOT FINITE'}{'' if row.is_good else '  BAD'}", flush=True)
    print(json.dumps({"ddp_is_finite": is_ddp_finite, "runs": [asdict(row) for row in rows]}))
    return 0 if is_ddp_finite and all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
