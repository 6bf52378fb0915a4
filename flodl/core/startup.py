"""The first act of a run: hosts come, ranks start and build their models, and all agree.

States: *waiting* for hosts (the join window) → *staging*: ranks are spawned and report ready one by one → *admitted*,
which ends this module's part. Invariants: ranks get their ids in the window's order; nobody is admitted unless every
rank, and the head where there is one, agrees on what is trained; a host that no roster knows and that trains something
else is sent away, and stops nobody. It decides nothing about losses or the run's end: JobCore does, with what it says
here.
"""

from collections.abc import Iterable
from dataclasses import replace

from flodl.core import ending as end
from flodl.core.actions import DropHost, Failure, JobAction, Record, SendHost, Severity
from flodl.core.admission import disagreement, fits_head, miscounted_ratios, shut_off, torch_skew
from flodl.core.counted import counted
from flodl.core.events import HostFailed, StartAsked
from flodl.core.liveness import Liveness
from flodl.core.membership import Membership, RankStatus
from flodl.core.window import Absence, JoinSettings, JoinWindow, StartRule, Verdict
from flodl.ids import HostName, RankId, Version
from flodl.messages import Admitted, HeadReady, HostHello, RankReady, RankSpec, Settings, SpawnRanks, StopHost

STAGE_PREFLIGHT = "preflight"
"""Of a host that was reached and found unfit; docs/operations.md lists the checks."""


