"""JobCore: the controller's half of every conversation, and the only core that sees all others.

Purpose: one run from the opening of the join window to its outcome. Phases: *waiting* for hosts → *staging* (ranks
start and build their models; the place of the checkpoints is tried) → *loading* (only where the run goes on from a
checkpoint) → *forming* (group, first version) → *training* → *finishing* (last evaluations, the last checkpoint, the
state goes to the head) → *ending* (ranks, head and hosts leave) → *ended*.
Invariants: every event in every phase is handled or noted; a rank that is dead or finished changes nothing any more and
is told so; time in which we did not run ourselves counts against nobody; one loss is one cascade inside one ``handle``;
an outcome, once decided, only gets its exit code corrected.
It opens nothing, sleeps nowhere and reads no clock: time comes in as ``now_s``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import TypeAlias, assert_never

from flodl.core import ending as end
from flodl.core.actions import (
    DropHost,
    EndRun,
    Failure,
    JobAction,
    Record,
    RestoreHost,
    SendHost,
    Severity,
)
from flodl.core.admission import shut_off
from flodl.core.counted import numbered
from flodl.core.events import (
    BundleRead,
    DrainAsked,
    HeadExited,
    HeadSaid,
    HostDropped,
    HostFailed,
    HostSaid,
    JobEvent,
    PlaceTried,
    SaveSettled,
    Stalled,
    StartAsked,
    StateStored,
    StopAsked,
    Ticked,
)
from flodl.core.finale import Finale
from flodl.core.growth import DRAINED, ENDED_WITH_RUN, NOT_ELASTIC, Growth, refusal, sent_away
from flodl.core.leaving import Leaving
from flodl.core.liveness import Liveness, LivenessSettings, Pulse, PulseChanged
from flodl.core.losses import Losses
from flodl.core.membership import Membership, RankStatus
from flodl.core.place import Place
from flodl.core.position import ResumePoint, SaveReason
from flodl.core.preemption import stop_asked
from flodl.core.resume import Resume
from flodl.core.running_time import RunningTime
from flodl.core.saving import never_due
from flodl.core.startup import Startup
from flodl.core.training import Training, TrainingState
from flodl.core.window import JoinSettings, Verdict
from flodl.errors import CoverageError
from flodl.ids import HostName, RankId
from flodl.messages import (
    Beat,
    CallbackDone,
    EvalDone,
    Evict,
    FromDaemon,
    FromHead,
    FromRank,
    GroupFormed,
    HeadError,
    HeadReady,
    Heard,
    HostHello,
    HostStopped,
    KillRank,
    LeaveWanted,
    LogChunk,
    MinReached,
    OnError,
    PortPicked,
    RankBeat,
    RankError,
    RankExited,
    RankFinished,
    RankReady,
    Reduced,
    RoundJudged,
    Settings,
    StateLoaded,
    StateSent,
    StopRequest,
    StopWanted,
    StoreRequest,
    SumDescribed,
    WindowDone,
)

TrainingWord: TypeAlias = GroupFormed | MinReached | WindowDone | Reduced | SumDescribed | EvalDone | CallbackDone
"""What only a live rank may say."""


class Phase(StrEnum):
    """Where the run stands."""

    WAITING = "waiting"
    STAGING = "staging"
    LOADING = "loading"
    FORMING = "forming"
    TRAINING = "training"
    FINISHING = "finishing"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What the launch decided. ``stop_grace_s`` is the time between SIGTERM and SIGKILL."""

    join: JoinSettings
    liveness: LivenessSettings
    has_head: bool
    stop_grace_s: float = 30.0


