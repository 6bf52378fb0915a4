"""Faults that consist of several steps, and the count of those that had an effect."""

from typing import TYPE_CHECKING

from flodl.core.job import Phase
from flodl.ids import RankId

if TYPE_CHECKING:
    from tests.sim.world import World

Link = tuple[str, str]
"""From whom to whom."""


class Effect:
    """One fault. It counts as fired once it has changed something in a run that was not over."""

    def __init__(self, world: "World", kind: str) -> None:
        self.kind, self._world, self._has_bitten = kind, world, False

    def bite(self) -> None:
        if self._has_bitten:
            return
        self._has_bitten = True
        self._world.struck[self.kind] += 1
        self._world.fired[self.kind] += self._world.is_running


def all_links(host: str) -> tuple[Link, ...]:
    """The host's cable."""
    return (*links_up(host), *links_down(host))


def links_up(host: str) -> tuple[Link, ...]:
    return ((host, "controller"), (host, "bulk"))


def links_down(host: str) -> tuple[Link, ...]:
    return (("controller", host), ("bulk", host))


def clogged(host: str, rank: RankId, pick: int) -> Link:
    """One link alone: what goes over the others, heartbeats perhaps, arrives."""
    links = (*all_links(host), (f"rank{rank}", host), (host, f"rank{rank}"))
    return links[pick % len(links)]


def join_in_death(world: "World", rank: RankId, host: str, pick: int, delay_s: float) -> None:
    """A host joins, and others die: as it comes, as the newest version is handed over, or as its ranks are taken in.

    Who dies: a rank, a host, the newcomer, or a rank and then the newcomer.
    """
    name, core, effect = f"late{rank}", world.controller.core, Effect(world, "join in death")
    world.join(name, (0.02, 0.03)[: 1 + pick % 2])

    def has_taken_in() -> bool:
        return any(core.membership[each].host == name for each in core.membership.live)

    stages = (lambda: name in core.hosts, lambda: core.growth.is_handing_over, has_taken_in)

    def strike() -> None:
        victims = ((rank, ""), (None, host), (None, name), (rank, name))[pick // 3 % 4]
        if core.phase is Phase.TRAINING and name in core.hosts and world.kill(*victims):
            effect.bite()

    world.once(stages[pick % 3], lambda: world.after(delay_s, strike))
