"""Whole calibrations, round by round, against ``golden/*.txt``: what is proposed, judged and committed.

``pytest tests/unit/core/test_golden_cadence.py --rewrite`` writes the traces anew; the diff is to be read.
"""

import random
from pathlib import Path

import pytest

from flodl.messages import CadenceSettings, GuardKind, GuardSettings
from tests.unit.core.calibration import HEADER, Calibration, Devices, steady

GOLDEN = Path(__file__).parent / "golden"


def slows_down_and_recovers() -> Devices:
    fast, slow = {0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 3.0}
    return Devices(lambda version: slow if 12 <= version < 24 else fast, lambda version: 0.4)


def noisy() -> Devices:
    draw = random.Random(7)
    costs = [{rank: ms * draw.uniform(0.8, 1.25) for rank, ms in ((0, 2.0), (1, 2.0), (2, 5.0))} for _ in range(40)]
    averaging = [draw.uniform(1.0, 4.0) for _ in range(40)]
    return Devices(lambda version: costs[version - 1], lambda version: averaging[version - 1])


def drifts_apart_when_windows_grow() -> Devices:
    """The longer the window, the farther the ranks stand from each other; averaging is dear all the time."""
    ms = {0: 1.0, 1: 1.0, 2: 2.5}
    return Devices(lambda version: ms, lambda version: 60.0, lambda version, k_max: 0.02 * k_max**0.5)


def jumps_once() -> Devices:
    """One rank's learning rate is raised by accident in round 13: its divergence jumps and stays up."""
    ms = {0: 1.0, 1: 1.0, 2: 1.0}
    return Devices(lambda version: ms, lambda version: 2.0, lambda version, k_max: 0.02 if version < 13 else 0.4)


def rises_and_rises() -> Devices:
    ms = {0: 1.0, 1: 1.0, 2: 1.0}
    return Devices(
        lambda version: ms, lambda version: 2.0, lambda version, k_max: 0.02 if version < 13 else 0.05 * (version - 11)
    )


def learning_rate_drops() -> Devices:
    ms = {0: 1.0, 1: 1.0}
    return Devices(
        lambda version: ms,
        lambda version: 2.0,
        rate=lambda version: 0.1 if version < 12 else 0.01 if version < 26 else 0.006,
    )


TRACES = {
    "equal_ranks": (CadenceSettings(), steady({0: 5.0, 1: 5.0, 2: 5.0}, 2.0), 16),
    "one_to_0_4_to_0_4": (CadenceSettings(), steady({0: 4.0, 1: 10.0, 2: 10.0}, 8.0), 16),
    "slows_down_and_recovers": (CadenceSettings(), slows_down_and_recovers(), 36),
    "noisy": (CadenceSettings(), noisy(), 40),
    "slow_link": (CadenceSettings(), steady({0: 1.0, 1: 1.0}, 10.0), 20),
    "guard_vetoes_growth": (CadenceSettings(), drifts_apart_when_windows_grow(), 20),
    "jump_and_default_guard": (CadenceSettings(), jumps_once(), 24),
    "rising_and_default_guard": (CadenceSettings(), rises_and_rises(), 24),
    "jump_and_msf_guard": (
        CadenceSettings(guard=GuardSettings(GuardKind.MSF, nudge_rounds=1)), jumps_once(), 24,
    ),
    "learning_rate_drops": (CadenceSettings(), learning_rate_drops(), 36),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_calibration_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    settings, devices, rounds = TRACES[name]
    trace = "\n".join([HEADER, *map(str, Calibration(settings, devices).run(rounds))]) + "\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--rewrite"):
        path.write_text(trace, encoding="utf-8")
    assert trace == path.read_text(encoding="utf-8")


def test_every_golden_trace_has_its_calibration() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == TRACES.keys()
