"""The whole system in one thread under a virtual clock: the real cores, the real codec, virtual ranks and wires.

Coverage is read from the weights (``tests.sim.model``), not from bookkeeping. Every random choice comes from the seed,
the moment and what is chosen, so that what befalls one host changes no delay of another one; nothing iterates over a
set. ``check()`` of a core runs after each of its events.
"""

import heapq
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flodl.checkpoint.writer import BundleWriter
from flodl.core import actions as act
from flodl.core import events as ev
from flodl.core.host import HostCore, HostSettings
from flodl.core.job import JobCore, JobSettings, Phase
from flodl.core.liveness import LivenessSettings
from flodl.core.position import ResumePoint
from flodl.core.supply import Supply
from flodl.core.window import JoinSettings
from flodl.errors import CheckpointError
from flodl.ids import RankId, RoundKey
from flodl.messages import (
    CadenceSettings,
    CheckpointSettings,
    DaemonToRank,
    Device,
    FromDaemon,
    FromHead,
    HeadReady,
    HostHello,
    OnError,
    Settings,
    StartRound,
    ToDaemon,
    ToHead,
)
from tests.sim.actor import Actor, wire
from tests.sim.disk import Crash, Disk
from tests.sim.faults import Effect, Link, all_links
from tests.sim.model import Contribution, Model, Sample, Sum
from tests.sim.plane import Group
from tests.sim.rank import Rank

MAX_EVENTS = 2_000_000
MAX_EVENTS_AT_ONCE = 100_000
"""More at one instant is a core that asks for a deadline which has passed."""
GRACE_S = 5.0
REJOIN_S = 2.0
CRASHED = "crashed"
"""The status of a run whose controller was killed."""


@dataclass(frozen=True)
class HostSpec:
    """``speeds``: seconds per sample of each of its ranks."""

    name: str
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class Scenario:
    """One run to simulate. ``absent`` hosts never start; ``settings_of`` and ``fingerprint_of`` see rank by rank;
    ``restores_hosts``: whoever is lost while the others train is brought up again; a message takes up to ``latency_s``.
    """

    seed: int
    hosts: tuple[HostSpec, ...]
    cadence: CadenceSettings = field(default_factory=CadenceSettings)
    dataset_size: int = 200
    batch_size: int = 4
    num_epochs: int = 2
    epoch_splits: int = 1
    merge_single_tail: bool = False
    eval_samples: int = 0
    min_rank_start: int = 0
    has_head: bool = True
    is_head_silent: bool = False
    absent: tuple[str, ...] = ()
    settings_of: Callable[[RankId, Settings], Settings] | None = None
    fingerprint_of: Callable[[RankId], dict[str, str]] | None = None
    liveness: LivenessSettings = field(default_factory=LivenessSettings)
    on_error: OnError = OnError.STOP
    max_failure: float | None = None
    has_callbacks: bool = False
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    disk: Disk | None = None
    restores_hosts: bool = False
    latency_s: float = 0.002

    @property
    def settings(self) -> Settings:
        return Settings(
            self.dataset_size, self.batch_size, self.num_epochs, 0, self.cadence,
            eval_samples=self.eval_samples, epoch_splits=self.epoch_splits, checkpoint=self.checkpoint,
            on_error=self.on_error, max_failure=self.max_failure,
            has_epoch_fn=self.has_callbacks, has_checkpoint_fn=self.has_callbacks,
        )  # fmt: skip


