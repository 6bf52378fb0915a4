"""Checkpoints: when one is due, which rank gives the consensus for it, and what came of it.

A save begins right behind a commit, while every rank holds the consensus: one rank is asked for it, takes a copy and
trains on; the shell writes what comes. States: *idle* → (due) → *ordered*: from one rank, until the shell has settled
it. Invariants: one save at a time; what is saved is a published version with the coverage of that very version; a save
that fails for its rank's sake is made again from another one, of the same version while it is still held, else of a
later one. It writes nothing and knows no file formats.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flodl.core.actions import DropSave, JobAction, OpenSave, Record, SendHost, Severity
from flodl.core.events import SaveSettled
from flodl.core.membership import Membership
from flodl.core.position import ResumePoint, SaveReason
from flodl.core.slowness import Slowness
from flodl.ids import RankId
from flodl.messages import CheckpointSettings, Scalar, SendState, StateSent

SAVE_TIMEOUT_S = 600.0
"""A whole state must be on the controller's disk in this time: 10 GB at 17 MB/s. Then another rank is asked."""


HANDOVER_STEM = ""
"""Where a version goes that newcomers shall have: a place of the run's own, and no checkpoint of the user's."""


def is_due(settings: CheckpointSettings, epoch: int) -> bool:
    """Whether the settings ask for a checkpoint behind ``epoch``, which counts from 0."""
    number = epoch + 1
    return (settings.every > 0 and number % settings.every == 0) or number in settings.at_epochs


def never_due(settings: CheckpointSettings, epochs: int) -> str:
    """What to say where ``checkpoint_every`` reaches beyond the run's epochs; else nothing."""
    if settings.every <= epochs:
        return ""
    end = "; one is made at the end all the same" if settings.save_path else ""
    return f"checkpoint_every {settings.every} asks for no checkpoint, for the run has {epochs} epochs{end}"


@dataclass(frozen=True, slots=True)
class _Order:
    """A save under way."""

    transfer: int
    rank: RankId
    stem: str
    reason: SaveReason
    point: ResumePoint
    deadline_s: float
    slowness: Slowness


@dataclass(frozen=True, slots=True)
class _Held:
    """The consensus that every live rank has in its model now. ``ranks`` in the order in which they are asked."""

    point: ResumePoint
    ranks: tuple[RankId, ...]


