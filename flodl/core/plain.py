"""PlainCore: the controller's core of a plain run, whose script trains by itself: no engine, no head.

Purpose: what torchrun does, on this cluster: the same ranks, started together, stopped together, started again. Phases:
*waiting* for hosts → *starting* (rank 0's host picks the port at which the ranks meet) → *running* → *ending* →
*ended*. A rank that fails leads from running to *stopping*: the others would wait for it for ever, so they are told to
end at once; when all have ended there is a restart (*starting* again, by way of *gathering* while a lost host has to
come back), or the end. Invariants: ranks are started only when none runs; a rank has the same device in every start;
the failure that stopped a start is the run's unless a restart follows; a port that a stranger has taken costs no
restart. It looks into no rank: all it hears of one is how its process ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import assert_never

from flodl.core import ending as end
from flodl.core.actions import DropHost, EndRun, Failure, JobAction, Record, RestoreHost, SendHost, Severity
from flodl.core.counted import counted
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
from flodl.core.finale import KILL_MARGIN_S, Finale
from flodl.core.liveness import Liveness, LivenessSettings, Pulse
from flodl.core.membership import Membership
from flodl.core.places import Places, meeting_point, mixture, shut_off
from flodl.core.preemption import stop_asked
from flodl.core.restarts import Restarts
from flodl.core.running_time import RunningTime
from flodl.core.startup import Startup
from flodl.core.window import JoinSettings, Verdict
from flodl.errors import InvariantViolation
from flodl.ids import HostName, RankId
from flodl.messages import (
    Beat,
    FromDaemon,
    Heard,
    HostHello,
    HostStopped,
    LeaveWanted,
    PickPort,
    PortPicked,
    RankBeat,
    RankExited,
    StopHost,
    StopRanks,
    StopWanted,
)

FROZEN = "stopped by a signal; on its host, kill -CONT {pid} lets it go on"

NO_DRAIN = "a plain run needs all of its ranks: use fdl stop"


class PlainPhase(StrEnum):
    """Where a plain run stands."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GATHERING = "gathering"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PlainSettings:
    """What the launch decided. ``stop_grace_s`` is the time between SIGTERM and SIGKILL."""

    join: JoinSettings
    liveness: LivenessSettings
    max_restarts: int = 0
    stop_grace_s: float = 30.0


