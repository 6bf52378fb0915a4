"""The first act of a run: hosts come, ranks start and build their models, and all agree.

States: *waiting* for hosts (the join window) → *staging*: ranks are spawned and report ready one by one → *admitted*,
which ends this module's part. Invariants: ranks get their ids in the window's order; nobody is admitted unless every
rank, and the head where there is one, agrees on what is trained. It decides nothing about losses or the run's end:
JobCore does, with what it says here.
"""

from dataclasses import replace

from flodl.core import ending as end
from flodl.core.actions import DropHost, Failure, JobAction, Record, SendHost, Severity
from flodl.core.admission import disagreement, miscounted_ratios, shut_off
from flodl.core.events import HostFailed
from flodl.core.liveness import Liveness
from flodl.core.membership import Membership, RankStatus
from flodl.core.window import Absence, JoinSettings, JoinWindow, Verdict
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
        detail = f"{hello.host} joined with {len(hello.devices)} device(s)"
        return [Record("host_joined", Severity.INFO, detail, {"host": hello.host, "address": hello.address})]

    def fail(self, event: HostFailed) -> list[JobAction]:
        """The host could not be brought up."""
        self.window.fail(Absence(event.host, event.stage, event.reason, event.remedy))
        detail = f"{event.host}: {event.stage}: {event.reason}"
        return [Record("host_failed", Severity.CRITICAL, detail, {"host": event.host, "stage": event.stage})]

    def verdict(self, now_s: float) -> Verdict:
        """What the window says; while it waits, its next deadline is this module's."""
        verdict = self.window.verdict(now_s)
        self._deadline_s = self.window.next_deadline_s(now_s) if verdict is Verdict.WAIT else None
        return verdict

    def absence_failure(self) -> Failure:
        """Why the run cannot start: every host that is not there, with its remedy."""
        absences = self.window.absences()
        lines = [f"host {a.host}: {a.stage}: {a.reason}" + (f"\n  {a.remedy}" if a.remedy else "") for a in absences]
        stages = {absence.stage for absence in absences}
        if stages - {"join", STAGE_PREFLIGHT}:
            code = end.EXIT_UNREACHABLE
        else:
            code = end.EXIT_PREFLIGHT if STAGE_PREFLIGHT in stages else end.EXIT_TOO_FEW_RANKS
        host = absences[0].host if absences else ""
        return Failure(end.KIND_HOST, host, -1, "\n".join(lines), "", code, 0)

    # -------------------------------------------------------------------------------------------------------- ranks
    def spawn(self, now_s: float) -> list[JobAction]:
        """Give every device of the window its rank, and have them started."""
        specs: dict[HostName, list[RankSpec]] = {}
        for host, device in self.window.devices():
            member = self._membership.spawn(host, device)
            self._liveness.watch_rank(member.rank, host, now_s)
            mine = specs.setdefault(host, [])
            mine.append(RankSpec(member.rank, len(mine), device))
        world_size = len(self._membership)
        note = Record("spawning", Severity.INFO, f"starting {world_size} rank(s) on {len(specs)} host(s)", {})
        return [note, *(SendHost(host, SpawnRanks(world_size, tuple(ranks))) for host, ranks in specs.items())]

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

    def disagreement(self) -> str:
        """Why the ready ranks, and the head, may not train together; empty when they may."""
        reports = [self.ready[rank] for rank in self._membership.with_status(RankStatus.READY)]
        settings = reports[0].settings
        return (
            disagreement(reports, self.head_ready)
            or shut_off(settings, self.window.joined.values())
            or miscounted_ratios(settings, len(self._membership))
        )

    def admit(self, version: Version = -1) -> list[JobAction]:
        """All ready ranks are live from now on; their first round publishes ``version`` + 1."""
        ranks = self._membership.with_status(RankStatus.READY)
        self._membership.admit(ranks)
        self._deadline_s = None
        size = len(self._membership)
        checkpoint = self.settings.checkpoint
        stems = {"save_path": checkpoint.save_path, "resume_from": checkpoint.resume_from}
        note = Record("admitted", Severity.INFO, f"{len(ranks)} rank(s) agree", stems)
        return [note, *(SendHost(self._membership[rank].host, Admitted(rank, size, ranks, version)) for rank in ranks)]
