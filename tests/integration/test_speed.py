"""What takes time: starting, unequal ranks, and the control plane, which must not work per step."""

import re
import subprocess

import pytest

from benchmarks.unequal import LEAST_EFFICIENCY, SLOW_SHARE, measure
from tests.runs import END_S, Fdl, Launched

pytestmark = pytest.mark.timeout(240)

_RECEIVED = re.compile(r"bytes_received:(\d+)")


def test_help_does_without_torch(fdl: Fdl) -> None:
    code = "import sys, flodl_cli.main as m\ntry:\n m.main(['--help'])\nfinally:\n assert 'torch' not in sys.modules"
    done = fdl.python("-c", code)

    assert done.returncode == 0, done.stderr
    assert "launch" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("mode", ["cpu_cadence", "nccl_cadence"])
def test_slow_rank_does_a_third_of_the_batches_and_holds_nobody_up(mode: str) -> None:
    figures = measure(mode, batches=200, epochs=3)

    assert SLOW_SHARE[0] <= figures.slow_share <= SLOW_SHARE[1], figures
    assert figures.efficiency >= LEAST_EFFICIENCY, figures


def received_bytes(run: Launched) -> int:
    """What the controller has received so far, over all its connections."""
    _, port = run.address
    command = ["ss", "-tinH", "state", "established", "sport", "=", f":{port}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    return sum(map(int, _RECEIVED.findall(text)))


def bytes_per_window(fdl: Fdl, anchor: int, windows: int) -> float:
    """Over ``windows`` windows of ``anchor`` steps, from the tenth on."""
    fixed = {"anchor": anchor, "min_anchor": anchor, "max_anchor": anchor}
    run = fdl.job(step_ms=1, batch_size=2, size=100_000, epochs=1000, **fixed)
    run.wait_for_training(version=10)
    first, first_bytes = len(run.commits()), received_bytes(run)
    run.wait_for_training(version=first + windows)
    last, last_bytes = len(run.commits()), received_bytes(run)
    assert fdl.call("stop", "-x", run.run_id, timeout_s=END_S).returncode == 0
    run.wait(END_S)
    return (last_bytes - first_bytes) / (last - first)


@pytest.mark.long
def test_controller_hears_of_windows_and_not_of_steps(fdl: Fdl) -> None:
    short, long = bytes_per_window(fdl, anchor=5, windows=100), bytes_per_window(fdl, anchor=100, windows=30)

    assert long < 2 * short, "twenty times the steps in a window, and the controller hears more of it"