class World:
    """See the module docstring. ``run()`` returns the outcome; the fault methods may be given to ``after``."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = self._committed_s = 0.0
        self.trace: list[str] = []
        self.records: list[act.Record] = []
        self.check_every = 1 if len(scenario.hosts) < 50 else 100
        self.messages: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.awaited: dict[tuple[str, object], Effect] = {}
        self.outcome: act.Outcome | None = None
        self.final: Model | None = None
        self.disk = scenario.disk or Disk()
        self.failing_formations: list[Effect] = []
        self.failed_formations = 0
        self.failing_reduces: list[Effect] = []
        self.groups: dict[tuple[int, int], Group] = {}
        self.reductions: dict[RoundKey, dict[str, Sum | None]] = {}
        self._at_round: dict[int, list[tuple[float, Callable[[], None]]]] = {}
        self._rounds: dict[RoundKey, None] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._links: dict[tuple[str, str], float] = {}
        self._held: dict[Link, tuple[float, Effect]] = {}
        self._reachable_s: dict[str, float] = {}
        self._once: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self.retired: list[Daemon] = []
        self.daemons = {spec.name: Daemon(self, spec) for spec in scenario.hosts}
        self.controller = Controller(self)
        for number, daemon in enumerate(self.daemons.values()):
            if daemon.name not in scenario.absent:
                self.after(0.01 * (number + 1), daemon.start)

    # ---------------------------------------------------------------------------------------------------- the clock
    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, call)

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, call))

    def draw(self, *what: object) -> float:
        """A random number from 0 to 1 that depends on the seed, the moment and ``what``, and on nothing else."""
        return zlib.crc32(f"{self.scenario.seed} {self.now_s!r} {what}".encode()) / 2**32

    def uniform(self, least: float, most: float, *what: object) -> float:
        return least + (most - least) * self.draw(*what)

    def at_round(self, number: int, delay_s: float, call: Callable[[], None]) -> None:
        """Call so long after the ``number``-th attempt at a round, counted from 0, has begun."""
        self._at_round.setdefault(number, []).append((delay_s, call))

    def once(self, condition: Callable[[], bool], call: Callable[[], None]) -> None:
        """Call as soon as the controller has come so far."""
        self._once.append((condition, call))

    def look(self) -> None:
        """The controller has handled an event."""
        if self._once:
            due = [each for each in self._once if each[0]()]
            self._once = [each for each in self._once if each not in due]
            for _, call in due:
                call()

    def note(self, record: act.Record) -> None:
        """The controller tells what it does."""
        self.records.append(record)
        if record.event == "commit":
            self._committed_s = self.now_s
        if self.awaited and (effect := self.awaited.pop((record.event, record.fields.get("host")), None)):
            effect.bite()

    def note_round(self, key: RoundKey) -> None:
        """The controller begins an attempt, rank by rank."""
        if key not in self._rounds:
            for delay_s, call in self._at_round.get(len(self._rounds), ()):
                self.after(delay_s, call)
            self._rounds[key] = None

    def send(self, source: str, target: str, call: Callable[[], None]) -> None:
        """Deliver in order on the link from ``source`` to ``target`` after a random delay."""
        delay_s = self.uniform(0.0001, self.scenario.latency_s, source, target)
        at_s = self._links[source, target] = max(self.now_s + delay_s, self._links.get((source, target), 0.0))
        self.at(at_s, call)
        if self._held and (source, target) in self._held:
            until_s, effect = self._held[source, target]
            if self.now_s < until_s:
                effect.bite()

    def reachable_in_s(self, host: str) -> float:
        """How long the host's network is still cut."""
        return max(0.0, self._reachable_s.get(host, 0.0) - self.now_s)

    def run(self, limit_s: float = 100_000.0, idle_s: float = 100_000.0) -> act.Outcome:
        """Run to the end of the job, or of the controller; ``idle_s`` is the longest time without a commit."""
        count = at_once = 0
        while self.outcome is None:
            if not self._heap:
                raise AssertionError(f"nothing left to happen: {self.where()}")
            at_s, _, call = heapq.heappop(self._heap)
            count, at_once = count + 1, at_once + 1 if at_s == self.now_s else 0
            self.now_s = at_s
            if at_s > min(limit_s, self._committed_s + idle_s) or count > MAX_EVENTS or at_once > MAX_EVENTS_AT_ONCE:
                raise AssertionError(f"the job does not end: {self.where()}")
            call()
        return self.outcome

    def where(self) -> str:
        job = self.controller.core
        ranks = {rank.rank: rank.core.snapshot() for rank in self.ranks()}
        return (
            f"seed {self.scenario.seed} at {self.now_s:.3f} s, phase {job.phase}, ranks {ranks}, last {self.trace[-5:]}"
        )

    # --------------------------------------------------------------------------------------------------- the faults
    @property
    def is_running(self) -> bool:
        """True until the run has begun to end: what happens then is no fault that it must bear."""
        return self.outcome is None and self.controller.core.phase not in (Phase.ENDING, Phase.ENDED)

    def ranks(self) -> list[Rank]:
        return [rank for daemon in (*self.retired, *self.daemons.values()) for rank in daemon.ranks.values()]

    def rank(self, number: RankId) -> Rank:
        return next(rank for rank in self.ranks() if rank.rank == number)

    @staticmethod
    def bites(effects: list[Effect]) -> bool:
        """Take the next of the faults that wait for this moment, if there is one."""
        if not effects:
            return False
        effects.pop(0).bite()
        return True

    def _on_rank(self, number: RankId, call: Callable[[Rank], object]) -> bool:
        """Faults come when they come: before the rank was spawned or after its end they are no fault."""
        found = [rank for rank in self.ranks() if rank.rank == number and rank.is_alive]
        for rank in found:
            call(rank)
        return bool(found)

    def kill_rank(self, number: RankId) -> bool:
        return self._on_rank(number, lambda rank: (Effect(self, "kill").bite(), rank.die(0, 9)))

    def pause_rank(self, number: RankId, for_s: float) -> None:
        self._on_rank(number, lambda rank: rank.pause(for_s, Effect(self, "pause")))

    def slow_rank(self, number: RankId, factor: float) -> None:
        self._on_rank(number, lambda rank: rank.change_speed(factor, Effect(self, "slow")))

    def poison_loss(self, number: RankId, windows: int) -> None:
        """The loss of this rank's next windows is not finite."""
        self._on_rank(number, lambda rank: rank.bad_losses.extend([Effect(self, "bad loss")] * windows))

    def poison_weights(self, number: RankId, windows: int) -> None:
        """The parameters of this rank are found not finite at its next packings."""
        self._on_rank(number, lambda rank: rank.bad_packs.extend([Effect(self, "bad weights")] * windows))

    def flip_bits(self, number: RankId, rounds: int) -> None:
        """This rank's next sums differ from the others'."""
        self._on_rank(number, lambda rank: rank.bad_digests.extend([Effect(self, "wrong digest")] * rounds))

    def break_saves(self, number: RankId, count: int) -> None:
        """The rank's next whole states cannot be written."""
        self._on_rank(number, lambda rank: rank.bad_saves.extend([Effect(self, "bad save")] * count))

    def raise_in_rank(self, number: RankId, error: str) -> None:
        self._on_rank(number, lambda rank: (Effect(self, "exception").bite(), rank.raise_error(error)))

    def break_reduces(self, count: int) -> None:
        """The next collective reduces end in an error everywhere, with everybody alive."""
        self.failing_reduces += [Effect(self, "reduce error")] * count

    def break_formations(self, count: int) -> None:
        """The next formations of a group fail at its last rank."""
        self.failing_formations += [Effect(self, "formation error")] * count

    def kill_daemon(self, host: str) -> bool:
        daemon = self.daemons.get(host)
        if daemon is None or not daemon.is_alive:
            return False
        Effect(self, "daemon").bite()
        daemon.die()
        return True

    def kill(self, rank: RankId | None, host: str) -> bool:
        """A rank, a daemon, or both at once; False when they are dead."""
        was_alive = rank is not None and self.kill_rank(rank)
        return (bool(host) and self.kill_daemon(host)) or was_alive

    def crash_within(self, name: str, least: int, share: int) -> None:
        """A process ends between two actions of one handling: the controller, a daemon or a rank."""
        actors: list[Actor] = [self.controller, *self.daemons.values(), *self.ranks()]
        for actor in actors:
            if actor.name == name and actor.is_alive:
                kind = type(actor).__name__.lower()
                actor.crash_within(least, share, Effect(self, f"{kind} between actions"))

    def freeze_host(self, host: str, for_s: float) -> None:
        """SIGSTOP to a daemon and all its ranks, and SIGCONT later."""
        daemon, effect = self.daemons[host], Effect(self, "freeze")
        if daemon.is_alive:
            daemon.freeze(for_s, effect)
            for rank in daemon.ranks.values():
                rank.pause(for_s, effect)

    def stall_controller(self, for_s: float) -> None:
        self.controller.freeze(for_s, Effect(self, "stall"))

    def join(self, name: str, speeds: tuple[float, ...], kind: str = "join") -> None:
        """A host comes while the others train: a new one, or one that was lost; until it is let in it tries again."""
        if self.outcome is not None:
            return
        old = self.daemons.get(name)
        self.after(REJOIN_S, lambda: self.join(name, speeds, kind))
        if old is not None and old.is_alive:
            return
        self.awaited["host_joined", name] = Effect(self, kind)
        if old is not None:
            self.retired.append(old)
        self.daemons[name] = daemon = Daemon(self, HostSpec(name, speeds))
        daemon.start()

    def hold(self, links: tuple[Link, ...], for_s: float, kind: str) -> None:
        """Nothing is lost in the end, but nothing of what is sent arrives before."""
        until_s, effect = self.now_s + for_s, Effect(self, kind)
        for link in links:
            self._links[link] = max(self._links.get(link, 0.0), until_s)
            self._held[link] = (until_s, effect)

    def partition(self, host: str, for_s: float, kind: str = "partition", links: tuple[Link, ...] = ()) -> None:
        """The host's cable is out, or works in one direction only, which helps no group of peers."""
        self.hold(links or all_links(host), for_s, kind)
        self._reachable_s[host] = max(self._reachable_s.get(host, 0.0), self.now_s + for_s)

    def reset(self, host: str) -> None:
        """The host's connection is cut; what was on its way to the controller is lost, and both ends see it."""
        daemon = self.daemons[host]
        if daemon.is_alive and daemon.is_connected:
            Effect(self, "reset").bite()
            daemon.is_connected, daemon.is_dropped = False, True
            daemon.post(ev.ControllerDropped("connection reset"))
            self.after(0.001, lambda: self.controller.post(ev.HostDropped(host, "connection reset")))

    def drain(self, host: str) -> None:
        """An operator lets a host go; whether it may is the core's affair."""
        self.awaited["draining", host] = Effect(self, "drain")
        self.controller.post(ev.DrainAsked(host, "an operator"))

    def stop_run(self) -> None:
        """An operator's orderly stop: one more round, and a checkpoint in the middle of an epoch."""
        Effect(self, "stop").bite()
        self.controller.post(ev.StopAsked("an operator", abort=False, exit_code=130))

    def crash_controller(self, kind: str = "controller") -> None:
        """kill -9: all that is left of the run is what lies on the disk."""
        if self.outcome is None:
            if kind:
                Effect(self, kind).bite()
            self.outcome = act.Outcome(CRASHED, 137, "the controller was killed", None, (), 0)

    # ------------------------------------------------------------------------------------------------- the verdicts
    def commits(self) -> list[dict[str, object]]:
        """What was told of each commit."""
        return [dict(record.fields) for record in self.records if record.event == "commit"]

    def assert_exact_coverage(self) -> None:
        """Every sample of every epoch exactly once in the final weights; all finished ranks hold them."""
        assert self.final is not None, self.where()
        epochs, size = self.scenario.num_epochs, self.scenario.dataset_size
        want = Counter({(epoch, position): 1 for epoch in range(epochs) for position in range(size)})
        missing, extra = want - self.final.samples, self.final.samples - want
        assert not missing, f"missing {len(missing)} ({self.where()})"
        assert not extra, f"absorbed twice: {extra} ({self.where()})"
        self.assert_one_consensus()

    def assert_one_consensus(self) -> None:
        """No sample twice in any rank's consensus, and all finished ranks hold the same."""
        for rank in self.ranks():
            twice = {sample: count for sample, count in rank.model.samples.items() if count > 1}
            assert not twice, f"rank {rank.rank} absorbed twice: {twice} ({self.where()})"
        finished = [rank.model for rank in self.ranks() if rank.has_finished and "drained" not in rank.end_reason]
        assert all(model == finished[0] for model in finished), f"finished ranks differ ({self.where()})"
        assert self.final is None or all(model == self.final for model in finished), self.where()


