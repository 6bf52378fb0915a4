"""The whole system in one thread under a virtual clock: the real cores, the real codec, virtual ranks and wires.

A virtual model *is* the multiset of samples it absorbed, so coverage is read from the weights, not from bookkeeping.
Every random choice comes from one seeded generator; nothing iterates over a set; a failure names its seed.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flodl.core import actions as act
from flodl.core import events as ev
from flodl.core.host import HostCore, HostSettings
from flodl.core.job import JobCore, JobSettings
from flodl.core.liveness import LivenessSettings
from flodl.core.rank import RankCore
from flodl.core.window import JoinSettings
from flodl.ids import Grant, RankId, RoundKey, batches_of
from flodl.messages import (
    CadenceSettings,
    DaemonToRank,
    Device,
    FromDaemon,
    FromHead,
    HeadReady,
    HostHello,
    Layout,
    RankAlive,
    RankHello,
    RankReady,
    RankSpec,
    RankToDaemon,
    Settings,
    ToDaemon,
    ToHead,
)
from flodl.wire.codec import decode, encode

LAYOUT = Layout(4, 0, 0)
MAX_EVENTS = 2_000_000


@dataclass(frozen=True)
class Model:
    """Weights as the multiset of absorbed samples on top of one initial model."""

    origin: str
    samples: tuple[tuple[tuple[int, int], int], ...] = ()

    def plus(self, more: Counter) -> "Model":
        total = Counter(dict(self.samples))
        total.update(more)
        return Model(self.origin, tuple(sorted(total.items())))


@dataclass
class Contribution:
    """What a rank puts into a round."""

    weight: float
    base: Model
    delta: Counter


def merge(parts: list[Contribution]) -> Model | None:
    """The weighted sum: the common base of those with weight plus everything they trained; None if it is garbage."""
    used = [part for part in parts if part.weight > 0]
    bases = dict.fromkeys(part.base for part in used)
    if len(bases) != 1 or abs(sum(part.weight for part in used) - 1.0) > 1e-9:
        return None
    model = next(iter(bases))
    for part in used:
        model = model.plus(part.delta)
    return model


@dataclass
class HostSpec:
    """``speeds``: seconds per sample of each of its ranks."""

    name: str
    speeds: tuple[float, ...]


@dataclass
class Scenario:
    """One run to simulate."""

    seed: int
    hosts: tuple[HostSpec, ...]
    cadence: CadenceSettings = field(default_factory=CadenceSettings)
    dataset_size: int = 200
    batch_size: int = 4
    num_epochs: int = 2
    merge_single_tail: bool = False
    eval_samples: int = 0
    min_rank_start: int = 0
    has_head: bool = True
    settings_of: Callable[[RankId, Settings], Settings] | None = None
    liveness: LivenessSettings = field(default_factory=LivenessSettings)

    @property
    def settings(self) -> Settings:
        return Settings(
            self.dataset_size, self.batch_size, self.num_epochs, 0, self.cadence, eval_samples=self.eval_samples
        )


class World:
    """See the module docstring. ``run()`` returns the outcome."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.now_s = 0.0
        self.trace: list[str] = []
        self.records: list[act.Record] = []
        self.outcome: act.Outcome | None = None
        self.final: Model | None = None
        self.ended = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._links: dict[tuple[str, str], float] = {}
        self.groups: dict[tuple[int, int], Group] = {}
        self.reductions: dict[RoundKey, dict[str, Model | None]] = {}
        self.daemons = {spec.name: Daemon(self, spec) for spec in scenario.hosts}
        self.controller = Controller(self)
        for number, daemon in enumerate(self.daemons.values()):
            self.after(0.01 * (number + 1), daemon.start)

    # ---------------------------------------------------------------------------------------------------- the clock
    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._sequence, call))

    def send(self, source: str, target: str, call: Callable[[], None]) -> None:
        """Deliver in order on the link from ``source`` to ``target`` after a random delay."""
        at_s = max(self.now_s + self.random.uniform(0.0001, 0.002), self._links.get((source, target), 0.0))
        self._links[source, target] = at_s
        self.after(at_s - self.now_s, call)

    def run(self, limit_s: float = 100_000.0) -> act.Outcome:
        """Run to the end of the job."""
        count = 0
        while self.outcome is None:
            if not self._heap:
                raise AssertionError(f"nothing left to happen: {self.where()}")
            self.now_s, _, call = heapq.heappop(self._heap)
            count += 1
            if self.now_s > limit_s or count > MAX_EVENTS:
                raise AssertionError(f"the job does not end: {self.where()}")
            call()
        return self.outcome

    def where(self) -> str:
        job = self.controller.core
        ranks = {r.rank: r.core.snapshot() for d in self.daemons.values() for r in d.ranks.values()}
        return (
            f"seed {self.scenario.seed} at {self.now_s:.3f} s, phase {job.phase}, ranks {ranks}, "
            f"last {self.trace[-5:]}"
        )

    # --------------------------------------------------------------------------------------------------- the faults
    def rank(self, rank: RankId) -> "Rank | None":
        return next((d.ranks[rank] for d in self.daemons.values() if rank in d.ranks), None)

    def kill_rank(self, rank: RankId) -> None:
        found = self.rank(rank)
        if found is not None and found.is_alive:
            found.die(0, 9)

    def pause_rank(self, rank: RankId, for_s: float) -> None:
        found = self.rank(rank)
        if found is not None and found.is_alive:
            found.pause(for_s)

    def slow_rank(self, rank: RankId, factor: float) -> None:
        found = self.rank(rank)
        if found is not None:
            found.speed_s *= factor

    def kill_daemon(self, host: str) -> None:
        self.daemons[host].die()

    def stall_controller(self, for_s: float) -> None:
        self.controller.stall(for_s)

    # ------------------------------------------------------------------------------------------------- the verdicts
    def assert_exact_coverage(self) -> None:
        """Every sample of every epoch exactly once in the final weights; all finished ranks hold them."""
        assert self.final is not None, self.where()
        got = Counter(dict(self.final.samples))
        want = Counter(
            {(e, i): 1 for e in range(self.scenario.num_epochs) for i in range(self.scenario.dataset_size)}
        )
        missing, extra = want - got, got - want
        assert not missing and not extra, f"missing {len(missing)}, extra {extra} ({self.where()})"
        for daemon in self.daemons.values():
            for rank in daemon.ranks.values():
                if rank.has_finished:
                    assert rank.model == self.final, f"rank {rank.rank} differs ({self.where()})"


