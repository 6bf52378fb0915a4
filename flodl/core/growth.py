"""Hosts that come to a run that trains: their ranks start, get the newest version, and take part from the next round.

States of a newcomer: *building* its model → *ready* → *loading* the version that the cohort has just published → in the
cohort, or gone. Behind a commit one rank hands that version over, optimizer and all, and the round that follows waits
for the newcomers to load it (``LOAD_PATIENCE_S`` at most): so a newcomer is a whole member from its first round on,
with the same consensus and outer state as everybody, and nothing to give yet. Invariants: nothing that befalls a
newcomer stops the run; nobody is taken in with another version than the cohort's. It decides neither who hands over
(``core.saving``) nor when a round starts (``core.training``).
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from flodl.core.actions import JobAction, ReadBundle, Record, SendBundle, SendHost, Severity
from flodl.core.admission import disagreement, torch_skew
from flodl.core.liveness import Liveness
from flodl.core.membership import Membership
from flodl.core.saving import HANDOVER_STEM
from flodl.ids import HostName, RankId
from flodl.messages import HostHello, KillRank, LoadState, RankReady, RankSpec, Settings, SpawnRanks, StateLoaded

LOAD_PATIENCE_S = 60.0
"""How long a round is held up for newcomers that load: 1 GB at 17 MB/s. Those who are not done try again later."""

MAX_TRIES = 3
"""Versions that a newcomer may fail to load in time before it is sent away."""

NOT_ELASTIC = "the run has started without it, and join.elastic is false"

DRAINED = "its host is drained"

ENDED_WITH_RUN = "stopped with the run"


class Newcomer(StrEnum):
    """One rank's way into the cohort."""

    BUILDING = "building"
    READY = "ready"
    LOADING = "loading"
    LOADED = "loaded"


