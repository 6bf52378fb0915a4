"""What shall be done: the output of the three cores. Frozen imperatives, executed in list order by a shell.

No action returns a value to the core; what comes of it comes back as an event (``flodl.core.events``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from flodl.core.position import ResumePoint, SaveReason
from flodl.ids import Grant, HostName, Incarnation, RankId, RoundKey
from flodl.messages import (
    CallbackKind,
    DaemonToRank,
    FromDaemon,
    Layout,
    PlainGroup,
    RankSpec,
    RankToDaemon,
    Scalar,
    ToDaemon,
    ToHead,
)


class Severity(StrEnum):
    """How much a recorded event matters: critical means that something was lost."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Record:
    """Write one line to the run's event log. ``event`` is a short class name such as ``rank_lost``."""

    event: str
    severity: Severity
    detail: str
    fields: Mapping[str, Scalar | tuple[object, ...]]


# ------------------------------------------------------------------------------------------------ controller (JobCore)
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
    """Find out whether a checkpoint can be written at ``stem``, and leave nothing behind; PlaceTried follows."""

    stem: str


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


# ---------------------------------------------------------------------------------------------------- daemon (HostCore)
@dataclass(frozen=True, slots=True)
class SendController:
    """Send ``message`` upstream; dropped silently when the controller is gone."""

    message: FromDaemon


@dataclass(frozen=True, slots=True)
class SendRank:
    """Send ``message`` to a local rank; a rank that is gone swallows it."""

    rank: RankId
    message: DaemonToRank


@dataclass(frozen=True, slots=True)
class SpawnRank:
    """Start one rank's process; with ``plain`` it runs without the engine."""

    spec: RankSpec
    world_size: int
    local_world_size: int
    plain: PlainGroup | None = None


@dataclass(frozen=True, slots=True)
class HoldPort:
    """Keep a free port for a rank that will ask for it by number, instead of the one before; PortHeld follows.

    ``peer``: find out which address of this machine reaches it, too; empty when that is known.
    """

    start: int
    peer: str


@dataclass(frozen=True, slots=True)
class TerminateRank:
    """SIGTERM to the rank's own process."""

    rank: RankId


@dataclass(frozen=True, slots=True)
class KillRankTree:
    """SIGKILL to everything the rank ever started."""

    rank: RankId


@dataclass(frozen=True, slots=True)
class StreamSum:
    """Send the host's sum (the result area) upstream and put the total in its place; SumReturned follows.

    ``bf16``: as in ``OpenReduction``.
    """

    key: RoundKey
    layout: Layout
    bf16: bool = False


@dataclass(frozen=True, slots=True)
class CancelStream:
    """Stop streaming ``key``; what still arrives for it is thrown away."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class StreamState:
    """Send ``size_bytes`` of the rank's outbox upstream as ``transfer``."""

    rank: RankId
    transfer: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class EmptyInbox:
    """Every rank of the host has taken the state of ``transfer``: let go of the memory in which it lies."""

    transfer: int


@dataclass(frozen=True, slots=True)
class ShipLogs:
    """Ship what the ranks' spools still hold; LogsShipped follows when all of it is sent."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End the daemon's process with ``exit_code``. ``reason`` is said once, in the daemon's log."""

    reason: str
    exit_code: int


HostAction: TypeAlias = (
    Record
    | SendController
    | SendRank
    | SpawnRank
    | HoldPort
    | TerminateRank
    | KillRankTree
    | StreamSum
    | CancelStream
    | StreamState
    | EmptyInbox
    | ShipLogs
    | Leave
)


# ------------------------------------------------------------------------------------------------------ rank (RankCore)
@dataclass(frozen=True, slots=True)
class SendUp:
    """Send ``message`` to the daemon."""

    message: RankToDaemon


@dataclass(frozen=True, slots=True)
class LoadAhead:
    """A new lease: start loading its batches, behind those of earlier grants."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """A window begins: ``progress_samples`` of the run are merged; each step moves the run on by ``stride`` batches.

    ``steps`` of the window are done already, beyond the one before.
    """

    progress_samples: int
    stride: float
    steps: int


@dataclass(frozen=True, slots=True)
class AccountWindow:
    """The window is over: report and reset the shell's sums (WindowAccounted follows)."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Asynchronous mode: keep what the rank gives to the next round, so that it can train on (SnapshotTaken follows).

    ``is_untouched``: the rank has done no step since the last round; it gives the consensus itself.
    """

    is_untouched: bool


@dataclass(frozen=True, slots=True)
class FormCollective:
    """Abandon any older group and form this incarnation's in the background; GroupSettled follows."""

    incarnation: Incarnation
    attempt: int
    ranks: tuple[RankId, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pack:
    """Write the pre-weighted contribution into the side buffer (collective) or the slot (CPU plane); Packed follows."""

    key: RoundKey
    weight: float
    buffer_weight: float
    include_raw: bool
    owns_raw: bool


@dataclass(frozen=True, slots=True)
class ReduceCollective:
    """All-reduce the side buffer over the group, in the background; SumReady follows."""

    key: RoundKey
    include_raw: bool


@dataclass(frozen=True, slots=True)
class SumSlice:
    """CPU plane: reduce slice ``index`` of ``slices`` over ``slots`` into the result area; SliceSummed follows."""

    key: RoundKey
    index: int
    slices: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeResult:
    """CPU plane: digest the result area and make it the side buffer; SumReady follows."""

    key: RoundKey
    include_raw: bool


@dataclass(frozen=True, slots=True)
class DigestTensors:
    """Digest the side buffer tensor by tensor, to name what differs between ranks; TensorsDigested follows."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class AbandonReduce:
    """Park or drop everything of ``key``: its sum must never be adopted. ``group_too``: the group is stuck or stale."""

    key: RoundKey
    group_too: bool


@dataclass(frozen=True, slots=True)
class Adopt:
    """Copy the side buffer into the model. ``take_raw`` replaces integer and bool buffers too."""

    key: RoundKey
    take_raw: bool


@dataclass(frozen=True, slots=True)
class Blend:
    """Asynchronous mode: move the model towards the side buffer, and keep that as the consensus."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class BackUp:
    """A round is committed: what the optimizer remembers now is what ``RollBack`` returns to."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """A round is committed that this rank's work was left out of, not being finite: back to the last ``BackUp``."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run ``eval_fn`` over the evaluation dataset; Evaluated follows."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CallBack:
    """Call the script's function of this kind for ``epoch``; CalledBack follows."""

    kind: CallbackKind
    epoch: int


@dataclass(frozen=True, slots=True)
class WriteState:
    """Put the consensus into the outbox; StateWritten follows. ``whole``: with all that a checkpoint needs, from a
    copy, while the rank trains on.
    """

    transfer: int
    whole: bool


@dataclass(frozen=True, slots=True)
class TakeState:
    """Load the state that lies in the host's inbox; StateTaken follows."""

    transfer: int


@dataclass(frozen=True, slots=True)
class EndRank:
    """Training in this rank is over; ``join()`` ends the process with ``exit_code``."""

    reason: str
    exit_code: int


RankAction: TypeAlias = (
    SendUp
    | LoadAhead
    | OpenWindow
    | AccountWindow
    | TakeSnapshot
    | FormCollective
    | Pack
    | ReduceCollective
    | SumSlice
    | TakeResult
    | DigestTensors
    | AbandonReduce
    | Adopt
    | Blend
    | BackUp
    | RollBack
    | Evaluate
    | CallBack
    | WriteState
    | TakeState
    | EndRank
)
