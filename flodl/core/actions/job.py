"""What the controller shall do: the output of JobCore."""

from dataclasses import dataclass
from typing import TypeAlias

from flodl.core.actions.record import Record
from flodl.core.position import ResumePoint, SaveReason
from flodl.ids import HostName, Incarnation, RankId, RoundKey
from flodl.messages import Layout, ToDaemon, ToHead


@dataclass(frozen=True, slots=True)
class SendHost:
    """Send ``message`` on the host's control connection; a host that is gone swallows it."""

    host: HostName
    message: ToDaemon


@dataclass(frozen=True, slots=True)
class SendHead:
    """Send ``message`` to the head, if there is one."""

    message: ToHead


@dataclass(frozen=True, slots=True)
class DropHost:
    """Close the host's connections and forget them; no HostDropped follows."""

    host: HostName
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreHost:
    """The host was lost and may come back: bring its daemon up again when it can be reached; its hello may follow."""

    host: HostName


@dataclass(frozen=True, slots=True)
class OpenReduction:
    """CPU plane over several hosts: sum the hosts' streams for ``key`` in this order of hosts.

    ``bf16``: the float32 region comes and goes as bfloat16.
    """

    key: RoundKey
    hosts: tuple[HostName, ...]
    layout: Layout
    bf16: bool = False


@dataclass(frozen=True, slots=True)
class CloseReduction:
    """Drop the reduction ``key``: committed or aborted. Late bytes of it are read and thrown away."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class ResetStore:
    """A new incarnation forms: forget every rendezvous key of earlier ones and refuse their waiters."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class ReceiveState:
    """The final state comes on the host's bulk connection as ``transfer``: store it; StateStored follows."""

    host: HostName
    rank: RankId
    transfer: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TryPlace:
    """Find out whether a checkpoint can be written at ``stem``, and leave nothing behind; PlaceTried follows.

    A checkpoint that lies there is told of, unless it is the one at ``resume_from``.
    """

    stem: str
    resume_from: str = ""


@dataclass(frozen=True, slots=True)
class OpenSave:
    """A whole state will come from ``host`` as ``transfer``: make it the checkpoint at ``stem``; SaveSettled comes.

    So many checkpoints stay, ``keep_last``; with 1 each replaces the one before.
    """

    transfer: int
    host: HostName
    stem: str
    reason: SaveReason
    point: ResumePoint
    keep_last: int = 1


@dataclass(frozen=True, slots=True)
class DropSave:
    """``transfer`` will not come, or comes too late: take back what there is of its checkpoint. Nothing follows."""

    transfer: int


@dataclass(frozen=True, slots=True)
class ReadBundle:
    """Read and check the checkpoint at ``stem``; BundleRead follows."""

    stem: str


@dataclass(frozen=True, slots=True)
class SendBundle:
    """Stream the state of the checkpoint that was read to these hosts, as ``transfer``."""

    transfer: int
    hosts: tuple[HostName, ...]


@dataclass(frozen=True, slots=True)
class StopHead:
    """End the head's process tree: SIGTERM, ``grace_s``, SIGKILL."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class WatchHead:
    """Nothing but the head is left of a run that has been stopped: a script that works is waited for, one that a signal
    has frozen is ended after ``grace_s``.
    """

    grace_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that went wrong. ``rank`` is -1 for a host or the head; ``signal`` 0 unless a signal ended it."""

    kind: str
    host: HostName
    rank: RankId
    error: str
    traceback: str
    exit_code: int
    signal: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended. ``status`` is completed, stopped or failed; ``losses`` were tolerated, ``collateral`` is the
    count of failures that only followed from the first one.
    """

    status: str
    exit_code: int
    message: str
    failure: Failure | None
    losses: tuple[Failure, ...]
    collateral: int


@dataclass(frozen=True, slots=True)
class EndRun:
    """Everything of the run has ended; write the outcome and leave."""

    outcome: Outcome


JobAction: TypeAlias = (
    Record
    | SendHost
    | SendHead
    | DropHost
    | RestoreHost
    | OpenReduction
    | CloseReduction
    | ResetStore
    | ReceiveState
    | TryPlace
    | OpenSave
    | DropSave
    | ReadBundle
    | SendBundle
    | StopHead
    | WatchHead
    | EndRun
)
