"""What may happen: the input of the three cores. Frozen, in past participles, with no behaviour.

Every message that a peer sends reaches a core inside one of the ``…Said`` events; effects that a shell carried out
come back as the other ones. Times inside events are measured by the shell in monotonic seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from flodl.core.position import ResumePoint
from flodl.ids import HostName, Incarnation, RankId, RoundKey
from flodl.messages import CallbackKind, DaemonToRank, FromDaemon, FromHead, RankToDaemon, ToDaemon


@dataclass(frozen=True, slots=True)
class Ticked:
    """A deadline that the core asked for has passed."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """This very process did not run for ``gap_s``: nobody's silence in that time counts against them."""

    gap_s: float


# ------------------------------------------------------------------------------------------------ controller (JobCore)
@dataclass(frozen=True, slots=True)
class HostSaid:
    """A daemon's or, through it, a rank's message arrived on the host's control connection."""

    host: HostName
    message: FromDaemon


@dataclass(frozen=True, slots=True)
class HostDropped:
    """The control connection of an admitted host ended: reset, closed or unreadable."""

    host: HostName
    reason: str


@dataclass(frozen=True, slots=True)
class HostFailed:
    """A host of the roster could not be brought up. ``stage``: resolve, connect, host key, auth, start, join."""

    host: HostName
    stage: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class HeadSaid:
    """The head's message arrived."""

    message: FromHead


@dataclass(frozen=True, slots=True)
class HeadExited:
    """The head's process ended with ``code``, or by ``signal`` (> 0)."""

    code: int
    signal: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """An operator wants the run to end: in order, or at once (``abort``)."""

    source: str
    abort: bool
    exit_code: int


@dataclass(frozen=True, slots=True)
class StartAsked:
    """An operator wants the join window to close now, and the run to start with whoever is there."""

    source: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator wants ``host`` to leave the run at the next commit, without loss."""

    host: HostName
    source: str


@dataclass(frozen=True, slots=True)
class StateStored:
    """The final state that ``ReceiveState`` announced lies on disk at ``path``, or could not be stored."""

    path: str
    error: str


@dataclass(frozen=True, slots=True)
class PlaceTried:
    """A checkpoint can be written where ``TryPlace`` said, or not (``error``). ``holds`` says which one lies there."""

    error: str
    holds: str = ""


@dataclass(frozen=True, slots=True)
class SaveSettled:
    """The save of ``transfer`` is committed: the checkpoint at ``path`` is complete; or it could not be (``error``).

    ``warning``: it is complete, and something beside it could not be done.
    """

    transfer: int
    path: str
    error: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class BundleRead:
    """The checkpoint that ``ReadBundle`` named is whole; with ``point`` None it is not, and ``error`` says why."""

    path: str
    point: ResumePoint | None
    error: str


JobEvent: TypeAlias = (
    Ticked
    | Stalled
    | HostSaid
    | HostDropped
    | HostFailed
    | HeadSaid
    | HeadExited
    | StopAsked
    | StartAsked
    | DrainAsked
    | StateStored
    | PlaceTried
    | SaveSettled
    | BundleRead
)


# ---------------------------------------------------------------------------------------------------- daemon (HostCore)
@dataclass(frozen=True, slots=True)
class ControllerSaid:
    """A message from the controller."""

    message: ToDaemon


@dataclass(frozen=True, slots=True)
class ControllerDropped:
    """The control connection was reset or closed: the controller is gone at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A message of a local rank."""

    rank: RankId
    message: RankToDaemon


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A local rank's process has been reaped and its log pipes have been read to their end."""

    rank: RankId
    code: int
    signal: int