class Actor:
    """A process with a core: events in, actions out, one timer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.core: JobCore | HostCore | RankCore
        self.is_alive = False
        self.paused_until_s = 0.0
        self._timer = 0

    def post(self, event: object) -> None:
        """Handle ``event`` now, or when the process runs again."""
        if not self.is_alive:
            return
        if self.world.now_s < self.paused_until_s:
            self.world.after(self.paused_until_s - self.world.now_s, lambda: self.post(event))
            return
        actions = self.core.handle(event, self.world.now_s)
        self.core.check()
        self.world.trace.append(f"{self.world.now_s:.6f} {self.name} {type(event).__name__} {len(actions)}")
        for action in actions:
            self.execute(action)
        self.arm()

    @property
    def name(self) -> str:
        raise NotImplementedError

    def execute(self, action: object) -> None:
        raise NotImplementedError

    def arm(self) -> None:
        self._timer += 1
        timer, at_s = self._timer, self.core.next_deadline_s()
        if at_s is not None and self.is_alive:
            self.world.after(max(0.0, at_s - self.world.now_s), lambda: self._tick(timer))

    def _tick(self, timer: int) -> None:
        if timer == self._timer:
            self.post(ev.Ticked())


class Controller(Actor):
    """JobCore with a head beside it."""

    name = "controller"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        scenario = world.scenario
        join = JoinSettings(tuple(host.name for host in scenario.hosts), scenario.min_rank_start)
        settings = JobSettings(join, scenario.liveness, scenario.has_head, stop_grace_s=5.0)
        self.core = JobCore(settings, 0.0)
        self.is_alive = True
        self.head_messages: list[ToHead] = []
        self.state_path = ""
        if scenario.has_head:
            world.after(0.05, lambda: self.post(ev.HeadSaid(_wire(HeadReady(scenario.settings, {}), FromHead))))
        self.arm()

    def stall(self, for_s: float) -> None:
        self.paused_until_s = self.world.now_s + for_s
        self.world.after(for_s, lambda: self.post(ev.Stalled(for_s)))

    def execute(self, action: act.JobAction) -> None:
        world = self.world
        match action:
            case act.SendHost(host, message):
                daemon = world.daemons[host]
                message = _wire(message, ToDaemon)
                world.send("controller", host, lambda: daemon.hear(message))
            case act.SendHead(message):
                self.head_messages.append(_wire(message, ToHead))
                if type(message).__name__ == "RunEnded":
                    world.after(0.5, lambda: self.post(ev.HeadExited(0, 0)))
            case act.StopHead():
                world.after(0.1, lambda: self.post(ev.HeadExited(0, 15)))
            case act.DropHost(host):
                world.daemons[host].cut()
            case act.OpenReduction(key, hosts, _):
                world.reductions[key] = dict.fromkeys(hosts)
            case act.CloseReduction(key):
                world.reductions.pop(key, None)
            case act.ReceiveState(_, rank, _):
                world.final = world.rank(rank).model
                world.after(0.01, lambda: self.post(ev.StateStored("/state", "")))
            case act.ResetStore():
                pass
            case act.Record():
                world.records.append(action)
            case act.EndRun(outcome):
                world.outcome = outcome


class Daemon(Actor):
    """HostCore with its ranks and their shared memory."""

    def __init__(self, world: World, spec: HostSpec) -> None:
        super().__init__(world)
        self.spec = spec
        self.ranks: dict[RankId, Rank] = {}
        self.slots: dict[int, Contribution] = {}
        self.result: Model | None = None
        self.is_connected = False

    @property
    def name(self) -> str:
        return self.spec.name

    def start(self) -> None:
        self.core = HostCore(HostSettings(self.name, stop_grace_s=5.0), self.world.now_s)
        self.is_alive = self.is_connected = True
        devices = tuple(Device("cpu", index) for index in range(len(self.spec.speeds)))
        self.say(HostHello(self.name, 1, self.name, "127.0.0.1", devices, 2, "3.11", "2.13", "0"))
        self.arm()

    def say(self, message: FromDaemon) -> None:
        if not self.is_connected:
            return
        message = _wire(message, FromDaemon)
        controller = self.world.controller
        self.world.send(self.name, "controller", lambda: controller.post(ev.HostSaid(self.name, message)))

    def hear(self, message: ToDaemon) -> None:
        if self.is_connected:
            self.post(ev.ControllerSaid(message))

    def cut(self) -> None:
        """The controller closed our connection."""
        self.is_connected = False
        self.post(ev.ControllerDropped("closed by the controller"))

    def die(self) -> None:
        """kill -9 of the daemon: its warden ends the ranks, the controller sees a reset."""
        if not self.is_alive:
            return
        for rank in self.ranks.values():
            rank.is_alive = False
            rank.leave_groups()
        self.is_alive = self.is_connected = False
        controller = self.world.controller
        self.world.after(0.001, lambda: controller.post(ev.HostDropped(self.name, "connection reset")))

    def execute(self, action: act.HostAction) -> None:
        world = self.world
        match action:
            case act.SendController(message):
                self.say(message)
            case act.SendRank(rank, message):
                target = self.ranks[rank]
                message = _wire(message, DaemonToRank)
                world.send(self.name, target.name, lambda: target.post(ev.DaemonSaid(message)))
            case act.SpawnRank(spec, world_size, _):
                self.ranks[spec.rank] = Rank(world, self, spec, world_size)
            case act.TerminateRank(rank) | act.KillRankTree(rank):
                target = self.ranks[rank]
                signal = 15 if isinstance(action, act.TerminateRank) else 9
                world.after(0.001, lambda: target.die(0, signal))
            case act.StreamSum(key, _):
                total = self.result
                world.send(self.name, "bulk", lambda: self._upload(key, total))
            case act.CancelStream() | act.StreamState():
                pass
            case act.ShipLogs():
                world.after(0.001, lambda: self.post(ev.LogsShipped()))
            case act.Leave():
                self.is_alive = False
            case act.Record():
                world.records.append(action)

    def _upload(self, key: RoundKey, total: Model | None) -> None:
        """The controller's bulk threads: when all hosts' sums are in, the total goes back to each."""
        world = self.world
        parts = world.reductions.get(key)
        if parts is None or self.name not in parts:
            return
        parts[self.name] = total
        if any(part is None for part in parts.values()):
            return
        joined = _join_hosts(list(parts.values()))
        for host in parts:
            daemon = world.daemons[host]
            world.send("bulk", host, lambda daemon=daemon: daemon.returned(key, joined))

    def returned(self, key: RoundKey, total: Model) -> None:
        self.result = total
        self.post(ev.SumReturned(key))


class Rank(Actor):
    """RankCore with a virtual model, loader and planes."""

    def __init__(self, world: World, daemon: Daemon, spec: RankSpec, world_size: int) -> None:
        super().__init__(world)
        scenario = world.scenario
        self.daemon, self.rank, self.slot = daemon, spec.rank, spec.local_rank
        settings = scenario.settings
        if scenario.settings_of is not None:
            settings = scenario.settings_of(self.rank, settings)
        self.settings = settings
        self.speed_s = daemon.spec.speeds[spec.local_rank]
        self.core = RankCore(self.rank, settings, scenario.merge_single_tail)
        self.is_alive = True
        self.has_finished = False
        self.model = Model(f"init of rank {self.rank}")
        self.delta: Counter = Counter()
        self.side: Model | None = None
        self.batches: list[tuple[tuple[int, int], ...]] = []
        self.is_stepping = False
        self.inbox: list[object] = []
        self.window_loss = 0.0
        self.group: Group | None = None
        world.after(world.random.uniform(0.5, 3.0), self._ready)

    @property
    def name(self) -> str:
        return f"rank{self.rank}"

    def say(self, message: RankToDaemon) -> None:
        message = _wire(message, RankToDaemon)
        daemon = self.daemon
        self.world.send(self.name, daemon.name, lambda: daemon.post(ev.RankSaid(self.rank, message)))

    def _ready(self) -> None:
        if not self.is_alive:
            return
        self.say(RankHello(self.rank, 1))
        self.say(
            RankReady(self.rank, self.settings, {"model": "m"}, LAYOUT, self.world.scenario.merge_single_tail, "gloo")
        )
        self._beat()

    def _beat(self) -> None:
        if not self.is_alive:
            return
        if self.world.now_s >= self.paused_until_s:
            self.say(RankAlive(self.rank, self.core.steps_total))
        self.world.after(1.0, self._beat)

    def pause(self, for_s: float) -> None:
        self.paused_until_s = max(self.paused_until_s, self.world.now_s + for_s)
        self.world.after(self.paused_until_s - self.world.now_s, self.wake)

    def die(self, code: int, signal: int) -> None:
        """The process ends; the daemon reports it after everything the rank said."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.leave_groups()
        daemon = self.daemon
        if daemon.is_alive:
            self.world.send(self.name, daemon.name, lambda: daemon.post(ev.RankEnded(self.rank, code, signal)))

    def leave_groups(self) -> None:
        for group in self.world.groups.values():
            group.lose(self.rank)

    def post(self, event: object) -> None:
        """The main thread handles events between steps, in order of arrival."""
        self.inbox.append(event)
        self.wake()

    def wake(self) -> None:
        while self.inbox and not self.is_stepping and self.is_alive and self.world.now_s >= self.paused_until_s:
            super().post(self.inbox.pop(0))
            if not self.inbox:
                self._maybe_step()

    def _maybe_step(self) -> None:
        if self.is_alive and not self.is_stepping and self.core.wants_step and self.world.now_s >= self.paused_until_s:
            self.is_stepping = True
            batch = self.batches.pop(0)
            cost_s = self.speed_s * len(batch) * self.world.random.uniform(0.95, 1.05)
            started_s = self.world.now_s
            self.world.after(cost_s, lambda: self._step_done(batch, started_s))

    def _step_done(self, batch: tuple[tuple[int, int], ...], started_s: float) -> None:
        if not self.is_alive:
            return
        if self.world.now_s < self.paused_until_s:
            self.world.after(self.paused_until_s - self.world.now_s, lambda: self._step_done(batch, started_s))
            return
        self.is_stepping = False
        self.delta.update(batch)
        self.window_loss += len(batch)
        self.inbox.insert(0, ev.StepDone(len(batch), started_s, self.world.now_s))
        self.wake()

    def execute(self, action: act.RankAction) -> None:
        world = self.world
        match action:
            case act.SendUp(message):
                self.say(message)
            case act.LoadAhead(grant):
                self.batches += _cut(grant, self.settings.batch_size, world.scenario.merge_single_tail)
            case act.AccountWindow():
                loss, self.window_loss = self.window_loss, 0.0
                self._later(0.0, lambda: self.post(ev.WindowAccounted(loss, True, {})))
            case act.FormCollective(incarnation, attempt, ranks):
                group = world.groups.setdefault((incarnation, attempt), Group(world, incarnation, attempt, ranks))
                if self.group is not None:
                    self.group.lose(self.rank)
                self.group = group
                group.join(self)
            case act.Pack(key, weight, _, _, _):
                part = Contribution(weight, self.model, Counter(self.delta) if weight > 0 else Counter())
                self.side = None
                self._part = part
                if not self.settings.cadence.mode.is_collective:
                    self.daemon.slots[self.slot] = part
                self._later(0.001, lambda: self.post(ev.Packed(key, True)))
            case act.ReduceCollective(key):
                self.group.reduce(self, key, self._part)
            case act.SumSlice(key, _, _, slots):
                self.daemon.result = _partial([self.daemon.slots[slot] for slot in slots])
                self._later(0.001, lambda: self.post(ev.SliceSummed(key)))
            case act.TakeResult(key):
                self.take(key, _whole(self.daemon.result))
            case act.AbandonReduce():
                self.side = None
            case act.Adopt():
                assert self.side is not None, f"rank {self.rank} adopts nothing"
                self.model, self.delta, self.side = self.side, Counter(), None
            case act.Evaluate(epoch):
                self.pause(0.05)
                world.after(0.05, lambda: self.post(ev.Evaluated(epoch, 1.0, "")))
            case act.WriteState():
                self._later(0.01, lambda: self.post(ev.StateWritten(100, "")))
            case act.EndRank(_, code):
                self.has_finished = code == 0
                self._later(0.05, lambda: self.die(code, 0))

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.world.after(delay_s, call)

    def take(self, key: RoundKey, total: Model | None) -> None:
        """The consensus, or garbage, has arrived in the side buffer."""
        self.side = total
        digest = "garbage" if total is None else str(hash_of(total))
        self._later(0.001, lambda: self.post(ev.SumReady(key, digest, 0.01, "")))


