"""Closed loops over devices of random speeds: windows find their size in 15 rounds, shares follow speeds in 3."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from flodl.messages import CadenceSettings, Mode
from tests.unit.core.calibration import EPOCH_BATCHES, Calibration, Devices

CI_SEEDS = 40
LONG_SEEDS = 500
MODES = [mode for mode in Mode if not mode.is_sync]
FOUND_BY, SETTLED_FROM, ROUNDS = 15, 60, 100
FOLLOWED_IN = 3
NOISE = 0.05


@dataclass(frozen=True)
class Cohort:
    """2 to 8 ranks of 1 to 50 ms a batch; averaging that takes 1 to 800 batches of the slowest to pay."""

    ms: dict[int, float]
    averaging_ms: float


def cohort_of(draw: random.Random) -> Cohort:
    ms = {rank: draw.uniform(1, 50) for rank in range(draw.randint(2, 8))}
    overhead_target = CadenceSettings().overhead_target
    return Cohort(ms, 10 ** draw.uniform(0, 2.9) * max(ms.values()) * overhead_target)


def loop(mode: Mode, ms: Callable[[int], dict[int, float]], averaging_ms: float) -> Calibration:
    return Calibration(CadenceSettings(mode), Devices(ms, lambda version: averaging_ms))


def check_window_is_found(seed: int, mode: Mode) -> None:
    cohort = cohort_of(random.Random(seed))
    lines = loop(mode, lambda version: cohort.ms, cohort.averaging_ms).run(ROUNDS)
    anchors = [int(str(line.fields["committed_anchor"])) for line in lines]
    settled = sorted(anchors[SETTLED_FROM:])[(ROUNDS - SETTLED_FROM) // 2]
    tolerance = max(1, settled // 20)  # an anchor of a few batches may alternate: batches are whole
    assert all(abs(anchor - settled) <= tolerance for anchor in anchors[FOUND_BY - 1 :]), (seed, settled, anchors)


def check_shares_follow(seed: int, mode: Mode) -> None:
    draw = random.Random(seed)
    cohort = cohort_of(draw)
    slowed, change = draw.randrange(len(cohort.ms)), draw.randint(8, 30)

    def true_ms(version: int) -> dict[int, float]:
        return {rank: ms * (3 if rank == slowed and version > change else 1) for rank, ms in cohort.ms.items()}

    def noisy_ms(version: int) -> dict[int, float]:
        return {rank: ms * draw.uniform(1 - NOISE, 1 + NOISE) for rank, ms in true_ms(version).items()}

    calibration = loop(mode, noisy_ms, cohort.averaging_ms)
    calibration.run(change + FOLLOWED_IN)
    before, after = fair_share(true_ms(change), slowed), fair_share(true_ms(change + 1), slowed)
    share = calibration.cadence.elche.partition_ratios[slowed]
    assert abs(share / after - 1) < 0.2, (seed, share, after)
    assert (before - share) / (before - after) > 0.8, (seed, before, share, after)
    counts = calibration.cadence.elche.plan(EPOCH_BATCHES)
    assert abs(counts[slowed] - after * sum(counts.values())) <= 1 + 0.2 * counts[slowed], (seed, counts)


def fair_share(ms: dict[int, float], rank: int) -> float:
    return 1 / ms[rank] / sum(1 / each for each in ms.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", [check_window_is_found, check_shares_follow])
def test_cadence_follows_random_devices(check: Callable[[int, Mode], None], mode: Mode) -> None:
    for seed in range(CI_SEEDS):
        check(seed, mode)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", [check_window_is_found, check_shares_follow])
def test_cadence_follows_hundreds_of_random_devices(check: Callable[[int, Mode], None], mode: Mode) -> None:
    for seed in range(LONG_SEEDS):
        check(seed, mode)