class PlainCore:
    """See the module docstring. ``started_s`` is when the ranks that run were started, ``ended_s`` when each ended;
    ``missing`` are the hosts that another start has to wait for.
    """

    def __init__(self, settings: PlainSettings, opened_s: float) -> None:
        self.settings = settings
        self.phase = PlainPhase.WAITING
        self.ending = end.Ending()
        self.membership = Membership()
        self.liveness = Liveness(settings.liveness)
        self.startup = Startup(settings.join, 0.0, self.membership, self.liveness, opened_s)
        self.hosts: dict[HostName, HostHello] = {}
        self.beats: dict[RankId, RankBeat] = {}
        self.restarts = Restarts(self.ending, settings.max_restarts)
        self.missing: dict[HostName, None] = {}
        self.started_s: float | None = None
        self.ended_s: dict[RankId, float] = {}
        self._finale = Finale(self.ending, self.membership, False, settings.stop_grace_s, count())
        self._time = RunningTime()
        self._places: Places | None = None
        self._start = 0
        self._port = 0
        self._address = ""
        self._deadline_s: float | None = None

    # ----------------------------------------------------------------------------------------------------- contract
    def handle(self, event: JobEvent, now_s: float) -> list[JobAction]:
        """Take one event; ``now_s`` is monotonic seconds."""
        if self.phase is PlainPhase.ENDED:
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
            case StartAsked():
                actions = self.startup.fire(event, self.start_refusal())
            case StopAsked():
                actions = self._on_stop(event, now_s)
            case Stalled(gap_s):
                actions = [Record("stalled", Severity.WARNING, f"the controller did not run for {gap_s:.1f} s", {})]
            case Ticked():
                actions = []
            case HeadSaid() | HeadExited() | DrainAsked() | StateStored() | SaveSettled() | BundleRead() | PlaceTried():
                actions = []  # of what a plain run does not have
            case _:
                assert_never(event)
        return actions + self._proceed(now_s)

    def next_deadline_s(self) -> float | None:
        """The earliest of everybody's deadlines."""
        match self.phase:
            case PlainPhase.ENDED:
                return None
            case PlainPhase.ENDING:
                return self._time.earliest_s([self._finale.next_deadline_s()])
            case PlainPhase.WAITING:
                return self._time.earliest_s([self.liveness.next_deadline_s(), self.startup.next_deadline_s()])
            case _:
                return self._time.earliest_s([self.liveness.next_deadline_s(), self._deadline_s])

    def running_s(self, now_s: float) -> float:
        """``now_s`` in the time that every deadline is counted in: without that in which we did not run ourselves."""
        return self._time.running_s(now_s)

    def refusal(self, host: HostName) -> str:
        """Why a host of this name may not come now, whatever it offers; empty when it may."""
        if self.phase is PlainPhase.WAITING:
            return self.startup.window.stranger(host)
        if self.phase in (PlainPhase.ENDING, PlainPhase.ENDED):
            return "the run is ending"
        if host in self.missing and host not in self.hosts:
            return ""
        return "a plain run keeps the ranks that it has started with"

    def may_come_later(self, host: HostName) -> bool:
        """Never: see ``refusal``."""
        return False

    def start_refusal(self) -> str:
        """Why a person may not start the run now; empty when they may."""
        return self.startup.start_refusal(self.phase, self.phase is PlainPhase.WAITING)

    def drain_refusal(self, host: HostName) -> str:
        """Why ``host`` may not be drained: there is no commit at which it could leave without loss."""
        return NO_DRAIN

    def check(self) -> None:
        """Raise InvariantViolation when the state contradicts itself."""
        if self.phase is PlainPhase.RUNNING and self.restarts.failure is not None:
            raise InvariantViolation(f"running on after {self.restarts.failure.error}")
        if self.phase in (PlainPhase.STARTING, PlainPhase.GATHERING) and self.membership.live:
            raise InvariantViolation(f"{self.phase} while ranks {self.membership.live} run")

    def uptime_s(self, now_s: float) -> float | None:
        """From the ranks' last start to now, or to the end of the last of them; None before. ``now_s`` is monotonic."""
        if self.started_s is None:
            return None
        has_ended = self.ended_s and not self.membership.live
        return (max(self.ended_s.values()) if has_ended else self.running_s(now_s)) - self.started_s

    def lived_s(self, rank: RankId, now_s: float) -> float | None:
        """How long the rank's process has run, or ran; None before its start. ``now_s`` is monotonic."""
        if self.started_s is None or rank not in self.ended_s:
            return self.uptime_s(now_s)
        return self.ended_s[rank] - self.started_s

    # -------------------------------------------------------------------------------------------------------- hosts
    def _on_host(self, host: HostName, message: FromDaemon, now_s: float) -> list[JobAction]:
        match message:
            case HostHello():
                return self._on_hello(message, now_s)
            case Beat(_, ranks):
                self.liveness.hear_host(host, now_s)
                frozen = self._take_beats([beat for beat in ranks if self._is_of(beat.rank, host)])
                return [SendHost(host, Heard()), *frozen]
            case RankExited(rank):
                return self._on_exited(message, now_s) if self._is_of(rank, host) else []
            case PortPicked():
                return self._on_port(message, now_s)
            case HostStopped(_, reason):
                return self._host_gone(host, f"stopped: {reason}", now_s, is_missed=False)
            case StopWanted():
                return [] if self.ending.is_decided else self._on_stop(stop_asked(message), now_s)
            case LeaveWanted(_, source):
                return self._on_leave(host, source, now_s)
            case _:
                return []  # bytes to disk; and what ranks with an engine say

    def _take_beats(self, beats: Sequence[RankBeat]) -> list[JobAction]:
        """Nothing else tells of a rank that a signal has stopped: all others wait for it, and nobody fails."""
        newly = [beat for beat in beats if beat.is_frozen and not self._is_frozen(beat.rank)]
        self.beats.update({beat.rank: beat for beat in beats})
        return [
            Record("rank_frozen", Severity.WARNING, f"rank {beat.rank} is {FROZEN.format(pid=beat.pid)}", {})
            for beat in newly
        ]

    def _is_frozen(self, rank: RankId) -> bool:
        return rank in self.beats and self.beats[rank].is_frozen

    def _is_of(self, rank: RankId, host: HostName) -> bool:
        return rank in self.membership and self.membership[rank].host == host

    def _on_hello(self, hello: HostHello, now_s: float) -> list[JobAction]:
        is_waiting = self.phase is PlainPhase.WAITING
        reason = self.refusal(hello.host) or self.startup.window.misfit(hello, is_waiting) or mixture(hello)
        if not reason and self._places is not None:
            reason = self._places.misfit(hello)
        if reason:
            return self.startup.refuse(hello, reason)
        self.hosts[hello.host] = hello
        self.missing.pop(hello.host, None)
        return self.startup.join(hello, now_s)

    def _host_gone(self, host: HostName, reason: str, now_s: float, is_missed: bool) -> list[JobAction]:
        """``is_missed``: it did not leave in order, and may come back for a restart."""
        if host not in self.hosts:
            return []
        del self.hosts[host]
        self.liveness.forget_host(host)
        lost = self.membership.on_host(host, self.membership.live)
        for rank in lost:
            self._bury(rank, reason, now_s)
        dropped = DropHost(host, reason)
        if self.phase is PlainPhase.ENDING:
            return [dropped]
        note = Record("host_lost", Severity.CRITICAL, f"{host}: {reason}", {"host": host})
        if self.phase is PlainPhase.WAITING:
            self.startup.window.leave(host, reason)
            return [dropped, note]
        self.missing[host] = None
        self.restarts.are_forbidden |= not is_missed
        failure = end.loss(end.KIND_HOST, host, -1, reason)
        return [dropped, note, *self._miss(failure, bool(lost), now_s)]

    def _miss(self, failure: Failure, has_lost_ranks: bool, now_s: float) -> list[JobAction]:
        """A host of the run is gone. Where all that ran on it had ended, only a restart has to wait for it."""
        if self.phase is PlainPhase.GATHERING:
            return self._fail(failure, now_s) if self.restarts.are_forbidden else self._look_for(failure.host)
        is_needed = has_lost_ranks or self.phase is PlainPhase.STARTING
        actions = self._on_failure(failure, now_s) if is_needed else []
        return actions + self._look_for(failure.host) if self.restarts.are_left else actions

    def _look_for(self, host: HostName) -> list[JobAction]:
        """One that no roster knows comes back by itself, or not."""
        return [RestoreHost(host)] if host in self.settings.join.roster else []

    def _pulse(self, now_s: float) -> list[JobAction]:
        """Silence of hosts: suspects are noted, the dead are lost. Ranks do not beat."""
        actions: list[JobAction] = []
        for change in self.liveness.changes(now_s):
            if change.pulse is Pulse.DEAD:
                reason = f"silent for {change.silent_s:.1f} s"
                actions += self._host_gone(change.host, reason, now_s, is_missed=True)
            else:
                severity = Severity.WARNING if change.pulse is Pulse.SUSPECT else Severity.INFO
                detail = f"host {change.host} is {change.pulse} (silent for {change.silent_s:.1f} s)"
                actions.append(Record(f"peer_{change.pulse}", severity, detail, {}))
        return actions

    # -------------------------------------------------------------------------------------------------------- ranks
    def _on_exited(self, message: RankExited, now_s: float) -> list[JobAction]:
        rank = message.rank
        if rank not in self.membership.live:
            return []
        code = end.process_exit_code(message.code, message.signal)
        if message.by_us and self.phase is not PlainPhase.RUNNING:
            self._bury(rank, "stopped with the others", now_s)
            return []
        if not code and not message.by_us:
            self.ended_s[rank] = now_s
            self.membership.finish(rank)
            return []
        failure = self._failure_of(message, code)
        self._bury(rank, failure.error, now_s)
        if self.restarts.failure is not None or self.phase is PlainPhase.ENDING:
            return self._on_failure(failure, now_s)
        fields = {"rank": rank, "code": code}
        note = Record("rank_failed", Severity.CRITICAL, f"rank {rank}: {failure.error}", fields)
        return [note, *self._on_failure(failure, now_s)]

    def _failure_of(self, message: RankExited, code: int) -> Failure:
        rank, host = message.rank, self.membership[message.rank].host
        if message.by_us:
            self.restarts.are_forbidden = True
            reason = "stopped by its daemon, which leaves the run"
            return end.loss(end.KIND_HOST, host, rank, reason)
        if message.signal:
            return Failure(end.KIND_SIGNAL, host, rank, f"ended by signal {message.signal}", "", code, message.signal)
        return Failure(end.KIND_EXIT, host, rank, f"exited with code {code}", "", code, 0)

    def _bury(self, rank: RankId, reason: str, now_s: float) -> None:
        self.ended_s[rank] = now_s
        self.membership.bury(rank, reason)

    def _on_failure(self, failure: Failure, now_s: float) -> list[JobAction]:
        """The first one stops the others; a later one only follows from it, or explains it better."""
        if self.phase is PlainPhase.ENDING:
            self.ending.fail(failure, failure.error)
            return []
        is_first = self.restarts.failure is None
        self.restarts.take(failure)
        return self._stop_ranks(now_s) if is_first or self.phase is not PlainPhase.STOPPING else []

    def _stop_ranks(self, now_s: float) -> list[JobAction]:
        self.phase = PlainPhase.STOPPING
        grace_s = self.settings.stop_grace_s
        self._deadline_s = now_s + grace_s + 2 * KILL_MARGIN_S
        reason = "" if self.restarts.failure is None else self.restarts.failure.error
        hosts = self.membership.hosts_of(self.membership.live)
        return [SendHost(host, StopRanks(reason, grace_s)) for host in hosts]

    # ------------------------------------------------------------------------------------------------------- starts
    def _pick_port(self, places: Places) -> list[JobAction]:
        """Rank 0's host picks the port; after a start that has failed, it also tells whether the last one was ours."""
        self.phase, self._deadline_s = PlainPhase.STARTING, None
        self._start += 1
        self._address, peer = meeting_point(places.hosts, self.hosts)
        return [SendHost(places.hosts[0], PickPort(self._start, peer))]

    def _on_port(self, picked: PortPicked, now_s: float) -> list[JobAction]:
        places = self._places
        if self.phase is not PlainPhase.STARTING or picked.start != self._start or places is None:
            return []
        if self.restarts.failure is None:
            return self._spawn(places, picked, now_s)
        actions = self._judge(self.restarts.failure, picked.was_taken, now_s)
        return actions + (self._spawn(places, picked, now_s) if self._can_start else [])

    @property
    def _can_start(self) -> bool:
        return self.restarts.failure is None and not self.missing

    def _spawn(self, places: Places, picked: PortPicked, now_s: float) -> list[JobAction]:
        if picked.error:
            reason = f"no port for the ranks to meet at: {picked.error}"
            return self._fail(Failure(end.KIND_HOST, picked.host, -1, reason, "", end.EXIT_PREFLIGHT, 0), now_s)
        self.phase, self._port = PlainPhase.RUNNING, picked.port
        self.membership = places.new_membership()
        self.started_s, self.ended_s = now_s, {}
        self.beats.clear()
        size, hosts = len(self.membership), len(places.hosts)
        note = Record(
            "spawning",
            Severity.INFO,
            f"starting {counted(size, 'rank')} on {counted(hosts, 'host')}",
            {"port": picked.port},
        )
        address = self._address or picked.address
        return [note, *places.orders(address, picked.port, self.restarts.count, self.settings.max_restarts)]

    def _judge(self, failure: Failure, was_taken: bool, now_s: float) -> list[JobAction]:
        """All ranks of a start that failed have ended: is there another one?"""
        note = self.restarts.judge(failure, self._port, was_taken)
        if note is None:
            return self._fail(failure, now_s)
        if self.missing:
            self.phase, self._deadline_s = PlainPhase.GATHERING, now_s + self.settings.join.max_join_timeout_s
        return [note]

    # ---------------------------------------------------------------------------------------------------------- end
    def _on_leave(self, host: HostName, source: str, now_s: float) -> list[JobAction]:
        """A walk-in must go: before the start it is not waited for, later nobody trains on without it."""
        if self.ending.is_decided or host not in self.hosts:
            return []
        if self.phase is PlainPhase.WAITING:
            return [SendHost(host, StopHost(source, 0.0))]
        return self._on_stop(StopAsked(f"{source} on {host}", False, end.EXIT_TERMINATED), now_s)

    def _on_stop(self, event: StopAsked, now_s: float) -> list[JobAction]:
        how = "abort" if event.abort else "stop"
        note = Record("stop_requested", Severity.INFO, f"{how} requested by {event.source}", {"source": event.source})
        if self.phase is PlainPhase.ENDING and not event.abort:
            return [Record("stop_requested", Severity.INFO, "the run is ending already; abort it to end it now", {})]
        if self.restarts.failure is None:
            self.ending.stop(event.exit_code, f"{'aborted' if event.abort else 'stopped'} by {event.source}")
        elif not self.ending.is_decided:
            self.restarts.give_up(self.restarts.failure)  # it came first
        return [note, *self._end(now_s, 0.0 if event.abort else self.settings.stop_grace_s)]

    def _fail(self, failure: Failure, now_s: float) -> list[JobAction]:
        self.restarts.give_up(failure)
        return self._end(now_s, self.settings.stop_grace_s)

    def _refuse(self, reason: str, now_s: float) -> list[JobAction]:
        self.ending.fail(Failure(end.KIND_REFUSED, "", -1, reason, "", end.EXIT_USAGE, 0), reason)
        return self._end(now_s, self.settings.stop_grace_s)

    def _end(self, now_s: float, grace_s: float) -> list[JobAction]:
        self.phase, self._deadline_s = PlainPhase.ENDING, None
        return self._finale.stop_all(self.hosts, now_s, grace_s)

    # ------------------------------------------------------------------------------------------------------- phases
    def _proceed(self, now_s: float) -> list[JobAction]:
        """Everything that time or the last event has made due."""
        actions = self._pulse(now_s) if self.phase is not PlainPhase.ENDING else []
        places = self._places
        if self.phase is PlainPhase.WAITING:
            actions += self._proceed_waiting(now_s)
        elif self.phase is PlainPhase.RUNNING and not self.membership.live:
            actions += self._end(now_s, self.settings.stop_grace_s)
        elif self.phase is PlainPhase.STOPPING and places is not None and self.restarts.failure is not None:
            actions += self._proceed_stopping(places, self.restarts.failure, now_s)
        elif self.phase is PlainPhase.GATHERING and places is not None:
            actions += self._proceed_gathering(places, now_s)
        return actions + (self._proceed_ending(now_s) if self.phase is PlainPhase.ENDING else [])

    def _proceed_waiting(self, now_s: float) -> list[JobAction]:
        match self.startup.verdict(now_s):
            case Verdict.WAIT:
                return self.startup.hold()
            case Verdict.START:
                if reason := shut_off(tuple(self.startup.window.joined.values())):
                    return self._refuse(reason, now_s)
                self._places = places = Places(self.startup.window.devices())
                return [*self.startup.note_shortfall(), *self._pick_port(places)]
            case Verdict.FAIL:
                self.ending.fail(*self.startup.give_up(now_s))
                return self._end(now_s, self.settings.stop_grace_s)
            case _ as verdict:
                assert_never(verdict)

    def _proceed_stopping(self, places: Places, failure: Failure, now_s: float) -> list[JobAction]:
        if self.membership.live and not self._is_late(now_s):
            return []
        if self.membership.live:  # a start beside what is left of the last one would be two
            return self._fail(failure, now_s)
        if places.hosts[0] in self.hosts:
            return self._pick_port(places)
        return self._judge(failure, False, now_s)

    def _proceed_gathering(self, places: Places, now_s: float) -> list[JobAction]:
        if not self.missing:
            return self._pick_port(places)
        if not self._is_late(now_s):
            return []
        named, limit_s = ", ".join(self.missing), self.settings.join.max_join_timeout_s
        reason = f"did not come back within {limit_s:g} s, and the ranks cannot start again without it"
        host = next(iter(self.missing))
        return self._fail(end.loss(end.KIND_HOST, host, -1, f"{named}: {reason}"), now_s)

    def _proceed_ending(self, now_s: float) -> list[JobAction]:
        actions: list[JobAction] = []
        if self._finale.is_late(now_s):
            for host in tuple(self.hosts):
                actions += self._host_gone(host, "did not stop in time", now_s, is_missed=True)
        if self.hosts:
            return actions
        self.phase = PlainPhase.ENDED
        return [*actions, EndRun(self.ending.finish(0))]

    def _is_late(self, now_s: float) -> bool:
        return self._deadline_s is not None and now_s >= self._deadline_s
