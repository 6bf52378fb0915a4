"""Random runs: a seed gives a scenario and its faults, a verdict says whether the run kept every promise."""

import random
from dataclasses import dataclass, replace
from functools import partial

from flodl.messages import CadenceSettings, CheckpointSettings, Mode, OnError
from tests.sim.world import CRASHED, HostSpec, Scenario, World

KINDS = (
    "kill", "pause", "slow", "stall", "daemon", "partition",
    "bad loss", "bad weights", "wrong digest", "reduce error", "formation error",
    "bad save", "no space", "controller", "stop", "join", "join", "drain", "exception",
)  # fmt: skip
LAST_FAULT_S = 12.0
ROUND_S = 0.015
"""What an attempt at a round takes: faults inside one come this soon after its start."""
COLLECTIVE_ALONE = "a collective mode needs two ranks"
TOO_FEW = "too few ranks to go on"
NOT_FINITE = "not finite"
NOT_SAVED = "could not be saved"


@dataclass(frozen=True)
class Fault:
    """``at_s`` counts from the start, or from that of attempt ``round``. ``amount``: seconds, factor or count."""

    at_s: float
    round: int | None
    kind: str
    rank: int
    host: str
    amount: float


@dataclass(frozen=True)
class Schedule:
    """One run and what befalls it."""

    scenario: Scenario
    faults: tuple[Fault, ...]

    @property
    def replay(self) -> str:
        """The command that runs it again, with its trace."""
        return f"python -m tests.sim.replay --seed {self.scenario.seed}"


def schedule_of(seed: int) -> Schedule:
    r = random.Random(seed)
    hosts = tuple(
        HostSpec(f"h{number}", tuple(r.choice([0.01, 0.01, 0.02, 0.05]) for _ in range(r.randint(1, 3))))
        for number in range(r.randint(1, 3))
    )
    rank_count = sum(len(host.speeds) for host in hosts)
    mode = r.choice(list(Mode))
    overshoot = r.choice([None, 0, 1, 5, 50]) if mode.is_async else None
    cadence = CadenceSettings(mode=mode, max_batch_diff=r.choice([None, None, 0, 2]), max_overshoot=overshoot)
    scenario = Scenario(
        seed, hosts, cadence,
        dataset_size=max(rank_count, r.randint(1, 400)),
        batch_size=r.randint(1, 8),
        num_epochs=r.randint(1, 3),
        merge_single_tail=r.random() < 0.3,
        eval_samples=r.choice([0, 5]),
        min_rank_start=1,
        epoch_splits=r.choice([1, 1, 2, 3]),
        on_error=r.choice([OnError.STOP, OnError.SHRINK, OnError.SHRINK]),
        max_failure=r.choice([None, None, None, 2, 0.5]),
        checkpoint=CheckpointSettings("run", r.choice([0, 1, 1, 2])) if r.random() < 0.7 else CheckpointSettings(),
        has_callbacks=seed % 3 == 0,
    )  # fmt: skip
    faults = [_fault(r, rank_count, hosts) for _ in range(r.randint(0, 4))]
    return Schedule(scenario, tuple(faults))


def _fault(r: random.Random, rank_count: int, hosts: tuple[HostSpec, ...]) -> Fault:
    kind = r.choice(KINDS)
    amount = {
        "pause": r.choice([2, 8, 15, 45]),
        "slow": r.choice([0.3, 3]),
        "stall": r.choice([5, 60]),
        "partition": r.choice([3, 12, 45, 150]),
    }.get(kind, 1)
    number = r.randrange(8) if r.random() < 0.4 else None
    at_s = round(r.uniform(0.2, LAST_FAULT_S) if number is None else r.uniform(0.0, ROUND_S), 4)
    return Fault(at_s, number, kind, r.randrange(rank_count), r.choice(hosts).name, amount)


def arrange(world: World, faults: tuple[Fault, ...]) -> None:
    for fault in faults:
        call = partial(inflict, world, fault)
        if fault.round is None:
            world.after(fault.at_s, call)
        else:
            world.at_round(fault.round, fault.at_s, call)


def inflict(world: World, fault: Fault) -> None:
    match fault.kind:
        case "kill":
            world.kill_rank(fault.rank)
        case "pause":
            world.pause_rank(fault.rank, fault.amount)
        case "slow":
            world.slow_rank(fault.rank, fault.amount)
        case "stall":
            world.stall_controller(fault.amount)
        case "daemon":
            world.kill_daemon(fault.host)
        case "partition":
            world.partition(fault.host, fault.amount)
        case "bad loss":
            world.poison_loss(fault.rank, int(fault.amount))
        case "bad weights":
            world.poison_weights(fault.rank, int(fault.amount))
        case "wrong digest":
            world.flip_bits(fault.rank, int(fault.amount))
        case "reduce error":
            world.break_reduces(int(fault.amount))
        case "formation error":
            world.break_formations(int(fault.amount))
        case "bad save":
            world.break_saves(fault.rank, int(fault.amount))
        case "no space":
            world.fill_disk(int(fault.amount))
        case "controller":
            world.crash_controller()
        case "stop":
            world.stop_run()
        case "drain":
            world.drain(fault.host)
        case "exception":
            world.raise_in_rank(fault.rank, "ValueError: planted")
        case "join":
            world.join(fault.host if fault.rank % 2 else f"new{fault.rank}", (0.01, 0.02)[: 1 + fault.rank % 2])
        case _:
            raise ValueError(fault.kind)


def play(schedule: Schedule) -> World:
    """Run to the end."""
    world = World(schedule.scenario)
    arrange(world, schedule.faults)
    world.run()
    return world


def heal(world: World) -> None:
    """Another run goes on from the last checkpoint, if there is one, and then every sample is in the weights once."""
    if world.bundle is None:
        return
    again = replace(world.scenario.checkpoint, resume_from="run", reshape=True)
    healed = World(replace(world.scenario, checkpoint=again, bundle=world.bundle))
    outcome = healed.run()
    assert outcome.status == "completed", outcome
    healed.assert_exact_coverage()


def judge(world: World) -> None:
    """A completed run covered everything once; one that ended early had a reason to, and can be gone on from."""
    outcome = world.outcome
    assert outcome is not None
    if outcome.status != "completed":
        heal(world)
    if outcome.status == CRASHED:
        return
    if outcome.status == "stopped" and "stop" in world.fired:
        world.assert_one_consensus()
        return
    if outcome.status == "completed":
        assert outcome.exit_code == 0, outcome
        world.assert_exact_coverage()
        return
    excuses = [TOO_FEW]
    if world.scenario.cadence.mode.is_collective:
        excuses.append(COLLECTIVE_ALONE)
    if {"bad loss", "bad weights"} & world.fired.keys():
        excuses.append(NOT_FINITE)
    if "exception" in world.fired:
        excuses.append("planted")
    if world.scenario.max_failure is not None:
        excuses.append("max_failure")
    if {"bad save", "no space"} & world.fired.keys():
        excuses.append(NOT_SAVED)
    assert any(excuse in outcome.message for excuse in excuses), outcome
    assert outcome.exit_code != 0, outcome
    world.assert_one_consensus()