class Group:
    """A collective group: completes when all are in; a lost peer breaks it, mostly."""

    def __init__(self, world: World, incarnation: int, attempt: int, ranks: tuple[RankId, ...]) -> None:
        self.world, self.incarnation, self.attempt, self.ranks = world, incarnation, attempt, ranks
        self.joined: dict[RankId, Rank] = {}
        self.parts: dict[RoundKey, dict[RankId, Contribution]] = {}
        self.is_broken = False

    def join(self, rank: Rank) -> None:
        self.joined[rank.rank] = rank
        if len(self.joined) == len(self.ranks):
            for each in self.joined.values():
                self._settle(each, "")

    def _settle(self, rank: Rank, error: str) -> None:
        event = ev.GroupSettled(self.incarnation, self.attempt, error)
        self.world.after(self.world.random.uniform(0.005, 0.02), lambda: rank.post(event))

    def reduce(self, rank: Rank, key: RoundKey, part: Contribution) -> None:
        if self.is_broken:
            self._fail(rank, key)
            return
        parts = self.parts.setdefault(key, {})
        parts[rank.rank] = part
        if len(parts) == len(self.ranks):
            total = merge(list(parts.values()))
            for each in self.joined.values():
                self._deliver(each, key, total)

    def _deliver(self, rank: Rank, key: RoundKey, total: Model | None) -> None:
        def land() -> None:
            # as measured with Gloo: a peer lost inside a reduce may leave some survivors with a sum and others without
            if self.is_broken and self.world.random.random() < 0.5:
                self._fail(rank, key)
            else:
                rank.take(key, total)

        self.world.after(self.world.random.uniform(0.001, 0.01), land)

    def lose(self, lost: RankId) -> None:
        if lost not in self.ranks or self.is_broken:
            return
        self.is_broken = True
        for key, parts in self.parts.items():
            if len(parts) < len(self.ranks):
                for rank in parts:
                    self._fail(self.joined[rank], key)

    def _fail(self, rank: Rank, key: RoundKey) -> None:
        self.world.after(0.02, lambda: rank.post(ev.SumReady(key, "", 0.0, "connection reset by peer")))