class Controller(Actor):
    """JobCore with a head beside it."""

    core: JobCore
    name = "controller"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        scenario = world.scenario
        join = JoinSettings(tuple(host.name for host in scenario.hosts), scenario.min_rank_start)
        self.core = JobCore(JobSettings(join, scenario.liveness, scenario.has_head, stop_grace_s=GRACE_S), 0.0)
        self.is_alive = True
        self.to_head: list[Any] = []
        self.saves: dict[int, tuple[act.OpenSave, BundleWriter]] = {}
        self.opened: Model | None = None
        if scenario.has_head and not scenario.is_head_silent:
            ready = wire(HeadReady(scenario.settings, {}), FromHead)
            world.after(0.05, lambda: self.post(ev.HeadSaid(ready)))
        self.arm()

    def post(self, event: Any) -> None:
        super().post(event)
        self.world.look()

    def crash(self) -> None:
        self.is_alive = False
        self.world.crash_controller(kind="")

    def execute(self, action: act.JobAction) -> None:
        world = self.world
        match action:
            case act.SendHost(host, message):
                daemon = world.daemons[host]
                world.messages[type(message).__name__] += 1
                if isinstance(message, StartRound):
                    world.note_round(message.key)
                message = wire(message, ToDaemon)
                world.send(self.name, host, lambda: daemon.hear(message))
            case act.SendHead(message):
                self.to_head.append(wire(message, ToHead))
                if type(message).__name__ == "RunEnded":
                    world.after(0.5, lambda: self.post(ev.HeadExited(0, 0)))
            case act.StopHead():
                world.after(0.1, lambda: self.post(ev.HeadExited(0, 15)))
            case act.DropHost(host):
                daemon = world.daemons[host]
                daemon.is_dropped = True
                world.send(self.name, host, daemon.cut)
            case act.OpenReduction(key, hosts):
                world.reductions[key] = dict.fromkeys(hosts)
            case act.CloseReduction(key):
                world.reductions.pop(key, None)
            case act.ReceiveState(_, rank, _):
                world.final = world.rank(rank).model
                world.after(0.01, lambda: self.post(ev.StateStored("/state", "")))
            case act.TryPlace():
                world.after(0.01, lambda: self.post(ev.PlaceTried("")))
            case act.OpenSave() | act.DropSave():
                self._change_saves(action)
            case act.ReadBundle(stem):
                read = self._read(stem)
                world.after(0.01, lambda: self.post(read))
            case act.SendBundle(transfer, hosts):
                assert self.opened is not None
                for host in hosts:
                    land = partial(world.daemons[host].land, transfer, self.opened)
                    world.send("bulk", host, land)
            case act.ResetStore():
                pass
            case act.RestoreHost(host):
                if world.scenario.restores_hosts:
                    speeds = world.daemons[host].spec.speeds
                    world.after(world.uniform(0.5, 3, host), lambda: world.join(host, speeds, "return"))
            case act.Record():
                world.note(action)
            case act.EndRun(outcome):
                world.outcome = outcome

    # ----------------------------------------------------------------------------------------------------- the disk
    def arrive(self, transfer: int, model: Model) -> None:
        """A whole state is there: what it holds must be what its meta file will say."""
        order, writer = self.saves.get(transfer, (None, None))
        if order is None or writer is None or not self.is_alive:
            return
        want, version = covered_samples(order.point, self.world.scenario), order.point.position.version
        assert model.samples == want, f"version {version} is not what was saved ({self.world.where()})"
        self._on_disk(order, lambda: self.world.disk.receive(writer, model))
        self.world.after(self.world.uniform(0.001, 0.5, "save"), lambda: self._commit(transfer))

    def _change_saves(self, action: act.OpenSave | act.DropSave) -> None:
        if isinstance(action, act.OpenSave):
            self._on_disk(action, lambda: self._open(action))
            return
        order, writer = self.saves.pop(action.transfer, (None, None))
        if order is not None and writer is not None:
            self._on_disk(order, lambda: self.world.disk.drop(writer))

    def _open(self, order: act.OpenSave) -> None:
        self.saves[order.transfer] = (order, self.world.disk.begin(order.stem))

    def _commit(self, transfer: int) -> None:
        order, writer = self.saves.get(transfer, (None, None))
        if order is None or writer is None or not self.is_alive:
            return
        disk = self.world.disk
        if self._on_disk(order, lambda: disk.commit(writer, order.stem, order.reason, order.point)):
            del self.saves[transfer]
            self.post(ev.SaveSettled(transfer, f"{order.stem}.fdl", ""))

    def _on_disk(self, order: act.OpenSave, work: Callable[[], None]) -> bool:
        """False when it failed, which the core is told, or when the process has ended in the middle of it."""
        try:
            work()
        except CheckpointError as error:
            _, writer = self.saves.pop(order.transfer, (None, None))
            if writer is not None:
                self._on_disk(order, lambda: self.world.disk.drop(writer))
            settled = ev.SaveSettled(order.transfer, "", self.world.disk.words(error))
            self.world.after(0.001, lambda: self.post(settled))
            return False
        except Crash:
            self.crash()
            return False
        return True

    def _read(self, stem: str) -> ev.BundleRead:
        try:
            point, self.opened = self.world.disk.read(stem)
        except CheckpointError as error:
            return ev.BundleRead(stem, None, self.world.disk.words(error))
        return ev.BundleRead(f"{stem}.fdl", point, "")


