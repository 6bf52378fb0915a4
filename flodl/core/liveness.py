"""Who has fallen silent: two clocks, the host daemon's beat and each rank's own heartbeat.

Purpose: turn silence into *suspect* and *dead*. States of a peer: *starting* (ranks only, with a grace of its own) →
*alive* ⇄ *suspect* → *dead*. Invariants: a peer that is heard of is alive again unless it was declared dead; a rank is
judged only while its daemon, by which alone we hear of it, is not silent itself. It knows nothing of what a loss means.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from flodl.ids import HostName, RankId


@dataclass(frozen=True, slots=True)
class LivenessSettings:
    """In seconds: the period of beats, and the silence after which a peer is suspect, dead, or stuck in start-up."""

    heartbeat_s: float = 1.0
    suspect_s: float = 10.0
    dead_s: float = 30.0
    startup_s: float = 300.0


class Pulse(StrEnum):
    """What silence says of a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class PulseChanged:
    """A peer's pulse changed; exactly one of ``host`` (non-empty) and ``rank`` (≥ 0) names it."""

    host: HostName
    rank: RankId
    pulse: Pulse
    silent_s: float


@dataclass(slots=True)
class _Peer:
    host: HostName
    rank: RankId
    heard_s: float
    is_starting: bool
    keeper: "_Peer | None" = None
    pulse: Pulse = Pulse.ALIVE


class Liveness:
    """See the module docstring."""

    def __init__(self, settings: LivenessSettings) -> None:
        self._settings = settings
        self._hosts: dict[HostName, _Peer] = {}
        self._ranks: dict[RankId, _Peer] = {}
        self._due_s = math.inf  # no pulse changes before; who is heard of only moves it later, so it may come early

    def watch_host(self, host: HostName, now_s: float) -> None:
        """Expect beats of ``host`` from now on."""
        self._watch(self._hosts.setdefault(host, _Peer(host, -1, now_s, is_starting=False)))

    def watch_rank(self, rank: RankId, host: HostName, now_s: float) -> None:
        """Expect a first heartbeat within the start-up grace; ``host`` is watched already."""
        keeper = self._hosts[host]
        self._watch(self._ranks.setdefault(rank, _Peer("", rank, now_s, is_starting=True, keeper=keeper)))

    def forget_host(self, host: HostName) -> None:
        """The host is gone or done."""
        self._hosts.pop(host, None)

    def forget_rank(self, rank: RankId) -> None:
        """The rank is gone or done."""
        self._ranks.pop(rank, None)

    def hear_host(self, host: HostName, now_s: float) -> None:
        """A beat came."""
        peer = self._hosts.get(host)
        if peer is not None:
            peer.heard_s = now_s
            self._watch(peer)

    def hear_rank(self, rank: RankId, age_s: float, now_s: float) -> None:
        """The daemon reports that the rank last spoke ``age_s`` ago."""
        peer = self._ranks.get(rank)
        if peer is not None:
            peer.heard_s = now_s - age_s if peer.is_starting else max(peer.heard_s, now_s - age_s)
            peer.is_starting = False
            self._watch(peer)

    def changes(self, now_s: float) -> tuple[PulseChanged, ...]:
        """Every pulse that changed by ``now_s``: hosts first, then ranks, each in order of being watched."""
        if now_s < self._due_s:
            return ()
        changed: list[PulseChanged] = []
        for peer in (*self._hosts.values(), *self._ranks.values()):
            silent_s = now_s - peer.heard_s
            pulse = self._pulse(peer, now_s)
            if pulse is not peer.pulse:
                peer.pulse = pulse
                changed.append(PulseChanged(peer.host, peer.rank, pulse, silent_s))
        self._due_s = min(
            (
                peer.heard_s + self._limit_s(peer)
                for peer in (*self._hosts.values(), *self._ranks.values())
                if peer.pulse is not Pulse.DEAD and not self._is_unheard(peer, now_s)
            ),
            default=math.inf,
        )
        return tuple(changed)

    def next_deadline_s(self) -> float | None:
        """No pulse changes before this; None when nobody is watched."""
        return None if self._due_s == math.inf else self._due_s

    def silence_s(self, host: HostName, now_s: float) -> float | None:
        """How long ``host`` has been silent; None if it is not watched."""
        peer = self._hosts.get(host)
        return None if peer is None else now_s - peer.heard_s

    def rank_pulse(self, rank: RankId) -> Pulse | None:
        """The rank's pulse; None if it is not watched."""
        peer = self._ranks.get(rank)
        return None if peer is None else peer.pulse

    def host_pulse(self, host: HostName) -> Pulse | None:
        """The host's pulse; None if it is not watched."""
        peer = self._hosts.get(host)
        return None if peer is None else peer.pulse

    def _pulse(self, peer: _Peer, now_s: float) -> Pulse:
        # the same sums as in changes: a difference may round to just below the limit, and tick for ever
        if peer.pulse is Pulse.DEAD or self._is_unheard(peer, now_s):
            return peer.pulse
        if peer.is_starting:
            return Pulse.DEAD if now_s >= peer.heard_s + self._settings.startup_s else Pulse.ALIVE
        if now_s >= peer.heard_s + self._settings.dead_s:
            return Pulse.DEAD
        return Pulse.SUSPECT if now_s >= peer.heard_s + self._settings.suspect_s else Pulse.ALIVE

    def _watch(self, peer: _Peer) -> None:
        """The peer's next change may come earlier than all others: it is new, or was a suspect and has spoken."""
        at_s = peer.heard_s if peer.pulse is Pulse.SUSPECT else peer.heard_s + self._limit_s(peer)
        self._due_s = min(self._due_s, at_s)

    def _is_unheard(self, peer: _Peer, now_s: float) -> bool:
        """True for a rank whose daemon is silent: hearing nothing of it says nothing about it."""
        return peer.keeper is not None and now_s >= peer.keeper.heard_s + self._settings.suspect_s

    def _limit_s(self, peer: _Peer) -> float:
        if peer.is_starting:
            return self._settings.startup_s
        return self._settings.dead_s if peer.pulse is Pulse.SUSPECT else self._settings.suspect_s
