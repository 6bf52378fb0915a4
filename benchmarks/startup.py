"""How long the command line takes to answer: wall-clock of whole processes, page cache warm.

The last line of output is a JSON object with seconds; the exit code is 1 while a median is over its limit.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 15
PROBE_LIMIT_S = 60
BIN = Path(sys.executable).parent
COMMANDS = {
    "fdl --help": ((str(BIN / "fdl"), "--help"), 0.150),
    "fdl launch --help": ((str(BIN / "fdl"), "launch", "--help"), 0.300),
}


def main() -> int:
    figures = {}
    for name, (command, limit_s) in COMMANDS.items():
        seconds = sorted(measure(command) for _ in range(RUNS + 1))[:RUNS]
        median_s = statistics.median(seconds)
        figures[name] = {
            "median_s": round(median_s, 4),
            "min_s": round(seconds[0], 4),
            "max_s": round(seconds[-1], 4),
            "limit_s": limit_s,
            "is_good": median_s <= limit_s,
        }
        print(f"{name:20} {median_s * 1000:6.0f} ms (limit {limit_s * 1000:.0f} ms)")
    print(json.dumps(figures))
    return 0 if all(row["is_good"] for row in figures.values()) else 1


def measure(command: tuple[str, ...]) -> float:
    """Seconds from start to end of one process that must succeed."""
    started_s = time.perf_counter()
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=PROBE_LIMIT_S)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
