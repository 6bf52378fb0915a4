"""Runs of tests/scripts/phased.py: where and when a peer is hit, and what is wrong with a run afterwards."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from flodl.averaging.flat import FlatModel
from tests.recount import recount
from tests.runs import ROOT, Fdl, Launched
from tests.scripts.job import network
from tests.witness import witness_run

PHASED: Final = ROOT / "tests" / "scripts" / "phased.py"
EPOCHS: Final = 2
VERSION: Final = 3
"""The round that is hit: past the seed, in the middle of an epoch."""

COMMON: Final = (
    "window",
    "accounted",
    "packing",
    "packed",
    "reducing",
    "reduced",
    "holding",
    "adopting",
    "adopted",
)
MOMENTS: Final = [
    *(("nccl_cadence", phase) for phase in COMMON),
    *((mode, phase) for mode in ("cpu_cadence", "cpu_async") for phase in (*COMMON, "written", "sliced")),
]
"""Every mode and phase of a round; see ``PHASES`` in the script."""


def moments(*brief: tuple[str, str]) -> list[Any]:
    """All of ``MOMENTS``; those that are not ``brief`` are marked long."""
    return [moment if moment in brief else pytest.param(*moment, marks=pytest.mark.long) for moment in MOMENTS]


def fault(phase: str, action: str, rank: int = 1, version: int | str = VERSION, **more: int) -> dict[str, Any]:
    """One fault of the script."""
    return {"rank": rank, "version": version, "phase": phase, "action": action, **more}


@dataclass
class Faulted:
    """One run, its diaries in ``log``."""

    run: Launched
    log: Path
    mode: str
    size: int

    def struck(self, rank: int = 1) -> list[str]:
        """What the rank's diary says of its faults: ``fault``, ``woke``."""
        path = self.log / f"diary-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry["did"] for entry in entries if entry["did"] in ("fault", "woke")]

    def is_missed(self, rank: int = 1) -> bool:
        """Whether the rank has stopped and the controller suspects it since; a busy machine makes suspects, too."""
        if self.struck(rank) != ["fault"]:
            return False
        changes = sorted(
            self.run.events("peer_suspect") + self.run.events("peer_alive"), key=lambda event: event["seq"]
        )
        mine = [event["event"] for event in changes if event["detail"].startswith(f"rank {rank} ")]
        return mine[-1:] == ["peer_suspect"]

    def losses(self) -> list[tuple[int, str, int]]:
        """The tolerated losses of the outcome: rank, kind, signal."""
        outcome = self.run.read("outcome.json")
        assert outcome is not None
        return [(loss["rank"], loss["kind"], loss["signal"]) for loss in outcome["losses"]]

    def wrongs(self, *lost: int) -> list[str]:
        """What is wrong with the run; nothing when all is well. ``lost`` are the ranks without an end."""
        seen = witness_run(self.run.folder, self.log, self.size, EPOCHS, lost=lost)
        in_order = self.mode.startswith("cpu")
        return seen.faults + recount(self.run.folder, self.log, FlatModel(network()).layout, in_order, lost)


def launch(
    fdl: Fdl,
    where: tuple[object, ...],
    mode: str,
    *faults: dict[str, Any],
    size: int = 403,
    step_ms: int = 10,
) -> Faulted:
    """Start a run of two epochs with windows of at most four batches; ``where`` are the launch's own options."""
    log = fdl.folder / "log"
    log.mkdir()
    flags = {"mode": mode, "size": size, "epochs": EPOCHS, "anchor": 4, "max-anchor": 4, "step-ms": step_ms, "log": log}
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    env = {"FLODL_TEST_FAULTS": json.dumps(faults)}
    return Faulted(fdl.launch("--stop-timeout", 5, *where, PHASED, *given, env=env), log, mode, size)


def impatient_cluster(fdl: Fdl, ranks: int, dead_s: float) -> tuple[object, ...]:
    """Launch options: this machine, where a peer is suspect after 2 s of silence and dead after ``dead_s``."""
    seconds = {"heartbeat_s": 0.5, "suspect_s": 2.0, "dead_s": dead_s}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    cluster = {
        "controller": {"host": "127.0.0.1", "port": port},
        "workers": [{"host": "localhost", "local_devices": ["cpu"] * ranks}],
        "liveness": {name: value * fdl.deadline_factor for name, value in seconds.items()},
    }
    path = fdl.folder / "here.yml"
    path.write_text(yaml.safe_dump({"cluster": cluster}))
    return "-c", path