def covered_samples(point: ResumePoint, scenario: Scenario) -> Counter[Sample]:
    """Every sample that a position says is in the weights, once."""
    supply = Supply(scenario.settings, scenario.merge_single_tail, point.position)
    spans = [(epoch // scenario.epoch_splits, supply.span(epoch)) for epoch in range(point.position.epoch)]
    spans += [(each.epoch // scenario.epoch_splits, span) for each in point.position.covered for span in each.spans]
    return Counter((turn, place) for turn, span in spans for place in range(span.start, span.stop))


class Daemon(Actor):
    """HostCore with its ranks and their shared memory. ``is_dropped``: the controller has closed our connection."""

    core: HostCore

    def __init__(self, world: World, spec: HostSpec) -> None:
        super().__init__(world)
        self.spec, self.name = spec, spec.name
        self.core = HostCore(HostSettings(self.name, stop_grace_s=GRACE_S), 0.0)
        self.ranks: dict[RankId, Rank] = {}
        self.slots: dict[int, Contribution] = {}
        self.result: Sum | None = None
        self.inbox: Model | None = None
        self.is_connected = False
        self.is_dropped = False

    def start(self) -> None:
        self.core = HostCore(HostSettings(self.name, stop_grace_s=GRACE_S), self.world.now_s)
        self.is_alive = self.is_connected = True
        devices = tuple(Device("cpu", index) for index in range(len(self.spec.speeds)))
        self.say(HostHello(self.name, 1, self.name, "127.0.0.1", devices, 2, "3.11", "2.13", "0"))
        self.arm()

    def say(self, message: FromDaemon) -> None:
        if not self.is_connected:
            return
        self.world.messages[type(message).__name__] += 1
        message = wire(message, FromDaemon)
        self.world.send(self.name, "controller", lambda: self._land(message))

    def _land(self, message: FromDaemon) -> None:
        if not self.is_dropped:
            self.world.controller.post(ev.HostSaid(self.name, message))

    def hear(self, message: ToDaemon) -> None:
        if self.is_connected:
            self.post(ev.ControllerSaid(message))

    def cut(self) -> None:
        """The controller closed our connection."""
        if self.is_connected:
            self.is_connected = False
            self.post(ev.ControllerDropped("closed by the controller"))

    def crash(self) -> None:
        self.die()

    def die(self) -> None:
        """kill -9 of the daemon: its warden ends the ranks, the controller sees a reset."""
        for rank in self.ranks.values():
            rank.is_alive = False
            rank.leave_groups()
        self.is_alive = self.is_connected = False
        self.world.send(self.name, "controller", self._reset)

    def _reset(self) -> None:
        if not self.is_dropped:
            self.world.controller.post(ev.HostDropped(self.name, "connection reset"))

    def execute(self, action: act.HostAction) -> None:
        world = self.world
        match action:
            case act.SendController(message):
                self.say(message)
            case act.SendRank(rank, message):
                target = self.ranks[rank]
                message = wire(message, DaemonToRank)
                world.send(self.name, target.name, lambda: target.post(ev.DaemonSaid(message)))
            case act.SpawnRank(spec, _, _):
                self.ranks[spec.rank] = Rank(world, self, spec)
            case act.TerminateRank(rank):
                target = self.ranks[rank]
                world.after(0.001, lambda: target.die(0, 15))
            case act.KillRankTree(rank):
                target = self.ranks[rank]
                world.after(0.001, target.kill)
            case act.StreamSum(key):
                total = self.result
                world.send(self.name, "bulk", lambda: self._upload(key, total))
            case act.CancelStream():
                pass
            case act.StreamState(rank, transfer, _):
                model = self.ranks[rank].outbox
                assert model is not None
                world.send(self.name, "bulk", lambda: world.controller.arrive(transfer, model))
            case act.ShipLogs():
                world.after(0.001, lambda: self.post(ev.LogsShipped()))
            case act.Leave():
                self.is_alive = False
            case act.Record():
                world.records.append(action)

    def _upload(self, key: RoundKey, total: Sum | None) -> None:
        """The controller's bulk threads: when all hosts' sums are in, the total goes back to each."""
        world = self.world
        parts = world.reductions.get(key)
        if parts is None or self.name not in parts:
            return
        parts[self.name] = total
        sums = [part for part in parts.values() if part is not None]
        if len(sums) == len(parts):
            joined = Sum(tuple(part for each in sums for part in each.parts))
            for host in parts:
                world.send("bulk", host, lambda daemon=world.daemons[host]: daemon.returned(key, joined))  # type: ignore[misc]

    def land(self, transfer: int, model: Model) -> None:
        """The state lies in the host's inbox."""
        self.inbox = model
        self.post(ev.StateLanded(transfer))

    def returned(self, key: RoundKey, total: Sum) -> None:
        self.result = total
        self.post(ev.SumReturned(key))