class Saving:
    """See the module docstring. ``failure`` says why the newest save that was tried is not there; empty when it is."""

    def __init__(self, settings: CheckpointSettings, membership: Membership, transfers: Iterator[int]) -> None:
        """``transfers`` gives numbers that nobody else in the run uses."""
        self.failure = ""
        self._settings, self._membership, self._transfers = settings, membership, transfers
        self._due: dict[str, SaveReason] = {}
        self._order: _Order | None = None
        self._held: _Held | None = None
        self._unable: dict[RankId, str] = {}
        self._is_given = False

    @property
    def is_pending(self) -> bool:
        """True while a save is under way, or a checkpoint is due and still possible."""
        return self._order is not None or (self._settings.save_path in self._due and self._next_rank() is not None)

    @property
    def is_handing_over(self) -> bool:
        """True while a rank has been asked for a version that newcomers shall have."""
        return self._order is not None and self._order.stem == HANDOVER_STEM

    def is_from(self, ranks: Iterable[RankId]) -> bool:
        """Whether one of these has been asked for the state of a save under way."""
        return self._order is not None and self._order.rank in ranks

    def next_deadline_s(self) -> float | None:
        """When the rank that was asked is given up, or the wait is told of."""
        order = self._order
        return None if order is None else min(order.deadline_s, order.slowness.next_s)

    # ------------------------------------------------------------------------------------------------------ triggers
    def close_epochs(self, epochs: Iterable[int]) -> None:
        """These epochs (0-based) are complete: the settings may want a checkpoint after one of them."""
        if any(is_due(self._settings, epoch) for epoch in epochs):
            self.demand(SaveReason.CHECKPOINT)

    def demand(self, reason: SaveReason) -> None:
        """Save the next published version, or the one that is held now, where a ``save_path`` is set."""
        stem = self._settings.save_path
        if stem and self._due.get(stem) in (None, SaveReason.CHECKPOINT):
            self._due[stem] = reason
            self._unable = {}

    def demand_handover(self) -> None:
        """Newcomers want the next version that is published."""
        self._due[HANDOVER_STEM] = SaveReason.HANDOVER

    def forget_handover(self) -> None:
        """Nobody is taken in any more."""
        self._due.pop(HANDOVER_STEM, None)

    # ---------------------------------------------------------------------------------------------------- the rounds
    def hold(self, point: ResumePoint, ranks: Sequence[RankId], now_s: float) -> list[JobAction]:
        """A version is published and every live rank holds it; ``ranks`` in the order in which to ask them."""
        self._held = _Held(point, tuple(ranks))
        return self._begin(now_s)

    def release(self) -> None:
        """The ranks train on: what they hold is no published version any more."""
        self._held = None

    def lose(self, ranks: Iterable[RankId], now_s: float) -> list[JobAction]:
        """These are dead; what one of them was to give will not come."""
        if self._order is None or self._order.rank not in ranks:
            return []
        return self._try_again(self._order, now_s)

    def tick(self, now_s: float) -> list[JobAction]:
        """Whoever has not delivered in time is passed over, and a save that takes long is told of on the way."""
        order = self._order
        if order is None:
            return []
        if now_s < order.deadline_s:
            return self._tell_slow(order, order.slowness.take(now_s))
        self._unable[order.rank] = f"did not deliver within {SAVE_TIMEOUT_S:g} s"
        return self._try_again(order, now_s)

    # -------------------------------------------------------------------------------------------------- what came of it
    def on_sent(self, message: StateSent, now_s: float) -> list[JobAction]:
        """The rank has handed its copy over, or cannot."""
        order = self._order
        if order is None or message.transfer != order.transfer:
            return []
        if not message.error:
            self._is_given = True
            return []
        self._unable[order.rank] = message.error
        return self._try_again(order, now_s)

    def on_settled(self, event: SaveSettled, now_s: float) -> list[JobAction]:
        """The shell has made the checkpoint, or could not: its disk is the same for every rank."""
        order = self._order
        if order is None or event.transfer != order.transfer:
            return []
        self._order = None
        told = self._give_up(order, event.error) if event.error else self._report(order, event)
        return [*told, *self._begin(now_s)]

    # ------------------------------------------------------------------------------------------------------- details
    def _begin(self, now_s: float) -> list[JobAction]:
        rank, held = self._next_rank(), self._held
        if self._order is not None or rank is None or held is None:
            return []
        stem = next(iter(self._due))
        reason = self._due.pop(stem)
        deadline_s, slowness = now_s + SAVE_TIMEOUT_S, Slowness(now_s)
        order = _Order(next(self._transfers), rank, stem, reason, held.point, deadline_s, slowness)
        self._order, self._is_given = order, False
        host = self._membership[rank].host
        keep_last = 1 if stem == HANDOVER_STEM else self._settings.keep_last
        return [
            OpenSave(order.transfer, host, stem, reason, held.point, keep_last),
            SendHost(host, SendState(rank, order.transfer, whole=True)),
        ]

    def _next_rank(self) -> RankId | None:
        if not self._due or self._held is None:
            return None
        able = [rank for rank in self._held.ranks if rank not in self._unable]
        return next((rank for rank in able if rank in self._membership.live), None)

    def _try_again(self, order: _Order, now_s: float) -> list[JobAction]:
        """Not this rank: another one, now or behind the next commit."""
        self._order = None
        drop = DropSave(order.transfer)
        if self._unable and all(rank in self._unable for rank in self._membership.live):
            errors = "; ".join(f"rank {rank}: {error}" for rank, error in self._unable.items())
            return [drop, *self._give_up(order, errors), *self._begin(now_s)]
        if order.stem != HANDOVER_STEM and self._due.get(order.stem) in (None, SaveReason.CHECKPOINT):
            self._due[order.stem] = order.reason
        return [drop, *self._begin(now_s)]

    def _tell_slow(self, order: _Order, waited_s: float | None) -> list[JobAction]:
        if waited_s is None:
            return []
        is_handover, rank, version = order.stem == HANDOVER_STEM, order.rank, order.point.position.version
        what = "handed over to newcomers" if is_handover else f"saved to {order.stem}"
        why = (
            f"rank {rank} has given its state, and the disk, or the network on the way to it, is slow or hangs"
            if self._is_given
            else f"rank {rank} has not given its state yet"
        )
        detail = f"version {version} is not {what} after {waited_s:.0f} s: {why}"
        event = "handover_slow" if is_handover else "checkpoint_slow"
        return [Record(event, Severity.WARNING, detail, {"version": version, "path": order.stem, "rank": rank})]

    def _report(self, order: _Order, event: SaveSettled) -> list[JobAction]:
        if order.stem == HANDOVER_STEM:
            return []
        self.failure = ""
        version, path = order.point.position.version, event.path
        detail = f"version {version} is saved: {path} ({order.reason})"
        fields: dict[str, Scalar | tuple[object, ...]] = {
            "version": version,
            "path": path,
            "reason": str(order.reason),
            "rank": order.rank,
        }
        warned = [Record("checkpoint_not_kept", Severity.WARNING, event.warning, {"version": version})]
        return [Record("checkpoint", Severity.INFO, detail, fields), *(warned if event.warning else ())]

    def _give_up(self, order: _Order, error: str) -> list[JobAction]:
        version = order.point.position.version
        if order.stem == HANDOVER_STEM:
            detail = f"version {version} could not be handed over to newcomers: {error}"
            return [Record("handover_failed", Severity.WARNING, detail, {"version": version})]
        self.failure = f"version {version} could not be saved: {error}"
        return [Record("checkpoint_failed", Severity.CRITICAL, self.failure, {"version": version})]
