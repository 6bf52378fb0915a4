"""How long the command line takes to answer and a daemon to be ready: wall-clock of processes, page cache warm.

The last line of output is a JSON object with seconds; the exit code is 1 while a median is over its limit. Meant for
an otherwise idle machine: ``cpu_s``, which no other load stretches much, is given beside the wall-clock.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flodl.launch.bootstrap import Bootstrap, Liveness, ReadyScanner, encode

RUNS = 15
PROBE_LIMIT_S = 60
FDL = str(Path(sys.executable).parent / "fdl")
NOBODY = "127.0.0.1:9"
"""The discard port: a daemon is ready before it dials, and here it has nobody to reach."""


def main() -> int:
    probes = {
        "fdl --help": (lambda: answer(FDL, "--help"), 0.150),
        "fdl launch --help": (lambda: answer(FDL, "launch", "--help"), 0.300),
        "daemon ready": (daemon_ready, 0.500),
    }
    figures = {name: measure(name, probe, limit_s) for name, (probe, limit_s) in probes.items()}
    print(json.dumps(figures))
    return 0 if all(row["is_good"] for row in figures.values()) else 1


def measure(name: str, probe: Callable[[], float], limit_s: float) -> dict[str, float | bool]:
    """Figures of ``RUNS`` runs after one that warms the page cache."""
    probe()
    cpu_before_s = _cpu_of_children_s()
    seconds = sorted(probe() for _ in range(RUNS))
    cpu_s = (_cpu_of_children_s() - cpu_before_s) / RUNS
    median_s = statistics.median(seconds)
    print(f"{name:20} {median_s * 1000:6.0f} ms (limit {limit_s * 1000:.0f} ms), {cpu_s * 1000:.0f} ms of CPU")
    return {
        "median_s": round(median_s, 4),
        "min_s": round(seconds[0], 4),
        "max_s": round(seconds[-1], 4),
        "cpu_s": round(cpu_s, 4),
        "limit_s": limit_s,
        "is_good": median_s <= limit_s,
    }


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def answer(*command: str) -> float:
    """Seconds from start to end of one process that must succeed."""
    started_s = time.perf_counter()
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=PROBE_LIMIT_S)
    return time.perf_counter() - started_s


def daemon_ready() -> float:
    """Seconds from a daemon's start to its word that it has read its bootstrap."""
    with tempfile.TemporaryDirectory(prefix="flodl-startup-") as folder:
        given = encode(bootstrap(folder))
        scanner = ReadyScanner("startup")
        started_s = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "flodl_daemon", "run", "--bootstrap-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        ) as daemon:
            assert daemon.stdin is not None
            assert daemon.stdout is not None
            try:
                daemon.stdin.write(given)
                while not scanner.is_found:
                    piece = daemon.stdout.read(4096)
                    if not piece:
                        raise SystemExit("the daemon ended before it was ready")
                    scanner.feed(piece)
                return time.perf_counter() - started_s
            finally:
                daemon.kill()


def bootstrap(folder: str) -> Bootstrap:
    """One CPU rank of a script that is never started."""
    return Bootstrap(
        run_id="startup",
        secret="00" * 32,
        controllers=(NOBODY,),
        host="here",
        devices=("cpu",),
        script=("train.py",),
        cwd=folder,
        env={},
        python="",
        liveness=Liveness(),
        on_disconnect_s=5,
        stop_timeout_s=5,
        spool_dir=folder,
    )


if __name__ == "__main__":
    sys.exit(main())
