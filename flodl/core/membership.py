"""Who takes part: ranks, their hosts and the incarnation.

Purpose: the one place that knows which ranks are alive. States of a rank: *spawned* → *ready* → *live* → *finished*,
or *dead* from any of them. Invariants: a rank id is never reused; a dead or finished rank never comes back; the
incarnation grows by one with every change of the live set. It decides nothing about rounds, samples or time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from flodl.errors import InvariantViolation
from flodl.ids import HostName, Incarnation, RankId
from flodl.messages import Device


class RankStatus(StrEnum):
    """One rank's place in its life."""

    SPAWNED = "spawned"
    READY = "ready"
    LIVE = "live"
    FINISHED = "finished"
    DEAD = "dead"


@dataclass(slots=True)
class Member:
    """One rank. ``torch`` is its host's version, empty where that is not known; ``reason`` says why it is dead."""

    rank: RankId
    host: HostName
    device: Device
    torch: str = ""
    status: RankStatus = RankStatus.SPAWNED
    reason: str = ""


class Membership:
    """The roster of ranks; see the module docstring."""

    def __init__(self) -> None:
        self.incarnation: Incarnation = 0
        self._members: dict[RankId, Member] = {}

    def spawn(self, host: HostName, device: Device, torch: str = "") -> Member:
        """Give the next rank id to ``device`` on ``host``, which has that version of torch."""
        member = Member(len(self._members), host, device, torch)
        self._members[member.rank] = member
        return member

    def __contains__(self, rank: RankId) -> bool:
        return rank in self._members

    def __getitem__(self, rank: RankId) -> Member:
        return self._members[rank]

    def __len__(self) -> int:
        return len(self._members)

    def all(self) -> tuple[Member, ...]:
        """Every rank there ever was, in rank order."""
        return tuple(self._members.values())

    def with_status(self, *status: RankStatus) -> tuple[RankId, ...]:
        """The ranks in any of these states, in rank order."""
        return tuple(m.rank for m in self._members.values() if m.status in status)

    @property
    def live(self) -> tuple[RankId, ...]:
        """The ranks that train now."""
        return self.with_status(RankStatus.LIVE)

    def on_host(self, host: HostName, ranks: Iterable[RankId] | None = None) -> tuple[RankId, ...]:
        """Those of ``ranks`` (None: all) that belong to ``host``."""
        chosen = self._members.keys() if ranks is None else ranks
        return tuple(rank for rank in chosen if self._members[rank].host == host)

    def hosts_of(self, ranks: Iterable[RankId]) -> tuple[HostName, ...]:
        """The hosts of ``ranks``, in rank order, each once."""
        return tuple(dict.fromkeys(self._members[rank].host for rank in ranks))

    def mark_ready(self, rank: RankId) -> None:
        """The rank's model is built."""
        self._move(rank, RankStatus.SPAWNED, RankStatus.READY)

    def admit(self, ranks: Iterable[RankId]) -> Incarnation:
        """These ready ranks train from now on; a new incarnation begins."""
        for rank in ranks:
            self._move(rank, RankStatus.READY, RankStatus.LIVE)
        self.incarnation += 1
        return self.incarnation

    def bury(self, rank: RankId, reason: str) -> RankStatus:
        """The rank is dead; returns what it was. A new incarnation begins if it was live."""
        member = self._members[rank]
        before = member.status
        if before in (RankStatus.DEAD, RankStatus.FINISHED):
            raise InvariantViolation(f"rank {rank} died while {before}")
        member.status, member.reason = RankStatus.DEAD, reason
        if before is RankStatus.LIVE:
            self.incarnation += 1
        return before

    def release(self, ranks: Iterable[RankId]) -> Incarnation:
        """These live ranks leave while the others train on; a new incarnation begins."""
        for rank in ranks:
            self._move(rank, RankStatus.LIVE, RankStatus.FINISHED)
        self.incarnation += 1
        return self.incarnation

    def finish(self, rank: RankId) -> None:
        """The rank said that its work is done."""
        self._move(rank, RankStatus.LIVE, RankStatus.FINISHED)

    def _move(self, rank: RankId, expected: RankStatus, to: RankStatus) -> None:
        member = self._members[rank]
        if member.status is not expected:
            raise InvariantViolation(f"rank {rank} is {member.status}, not {expected}: cannot become {to}")
        member.status = to
