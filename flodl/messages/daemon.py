"""What a daemon says: to the controller, and last to its own ranks."""

from dataclasses import dataclass

from flodl.ids import HostName, RankId, RoundKey


# ---------------------------------------------------------------------------------------------------- to the controller
@dataclass(frozen=True, slots=True)
class Device:
    """One device as offered. ``kind`` is cpu, cuda (NVIDIA) or rocm (AMD; nobody offers it yet), ``index`` the local
    ordinal, ``id`` the opaque pin (UUID).
    """

    kind: str
    index: int
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class HostHello:
    """A daemon introduces its host. ``address`` is the local address that reached the controller; ``tunnelled``: only
    this end of an ssh session did, so that no other host reaches this one there.
    """

    host: HostName
    pid: int
    machine_id: str
    address: str
    devices: tuple[Device, ...]
    cores: int
    python: str
    torch: str
    flodl: str
    tunnelled: bool = False


@dataclass(frozen=True, slots=True)
class RankBeat:
    """One rank as its daemon sees it: ``age_ms`` since its own heartbeat, its step counter, its ``pid`` on that host.

    ``pid`` and ``rss_bytes`` are 0 until they have been measured.
    ``has_beaten`` is False until the rank's agent has spoken once (imports and model building come before).
    ``is_frozen``: a signal such as SIGSTOP has stopped the process.
    """

    rank: RankId
    has_beaten: bool
    age_ms: int
    steps: int
    rss_bytes: int
    pid: int = 0
    is_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """The host is alive; sent every ``heartbeat_s`` whatever the ranks do."""

    host: HostName
    ranks: tuple[RankBeat, ...]


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process ended: ``code`` its exit code, or ``signal`` (>0) when a signal ended it.

    ``by_us`` says that the daemon ended it on the controller's word or after a rank's own finish.
    """

    rank: RankId
    code: int
    signal: int
    by_us: bool


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of a rank's stdout or stderr. ``offset`` counts from the first byte that this daemon has of it, in
    all starts of the rank: repeats are dropped.
    """

    rank: RankId
    stream: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class HostStopped:
    """All ranks of the host are gone and the daemon is about to leave."""

    host: HostName
    reason: str


@dataclass(frozen=True, slots=True)
class StopWanted:
    """Somebody else has sent ``signal`` (10 is SIGUSR1, 15 SIGTERM) to this rank, or with -1 to the daemon itself: the
    run shall save, then stop.
    """

    host: HostName
    rank: RankId
    signal: int


@dataclass(frozen=True, slots=True)
class PortPicked:
    """The answer to PickPort: ``port`` is kept for a rank of this host that asks for it by number, or none is free
    (``error``). ``address`` is ours as the peer reaches it, empty unless asked for. ``was_taken``: a stranger listens
    on the port that was picked before.
    """

    host: HostName
    start: int
    port: int
    address: str
    was_taken: bool
    error: str


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """A walk-in must go: it leaves at the next commit; where the run cannot go on without it, the run shall save, then
    stop. ``source`` says who told it.
    """

    host: HostName
    source: str


# ---------------------------------------------------------------------------------------------------------- to the rank
@dataclass(frozen=True, slots=True)
class ReduceSlice:
    """CPU plane: every local contribution is written; reduce slice ``index`` of ``slices`` over ``slots``."""

    rank: RankId
    key: RoundKey
    index: int
    slices: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResultReady:
    """CPU plane: the consensus lies in the result area."""

    rank: RankId
    key: RoundKey
