"""The join window: which hosts have come, and whether that is enough to start.

States: *waiting* → *enough* (``least`` ranks are there: the window closes at ``join_timeout_s``, or is held for a
person where the start is manual) → *closed*. It closes at once when the target is there: ``target_ranks``, else every
rank of the roster. Hosts that no roster knows come too where the run is elastic, and count. At ``max_join_timeout_s``
too few means failure, naming who never came and why; so does, unless a person may start, a host that cannot be brought
up and without which there are too few. It knows nothing of ranks' processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from flodl.core.counted import counted, there
from flodl.ids import HostName, RankId
from flodl.messages import Device, HostHello


class Verdict(StrEnum):
    """What the window says now."""

    WAIT = "wait"
    START = "start"
    FAIL = "fail"


class StartRule(StrEnum):
    """Who closes the window: its own rules, a person, or whichever comes first."""

    AUTO = "auto"
    MANUAL = "manual"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a host of the roster is not there: ``stage`` as in ``HostFailed``, or join when it is only late."""

    host: HostName
    stage: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        """For a person, on one line."""
        return f"{self.host} ({self.reason if self.stage == 'join' else f'{self.stage}: {self.reason}'})"


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Seconds count from the window's opening. ``min_rank_start`` 0 means ``target_ranks``; where that is 0, too, every
    rank of the roster. ``ranks`` names the global ranks of each host, in the order of its devices, where the cluster
    file does; empty: ranks follow the roster. ``is_elastic`` lets hosts in that no roster knows, now and while the run
    trains. ``managed`` are hosts of the roster that dial in by themselves, and may do so again.
    """

    roster: tuple[HostName, ...]
    min_rank_start: int = 0
    target_ranks: int = 0
    ranks: Mapping[HostName, tuple[RankId, ...]] = field(default_factory=dict)
    join_timeout_s: float = 300.0
    max_join_timeout_s: float = 600.0
    is_elastic: bool = True
    start: StartRule = StartRule.AUTO
    managed: frozenset[HostName] = frozenset()


class JoinWindow:
    """See the module docstring."""

    def __init__(self, settings: JoinSettings, opened_s: float) -> None:
        self.settings = settings
        self._opened_s = opened_s
        self._joined: dict[HostName, HostHello] = {}
        self._absent: dict[HostName, Absence] = {}
        self.departed: dict[HostName, str] = {}
        """Hosts of no roster that came and went before the start, and why."""
        self._is_fired = False

    @property
    def joined(self) -> Mapping[HostName, HostHello]:
        """The hosts that came: the roster's in its order, then the others as they came."""
        order = (*self.settings.roster, *self._joined)
        return {host: self._joined[host] for host in order if host in self._joined}

    @property
    def rank_count(self) -> int:
        """Ranks that are there."""
        return sum(len(hello.devices) for hello in self._joined.values())

    @property
    def least(self) -> int:
        """Ranks without which nothing starts; 0: those of the whole roster, however many they are."""
        return self.settings.min_rank_start or self.settings.target_ranks

    @property
    def closes_at_s(self) -> float | None:
        """When it starts the run with ``least`` ranks; None where a person does."""
        return None if self.settings.start is StartRule.MANUAL else self._opened_s + self.settings.join_timeout_s

    @property
    def fails_at_s(self) -> float:
        """When it fails with fewer than ``least`` ranks."""
        return self._opened_s + self.settings.max_join_timeout_s

    def is_guest(self, host: HostName) -> bool:
        """Whether no roster knows this host."""
        return host not in self.settings.roster

    # -------------------------------------------------------------------------------------------------------- coming
    def stranger(self, host: HostName) -> str:
        """Why no host of this name may join, whatever it offers, or an empty string."""
        if host in self._joined:
            address = self._joined[host].address
            return f"host {host} has already joined this run, from {address}; another machine needs another name"
        if self.is_guest(host) and not self.settings.is_elastic:
            roster = ", ".join(self.settings.roster)
            return f"host {host} is not in this run's roster ({roster}), and join.elastic is false"
        return ""

    def misfit(self, hello: HostHello, is_waiting: bool) -> str:
        """Why what this host offers does not fit, or an empty string. Ranks have their numbers only before the start
        (``is_waiting``).
        """
        if not hello.devices:
            return f"host {hello.host} offers no device"
        ranks = self.settings.ranks.get(hello.host, ()) if is_waiting else ()
        if ranks and len(ranks) != len(hello.devices):
            return f"host {hello.host} offers {counted(len(hello.devices), 'device')} for ranks {list(ranks)}"
        return ""

    def join(self, hello: HostHello) -> None:
        """The host has come."""
        self._joined[hello.host] = hello
        self._absent.pop(hello.host, None)
        self.departed.pop(hello.host, None)

    def refuse(self, host: HostName, reason: str) -> None:
        """A host of the roster came and may not take part; one that has joined already stays."""
        self.fail(Absence(host, "join", f"refused: {reason}", "correct the cluster file or the host"))

    def leave(self, host: HostName, reason: str) -> None:
        """A joined host went away before the start."""
        self._joined.pop(host, None)
        if self.is_guest(host):
            self.departed[host] = reason
        self.fail(Absence(host, "join", reason, "see the host's daemon log"))

    def fail(self, absence: Absence) -> None:
        """A host of the roster could not be brought up; one that has joined all the same stays."""
        if absence.host not in self._joined and not self.is_guest(absence.host):
            self._absent[absence.host] = absence

    def devices(self) -> Sequence[tuple[HostName, Device]]:
        """Every device offered, in the order of ranks: the cluster file's, or the roster's; guests come last."""
        offered = [(host, device) for host, hello in self.joined.items() for device in hello.devices]
        known = [each for each in offered if not self.is_guest(each[0])]
        wanted = [rank for host in self.joined for rank in self.settings.ranks.get(host, ())]
        if len(wanted) != len(known):
            return offered
        return [*(known[place] for place in sorted(range(len(wanted)), key=wanted.__getitem__)), *offered[len(known) :]]

    # ------------------------------------------------------------------------------------------------------- closing
    def fire_refusal(self) -> str:
        """Why a person may not close it now; empty when they may."""
        if self.settings.start is StartRule.AUTO:
            return "it is not held: join.start is auto, and it starts by itself"
        if self.has_least:
            return ""
        missing = ", ".join(str(absence) for absence in self.absences())
        return f"too few ranks: {self.tally()}" + (f"; missing: {missing}" if missing else "")

    def fire(self) -> None:
        """A person closes it."""
        self._is_fired = True

    def verdict(self, now_s: float) -> Verdict:
        """What to do at ``now_s``."""
        if self._is_fired:
            return Verdict.START
        if self.settings.start is not StartRule.MANUAL:
            if self._has_target or (
                self.has_least and (self._is_settled or now_s >= self._opened_s + self.settings.join_timeout_s)
            ):
                return Verdict.START
            if self._is_settled:
                return Verdict.FAIL
        return Verdict.FAIL if self.has_expired(now_s) and not self.has_least else Verdict.WAIT

    def next_deadline_s(self, now_s: float) -> float | None:
        """When the verdict may change without an event."""
        ahead = [at_s for at_s in (self.closes_at_s, self.fails_at_s) if at_s is not None and now_s < at_s]
        return min(ahead, default=None)

    def absences(self) -> tuple[Absence, ...]:
        """Every host of the roster that is not there, in its order."""
        late = "has not joined"
        remedy = "see the host's daemon log; check that it can reach the controller's address and port"
        dialling = "is managed, and has not dialled in"
        check = "fdl daemon status there; check that it knows this controller's address and token"
        return tuple(
            self._absent.get(
                host,
                Absence(host, "join", dialling, check)
                if host in self.settings.managed
                else Absence(host, "join", late, remedy),
            )
            for host in self.settings.roster
            if host not in self._joined
        )

    def has_expired(self, now_s: float) -> bool:
        """Whether the time in which ``least`` ranks had to come is over."""
        return now_s >= self.fails_at_s

    def terms(self) -> str:
        """When it starts and when it fails, for whoever waits; empty where nobody has set terms: then all must come."""
        settings = self.settings
        if not (settings.target_ranks or settings.min_rank_start or settings.start is not StartRule.AUTO):
            return ""
        least = counted(self.least, "rank") if self.least else "all hosts"
        ways = []
        if settings.start is not StartRule.MANUAL:
            all_hosts = "with all hosts" if settings.roster else f"with {least}"
            ways.append(f"with {counted(settings.target_ranks, 'rank')}" if settings.target_ranks else all_hosts)
            if (settings.roster or settings.target_ranks) and self.least != settings.target_ranks:
                ways.append(f"with {least} after {settings.join_timeout_s:g} s")
        if settings.start is not StartRule.AUTO:
            ways.append(f"when fdl start says so, with {least} at least")
        return f"it starts {' or '.join(ways)}; it fails with fewer after {settings.max_join_timeout_s:g} s"

    def tally(self) -> str:
        """How many are there, and how many there shall be."""
        if self.least:
            return there(self.rank_count, self.least, "rank")
        here = sum(not self.is_guest(host) for host in self._joined)
        more = f", and {len(self._joined) - here} more" if len(self._joined) > here else ""
        return f"{there(here, len(self.settings.roster), 'host')}{more}"

    @property
    def _is_roster_there(self) -> bool:
        return all(host in self._joined for host in self.settings.roster)

    @property
    def has_least(self) -> bool:
        """Whether enough are there to start."""
        return self.rank_count >= self.least if self.least else self._is_roster_there

    @property
    def _has_target(self) -> bool:
        if self.settings.target_ranks:
            return self.rank_count >= self.settings.target_ranks
        return self._is_roster_there and self.has_least

    @property
    def _is_settled(self) -> bool:
        """Nobody else can be expected: all others of the roster have failed; of a whole one, that it is a closed world.

        A managed host may dial in again, whatever became of it.
        """
        missing = [host for host in self.settings.roster if host not in self._joined]
        if missing:
            return all(host in self._absent and host not in self.settings.managed for host in missing)
        return not self.settings.is_elastic