class Startup:
    """See the module docstring. ``grace_s`` is how long ranks wait for a head that is slower than they are."""

    def __init__(
        self, join: JoinSettings, grace_s: float, membership: Membership, liveness: Liveness, opened_s: float
    ) -> None:
        self.window = JoinWindow(join, opened_s)
        self.ready: dict[RankId, RankReady] = {}
        self.head_ready: HeadReady | None = None
        self._grace_s = grace_s
        self._membership, self._liveness = membership, liveness
        self._deadline_s: float | None = self.window.next_deadline_s(opened_s)
        self._is_held = False

    def next_deadline_s(self) -> float | None:
        """When the window's verdict may change, or the head is given up."""
        return self._deadline_s

    # -------------------------------------------------------------------------------------------------------- hosts
    def refuse(self, hello: HostHello, refusal: str) -> list[JobAction]:
        """The host may not join: tell it why and let it go."""
        self.window.refuse(hello.host, refusal)
        note = Record("join_refused", Severity.WARNING, f"{hello.host} refused: {refusal}", {"host": hello.host})
        return [note, SendHost(hello.host, StopHost(refusal, 0.0)), DropHost(hello.host, refusal)]

    def join(self, hello: HostHello, now_s: float) -> list[JobAction]:
        """The host has come."""
        self.window.join(hello)
        self._liveness.watch_host(hello.host, now_s)
        known = ", a host of no roster," if self.window.is_guest(hello.host) else ""
        detail = f"{hello.host}{known} joined with {counted(len(hello.devices), 'device')}: {self.window.tally()}"
        return [Record("host_joined", Severity.INFO, detail, {"host": hello.host, "address": hello.address})]

    def fail(self, event: HostFailed) -> list[JobAction]:
        """The host could not be brought up."""
        self.window.fail(Absence(event.host, event.stage, event.reason, event.remedy))
        detail = f"{event.host}: {event.stage}: {event.reason}" + (f"\n  {event.remedy}" if event.remedy else "")
        return [Record("host_failed", Severity.CRITICAL, detail, {"host": event.host, "stage": event.stage})]

    def verdict(self, now_s: float) -> Verdict:
        """What the window says; while it waits, its next deadline is this module's."""
        verdict = self.window.verdict(now_s)
        self._deadline_s = self.window.next_deadline_s(now_s) if verdict is Verdict.WAIT else None
        return verdict

    def hold(self) -> list[JobAction]:
        """While the window waits: said each time that it has come to wait for a person alone."""
        was_held = self._is_held
        self._is_held = self.window.settings.start is StartRule.MANUAL and self.window.has_least
        if was_held or not self._is_held:
            return []
        return [Record("window_held", Severity.INFO, f"{self.window.tally()}; fdl start starts the run", {})]

    def start_refusal(self, phase: str, is_waiting: bool) -> str:
        """Why a person may not start a run in this phase; empty when they may."""
        return self.window.fire_refusal() if is_waiting else f"the run is {phase}: it does not wait to be started"

    def fire(self, event: StartAsked, refusal: str) -> list[JobAction]:
        """A person starts the run, unless there is a ``refusal``."""
        if refusal:
            return [Record("start_refused", Severity.WARNING, f"{event.source} cannot start the run: {refusal}", {})]
        self.window.fire()
        return [Record("start_requested", Severity.INFO, f"{event.source} starts the run", {"source": event.source})]

    def give_up(self, now_s: float) -> tuple[Failure, str]:
        """Why the run cannot start, every host that is not there with its remedy; and that in one message."""
        failure = self._absence_failure(now_s)
        return failure, f"the run cannot start: {self.window.tally()}\n{failure.error}"

    def _absence_failure(self, now_s: float) -> Failure:
        absences = self.window.absences()
        lines = [f"host {a.host}: {a.stage}: {a.reason}" + (f"\n  {a.remedy}" if a.remedy else "") for a in absences]
        if not absences:
            left = [f"host {host} came, and left: {why}" for host, why in self.window.departed.items()]
            here = "the roster is empty" if self.window.joined else "no host has joined"
            here = "every host of the roster is there" if self.window.settings.roster else here
            lines = left or [here]
            lines[-1] += "\n  bring more hosts (fdl join), or lower join.min_rank_start"
        stages = {absence.stage for absence in absences} - {"join"}
        if not stages or self.window.has_expired(now_s):
            code = end.EXIT_TOO_FEW_RANKS
        else:
            code = end.EXIT_PREFLIGHT if stages == {STAGE_PREFLIGHT} else end.EXIT_UNREACHABLE
        host = absences[0].host if absences else ""
        return Failure(end.KIND_HOST, host, -1, "\n".join(lines), "", code, 0)

    # -------------------------------------------------------------------------------------------------------- ranks
    def spawn(self, now_s: float) -> list[JobAction]:
        """Give every device of the window its rank, and have them started."""
        specs: dict[HostName, list[RankSpec]] = {}
        for host, device in self.window.devices():
            member = self._membership.spawn(host, device, self.window.joined[host].torch)
            self._liveness.watch_rank(member.rank, host, now_s)
            mine = specs.setdefault(host, [])
            mine.append(RankSpec(member.rank, len(mine), device))
        world_size = len(self._membership)
        note = Record(
            "spawning", Severity.INFO, f"starting {counted(world_size, 'rank')} on {counted(len(specs), 'host')}", {}
        )
        orders = (SendHost(host, SpawnRanks(world_size, tuple(ranks))) for host, ranks in specs.items())
        return [*self.note_shortfall(), note, *orders]

    def note_shortfall(self) -> list[JobAction]:
        """A start without some of the roster is said, with their names."""
        absences = self.window.absences()
        if not absences:
            return []
        # Reason and remedy of a host that could not be brought up stand in its host_failed.
        missing = ", ".join(f"{each.host} ({each.stage})" if each.stage != "join" else str(each) for each in absences)
        detail = f"starting with {counted(self.window.rank_count, 'rank')}, without {missing}"
        return [Record("degraded_start", Severity.WARNING, detail, {})]

    def report_ready(self, report: RankReady) -> None:
        """A rank has built its model; a second report changes nothing."""
        if self._membership[report.rank].status is RankStatus.SPAWNED:
            self._membership.mark_ready(report.rank)
            self.ready[report.rank] = report

    @property
    def is_staged(self) -> bool:
        """True once no rank is still building its model."""
        return not self._membership.with_status(RankStatus.SPAWNED)

    @property
    def agreed(self) -> RankReady:
        """The first rank's word on what is trained: whoever comes later is compared with it."""
        taking_part = self._membership.with_status(RankStatus.READY, RankStatus.LIVE, RankStatus.FINISHED)
        return next((self.ready[rank] for rank in taking_part if rank in self.ready), next(iter(self.ready.values())))

    @property
    def settings(self) -> Settings:
        """What is trained, and the head's word on checkpoints: paths are its own, and may differ from host to host."""
        first = self.agreed.settings
        return first if self.head_ready is None else replace(first, checkpoint=self.head_ready.settings.checkpoint)

    def is_head_late(self, now_s: float) -> bool:
        """All ranks wait for the head: it has the same grace for its start-up as they had, from the first call on."""
        if self._deadline_s is None:
            self._deadline_s = now_s + self._grace_s
        return now_s >= self._deadline_s

    @property
    def least(self) -> int:
        """Ranks that must be left until training begins: as the window says, else all of the roster's."""
        return self.window.least or sum(not self.window.is_guest(member.host) for member in self._membership.all())

    def outcasts(self) -> dict[RankId, str]:
        """Ready ranks of guests that do not train what the roster trains, or the head where no roster rank is: they
        are sent away, with the reason.
        """
        reports = self._reports()
        guests = [report for report in reports if self.window.is_guest(self._membership[report.rank].host)]
        known = [report for report in reports if report not in guests]
        measures = known or [guest for guest in guests if fits_head(guest, self.head_ready)]
        if not measures:
            return {}
        reasons = {guest.rank: self._misfit(guest, measures[0]) for guest in guests}
        return {rank: reason for rank, reason in reasons.items() if reason}

    def _misfit(self, guest: RankReady, measure: RankReady) -> str:
        return disagreement([measure, guest], self._membership, None) or shut_off(
            measure.settings, self._hellos([guest])
        )

    def disagreement(self) -> str:
        """Why the ready ranks, and the head, may not train together; empty when they may."""
        reports = self._reports()
        settings = reports[0].settings
        return (
            disagreement(reports, self._membership, self.head_ready)
            or shut_off(settings, self._hellos(reports))
            or miscounted_ratios(settings, len(self._membership))
        )

    def _reports(self) -> list[RankReady]:
        return [self.ready[rank] for rank in self._membership.with_status(RankStatus.READY)]

    def _hellos(self, reports: Iterable[RankReady]) -> list[HostHello]:
        hosts, joined = self._membership.hosts_of(report.rank for report in reports), self.window.joined
        return [joined[host] for host in hosts]

    def admit(self, version: Version = -1) -> list[JobAction]:
        """All ready ranks are live from now on; their first round publishes ``version`` + 1."""
        ranks = self._membership.with_status(RankStatus.READY)
        self._membership.admit(ranks)
        self._deadline_s = None
        size = len(self._membership)
        checkpoint = self.settings.checkpoint
        stems = {"save_path": checkpoint.save_path, "resume_from": checkpoint.resume_from}
        note = Record("admitted", Severity.INFO, f"{counted(len(ranks), 'rank')} admitted", stems)
        skew = torch_skew(self._membership[rank] for rank in ranks)
        notes = [note, *([Record("torch_skew", Severity.WARNING, f"torch differs: {skew}", {})] if skew else [])]
        return [
            *notes,
            *(SendHost(self._membership[rank].host, Admitted(rank, size, ranks, version)) for rank in ranks),
        ]