@dataclass(frozen=True, slots=True)
class SumReturned:
    """The total of all hosts for ``key`` lies in the result area of shared memory."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class StateLanded:
    """The state of ``transfer`` lies whole in the host's inbox, or this machine cannot hold it (``error``)."""

    transfer: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class PortHeld:
    """The answer to ``HoldPort``: ``port`` is kept, or none is free (``error``). ``address`` reaches the peer, empty
    unless asked for. ``was_taken``: a stranger listens on the port that was held before.
    """

    start: int
    port: int
    address: str
    was_taken: bool
    error: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """Somebody has sent the daemon ``number``, SIGTERM or SIGUSR1; who started it is there still."""

    number: int


@dataclass(frozen=True, slots=True)
class LogsShipped:
    """Every byte the local ranks wrote has been handed to the control connection."""


HostEvent: TypeAlias = (
    Ticked
    | Stalled
    | ControllerSaid
    | ControllerDropped
    | RankSaid
    | RankEnded
    | SumReturned
    | StateLanded
    | PortHeld
    | Signalled
    | LogsShipped
)


# ------------------------------------------------------------------------------------------------------ rank (RankCore)
@dataclass(frozen=True, slots=True)
class DaemonSaid:
    """A message from the controller or the daemon."""

    message: DaemonToRank


@dataclass(frozen=True, slots=True)
class DaemonDropped:
    """The daemon's socket closed: nothing more can be said or heard."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step over ``samples`` samples ended; the times are the rank's monotonic clock."""

    samples: int
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The model as it was at the window's end is kept; whether every parameter and float buffer of it was finite."""

    is_finite: bool


@dataclass(frozen=True, slots=True)
class WindowAccounted:
    """What the shell summed over the window: loss weighted by samples, finiteness, user scalars as (sum, count).

    ``learning_rate`` is that of the optimizer's first parameter group; None if it has none. ``nonfinite_step`` is the
    first step of the window, counted from 1, whose loss was not finite; 0 if there was none.
    """

    loss_sum: float
    is_finite: bool
    scalars: Mapping[str, tuple[float, int]]
    learning_rate: float | None = None
    nonfinite_step: int = 0


@dataclass(frozen=True, slots=True)
class GroupSettled:
    """The formation that ``FormCollective`` started has ended; ``error`` is empty when the group stands."""

    incarnation: Incarnation
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class Packed:
    """The contribution is written; ``is_finite`` False means that zeros were written in its place."""

    key: RoundKey
    is_finite: bool


@dataclass(frozen=True, slots=True)
class SliceSummed:
    """CPU plane: this rank's slice of the host's sum is written."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class SumReady:
    """The consensus lies in the side buffer (or ``error``); digest and divergence were taken on the way."""

    key: RoundKey
    digest: str
    divergence: float
    error: str


@dataclass(frozen=True, slots=True)
class TensorsDigested:
    """What the side buffer of ``key`` holds: 8 bytes of digest per tensor, in the order of ``names``."""

    key: RoundKey
    names: tuple[str, ...]
    digests: bytes


@dataclass(frozen=True, slots=True)
class Evaluated:
    """``eval_fn`` ran over the whole evaluation dataset."""

    epoch: int
    value: float
    error: str


@dataclass(frozen=True, slots=True)
class CalledBack:
    """The script's function has returned, or raised ``error``."""

    kind: CallbackKind
    epoch: int
    error: str


@dataclass(frozen=True, slots=True)
class StateWritten:
    """What ``WriteState`` asked for lies in the rank's outbox."""

    transfer: int
    size_bytes: int
    error: str


@dataclass(frozen=True, slots=True)
class StateTaken:
    """Model, optimizer and schedule are as the state of ``transfer`` says, or it does not fit (``error``).

    ``warnings`` as in ``StateLoaded``.
    """

    transfer: int
    error: str
    warnings: tuple[str, ...] = ()


RankEvent: TypeAlias = (
    Ticked
    | DaemonSaid
    | DaemonDropped
    | StepDone
    | SnapshotTaken
    | WindowAccounted
    | GroupSettled
    | Packed
    | SliceSummed
    | SumReady
    | TensorsDigested
    | Evaluated
    | CalledBack
    | StateWritten
    | StateTaken
)
