"""Cohorts of random speeds, without faults: every mode ends, covers exactly, and lets no rank go without work."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from flodl.ids import RankId
from flodl.messages import CadenceSettings, Mode
from tests.sim.world import HostSpec, Scenario, World

CI_SEEDS = 12
LONG_SEEDS = 500
TAIL_WINDOWS = 2
"""The last window of an epoch, and one into which a rest was folded, may leave a rank out."""
SLOWEST_S, FASTEST_S = 0.05, 0.001
"""Per sample: fifty to one."""


@dataclass(frozen=True)
class Window:
    """One commit: steps by rank."""

    epoch: int
    counts: dict[RankId, int]


def cohort_of(seed: int, mode: Mode) -> Scenario:
    """2 to 8 ranks on 1 to 3 hosts, 20 to 60 batches for each rank and epoch."""
    r = random.Random(f"{seed} {mode}")
    ranks = r.randint(2, 8)
    cuts = sorted(r.sample(range(1, ranks), min(r.randint(0, 2), ranks - 1)))
    speeds = [SLOWEST_S * (FASTEST_S / SLOWEST_S) ** r.random() for _ in range(ranks)]
    hosts = [HostSpec(f"h{a}", tuple(speeds[a:b])) for a, b in zip([0, *cuts], [*cuts, ranks], strict=True)]
    batch_size = r.randint(1, 4)
    size = ranks * batch_size * r.randint(20, 60) + r.randrange(batch_size)
    return Scenario(seed, tuple(hosts), CadenceSettings(mode=mode), size, batch_size, num_epochs=2)


def windows_of(world: World) -> list[Window]:
    """Every commit behind version 0."""
    fields = [record.fields for record in world.records if record.event == "commit"][1:]
    return [Window(each["epoch"], dict(each["counts"])) for each in fields]  # type: ignore[arg-type]


def starved(mode: Mode, windows: Sequence[Window], ranks: Sequence[RankId]) -> list[str]:
    """Where a rank had nothing to do although there was work for it.

    In sync modes a rank that has done its share of the epoch stays idle to its end; else only a tail leaves one out.
    """
    found = []
    parts = [windows] if mode.is_async else [[w for w in windows if w.epoch == epoch] for epoch in (0, 1)]
    for part in parts:
        for rank in ranks:
            idle = [place for place, window in enumerate(part) if not window.counts.get(rank)]
            excused = min(len(idle), len(part) - 1) if mode.is_sync else TAIL_WINDOWS
            found += [
                f"rank {rank}: {part[place]}, {place} of {len(part)}" for place in idle if place < len(part) - excused
            ]
    return found


def run_cohort(seed: int, mode: Mode) -> None:
    world = World(cohort_of(seed, mode))
    outcome = world.run()
    ranks = sorted(rank.rank for rank in world.ranks())
    assert (outcome.status, outcome.losses) == ("completed", ()), f"seed {seed}: {outcome}"
    world.assert_exact_coverage()
    assert starved(mode, windows_of(world), ranks) == [], f"seed {seed}"


@pytest.mark.parametrize("mode", list(Mode))
def test_random_speeds_stall_nobody_and_starve_nobody(mode: Mode) -> None:
    for seed in range(CI_SEEDS):
        run_cohort(seed, mode)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", list(Mode))
def test_hundreds_of_random_speeds_stall_nobody_and_starve_nobody(mode: Mode) -> None:
    for seed in range(CI_SEEDS, LONG_SEEDS):
        run_cohort(seed, mode)


def test_idle_window_in_the_middle_of_an_epoch_is_starvation() -> None:
    windows = [Window(epoch, {0: 2, 1: 0 if place == 1 else 1}) for epoch in (0, 1) for place in range(5)]

    assert len(starved(Mode.CPU_CADENCE, windows, (0, 1))) == 2
    assert len(starved(Mode.CPU_SYNC, windows, (0, 1))) == 2