@dataclass(frozen=True)
class Partial:
    """A host's sum: what its ranks contributed."""

    parts: tuple[Contribution, ...]

    def __hash__(self) -> int:
        return id(self)


def _partial(parts: list[Contribution]) -> Partial:
    return Partial(tuple(replace(part, delta=Counter(part.delta)) for part in parts))


def _join_hosts(partials: list[Partial]) -> Partial:
    return Partial(tuple(part for partial in partials for part in partial.parts))


def _whole(partial: Partial | None) -> Model | None:
    return None if partial is None else merge(list(partial.parts))


def hash_of(model: Model) -> str:
    """A digest that does not depend on the interpreter's hash seed."""
    return f"{model.origin}/{len(model.samples)}/{sum((e + 1) * 7919 * (i + 1) * n for (e, i), n in model.samples)}"


def _cut(grant: Grant, batch_size: int, merge_single_tail: bool) -> list[tuple[tuple[int, int], ...]]:
    positions = [(grant.epoch, p) for span in grant.spans for p in range(span.start, span.stop)]
    batches, at = [], 0
    for size in batches_of(grant.samples, batch_size, merge_single_tail):
        batches.append(tuple(positions[at : at + size]))
        at += size
    return batches


def _wire(message: object, allowed: object) -> object:
    """Through the real codec, as bytes."""
    return decode(encode(message), allowed)


