"""A virtual rank: RankCore with a virtual model, loader and both planes."""

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from flodl.core import actions as act
from flodl.core import events as ev
from flodl.core.rank import RankCore
from flodl.ids import RankId, RoundKey
from flodl.messages import Layout, RankAlive, RankError, RankHello, RankReady, RankSpec, RankToDaemon
from tests.sim.actor import Actor, wire
from tests.sim.faults import Effect
from tests.sim.model import Batch, Contribution, Model, Sample, Sum, cut
from tests.sim.plane import Group

if TYPE_CHECKING:
    from tests.sim.world import Daemon, World

LAYOUT = Layout(4, 0, 0)


class Rank(Actor):
    """``is_unkillable``: the daemon's SIGKILL never arrives (a process in uninterruptible sleep)."""

    core: RankCore

    def __init__(self, world: "World", daemon: "Daemon", spec: RankSpec) -> None:
        super().__init__(world)
        scenario = world.scenario
        self.daemon, self.rank, self.slot = daemon, spec.rank, spec.local_rank
        self.name = f"rank{self.rank}"
        self.settings = scenario.settings
        if scenario.settings_of is not None:
            self.settings = scenario.settings_of(self.rank, self.settings)
        self.speed_s = daemon.spec.speeds[spec.local_rank]
        self.core = RankCore(self.rank, self.settings, scenario.merge_single_tail)
        self.is_alive = True
        self.is_unkillable = False
        self.has_finished = False
        self.end_reason = ""
        self.model = Model(f"init of rank {self.rank}")
        self.delta: Counter[Sample] = Counter()
        self.kept: Counter[Sample] = Counter()
        self.side: Model | None = None
        self.digest = ""
        self.part: Contribution | None = None
        self.batches: list[Batch] = []
        self.is_stepping = False
        self.is_sick = False
        self.is_kept_finite = True
        self.is_broken = False
        self.inbox: list[Any] = []
        self.window_loss = 0.0
        self.group: Group | None = None
        self.outbox: Model | None = None
        self.bad_losses: list[Effect] = []
        self.bad_packs: list[Effect] = []
        self.bad_digests: list[Effect] = []
        self.bad_saves: list[Effect] = []
        self._slowing: Effect | None = None
        world.after(world.uniform(0.5, 3.0, self.name), self._ready)

    def say(self, message: RankToDaemon) -> None:
        message = wire(message, RankToDaemon)
        daemon = self.daemon
        self.world.send(self.name, daemon.name, lambda: daemon.post(ev.RankSaid(self.rank, message)))

    def _ready(self) -> None:
        if not self.is_alive:
            return
        scenario = self.world.scenario
        fingerprint = {"model": "m"} if scenario.fingerprint_of is None else scenario.fingerprint_of(self.rank)
        self.say(RankHello(self.rank, 1))
        self.say(RankReady(self.rank, self.settings, fingerprint, LAYOUT, scenario.merge_single_tail, "gloo"))
        self._beat()

    def _beat(self) -> None:
        if not self.is_alive:
            return
        if self.world.now_s >= self.paused_until_s:
            self.say(RankAlive(self.rank, self.core.steps_total))
        else:
            self.bite_of_freeze()
        self.world.after(1.0, self._beat)

    # ------------------------------------------------------------------------------------------------------- faults
    def pause(self, for_s: float, effect: Effect | None = None) -> None:
        self.freezing = effect or self.freezing
        self.paused_until_s = max(self.paused_until_s, self.world.now_s + for_s)
        self.world.at(self.paused_until_s, self.wake)

    def change_speed(self, factor: float, effect: Effect) -> None:
        self.speed_s *= factor
        self._slowing = effect

    def raise_error(self, error: str) -> None:
        """The script's own exception: said, then the process ends."""
        self.say(RankError(self.rank, error, f"Traceback (most recent call last):\n{error}"))
        self.die(1, 0)

    def kill(self) -> None:
        if not self.is_unkillable:
            self.die(0, 9)

    def crash(self) -> None:
        self.die(0, 9)

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

    # ---------------------------------------------------------------------------------------------- the main thread
    def post(self, event: Any) -> None:
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
            if self._slowing is not None:
                self._slowing.bite()
            batch = self.batches.pop(0)
            cost_s = self.speed_s * len(batch) * self.world.uniform(0.95, 1.05, self.name)
            started_s = self.world.now_s
            self.world.after(cost_s, lambda: self._step_done(batch, started_s))

    def _step_done(self, batch: Batch, started_s: float) -> None:
        if not self.is_alive:
            return
        if self.world.now_s < self.paused_until_s:
            self.world.at(self.paused_until_s, lambda: self._step_done(batch, started_s))
            return
        self.is_stepping = False
        self.delta.update(batch)
        self.window_loss += len(batch)
        self.inbox.insert(0, ev.StepDone(len(batch), started_s, self.world.now_s))
        self.wake()

    def execute(self, action: act.RankAction) -> None:
        match action:
            case act.SendUp(message):
                self.say(message)
            case act.LoadAhead(grant):
                self.batches += cut(grant, self.settings.batch_size, self.world.scenario.merge_single_tail)
            case act.AccountWindow():
                loss, self.window_loss = self.window_loss, 0.0
                is_finite = not self.world.bites(self.bad_losses)
                self.is_sick |= not is_finite
                scalars = {"seen": (loss, 1)}
                accounted = (
                    ev.WindowAccounted(loss, True, scalars)
                    if is_finite
                    else ev.WindowAccounted(float("nan"), False, scalars, nonfinite_step=1)
                )
                self._later(0.0, accounted)
            case act.OpenWindow():
                pass  # virtual weights have no learning rate
            case act.BackUp():
                assert not self.is_sick, f"rank {self.rank} keeps an optimizer that is not finite"
            case act.RollBack():
                assert self.is_sick, f"rank {self.rank} is put back for nothing"
                self.is_sick = False
            case act.FormCollective(incarnation, attempt, ranks):
                self._form(incarnation, attempt, ranks)
            case act.Pack(key, weight, _, _, _):
                self._pack(key, weight)
            case act.ReduceCollective(key):
                assert self.group is not None
                assert self.part is not None
                assert self.rank in self.group.settled, f"rank {self.rank} reduces over a group that does not stand"
                self.group.reduce(self, key, self.part)
            case act.SumSlice(key, _, _, slots):
                self.daemon.result = Sum(tuple(self.daemon.slots[slot] for slot in slots))
                self._later(0.001, ev.SliceSummed(key))
            case act.TakeResult(key):
                assert self.daemon.result is not None
                self.take(key, self.daemon.result)
            case act.DigestTensors(key):
                digest = hashlib.sha256(self.digest.encode()).digest()[:8]
                self._later(0.001, ev.TensorsDigested(key, ("samples",), digest))
            case act.AbandonReduce():
                self.side = None
            case act.TakeSnapshot(is_untouched):
                self._keep(is_untouched)
                self._later(0.0, ev.SnapshotTaken(self.is_kept_finite))
            case act.Adopt():
                assert self.side is not None, f"rank {self.rank} adopts nothing"
                self.model, self.delta, self.kept, self.side = self.side, Counter(), Counter(), None
                self.is_broken = False
            case act.Blend():
                assert self.side is not None, f"rank {self.rank} blends nothing"
                self.model, self.kept, self.side = self.side, Counter(), None
            case act.Evaluate() | act.CallBack():
                self.pause(0.05)
                self._later(0.05, _answer(action))
            case act.WriteState() | act.TakeState():
                self._move_state(action)
            case act.EndRank(reason, code):
                self.has_finished, self.end_reason = code == 0, reason
                self.world.after(0.05, lambda: self.die(code, 0))

    def _move_state(self, action: act.WriteState | act.TakeState) -> None:
        """A checkpoint's, or the final one."""
        if isinstance(action, act.TakeState):
            assert self.daemon.inbox is not None, f"rank {self.rank} loads nothing"
            self.model = self.daemon.inbox
            self._later(0.01, ev.StateTaken(action.transfer, ""))
            return
        self.outbox = self.model
        error = "no room in the outbox" if action.whole and self.world.bites(self.bad_saves) else ""
        self._later(0.01, ev.StateWritten(action.transfer, 100, error))

    def _later(self, delay_s: float, event: Any) -> None:
        self.world.after(delay_s, lambda: self.post(event))

    def _form(self, incarnation: int, attempt: int, ranks: tuple[RankId, ...]) -> None:
        if self.group is not None:
            self.group.lose(self.rank)
        key = (incarnation, attempt)
        self.group = self.world.groups.setdefault(key, Group(self.world, incarnation, attempt, ranks))
        self.group.join(self)

    def _keep(self, is_untouched: bool) -> None:
        """What an asynchronous rank gives, whole or not: the round looks at nothing else. A consensus is finite."""
        has_center = self.core.version >= 0
        self.is_kept_finite = (is_untouched and has_center) or not self.world.bites(self.bad_packs)
        self.is_sick |= has_center and not self.is_kept_finite
        self.kept, self.delta = self.delta, Counter()

    def _pack(self, key: RoundKey, weight: float) -> None:
        """A snapshot of the contribution; zeros where the weight is 0 or the parameters are not finite.

        They stay so until the rank adopts others: an attempt that is repeated finds what the one before found.
        """
        is_async = self.settings.cadence.mode.is_async
        if weight and not self.is_broken and not is_async:
            self.is_broken = self.world.bites(self.bad_packs)
        is_finite = weight == 0 or (self.is_kept_finite if is_async else not self.is_broken)
        self.is_sick |= not is_finite
        weight = weight if is_finite else 0.0
        self.side = None
        given = self.kept if is_async else self.delta
        self.part = part = Contribution(weight, self.model, Counter(given) if weight else Counter())

        def write() -> None:
            if self.world.now_s < self.paused_until_s:  # stopped in the middle of it
                self.world.at(self.paused_until_s, write)
            elif self.is_alive:
                self.daemon.slots[self.slot] = part

        pack_s = self.world.uniform(0.001, 0.01, self.name, "pack")
        self.world.after(pack_s, write)
        self.pause(pack_s)  # what is said meanwhile is heard afterwards
        self._later(pack_s, ev.Packed(key, is_finite))

    def take(self, key: RoundKey, total: Sum) -> None:
        """The consensus, or garbage, has arrived in the side buffer."""
        self.side = total.model()
        digest = "garbage" if self.side is None else self.side.digest
        if self.world.bites(self.bad_digests):
            digest = f"of rank {self.rank} alone"
        self.digest = digest
        self._later(0.001, ev.SumReady(key, digest, 0.01, ""))


def _answer(action: act.Evaluate | act.CallBack) -> ev.RankEvent:
    if isinstance(action, act.CallBack):
        return ev.CalledBack(action.kind, action.epoch, "")
    return ev.Evaluated(action.epoch, 1.0, "")
