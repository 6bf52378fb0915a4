"""Going on from a checkpoint: it is read, found to fit, and loaded by every rank before anybody trains.

States: *reading* → *loading* → *loaded*, or a ``refusal`` in words. Invariants: no rank is asked to load what does not
fit the settings or the ranks; training starts from the checkpoint only when every rank that is left has loaded it. It
touches no files and decides nothing about losses.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flodl.core.actions import JobAction, ReadBundle, Record, SendBundle, SendHost, Severity
from flodl.core.elche import ElCheState
from flodl.core.events import BundleRead
from flodl.core.membership import Membership, RankStatus
from flodl.core.position import CadenceState, ResumePoint
from flodl.core.slowness import Slowness
from flodl.ids import RankId
from flodl.messages import LoadState, Settings, StateLoaded

LOAD_TIMEOUT_S = 600.0
"""A checkpoint must be read, and then be in every rank, in this time each: 10 GB at 17 MB/s."""


class Resume:
    """See the module docstring. ``point`` is what training starts from, None until it has been read.

    ``refusal`` says why the run cannot go on from there; empty while it can.
    """

    def __init__(self, settings: Settings, membership: Membership, transfers: Iterator[int], now_s: float) -> None:
        self.point: ResumePoint | None = None
        self.refusal = ""
        self._settings, self._membership = settings, membership
        self._transfer = next(transfers)
        self._missing: dict[RankId, None] = {}
        self._deadline_s = now_s + LOAD_TIMEOUT_S
        self._slowness = Slowness(now_s)
        self._told: dict[str, None] = {}

    @property
    def is_loaded(self) -> bool:
        """True once every rank that is left has loaded the checkpoint."""
        return self.point is not None and not self._missing

    def begin(self) -> list[JobAction]:
        """Have it read."""
        return [ReadBundle(self._settings.checkpoint.resume_from)]

    def next_deadline_s(self) -> float:
        """When waiting ends, or is told of."""
        return min(self._deadline_s, self._slowness.next_s)

    def tick(self, now_s: float) -> list[JobAction]:
        """Whoever is not done in time holds up the run for good; on the way there it is told of."""
        if self.is_loaded:
            return []
        who = f"rank {', '.join(map(str, self._missing))} has" if self._missing else "the controller has"
        source = self._settings.checkpoint.resume_from
        if now_s >= self._deadline_s:
            self.refusal = f"{who} not loaded {source} within {LOAD_TIMEOUT_S:g} s"
            return []
        waited_s = self._slowness.take(now_s)
        if waited_s is None:
            return []
        detail = f"{who} not loaded {source} after {waited_s:.0f} s: the disk, or the network, is slow or hangs"
        return [Record("loading_slow", Severity.WARNING, detail, {"path": source})]

    def on_read(self, event: BundleRead, now_s: float) -> list[JobAction]:
        """It has been read, or cannot be."""
        ready = self._membership.with_status(RankStatus.READY)
        if event.point is None:
            self.refusal = event.error
            return []
        self.refusal = misfit(event.point, self._settings, len(ready))
        if self.refusal:
            self.refusal = f"{event.path} does not fit this run: {self.refusal}"
            return []
        self.point = adapted(event.point, self._settings, ready)
        self._missing, self._deadline_s = dict.fromkeys(ready), now_s + LOAD_TIMEOUT_S
        hosts = self._membership.hosts_of(ready)
        position = event.point.position
        epochs = self._settings.num_epochs * self._settings.epoch_splits
        where = (
            f"epoch {position.epoch + 1} of {epochs}" if position.epoch < epochs else f"all {epochs} epochs complete"
        )
        detail = f"resuming from {event.path}: version {position.version}, {where}"
        note = Record("resuming", Severity.INFO, detail, {"path": event.path, "version": position.version})
        loads = [SendHost(self._membership[rank].host, LoadState(rank, self._transfer)) for rank in ready]
        return [note, SendBundle(self._transfer, hosts), *loads]

    def on_loaded(self, message: StateLoaded) -> list[JobAction]:
        """A rank has it, or it does not fit the rank's model. What the scripts of all ranks ask for is told once."""
        if message.transfer != self._transfer or message.rank not in self._missing:
            return []
        if message.error:
            self.refusal = f"rank {message.rank} cannot load {self._settings.checkpoint.resume_from}: {message.error}"
            return []
        del self._missing[message.rank]
        new = [text for text in message.warnings if text not in self._told]
        self._told |= dict.fromkeys(new)
        return [Record("resume_differs", Severity.WARNING, text, {"rank": message.rank}) for text in new]

    def lose(self, ranks: Iterable[RankId]) -> None:
        """These are dead: nobody waits for them."""
        for rank in ranks:
            self._missing.pop(rank, None)


def misfit(point: ResumePoint, settings: Settings, world_size: int) -> str:
    """Why a run with these settings and so many ranks may not go on from ``point``; empty when it may."""
    saved, here = point.settings, settings
    fixed = [
        f"{name} ({getattr(saved, name)} at the save, {getattr(here, name)} now)"
        for name in ("dataset_size", "seed", "epoch_splits")
        if getattr(saved, name) != getattr(here, name)
    ]
    if fixed:
        return f"{'; '.join(fixed)}: which samples are trained would not be known any more; set them as they were"
    epochs = settings.num_epochs * settings.epoch_splits
    if any(covered.epoch >= epochs for covered in point.position.covered):
        at = max(covered.epoch for covered in point.position.covered) + 1
        return (
            f"it is in epoch {at}, and the run has {epochs} now: raise num_epochs, or nothing of it would be left to do"
        )
    if settings.checkpoint.reshape:
        return ""
    others = [("batch_size", saved.batch_size, here.batch_size), ("mode", saved.cadence.mode, here.cadence.mode)]
    others.insert(0, ("ranks", point.position.world_size, world_size))
    changed = [f"{name} ({before} at the save, {now} now)" for name, before, now in others if before != now]
    return f"{'; '.join(changed)}: to go on all the same, resume with reshape=True" if changed else ""


def adapted(point: ResumePoint, settings: Settings, ranks: tuple[RankId, ...]) -> ResumePoint:
    """``point`` as these ranks go on from it: without the cadence where that must start afresh."""
    cadence, saved = point.cadence, point.settings
    fits = cadence is not None and len(cadence.elche.ranks) == len(ranks)
    if (
        not fits
        or cadence is None
        or (saved.batch_size, saved.cadence.mode) != (settings.batch_size, settings.cadence.mode)
    ):
        return replace(point, cadence=None)
    return replace(point, cadence=CadenceState(_renumbered(cadence.elche, ranks), cadence.trend_history))


def _renumbered(state: ElCheState, ranks: tuple[RankId, ...]) -> ElCheState:
    """The save's ranks in their order are ours in our order: an id is never used again, so there may be gaps."""
    new = dict(zip(sorted(state.ranks), ranks, strict=True))
    return replace(
        state,
        ranks=ranks,
        slow_rank=None if state.slow_rank is None else new[state.slow_rank],
        ms_per_batch={new[rank]: ms for rank, ms in state.ms_per_batch.items()},
        batch_counts={new[rank]: count for rank, count in state.batch_counts.items()},
        partition_ratios={new[rank]: ratio for rank, ratio in state.partition_ratios.items()},
    )
