"""The virtual collective plane: a group of ranks, with the ways in which a real one was seen to fail."""

from typing import TYPE_CHECKING

from flodl.core import events as ev
from flodl.ids import RankId, RoundKey
from tests.sim.model import Contribution, Sum

if TYPE_CHECKING:
    from tests.sim.rank import Rank
    from tests.sim.world import World


class Group:
    """Completes when all are in; a lost peer breaks it, mostly."""

    def __init__(self, world: "World", incarnation: int, attempt: int, ranks: tuple[RankId, ...]) -> None:
        self.world, self.incarnation, self.attempt, self.ranks = world, incarnation, attempt, ranks
        self.joined: dict[RankId, Rank] = {}
        self.settled: dict[RankId, None] = {}
        self.parts: dict[RoundKey, dict[RankId, Contribution]] = {}
        self.is_broken = False

    def join(self, rank: "Rank") -> None:
        self.joined[rank.rank] = rank
        if len(self.joined) < len(self.ranks):
            return
        is_failing = self.world.bites(self.world.failing_formations)
        self.world.failed_formations += is_failing
        for number, each in self.joined.items():
            self._settle(each, "connection refused" if is_failing and number == self.ranks[-1] else "")

    def _settle(self, rank: "Rank", error: str) -> None:
        event = ev.GroupSettled(self.incarnation, self.attempt, error)

        def settle() -> None:
            self.settled[rank.rank] = None
            rank.post(event)

        self.world.after(self._latency_s(rank, 0.005, 0.3), settle)

    def reduce(self, rank: "Rank", key: RoundKey, part: Contribution) -> None:
        if self.is_broken:
            self._fail(rank, key)
            return
        parts = self.parts.setdefault(key, {})
        parts[rank.rank] = part
        if len(parts) < len(self.ranks):
            return
        is_failing = self.world.bites(self.world.failing_reduces)
        total = Sum(tuple(parts[number] for number in self.ranks))
        for each in self.joined.values():
            if is_failing:
                self._fail(each, key)
            else:
                self._deliver(each, key, total)

    def _deliver(self, rank: "Rank", key: RoundKey, total: Sum) -> None:
        def land() -> None:
            # as measured with Gloo: a peer lost inside a reduce may leave some survivors with a sum and others without
            if self.is_broken and self.world.draw("broken", rank.rank) < 0.5:
                self._fail(rank, key)
            else:
                rank.take(key, total)

        self.world.after(self._latency_s(rank, 0.001, 0.01), land)

    def _latency_s(self, to: "Rank", least_s: float, most_s: float) -> float:
        """A member behind a cut cable holds up all."""
        cut_s = max(self.world.reachable_in_s(rank.daemon.name) for rank in self.joined.values())
        return cut_s + self.world.uniform(least_s, most_s, "group", to.rank)

    def lose(self, lost: RankId) -> None:
        if lost not in self.ranks or self.is_broken:
            return
        self.is_broken = True
        for key, parts in self.parts.items():
            if len(parts) < len(self.ranks):
                for rank in parts:
                    self._fail(self.joined[rank], key)

    def _fail(self, rank: "Rank", key: RoundKey) -> None:
        self.world.after(0.02, lambda: rank.post(ev.SumReady(key, "", 0.0, "connection reset by peer")))
