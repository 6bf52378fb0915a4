"""Random runs: a seed gives a scenario and its faults, a verdict says whether the run kept every promise."""

import random
from dataclasses import dataclass, replace
from functools import partial

from flodl.core.formation import MAX_ATTEMPTS
from flodl.ids import RankId
from flodl.messages import CadenceSettings, CheckpointSettings, Mode, OnError
from tests.sim.faults import Effect, clogged, join_in_death, links_down, links_up
from tests.sim.world import CRASHED, HostSpec, Scenario, World

KINDS = (
    "kill", "daemon", "pause", "freeze", "slow", "stall", "partition", "one-way", "clog", "reset",
    "rank between actions", "daemon between actions", "controller between actions", "controller",
    "bad loss", "bad weights", "wrong digest", "reduce error", "formation error",
    "bad save", "no space", "torn write", "torn save", "stop", "drain", "exception", "join", "join in death", "return",
)  # fmt: skip
"""Each of these is counted. ``return``: a host that was lost is brought up again by the controller."""
WEIGHTS = {
    "pause": 2, "freeze": 1.5, "slow": 2, "stall": 3, "partition": 1.5, "one-way": 2, "clog": 2.5, "daemon": 1,
    "rank between actions": 1.5, "daemon between actions": 1.5, "controller between actions": 1.5,
    "bad loss": 2, "bad weights": 1.5, "wrong digest": 1.5, "reduce error": 4, "formation error": 3,
    "bad save": 6, "no space": 4, "torn write": 3, "torn save": 4, "stop": 2.5, "drain": 3, "exception": 2,
    "join in death": 3, "return": 0,
}  # fmt: skip
"""How often a kind is drawn: some meet nothing that they could change more often than others."""
OF_GROUPS = ("reduce error", "formation error")
OF_SAVES = ("bad save", "no space", "torn write", "torn save")
MAX_RANKS = 16
LAST_FAULT_S = 10.0
IDLE_S = 290.0
"""No fault holds on for longer than 150 s. Where only a limit helps, 300 s for a round or 600 s for a save, something
was lost on the way.
"""
ROUND_S, HOPS = 0.03, 6
"""What an attempt at a round takes, and messages one after another: faults inside one come so soon after its start."""
COLLECTIVE_ALONE = "a collective mode needs two ranks"
TOO_FEW = "too few ranks to go on"
NOT_FORMED = "does not form"
NOT_FINITE = "not finite"
NOT_SAVED = "could not be saved"


@dataclass(frozen=True)
class Fault:
    """``at_s`` counts from the start, or from that of attempt ``round``. ``amount``: seconds, factor or count;
    ``pick`` says which of the fault's variants it is.
    """

    at_s: float
    round: int | None
    kind: str
    rank: RankId
    host: str
    amount: float
    pick: int


SLOWEST_SYNC_S = 0.1


@dataclass(frozen=True)
class Schedule:
    """One run and what befalls it, and what befalls the run that goes on from its checkpoint if it ends early."""

    scenario: Scenario
    faults: tuple[Fault, ...]
    later: tuple[Fault, ...]

    @property
    def replay(self) -> str:
        """The command that runs it again, with its trace."""
        return f"python -m tests.sim.replay --seed {self.scenario.seed}"


def schedule_of(seed: int) -> Schedule:
    r = random.Random(seed)
    hosts = _hosts(r)
    rank_count = sum(len(host.speeds) for host in hosts)
    mode = r.choice(list(Mode))
    if mode.is_sync:  # a round for every step: slower ones would need the limit for themselves
        hosts = tuple(
            replace(host, speeds=tuple(min(speed, SLOWEST_SYNC_S) for speed in host.speeds)) for host in hosts
        )
    overshoot = r.choice([None, 0, 1, 5, 50]) if mode.is_async else None
    cadence = CadenceSettings(mode=mode, max_batch_diff=r.choice([None, None, 0, 2]), max_overshoot=overshoot)
    scenario = Scenario(
        seed, hosts, cadence,
        dataset_size=max(rank_count, r.randint(1, 100 + 50 * rank_count)),
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
        restores_hosts=r.random() < 0.9,
        latency_s=r.choice([0.002, 0.02, 0.1]),
    )  # fmt: skip
    faults = tuple(_fault(r, rank_count, scenario) for _ in range(r.choice([0, 1, 2, 3, 4, 5, 6])))
    later = tuple(_fault(r, rank_count, scenario) for _ in range(r.choice([0, 0, 1, 2])))
    return Schedule(scenario, faults, later)


def _hosts(r: random.Random) -> tuple[HostSpec, ...]:
    """1 to 16 ranks, 1 to 4 on a host."""
    left, hosts, pace = r.choice([r.randint(1, 4), r.randint(1, MAX_RANKS)]), [], r.choice([1, 3, 10])
    while left:
        count = min(left, r.randint(1, 4))
        speeds = tuple(pace * r.choice([0.01, 0.01, 0.02, 0.05]) for _ in range(count))
        hosts.append(HostSpec(f"h{len(hosts)}", speeds))
        left -= count
    return tuple(hosts)