class JobCore:
    """See the module docstring."""

    def __init__(self, settings: JobSettings, opened_s: float) -> None:
        self.phase = Phase.WAITING
        self.ending = end.Ending()
        self.membership = Membership()
        self._transfers = count()
        self.finale = Finale(self.ending, self.membership, settings.has_head, settings.stop_grace_s, self._transfers)
        self.liveness = Liveness(settings.liveness)
        grace_s = settings.liveness.startup_s
        self.startup = Startup(settings.join, grace_s, self.membership, self.liveness, opened_s)
        self.growth = Growth(self.membership, self.liveness, self._transfers)
        self.place = Place()
        self.resume: Resume | None = None
        self.training: Training | None = None
        self.beats: dict[RankId, RankBeat] = {}
        self.hosts: dict[HostName, HostHello] = {}
        self._settings = settings
        self._time = RunningTime()
        self._deadline_s: float | None = None
        self.leaving = Leaving(self.membership, settings.stop_grace_s)
        self._losses = Losses()

    # ----------------------------------------------------------------------------------------------------- contract
    def handle(self, event: JobEvent, now_s: float) -> list[JobAction]:
        """Take one event; ``now_s`` is monotonic seconds."""
        if self.phase is Phase.ENDED:
            return []
        if isinstance(event, Stalled):
            self._time.stand_still(event.gap_s)
        now_s = self.running_s(now_s)
        match event:
            case HostSaid(host, message):
                actions = self._on_host(host, message, now_s)
            case HostDropped(host, reason):
                actions = self._host_gone(host, f"connection lost: {reason}", now_s, is_missed=True)
            case HostFailed():
                actions = self.startup.fail(event)
            case HeadSaid(message):
                actions = self._on_head(message, now_s)
            case HeadExited():
                actions = self._on_head_exited(event, now_s)
            case StopAsked():
                actions = self._on_stop(event, now_s)
            case StartAsked():
                actions = self.startup.fire(event, self.start_refusal())
            case DrainAsked():
                actions = self._on_drain(event)
            case StateStored():
                self.finale.on_state_stored(event.path, event.error)
                actions = []
            case PlaceTried():
                actions = self.place.on_tried(event)
            case SaveSettled():
                actions = [] if self.training is None else self._on_settled(self.training, event, now_s)
            case BundleRead():
                actions = self._on_read(event, now_s)
            case Stalled(gap_s):
                actions = [Record("stalled", Severity.WARNING, f"the controller did not run for {gap_s:.1f} s", {})]
            case Ticked():
                actions = []
            case _:
                assert_never(event)
        return actions + self._proceed(now_s)

    def next_deadline_s(self) -> float | None:
        """The earliest of everybody's deadlines."""
        if self.phase is Phase.ENDED:
            return None
        candidates = [self._deadline_s, self.finale.next_deadline_s()]
        if self.phase is not Phase.ENDING:
            candidates.append(self.liveness.next_deadline_s())
        if self.phase in (Phase.WAITING, Phase.STAGING):
            candidates += [self.startup.next_deadline_s(), self.place.next_deadline_s()]
        if self.resume is not None and self.phase is Phase.LOADING:
            candidates.append(self.resume.next_deadline_s())
        if self.training is not None and self.phase in (Phase.FORMING, Phase.TRAINING):
            candidates.append(self.training.next_deadline_s())
        if self.training is not None and self.phase is Phase.FINISHING:
            candidates.append(self.training.saving.next_deadline_s())
        return self._time.earliest_s(candidates)

    def running_s(self, now_s: float) -> float:
        """``now_s`` in the time that every deadline is counted in: without that in which we did not run ourselves."""
        return self._time.running_s(now_s)

    @property
    def is_head_told(self) -> bool:
        """True once the head has been told that training is over: its exit is its own from then on."""
        return self.finale.is_head_told

    def refusal(self, host: HostName) -> str:
        """Why a host of this name may not come now, whatever it offers; empty when it may."""
        match self.phase:
            case Phase.WAITING:
                return self.startup.window.stranger(host)
            case Phase.STAGING | Phase.LOADING | Phase.FORMING if self._settings.join.is_elastic:
                return f"the run is {self.phase} and takes hosts in once it trains"
            case Phase.STAGING | Phase.LOADING | Phase.FORMING:
                return NOT_ELASTIC
            case Phase.TRAINING if self.training is not None and not self.training.is_stopping:
                settings = self.startup.agreed.settings
                return refusal(host, settings, tuple(self.hosts), self._settings.join.is_elastic)
            case _:
                return "the run is ending"

    def may_come_later(self, host: HostName) -> bool:
        """Whether a host of this name, which may not come now, may once the run trains."""
        is_early = self.phase in (Phase.WAITING, Phase.STAGING, Phase.LOADING, Phase.FORMING)
        return is_early and self._settings.join.is_elastic and host not in self.hosts

    def check(self) -> None:
        """Raise InvariantViolation when any part contradicts itself."""
        if self.training is not None:
            self.training.check()

    # -------------------------------------------------------------------------------------------------- saved versions
    def _on_settled(self, training: Training, event: SaveSettled, now_s: float) -> list[JobAction]:
        was_handing_over = training.saving.is_handing_over
        actions = training.saving.on_settled(event, now_s)
        if was_handing_over and not training.saving.is_handing_over and not event.error:
            actions += self.growth.on_handed_over()
        return actions

    def _on_read(self, event: BundleRead, now_s: float) -> list[JobAction]:
        if self.phase is Phase.LOADING and self.resume is not None:
            return self.resume.on_read(event, now_s)
        if event.point is None:
            self.growth.fail()
            return []
        return self.growth.on_read()

    # -------------------------------------------------------------------------------------------------------- hosts
    def _on_host(self, host: HostName, message: FromDaemon, now_s: float) -> list[JobAction]:
        match message:
            case HostHello():
                return self._on_hello(message, now_s)
            case Beat():
                return self._on_beat(host, message, now_s)
            case RankExited():
                return self._on_rank_exited(host, message, now_s) + self._release_guest(host)
            case HostStopped(_, reason):
                return self._host_gone(host, f"stopped: {reason}", now_s)
            case StopWanted():
                return [] if self.ending.is_decided else self._on_stop(stop_asked(message), now_s)
            case LogChunk() | PortPicked():
                return []  # the shell's business: bytes to disk; and of no run but a plain one
            case LeaveWanted(_, source):
                return self._on_leave(host, source, now_s)
            case _:
                return self._on_rank(host, message, now_s)

    def _on_hello(self, hello: HostHello, now_s: float) -> list[JobAction]:
        reason = self.refusal(hello.host) or self.startup.window.misfit(hello, self.phase is Phase.WAITING)
        if not reason and self.phase is Phase.TRAINING:
            reason = shut_off(self.startup.settings, [hello])
        if reason:
            return self.startup.refuse(hello, reason)
        self.hosts[hello.host] = hello
        if self.phase is Phase.TRAINING:
            return self.growth.join(hello, now_s)
        return self.startup.join(hello, now_s)

    def _on_beat(self, host: HostName, beat: Beat, now_s: float) -> list[JobAction]:
        self.liveness.hear_host(host, now_s)
        for rank in beat.ranks:
            if rank.rank in self.membership and self.membership[rank.rank].host == host:
                self.beats[rank.rank] = rank
                if rank.has_beaten:
                    self.liveness.hear_rank(rank.rank, rank.age_ms / 1e3, now_s)
        return [SendHost(host, Heard())]

    def _host_gone(self, host: HostName, reason: str, now_s: float, is_missed: bool = False) -> list[JobAction]:
        """``is_missed``: it did not leave in order, and one of the roster may come back while the others train."""
        if host not in self.hosts:
            return []
        del self.hosts[host]
        self.liveness.forget_host(host)
        actions: list[JobAction] = [DropHost(host, reason)]
        if self.phase is Phase.WAITING:
            self.startup.window.leave(host, reason)
        if self.leaving.take(host) and not self._alive(host):
            return [*actions, Record("host_left", Severity.INFO, f"{host} has left the run", {"host": host})]
        if self.phase is not Phase.ENDING:
            actions.append(Record("host_lost", Severity.CRITICAL, f"{host}: {reason}", {"host": host}))
            ranks = self._alive(host)
            actions += self._lose(ranks, end.loss(end.KIND_HOST, host, -1, reason), now_s)
        if is_missed and host in self._settings.join.roster and self.phase is Phase.TRAINING and not self.refusal(host):
            actions.append(RestoreHost(host))
        return actions

    def _alive(self, host: HostName) -> tuple[RankId, ...]:
        status = (RankStatus.SPAWNED, RankStatus.READY, RankStatus.LIVE)
        return self.membership.on_host(host, self.membership.with_status(*status))

    def _pulse(self, now_s: float) -> list[JobAction]:
        """Silence: suspects are noted, the dead are buried."""
        actions: list[JobAction] = []
        for change in self.liveness.changes(now_s):
            who = f"host {change.host}" if change.host else f"rank {change.rank}"
            detail = f"{who} is {change.pulse} (silent for {change.silent_s:.1f} s)"
            if change.pulse is Pulse.DEAD:
                actions += self._bury_silent(change, detail, now_s)
            else:
                severity = Severity.WARNING if change.pulse is Pulse.SUSPECT else Severity.INFO
                actions.append(Record(f"peer_{change.pulse}", severity, detail, {}))
        return actions

    def _bury_silent(self, change: PulseChanged, detail: str, now_s: float) -> list[JobAction]:
        if change.host:
            return self._host_gone(change.host, f"silent for {change.silent_s:.1f} s", now_s, is_missed=True)
        host = self.membership[change.rank].host
        kill = SendHost(host, KillRank(change.rank, detail))
        failure = end.loss(end.KIND_SILENCE, host, change.rank, detail)
        return [kill, *self._lose((change.rank,), failure, now_s)]

    # -------------------------------------------------------------------------------------------------------- ranks
    def _on_rank(self, host: HostName, message: FromRank, now_s: float) -> list[JobAction]:
        rank = message.rank
        if rank not in self.membership or self.membership[rank].host != host:
            return [Record("stray", Severity.WARNING, f"{host} spoke for rank {rank}, which is not its own", {})]
        member = self.membership[rank]
        if member.status is RankStatus.DEAD:
            note = Record(
                "zombie", Severity.WARNING, f"rank {rank} is dead ({member.reason}) and speaks", {"rank": rank}
            )
            return [note, SendHost(host, Evict(rank, member.reason))]
        match message:
            case RankReady():
                return self._on_ready(message)
            case RankError():
                if self._is_guest(rank):
                    return self._dismiss_guest(rank, message.error, now_s)
                return self._on_rank_error(host, message, now_s)
            case RankFinished():
                return self._on_finished(host, rank)
            case StateSent():
                saving = [] if self.training is None else self.training.saving.on_sent(message, now_s)
                return saving + self.finale.on_state_sent(host, message)
            case StateLoaded():
                self.growth.on_loaded(message)
                if self.phase is not Phase.LOADING or self.resume is None:
                    return []
                return self.resume.on_loaded(message)
            case StoreRequest():
                return []  # the shell's business: rendezvous
            case _:
                return self._on_training(member.status, message, now_s)

    def _on_training(self, status: RankStatus, message: TrainingWord, now_s: float) -> list[JobAction]:
        training = self.training
        if status is RankStatus.FINISHED:
            return []  # it was drained: what it still said on its way is done by others
        if training is None or status is not RankStatus.LIVE:
            return [
                Record(
                    "early", Severity.WARNING, f"rank {message.rank} sent {type(message).__name__} before training", {}
                )
            ]
        match message:
            case GroupFormed():
                return training.on_group(message, now_s)
            case MinReached():
                return training.on_min(message)
            case WindowDone():
                return self._on_window(training, message, now_s)
            case Reduced():
                return training.on_reduced(message, now_s)
            case SumDescribed():
                return training.on_described(message)
            case EvalDone():
                return training.callbacks.on_eval(message)
            case CallbackDone():
                return training.callbacks.on_done(message)
            case _:
                assert_never(message)

    def _on_window(self, training: Training, message: WindowDone, now_s: float) -> list[JobAction]:
        try:
            return training.on_window(message, now_s)
        except CoverageError as error:
            host = self.membership[message.rank].host
            reason = f"reported samples that it was not leased: {error}"
            failure = end.loss(end.KIND_REFUSED, host, message.rank, reason)
            return [SendHost(host, KillRank(message.rank, reason)), *self._lose((message.rank,), failure, now_s)]

    def _on_ready(self, message: RankReady) -> list[JobAction]:
        if message.rank in self.growth:
            return self.growth.report_ready(message, self.startup.agreed)
        self.startup.report_ready(message)
        return []

    def _is_guest(self, rank: RankId) -> bool:
        """Whether this rank may fail without the run: a newcomer, or one of a guest while the others start."""
        is_trial = self.phase is Phase.STAGING and self.startup.window.is_guest(self.membership[rank].host)
        return rank in self.growth or is_trial

    def _dismiss_guest(self, rank: RankId, reason: str, now_s: float) -> list[JobAction]:
        """A guest cannot take part. Where the start counted on it there may be too few now."""
        actions = self._send_away(rank, reason)
        left = self.membership.with_status(RankStatus.SPAWNED, RankStatus.READY, RankStatus.LIVE)
        if self.phase is not Phase.STAGING or (left and len(left) >= self.startup.least):
            return actions
        message = f"too few ranks to start: {len(left)} of {self.startup.least} ranks are left; rank {rank}: {reason}"
        return actions + self._fail(
            end.loss(end.KIND_REFUSED, self.membership[rank].host, rank, reason), message, now_s
        )

    def _send_away(self, rank: RankId, reason: str) -> list[JobAction]:
        """A newcomer cannot take part; nobody else is touched. Its host leaves with its last rank."""
        host = self.membership[rank].host
        actions = sent_away(host, rank, reason)
        self.growth.lose((rank,))
        actions += self._bury_quietly(rank, reason)
        stays = self._alive(host) or self.leaving.is_draining(host)  # then it leaves in order
        return actions if stays else actions + self.leaving.release(host, reason, is_urgent=True)

    def _on_finished(self, host: HostName, rank: RankId) -> list[JobAction]:
        """The answer to FinishRank; unasked it says nothing, the exit that follows does."""
        if self.phase is Phase.ENDING and self.membership[rank].status is RankStatus.LIVE:
            self.membership.finish(rank)
        if self.membership[rank].status is RankStatus.FINISHED:
            self.liveness.forget_rank(rank)
        return self.leaving.end_rank(host, rank)

    def _release_guest(self, host: HostName) -> list[JobAction]:
        """A host outside the roster whose last rank is dead has nothing left to do here; it may join again."""
        is_guest = host in self.hosts and host not in self._settings.join.roster
        is_leaving = self.ending.is_decided or host in self.leaving
        if self.phase is not Phase.TRAINING or not is_guest or is_leaving or self._alive(host):
            return []
        return self.leaving.release(host, "its last rank is lost")

    def _on_rank_error(self, host: HostName, message: RankError, now_s: float) -> list[JobAction]:
        failure = Failure(end.KIND_EXCEPTION, host, message.rank, message.error, message.traceback, 1, 0)
        note = Record("rank_failed", Severity.CRITICAL, f"rank {message.rank}: {message.error}", {"rank": message.rank})
        return [note, *self._on_failed(failure, f"rank {message.rank} failed: {message.error}", now_s)]

    def _on_failed(self, failure: Failure, message: str, now_s: float) -> list[JobAction]:
        """The script failed in one rank: the same would befall its neighbours, unless the user knows better."""
        bears = self.phase is Phase.TRAINING and self.startup.settings.on_error is OnError.SHRINK
        return self._lose((failure.rank,), failure, now_s) if bears else self._fail(failure, message, now_s)

    def _on_rank_exited(self, host: HostName, message: RankExited, now_s: float) -> list[JobAction]:
        rank = message.rank
        if rank not in self.membership or self.membership[rank].host != host:
            return []
        member = self.membership[rank]
        code = end.process_exit_code(message.code, message.signal)
        if (not message.by_us and self.ending.correct_exit_code(rank, code)) or member.status in (
            RankStatus.FINISHED,
            RankStatus.DEAD,
        ):
            return self._bury_quietly(rank, "ended") + self.leaving.end_rank(host, rank)
        signalled = f"ended by signal {message.signal}"
        if self._is_guest(rank) and self.phase is not Phase.ENDING:
            return self._dismiss_guest(rank, signalled if message.signal else f"exited with code {code}", now_s)
        loss = Failure(end.KIND_SIGNAL, host, rank, signalled, "", code, message.signal)
        if self.phase is Phase.ENDING:
            is_loss = message.signal and not message.by_us and not self.ending.is_decided
            return self._note_late_loss(loss) if is_loss else self._bury_quietly(rank, ENDED_WITH_RUN)
        if message.by_us:
            reason = "stopped by its daemon, which leaves the run"
            return self._lose((rank,), end.loss(end.KIND_HOST, host, rank, reason), now_s)
        if message.signal:
            return self._lose((rank,), loss, now_s)
        error, code = (
            (f"exited with code {code}", code)
            if code
            else ("the script ended without finishing flodl.Trainer.run(...).join()", end.EXIT_USAGE)
        )
        failure = Failure(end.KIND_EXIT, host, rank, error, "", code, 0)
        note = Record("rank_failed", Severity.CRITICAL, f"rank {rank}: {error}", {"rank": rank, "code": code})
        return [note, *self._on_failed(failure, f"rank {rank}: {error}", now_s)]

    def _note_late_loss(self, loss: Failure) -> list[JobAction]:
        """Killed after the last commit and before it had finished: nothing is redone, but the summary tells."""
        self.ending.tolerate(loss)
        detail = f"rank {loss.rank} on {loss.host} lost: {loss.error}"
        note = Record("rank_lost", Severity.CRITICAL, detail, {"host": loss.host, "ranks": (loss.rank,)})
        return [note, *self._bury_quietly(loss.rank, loss.error)]

    def _bury_quietly(self, rank: RankId, reason: str) -> list[JobAction]:
        if self.membership[rank].status not in (RankStatus.DEAD, RankStatus.FINISHED):
            self.membership.bury(rank, reason)
        self.liveness.forget_rank(rank)
        return []

    def _lose(self, ranks: tuple[RankId, ...], failure: Failure, now_s: float) -> list[JobAction]:
        """The one cascade: membership → round and pool and cadence and group → what is left."""
        newcomers = tuple(rank for rank in ranks if rank in self.growth)
        for rank in newcomers:
            self._bury_quietly(rank, failure.error)
        self.growth.lose(newcomers)
        ranks = tuple(rank for rank in ranks if rank not in newcomers)
        if not ranks:
            return []
        for rank in ranks:
            self.membership.bury(rank, failure.error)
            self.liveness.forget_rank(rank)
        named = ", ".join(map(str, ranks))
        detail = f"rank {named} on {failure.host} lost: {failure.error}"
        actions: list[JobAction] = [
            Record("rank_lost", Severity.CRITICAL, detail, {"host": failure.host, "ranks": tuple(ranks)})
        ]
        if self.resume is not None:
            self.resume.lose(ranks)
        if self.training is not None:
            actions += self.training.lose(ranks, now_s)
        self.finale.lose(ranks)
        self._losses.add(len(ranks))
        if self.phase in (Phase.STAGING, Phase.LOADING, Phase.FORMING, Phase.TRAINING, Phase.FINISHING):
            actions += self._after_loss(failure, now_s)
        return actions

    def _after_loss(self, failure: Failure, now_s: float) -> list[JobAction]:
        left = tuple(
            rank
            for rank in self.membership.with_status(RankStatus.SPAWNED, RankStatus.READY, RankStatus.LIVE)
            if rank not in self.growth
        )
        is_staging = self.phase in (Phase.STAGING, Phase.LOADING)
        is_starting = is_staging or self.phase is Phase.FORMING
        least = self.startup.least if is_staging else self.startup.window.least or 1
        if not left or (is_starting and len(left) < least):
            have = f"{len(left)} of {least} ranks are left" if left else "no rank is left"
            message = f"too few ranks to go on: {have}; {failure.error}"
            return self._fail(self.ending.exhausted(failure), message, now_s)
        self.ending.tolerate(failure)
        mode = next(iter(self.startup.ready.values())).settings.cadence.mode if self.startup.ready else None
        if len(left) == 1 and mode is not None and mode.is_collective and self.phase in (Phase.FORMING, Phase.TRAINING):
            message = f"a collective mode needs two ranks and rank {left[0]} is alone; {failure.error}"
            return self._stop(end.EXIT_TOO_FEW_RANKS, message, SaveReason.SINGLE_SURVIVOR, now_s)
        return self._judge_losses(failure, now_s) if self.phase is Phase.TRAINING else []

    def _judge_losses(self, failure: Failure, now_s: float) -> list[JobAction]:
        """``max_failure``: so many losses are no accident any more."""
        verdict = self._losses.verdict(self.startup.agreed.settings.max_failure)
        if not verdict:
            return []
        message = f"{verdict}; the last one: {failure.error}"
        return self._stop(end.EXIT_TOO_FEW_RANKS, message, SaveReason.MAX_FAILURE_EXCEEDED, now_s)

    # ---------------------------------------------------------------------------------------------- head and operator
    def _on_head(self, message: FromHead, now_s: float) -> list[JobAction]:
        match message:
            case HeadReady():
                self.startup.head_ready = message
                return []
            case HeadError(error, traceback):
                failure = Failure(end.KIND_HEAD, "", -1, error, traceback, 1, 0)
                return self._fail(failure, f"the head failed: {error}", now_s)
            case RoundJudged():
                return [] if self.training is None else self.training.on_judged(message)
            case StopRequest(source, abort, exit_code):
                return self._on_stop(StopAsked(source, abort, exit_code), now_s)
            case _:
                assert_never(message)

    def _on_head_exited(self, event: HeadExited, now_s: float) -> list[JobAction]:
        self.finale.head_code = code = end.process_exit_code(event.code, event.signal)
        if self.ending.is_decided or (self.finale.is_head_told and not code):
            return []
        error = f"signal {event.signal}" if event.signal else f"code {event.code}"
        message = f"the head (the script on the controller's machine) ended with {error}"
        if not code:
            code, message = end.EXIT_USAGE, "the script ended in the head without flodl.Trainer.run(...).join()"
        failure = Failure(end.KIND_HEAD, "", -1, message, "", code, event.signal)
        return [Record("head_lost", Severity.CRITICAL, message, {}), *self._fail(failure, message, now_s)]

    def _on_stop(self, event: StopAsked, now_s: float) -> list[JobAction]:
        how = "abort" if event.abort else "stop"
        note = Record("stop_requested", Severity.INFO, f"{how} requested by {event.source}", {"source": event.source})
        if event.abort:
            self.ending.stop(event.exit_code, f"aborted by {event.source}")
            return [note, *self._end(now_s, grace_s=0.0)]
        if self.phase is Phase.ENDING:
            known = Record("stop_requested", Severity.INFO, "the run is ending already; abort it to end it now", {})
            return [known, *self.finale.watch_head()]
        message = f"stopped by {event.source}"
        return [note, *self._stop(event.exit_code, message, SaveReason.GRACEFUL_SHUTDOWN, now_s)]

    def start_refusal(self) -> str:
        """Why a person may not start the run now; empty when they may."""
        return self.startup.start_refusal(self.phase, self.phase is Phase.WAITING)

    def _on_drain(self, event: DrainAsked) -> list[JobAction]:
        refusal = self.drain_refusal(event.host)
        if refusal or self.training is None:
            return [Record("drain_refused", Severity.WARNING, refusal, {"host": event.host})]
        host, ranks = event.host, self._alive(event.host)
        named = f"{numbered('rank', ranks)} {'leaves' if len(ranks) == 1 else 'leave'} at the next commit"
        detail = f"{event.source} drains {host}: {named if ranks else 'no rank of it takes part; it leaves now'}"
        actions: list[JobAction] = [Record("draining", Severity.INFO, detail, {"host": host, "ranks": ranks})]
        actions += self.leaving.drain(host, ranks)
        for rank in ranks:
            if rank in self.growth:
                actions += self._send_away(rank, DRAINED) + self.leaving.end_rank(host, rank)
        self.training.drain(rank for rank in ranks if rank in self.membership.live)
        return actions

    def _on_leave(self, host: HostName, source: str, now_s: float) -> list[JobAction]:
        """A walk-in must go: it is drained; where it cannot be spared, the run saves and stops."""
        is_over = self.ending.is_decided or self.phase in (Phase.FINISHING, Phase.ENDING)
        if is_over or host not in self.hosts or host in self.leaving:
            return []
        if self.phase is not Phase.TRAINING:
            note = Record("leaving", Severity.INFO, f"{host} leaves before the start: {source}", {"host": host})
            return [note, *self.leaving.release(host, source)]
        if not self.drain_refusal(host):
            return self._on_drain(DrainAsked(host, source))
        return self._on_stop(StopAsked(f"{source} on {host}", False, end.EXIT_TERMINATED), now_s)

    def drain_refusal(self, host: HostName) -> str:
        """Why ``host`` may not be drained now; empty when it may."""
        if self.phase is not Phase.TRAINING:
            return f"the run is {self.phase}: a host is drained while it trains"
        least = 2 if self.startup.agreed.settings.cadence.mode.is_collective else 1
        return self.leaving.refusal(host, self.hosts, least)

    def _stop(self, exit_code: int, message: str, reason: SaveReason, now_s: float) -> list[JobAction]:
        self.ending.stop(exit_code, message)
        return self._wind_down(reason, now_s)

    def _fail(self, failure: Failure, message: str, now_s: float) -> list[JobAction]:
        """The run fails; what the survivors have trained is merged first where there is a cohort to merge it."""
        self.ending.fail(failure, message)
        actions: list[JobAction] = []
        rank = failure.rank
        if rank >= 0 and self.membership[rank].status not in (RankStatus.DEAD, RankStatus.FINISHED):
            self.membership.bury(rank, failure.error)
            self.liveness.forget_rank(rank)
            if self.training is not None:
                actions += self.training.lose((rank,), now_s)
        return actions + self._wind_down(SaveReason.GRACEFUL_SHUTDOWN, now_s)

    def _wind_down(self, reason: SaveReason, now_s: float) -> list[JobAction]:
        """One more round and its checkpoint, if there is a cohort; else the end."""
        if self.phase is Phase.FINISHING:
            return []
        if self.phase is not Phase.TRAINING or self.training is None or not self.membership.live:
            return self._end(now_s, self._settings.stop_grace_s)
        if self.training.is_stopping:
            return []
        self._deadline_s = now_s + self._settings.stop_grace_s
        return self.training.stop(reason, now_s)

    # ------------------------------------------------------------------------------------------------------- phases
    def _proceed(self, now_s: float) -> list[JobAction]:
        """Everything that time or the last event has made due."""
        actions = self._pulse(now_s) if self.phase is not Phase.ENDING else []
        if self.phase is Phase.WAITING:
            actions += self._proceed_waiting(now_s)
        elif self.phase is Phase.STAGING and self.startup.is_staged:
            actions += self._agree(now_s)
        elif self.resume is not None and self.phase is Phase.LOADING:
            actions += self._proceed_loading(self.resume, now_s)
        elif self.training is not None and self.phase in (Phase.FORMING, Phase.TRAINING):
            actions += self.training.tick(now_s)
            actions += self._proceed_training(self.training, now_s)
        elif self.training is not None and self.phase is Phase.FINISHING:
            actions += self._proceed_finishing(self.training, now_s)
        return actions + (self._proceed_ending(now_s) if self.phase is Phase.ENDING else [])

    def _proceed_waiting(self, now_s: float) -> list[JobAction]:
        match self.startup.verdict(now_s):
            case Verdict.WAIT:
                return self.startup.hold()
            case Verdict.START:
                self.phase = Phase.STAGING
                return self.startup.spawn(now_s)
            case Verdict.FAIL:
                return self._fail_to_join(now_s)
            case _ as verdict:
                assert_never(verdict)

    def _fail_to_join(self, now_s: float) -> list[JobAction]:
        self.ending.fail(*self.startup.give_up(now_s))
        return self._end(now_s, self._settings.stop_grace_s)

    def _agree(self, now_s: float) -> list[JobAction]:
        """All ranks are ready: they must agree, with the head, before they may train."""
        startup, grace_s = self.startup, self._settings.liveness.startup_s
        if self._settings.has_head and startup.head_ready is None:
            if not startup.is_head_late(now_s):
                return []
            late = f"the head (the script on the controller's machine) did not reach Trainer.run within {grace_s:g} s"
            return self._fail(Failure(end.KIND_HEAD, "", -1, late, "", 1, 0), late, now_s)
        outcasts = startup.outcasts()
        sent = [action for rank, why in outcasts.items() for action in self._dismiss_guest(rank, why, now_s)]
        if self.phase is not Phase.STAGING:
            return sent
        return sent + self._admit_sound(now_s)

    def _admit_sound(self, now_s: float) -> list[JobAction]:
        """Those that are left agree, and what they train can be saved: they are admitted."""
        startup = self.startup
        reason = startup.disagreement()
        if reason:
            return self._refuse(reason, now_s)
        settings, place = startup.settings, self.place
        actions = place.ask(settings.checkpoint, now_s)
        place.tick(now_s)
        if place.refusal:
            return self._refuse(place.refusal, now_s, end.EXIT_CHECKPOINT)
        if not place.is_sound:
            return actions
        if not settings.checkpoint.resume_from:
            return self._admit(settings, None, now_s)
        self.phase = Phase.LOADING
        self.resume = Resume(settings, self.membership, self._transfers, now_s)
        return self.resume.begin()

    def _refuse(self, reason: str, now_s: float, exit_code: int = end.EXIT_USAGE) -> list[JobAction]:
        return self._fail(Failure(end.KIND_REFUSED, "", -1, reason, "", exit_code, 0), reason, now_s)

    def _proceed_loading(self, resume: Resume, now_s: float) -> list[JobAction]:
        actions = resume.tick(now_s)
        if resume.refusal:
            return self._refuse(resume.refusal, now_s, end.EXIT_CHECKPOINT)
        return actions + (self._admit(self.startup.settings, resume.point, now_s) if resume.is_loaded else [])

    def _admit(self, settings: Settings, start: ResumePoint | None, now_s: float) -> list[JobAction]:
        """Training begins, where ``start`` says or from the first sample."""
        actions = self.startup.admit(-1 if start is None else start.position.version - 1)
        warning = never_due(settings.checkpoint, settings.num_epochs * settings.epoch_splits)
        if warning:
            actions.append(Record("checkpoint_never_due", Severity.WARNING, warning, {}))
        first = self.startup.ready[self.membership.live[0]]
        self._losses.begin(len(self.membership.live))
        self.phase = Phase.FORMING
        stall_s = max(300.0, 10 * self._settings.liveness.dead_s)
        self.training = Training(
            settings,
            first.layout,
            first.merge_single_tail,
            self.membership,
            stall_s,
            now_s,
            self._transfers,
            self.growth,
            start,
        )
        return actions + self.training.begin(now_s)

    def _proceed_training(self, training: Training, now_s: float) -> list[JobAction]:
        departing, self.growth.departing = self.growth.departing, {}
        actions = [action for rank, reason in departing.items() for action in self._send_away(rank, reason)]
        if self.growth.awaits_version and not training.saving.is_handing_over:
            self.growth.fail()
            actions += training.tick(now_s)
        return actions + self._proceed_rounds(training, now_s)

    def _proceed_rounds(self, training: Training, now_s: float) -> list[JobAction]:
        outcasts, training.outcasts = training.outcasts, {}
        if outcasts:
            return self._expel(outcasts, now_s)
        if training.state is TrainingState.STALLED:
            failure = end.loss(end.KIND_STALL, "", -1, training.stalled_reason)
            self.ending.fail(failure, training.stalled_reason)
            if not training.holds_consensus:
                return self._end(now_s, self._settings.stop_grace_s)
        if training.state in (TrainingState.FINISHED, TrainingState.STALLED):
            self.phase, self._deadline_s = Phase.FINISHING, None
            self.finale.begin()
            return self._proceed_finishing(training, now_s)
        if self.phase is Phase.FORMING and training.state is TrainingState.RUNNING:
            self.phase = Phase.TRAINING
        if self._deadline_s is not None and now_s >= self._deadline_s:
            return self._cut_off(training, now_s)
        return []

    def _expel(self, outcasts: Mapping[RankId, str], now_s: float) -> list[JobAction]:
        """Ranks that cannot be trusted any more: they are lost, and what they trained is given to others."""
        actions: list[JobAction] = []
        for rank, reason in outcasts.items():
            host = self.membership[rank].host
            failure = end.loss(end.KIND_DISSENT, host, rank, reason)
            actions += [SendHost(host, KillRank(rank, reason)), *self._lose((rank,), failure, now_s)]
        return actions

    def _cut_off(self, training: Training, now_s: float) -> list[JobAction]:
        """A stop's grace is over: who is still busy is given up, for the sake of what the others have trained."""
        laggards = training.missing()
        if not laggards or len(laggards) == len(self.membership.live):
            return self._end(now_s, self._settings.stop_grace_s)
        self._deadline_s = now_s + self._settings.stop_grace_s
        actions: list[JobAction] = []
        for rank in laggards:
            host = self.membership[rank].host
            reason = f"still busy {self._settings.stop_grace_s:g} s after the stop"
            failure = end.loss(end.KIND_SILENCE, host, rank, reason)
            actions += [SendHost(host, KillRank(rank, reason)), *self._lose((rank,), failure, now_s)]
        return actions

    def _proceed_finishing(self, training: Training, now_s: float) -> list[JobAction]:
        actions = training.saving.tick(now_s)
        self.finale.epochs = training.supply.epoch
        if self.finale.is_collecting(training, now_s):
            return actions + self.finale.collect(training, now_s)
        self.finale.judge_save(training.saving.failure)
        self.phase = Phase.ENDING
        return actions + self.finale.dismiss(now_s)

    def _end(self, now_s: float, grace_s: float) -> list[JobAction]:
        """Stop everything: ranks and hosts, and the head unless it has ended."""
        self.phase, self._deadline_s = Phase.ENDING, None
        return self.finale.stop_all(self.hosts, now_s, grace_s)

    def _proceed_ending(self, now_s: float) -> list[JobAction]:
        actions = self.finale.release_hosts(self.hosts, now_s)
        if self.finale.is_late(now_s):
            for host in tuple(self.hosts):
                actions += self._host_gone(host, "did not stop in time", now_s)
        if self.hosts:
            return actions
        actions += self.finale.await_head()
        if self.finale.head_code is None:
            return actions
        self.phase = Phase.ENDED
        return [*actions, EndRun(self.ending.finish(self.finale.head_code))]
