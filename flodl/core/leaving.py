"""Hosts that leave a run while it goes on: one that is drained once its ranks have ended, one whose ranks are all dead.

States of a host: staying → *draining*, its ranks leave at the next commit → *released*, it is to stop → gone. One that
leaves in order is no loss. It decides neither when a rank may end its work (``core.training``) nor what becomes of
ranks that are lost on the way there (``core.job``).
"""

from collections.abc import Collection, Iterable

from flodl.core.actions import JobAction, SendHost
from flodl.core.counted import counted
from flodl.core.membership import Membership
from flodl.ids import HostName, RankId
from flodl.messages import StopHost

IS_DRAINED = "it is drained"


class Leaving:
    """See the module docstring. ``stop_grace_s`` is the time between SIGTERM and SIGKILL on a host that stops."""

    def __init__(self, membership: Membership, stop_grace_s: float) -> None:
        self._membership, self._stop_grace_s = membership, stop_grace_s
        self._draining: dict[HostName, dict[RankId, None]] = {}
        self._released: set[HostName] = set()

    def __contains__(self, host: HostName) -> bool:
        return host in self._draining or host in self._released

    def is_draining(self, host: HostName) -> bool:
        """True from the beginning of a drain until the host has left."""
        return host in self._draining

    def refusal(self, host: HostName, hosts: Collection[HostName], least: int) -> str:
        """Why ``host`` may not be drained from a run of ``hosts`` that needs ``least`` ranks; empty when it may."""
        if host not in hosts:
            return f"host {host} is not in the run; there are: {', '.join(hosts)}"
        if host in self._draining:
            return f"host {host} is being drained already"
        stay = [rank for rank in self._membership.live if self._host_of(rank) not in (host, *self._draining)]
        if len(stay) < least:
            left = counted(len(stay), "rank")
            return f"without {host} only {left} would be left, and the mode needs {least}: use fdl stop"
        return ""

    def drain(self, host: HostName, ranks: Iterable[RankId]) -> list[JobAction]:
        """``host`` leaves once ``ranks`` have ended their work; at once without any."""
        self._draining[host] = dict.fromkeys(ranks)
        return [] if self._draining[host] else [self._stop(host, IS_DRAINED, self._stop_grace_s)]

    def end_rank(self, host: HostName, rank: RankId) -> list[JobAction]:
        """A rank has ended its work, or is dead; with the last one of a host that is drained the host may go."""
        waiting = self._draining.get(host)
        if not waiting or rank not in waiting:
            return []
        del waiting[rank]
        return [] if waiting else [self._stop(host, IS_DRAINED, self._stop_grace_s)]

    def release(self, host: HostName, reason: str, is_urgent: bool = False) -> list[JobAction]:
        """``host`` has nothing left to do here, and stops; ``is_urgent``: without any grace."""
        self._released.add(host)
        return [self._stop(host, reason, 0.0 if is_urgent else self._stop_grace_s)]

    def take(self, host: HostName) -> bool:
        """``host`` is gone and may come again; True when it was let go."""
        was_drained = self._draining.pop(host, None) is not None
        was_released = host in self._released
        self._released.discard(host)
        return was_drained or was_released

    def _host_of(self, rank: RankId) -> HostName:
        return self._membership[rank].host

    @staticmethod
    def _stop(host: HostName, reason: str, grace_s: float) -> JobAction:
        return SendHost(host, StopHost(reason, grace_s))