def _fault(r: random.Random, rank_count: int, scenario: Scenario) -> Fault:
    is_collective, saves = scenario.cadence.mode.is_collective, bool(scenario.checkpoint.save_path)
    idle = (() if is_collective else OF_GROUPS) + (() if saves else OF_SAVES)
    (kind,) = r.choices(KINDS, [0 if kind in idle else WEIGHTS.get(kind, 1) for kind in KINDS])
    amount = {
        "pause": r.choice([2, 8, 15, 45]),
        "freeze": r.choice([2, 15, 45, 150]),
        "slow": r.choice([0.3, 3]),
        "stall": r.choice([5, 60]),
        "partition": r.choice([3, 12, 45, 150]),
        "one-way": r.choice([3, 12, 45, 150]),
        "clog": r.choice([0.1, 1, 5, 20, 45]),
        "join in death": r.uniform(0, 0.03),
    }.get(kind, 1)
    number = r.randrange(8) if r.random() < 0.5 else None
    if kind == "formation error" and r.random() < 0.7:
        at_s, number = 0.2, None  # later there is none, unless somebody is lost
    else:
        at_s = round(
            r.uniform(0.2, LAST_FAULT_S) if number is None else r.uniform(0.0, ROUND_S + HOPS * scenario.latency_s), 4
        )
    return Fault(at_s, number, kind, r.randrange(rank_count), r.choice(scenario.hosts).name, amount, r.randrange(1000))


def arrange(world: World, faults: tuple[Fault, ...]) -> None:
    for fault in faults:
        call = partial(inflict, world, fault)
        if fault.round is None:
            world.after(fault.at_s, call)
        else:
            world.at_round(fault.round, fault.at_s, call)


def inflict(world: World, fault: Fault) -> None:
    rank, host, amount, pick = fault.rank, fault.host, fault.amount, fault.pick
    disk, effect = world.disk, Effect(world, fault.kind)
    two_speeds = (0.01, 0.02)[: 1 + pick % 2]
    calls = {
        "kill": lambda: world.kill_rank(rank),
        "daemon": lambda: world.kill_daemon(host),
        "pause": lambda: world.pause_rank(rank, amount),
        "freeze": lambda: world.freeze_host(host, amount),
        "slow": lambda: world.slow_rank(rank, amount),
        "stall": lambda: world.stall_controller(amount),
        "partition": lambda: world.partition(host, amount),
        "one-way": lambda: world.partition(host, amount, "one-way", (links_up, links_down)[pick % 2](host)),
        "clog": lambda: world.hold((clogged(host, rank, pick),), amount, "clog"),
        "reset": lambda: world.reset(host),
        "rank between actions": lambda: world.crash_within(f"rank{rank}", 1 + pick % 2, pick // 2),
        "daemon between actions": lambda: world.crash_within(host, 1 + pick % 2, pick // 2),
        "controller between actions": lambda: world.crash_within("controller", 2 + pick % 9, pick // 9),
        "controller": world.crash_controller,
        "bad loss": lambda: world.poison_loss(rank, int(amount)),
        "bad weights": lambda: world.poison_weights(rank, int(amount)),
        "wrong digest": lambda: world.flip_bits(rank, int(amount)),
        "reduce error": lambda: world.break_reduces(int(amount)),
        "formation error": lambda: world.break_formations(int(amount)),
        "bad save": lambda: world.break_saves(rank, int(amount)),
        "no space": lambda: disk.fill(pick % 8, effect),
        "torn write": lambda: disk.tear(pick % 4, effect),
        "torn save": lambda: disk.crash(pick % 16, effect),
        "stop": world.stop_run,
        "drain": lambda: world.drain(host),
        "exception": lambda: world.raise_in_rank(rank, "ValueError: planted"),
        "join": lambda: world.join(host if pick % 4 >= 2 else f"new{rank}", two_speeds),
        "join in death": lambda: join_in_death(world, rank, host, pick, amount),
    }
    calls[fault.kind]()


def play(schedule: Schedule) -> World:
    """Run to the end, and go on from the checkpoint if that came early; a broken promise is an AssertionError."""
    world = World(schedule.scenario)
    arrange(world, schedule.faults)
    world.run(idle_s=IDLE_S)
    judge(world)
    if world.outcome is not None and world.outcome.status != "completed":
        heal(world, schedule.later)
    return world


def heal(world: World, later: tuple[Fault, ...] = ()) -> None:
    """Another run goes on from the last checkpoint, if there is one, and then every sample is in the weights once."""
    if not world.disk.holds("run"):
        return
    world.disk.restart()
    again = replace(world.scenario.checkpoint, resume_from="run", reshape=True)
    healed = World(replace(world.scenario, checkpoint=again, disk=world.disk))
    arrange(healed, later)
    outcome = healed.run(idle_s=IDLE_S)
    world.fired += healed.fired
    if later and outcome.status != "completed":
        judge(healed)
        heal(healed)
        return
    assert outcome.status == "completed", outcome
    healed.assert_exact_coverage()


def judge(world: World) -> None:
    """A completed run covered everything once; one that ended early had a reason to."""
    outcome = world.outcome
    assert outcome is not None
    if outcome.status == CRASHED:
        return
    if outcome.status == "stopped" and "stop" in world.struck:
        world.assert_one_consensus()
        return
    if outcome.status == "completed":
        assert outcome.exit_code == 0, outcome
        world.assert_exact_coverage()
        return
    excuses = [TOO_FEW]
    if world.scenario.cadence.mode.is_collective:
        excuses.append(COLLECTIVE_ALONE)
    if {"bad loss", "bad weights"} & world.struck.keys():
        excuses.append(NOT_FINITE)
    if world.failed_formations >= MAX_ATTEMPTS:
        excuses.append(NOT_FORMED)
    if "exception" in world.struck:
        excuses.append("planted")
    if world.scenario.max_failure is not None:
        excuses.append("max_failure")
    if {"bad save", "no space"} & world.struck.keys():
        excuses.append(NOT_SAVED)
    assert any(excuse in outcome.message for excuse in excuses), outcome
    assert outcome.exit_code != 0, outcome
    world.assert_one_consensus()
