"""JobCore and all that it talks to: an order is answered at once, in order, unless answers of its kind are held."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flodl.core.actions import (
    EndRun,
    JobAction,
    OpenSave,
    Outcome,
    ReadBundle,
    ReceiveState,
    Record,
    SendHead,
    SendHost,
    StopHead,
    TryPlace,
)
from flodl.core.events import (
    BundleRead,
    HeadExited,
    HeadSaid,
    HostSaid,
    JobEvent,
    PlaceTried,
    SaveSettled,
    StateStored,
    StopAsked,
    Ticked,
)
from flodl.core.job import JobCore, JobSettings
from flodl.core.liveness import Liveness, LivenessSettings
from flodl.core.position import ResumePoint
from flodl.core.window import JoinSettings
from flodl.ids import RankId, RoundKey, batches_of
from flodl.messages import (
    CadenceSettings,
    CallbackDone,
    Device,
    EvalDone,
    FinishRank,
    FormGroup,
    FromDaemon,
    GroupFormed,
    HeadReady,
    HostHello,
    HostStopped,
    Layout,
    LoadState,
    Mode,
    RankExited,
    RankFinished,
    RankReady,
    Reduced,
    RunCallback,
    RunEnded,
    RunEval,
    SendState,
    Settings,
    SpawnRanks,
    StartRound,
    StateLoaded,
    StateSent,
    StopHost,
    WindowDone,
    WindowPlan,
)

LAYOUT = Layout(4, 0, 0)
WINDOW = ("min_rank_start", "target_ranks", "is_elastic", "start")


def hello(host: str, devices: int = 1) -> HostHello:
    offered = tuple(Device("cpu", index) for index in range(devices))
    return HostHello(host, 7, host, "10.0.0.1", offered, 4, "3.11", "2.13", "0.1")


class Cohort:
    """``hosts`` maps a host to its number of devices. Time stands still unless ``now_s`` is moved."""

    def __init__(self, mode: Mode = Mode.CPU_SYNC, hosts: dict[str, int] | None = None, **changes: Any) -> None:
        self.devices = {"a": 1, "b": 2} if hosts is None else hosts
        settings = Settings(12, 2, 2, 0, CadenceSettings(mode))
        job = {name: changes.pop(name) for name in ("has_head", *WINDOW) if name in changes}
        self.settings = replace(settings, **changes)
        has_head = job.pop("has_head", True)
        self.core = JobCore(JobSettings(JoinSettings(tuple(self.devices), **job), LivenessSettings(), has_head), 0.0)
        self.now_s = 1.0
        self.held: set[type] = set()
        self.waiting: list[tuple[type, Callable[[], list[JobAction]]]] = []
        self.actions: list[JobAction] = []
        self.outcome: Outcome | None = None
        self.saved: ResumePoint | None = None
        self.handed: ResumePoint | None = None
        self._inbox: deque[JobEvent] = deque()
        self._batches: dict[RankId, deque[int]] = {}

    def trust(self) -> None:
        """Nobody who is here by now is found silent, however much time goes by."""
        self.core.liveness = Liveness(LivenessSettings())

    # --------------------------------------------------------------------------------------------------------- driving
    def post(self, event: JobEvent) -> list[JobAction]:
        """One event and all that follows from the answers; returns what was done on the way."""
        seen = len(self.actions)
        self._inbox.append(event)
        while self._inbox:
            actions = self.core.handle(self._inbox.popleft(), self.now_s)
            self.core.check()
            self.core.next_deadline_s()
            self.actions += actions
            for action in actions:
                self._answer(action)
        return self.actions[seen:]

    def say(self, message: FromDaemon, host: str = "") -> list[JobAction]:
        """A message of a rank, by its daemon, or of a daemon."""
        rank = getattr(message, "rank", None)
        return self.post(HostSaid(host or self.core.membership[rank].host, message))  # type: ignore[index]

    def tick(self, now_s: float) -> list[JobAction]:
        self.now_s = now_s
        return self.post(Ticked())

    def release(self, kind: type) -> list[JobAction]:
        """Answer what was held back of ``kind``, and hold back no more."""
        self.held.discard(kind)
        due = [answer for held, answer in self.waiting if held is kind]
        self.waiting = [(held, answer) for held, answer in self.waiting if held is not kind]
        return [action for answer in due for action in answer()]

    def stop(self, abort: bool = False, exit_code: int = 130) -> list[JobAction]:
        return self.post(StopAsked("test", abort, exit_code))

    # -------------------------------------------------------------------------------------------------------- stations
    def join(self) -> "Cohort":
        for host, count in self.devices.items():
            self.say(hello(host, count), host)
        return self

    def get_ready(self) -> "Cohort":
        """Everyone has joined and is ready; what follows follows."""
        self.join()
        self.post(HeadSaid(HeadReady(self.settings, {})))
        for member in self.core.membership.all():
            self.say(self.ready(member.rank))
        return self

    def train_until(self, *held: type) -> "Cohort":
        """Get ready, and go on until an answer of a ``held`` kind is due."""
        self.held |= set(held)
        return self.get_ready()

    def ready(self, rank: RankId) -> RankReady:
        return RankReady(rank, self.settings, {"model": "m"}, LAYOUT, False, "gloo")

    # --------------------------------------------------------------------------------------------------------- reading
    def records(self, event: str) -> list[str]:
        return [action.detail for action in self.actions if isinstance(action, Record) and action.event == event]

    def sent(self, kind: type) -> list[Any]:
        """Messages of ``kind`` to hosts or the head, in order."""
        orders = [action.message for action in self.actions if isinstance(action, SendHost | SendHead)]
        return [message for message in orders if isinstance(message, kind)]

    @property
    def key(self) -> RoundKey:
        """The latest attempt's."""
        key: RoundKey = self.sent(StartRound)[-1].key
        return key

    # --------------------------------------------------------------------------------------------------------- answers
    def _answer(self, action: JobAction) -> None:
        match action:
            case SendHost(host, message):
                for reply in self._replies(message):
                    self._reply(type(reply), HostSaid(host, reply))
            case SendHead(RunEnded()):
                self._reply(HeadExited, HeadExited(0, 0))
            case StopHead():
                self._reply(HeadExited, HeadExited(0, 15))
            case ReceiveState():
                self._reply(StateStored, StateStored("/state", ""))
            case TryPlace():
                self._reply(PlaceTried, PlaceTried(""))
            case OpenSave(transfer, _, stem, _, point):
                self.handed = point
                self._reply(SaveSettled, SaveSettled(transfer, f"{stem}.fdl", ""))
            case ReadBundle(stem):
                self._reply(BundleRead, BundleRead(f"{stem}.fdl", self.saved if stem else self.handed, ""))
            case EndRun(outcome):
                self.outcome = outcome
            case _:
                pass

    def _reply(self, kind: type, event: JobEvent) -> None:
        if kind in self.held:
            self.waiting.append((kind, lambda: self.post(event)))
        else:
            self._inbox.append(event)

    def _replies(self, order: object) -> list[Any]:
        match order:
            case SpawnRanks(_, specs):
                self._batches |= {spec.rank: deque() for spec in specs}
                return []
            case FormGroup(rank, incarnation, attempt, _, _):
                return [GroupFormed(rank, incarnation, attempt, "")]
            case WindowPlan():
                return [self.window(order)]
            case StartRound(rank, key, _, _, _):
                return [Reduced(rank, key, "d", True, 0.1, 5.0, "")]
            case RunEval(rank, epoch):
                return [EvalDone(rank, epoch, 0.5, "")]
            case RunCallback(rank, kind, epoch):
                return [CallbackDone(rank, kind, epoch, "")]
            case SendState(rank, transfer, _):
                return [StateSent(rank, transfer, 99, "")]
            case LoadState(rank, transfer):
                return [StateLoaded(rank, transfer, "")]
            case FinishRank(rank, _):
                return [RankFinished(rank), RankExited(rank, 0, 0, by_us=True)]
            case StopHost(reason, _):
                return [HostStopped("", reason)]
            case _:
                return []

    def window(self, plan: WindowPlan) -> WindowDone:
        """All that the plan allows, at 10 ms a step; not beyond its count where it is asynchronous."""
        batches = self._batches[plan.rank]
        for grant in plan.grants:
            batches.extend(batches_of(grant.samples, self.settings.batch_size, merge_single_tail=False))
        steps = plan.min_steps if self.settings.cadence.mode.is_async else plan.max_steps
        samples = sum(batches.popleft() for _ in range(steps))
        delivered_ms = 10.0 if steps > 1 else None
        busy_ms = 10.0 * steps
        return WindowDone(plan.rank, plan.version, samples, steps, samples * 0.5, True, delivered_ms, 10.0, busy_ms, {})


def training(mode: Mode = Mode.CPU_CADENCE, **changes: Any) -> Cohort:
    """Three ranks, one on a and two on b, in the first window of a long epoch; windows end by ``step``."""
    return Cohort(mode, **({"dataset_size": 4000} | changes)).train_until(WindowDone)


def step(cohort: Cohort) -> None:
    """Let every rank finish the window that it is held back in, and no further one."""
    due = [answer for kind, answer in cohort.waiting if kind is WindowDone]
    cohort.waiting = [(kind, answer) for kind, answer in cohort.waiting if kind is not WindowDone]
    for answer in due:
        answer()