class Growth:
    """See the module docstring. ``departing`` are newcomers that cannot take part, and why: the caller loses them."""

    def __init__(self, membership: Membership, liveness: Liveness, transfers: Iterator[int]) -> None:
        self.departing: dict[RankId, str] = {}
        self._membership, self._liveness, self._transfers = membership, liveness, transfers
        self._newcomers: dict[RankId, Newcomer] = {}
        self._tries: dict[RankId, int] = {}
        self._transfer = -1
        self._until_s: float | None = None
        self._is_handed_over = False
        self._is_eager = False

    def __contains__(self, rank: RankId) -> bool:
        return rank in self._newcomers

    @property
    def are_waiting(self) -> bool:
        """True while a newcomer is ready and has no version yet."""
        return Newcomer.READY in self._newcomers.values()

    @property
    def is_handing_over(self) -> bool:
        """True while the next round is held up for newcomers."""
        return self._until_s is not None

    @property
    def awaits_version(self) -> bool:
        """True while the rank that was asked has not delivered."""
        return self.is_handing_over and not self._is_handed_over

    def take_eagerness(self) -> bool:
        """True once for each step of a newcomer that the end of the window would bring: it is ready, or it has come in
        and has no work yet. Asked for again and again, a checkpoint under way would make window after window short.
        """
        is_eager, self._is_eager = self._is_eager, False
        return is_eager

    def next_deadline_s(self) -> float | None:
        """When the round goes on without those that still load."""
        return self._until_s

    # -------------------------------------------------------------------------------------------------------- arrivals
    def join(self, hello: HostHello, now_s: float) -> list[JobAction]:
        """The host has come: start a rank on each of its devices, under new numbers."""
        self._liveness.watch_host(hello.host, now_s)
        specs: list[RankSpec] = []
        for device in hello.devices:
            member = self._membership.spawn(hello.host, device, hello.torch)
            self._liveness.watch_rank(member.rank, hello.host, now_s)
            self._newcomers[member.rank] = Newcomer.BUILDING
            specs.append(RankSpec(member.rank, len(specs), device))
        ranks = tuple(spec.rank for spec in specs)
        detail = f"{hello.host} joins the running training: starting rank {', '.join(map(str, ranks))}"
        note = Record(
            "host_joined", Severity.INFO, detail, {"host": hello.host, "address": hello.address, "ranks": ranks}
        )
        return [note, SendHost(hello.host, SpawnRanks(len(self._membership), tuple(specs)))]

    def report_ready(self, report: RankReady, first: RankReady) -> list[JobAction]:
        """The newcomer has built its model; ``first`` is what the cohort has agreed on."""
        if self._newcomers.get(report.rank) is not Newcomer.BUILDING:
            return []
        reason = disagreement([first, report], self._membership, None)
        if reason:
            self.departing[report.rank] = reason
            return []
        self._membership.mark_ready(report.rank)
        self._newcomers[report.rank] = Newcomer.READY
        skew = torch_skew(self._membership[rank] for rank in (first.rank, report.rank))
        notes = [Record("torch_skew", Severity.WARNING, f"torch differs: {skew}", {})] if skew else []
        self._is_eager = True
        host = self._membership[report.rank].host
        detail = f"rank {report.rank} on {host} is ready: it takes part from the next commit on"
        return [*notes, Record("newcomer_ready", Severity.INFO, detail, {"host": host, "rank": report.rank})]

    # ------------------------------------------------------------------------------------------------------ a handover
    def begin(self, now_s: float) -> None:
        """A rank has been asked to hand the newest version over: the round that follows waits for who is ready now."""
        self._until_s, self._is_handed_over = now_s + LOAD_PATIENCE_S, False
        for rank in self._in(Newcomer.READY):
            self._newcomers[rank] = Newcomer.LOADING

    def on_handed_over(self) -> list[JobAction]:
        """The version lies with us; have it read and checked."""
        self._is_handed_over = True
        return [ReadBundle(HANDOVER_STEM)] if self.is_handing_over else []

    def on_read(self) -> list[JobAction]:
        """Send it to the newcomers."""
        loading = self._in(Newcomer.LOADING)
        if not self.is_handing_over or not loading:
            return []
        self._transfer = next(self._transfers)
        hosts = self._membership.hosts_of(loading)
        loads = [SendHost(self._membership[rank].host, LoadState(rank, self._transfer)) for rank in loading]
        return [SendBundle(self._transfer, hosts), *loads]

    def on_loaded(self, message: StateLoaded) -> None:
        """A newcomer has it, or it does not fit."""
        if message.transfer != self._transfer or self._newcomers.get(message.rank) is not Newcomer.LOADING:
            return
        if message.error:
            self.departing[message.rank] = f"cannot load the training's state: {message.error}"
        else:
            self._newcomers[message.rank] = Newcomer.LOADED

    def fail(self) -> None:
        """The version will not come: whoever gave it is gone. Behind the next commit there is another one."""
        self._until_s = None
        for rank in (*self._in(Newcomer.LOADING), *self._in(Newcomer.LOADED)):
            self._newcomers[rank] = Newcomer.READY
            self._tries[rank] = self._tries.get(rank, 0) + 1
            if self._tries[rank] >= MAX_TRIES:
                self.departing[rank] = f"did not load {MAX_TRIES} versions in time"

    def take(self, now_s: float) -> tuple[RankId, ...]:
        """The newcomers that enter the cohort now: when all have loaded, or the time for it is over."""
        if self._until_s is None:
            return ()
        loaded, loading = self._in(Newcomer.LOADED), self._in(Newcomer.LOADING)
        if loading and now_s < self._until_s:
            return ()
        for rank in loaded:
            del self._newcomers[rank]
        self._is_eager |= bool(loaded)
        self.fail()
        return loaded

    # ---------------------------------------------------------------------------------------------------------- losses
    def lose(self, ranks: Iterable[RankId]) -> None:
        """These are dead."""
        for rank in ranks:
            self._newcomers.pop(rank, None)
            self.departing.pop(rank, None)

    def _in(self, *states: Newcomer) -> tuple[RankId, ...]:
        return tuple(rank for rank, state in self._newcomers.items() if state in states)


def refusal(host: HostName, settings: Settings, known: Sequence[HostName], is_elastic: bool) -> str:
    """Why a host of this name may not join a run that trains, whatever it offers; empty when it may."""
    if not is_elastic:
        return NOT_ELASTIC
    if host in known:
        return f"host {host} has already joined this run; another machine needs another name"
    if settings.cadence.partition_ratios is not None:
        return "partition_ratios name the share of each rank there was at the start; leave them out to let hosts join"
    return ""


def sent_away(host: HostName, rank: RankId, reason: str) -> list[JobAction]:
    """What a newcomer that cannot take part, and who watches, are told."""
    detail = f"rank {rank} on {host} does not take part: {reason}"
    return [
        Record("join_refused", Severity.WARNING, detail, {"host": host, "rank": rank}),
        SendHost(host, KillRank(rank, reason)),
    ]
