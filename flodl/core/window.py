"""The join window: which hosts have come, and whether that is enough to start.

States: *waiting* → *open for late comers* (quorum reached before ``join_timeout_s``) → *closed*. The window starts the
run when every host of the roster has joined, or when the join timeout has passed and at least ``min_rank_start`` ranks
are there; at ``max_join_timeout_s`` too few means failure, naming who never came and why. It knows nothing of ranks'
processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from flodl.ids import HostName, RankId
from flodl.messages import Device, HostHello


class Verdict(StrEnum):
    """What the window says now."""

    WAIT = "wait"
    START = "start"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a host of the roster is not there: ``stage`` as in ``HostFailed``, or join when it is only late."""

    host: HostName
    stage: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Seconds count from the window's opening. ``min_rank_start`` 0 means every rank of the roster; with
    ``target_ranks`` > 0 the run starts as soon as that many are there. ``ranks`` names the global ranks of each host,
    in the order of its devices, where the cluster file does; empty: ranks follow the roster. ``is_elastic`` lets hosts
    join a run that trains.
    """

    roster: tuple[HostName, ...]
    min_rank_start: int = 0
    target_ranks: int = 0
    ranks: Mapping[HostName, tuple[RankId, ...]] = field(default_factory=dict)
    join_timeout_s: float = 300.0
    max_join_timeout_s: float = 600.0
    is_elastic: bool = True


class JoinWindow:
    """See the module docstring."""

    def __init__(self, settings: JoinSettings, opened_s: float) -> None:
        self._settings = settings
        self._opened_s = opened_s
        self._joined: dict[HostName, HostHello] = {}
        self._absent: dict[HostName, Absence] = {}

    @property
    def joined(self) -> Mapping[HostName, HostHello]:
        """The hosts that came, in roster order."""
        return {host: self._joined[host] for host in self._settings.roster if host in self._joined}

    def stranger(self, host: HostName) -> str:
        """Why no host of this name may join, whatever it offers, or an empty string."""
        if host not in self._settings.roster:
            return f"host {host} is not in this run's roster ({', '.join(self._settings.roster)})"
        if host in self._joined:
            return f"host {host} has already joined this run"
        return ""

    def misfit(self, hello: HostHello, is_waiting: bool) -> str:
        """Why what this host offers does not fit, or an empty string. Ranks have their numbers only before the start
        (``is_waiting``).
        """
        if not hello.devices:
            return f"host {hello.host} offers no device"
        ranks = self._settings.ranks.get(hello.host, ()) if is_waiting else ()
        if ranks and len(ranks) != len(hello.devices):
            return f"host {hello.host} offers {len(hello.devices)} device(s) for ranks {list(ranks)}"
        return ""

    def join(self, hello: HostHello) -> None:
        """The host has come."""
        self._joined[hello.host] = hello
        self._absent.pop(hello.host, None)

    def refuse(self, host: HostName, reason: str) -> None:
        """A host of the roster came and may not take part; one that has joined already stays."""
        if host in self._settings.roster and host not in self._joined:
            self._absent[host] = Absence(host, "join", f"refused: {reason}", "correct the cluster file or the host")

    def leave(self, host: HostName, reason: str) -> None:
        """A joined host went away before the start."""
        self._joined.pop(host, None)
        self._absent[host] = Absence(host, "join", reason, "see the host's daemon log")

    def fail(self, absence: Absence) -> None:
        """The host could not be brought up; one that has joined all the same stays."""
        if absence.host not in self._joined:
            self._absent[absence.host] = absence

    def devices(self) -> Sequence[tuple[HostName, Device]]:
        """Every device offered, in the order of ranks: the cluster file's, or the roster's."""
        offered = [(host, device) for host, hello in self.joined.items() for device in hello.devices]
        wanted = [rank for host in self.joined for rank in self._settings.ranks.get(host, ())]
        if len(wanted) != len(offered):
            return offered
        return [offered[place] for place in sorted(range(len(wanted)), key=wanted.__getitem__)]

    def verdict(self, now_s: float) -> Verdict:
        """What to do at ``now_s``."""
        waiting = len(self._settings.roster) - len(self._joined) - len(self._absent)
        is_full = 0 < self._settings.target_ranks <= len(self.devices())
        if is_full or (waiting == 0 and not self._absent):
            return Verdict.START
        enough = 0 < self._settings.min_rank_start <= len(self.devices())
        if waiting == 0:
            return Verdict.START if enough else Verdict.FAIL
        if enough and now_s >= self._opened_s + self._settings.join_timeout_s:
            return Verdict.START
        if now_s >= self._opened_s + self._settings.max_join_timeout_s:
            return Verdict.FAIL
        return Verdict.WAIT

    def next_deadline_s(self, now_s: float) -> float:
        """When the verdict may change without an event."""
        soft_s = self._opened_s + self._settings.join_timeout_s
        return soft_s if now_s < soft_s else self._opened_s + self._settings.max_join_timeout_s

    def absences(self) -> tuple[Absence, ...]:
        """Everyone who is not there, in roster order."""
        late = "has not joined"
        remedy = "see the host's daemon log; check that it can reach the controller's address and port"
        return tuple(
            self._absent.get(host, Absence(host, "join", late, remedy))
            for host in self._settings.roster
            if host not in self._joined
        )
