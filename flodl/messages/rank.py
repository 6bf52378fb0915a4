"""What a rank says: through its daemon to the controller, and last to the daemon only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flodl.ids import Incarnation, RankId, RoundKey, Version
from flodl.messages.settings import CallbackKind, Layout, Settings


# ---------------------------------------------------------------------------------------------------- to the controller
@dataclass(frozen=True, slots=True)
class RankReady:
    """Model, optimizer and dataset are built. ``fingerprint`` names what must be equal everywhere."""

    rank: RankId
    settings: Settings
    fingerprint: Mapping[str, str]
    layout: Layout
    merge_single_tail: bool
    backend: str


@dataclass(frozen=True, slots=True)
class RankError:
    """The script's own exception in this rank, before its process ends."""

    rank: RankId
    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """torch.distributed rendezvous: one call on the run's key-value store."""

    rank: RankId
    request: int
    op: str
    keys: tuple[str, ...]
    values: tuple[bytes, ...]
    number: int


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """The rank's group of this incarnation stands (``error`` empty) or its formation failed."""

    rank: RankId
    incarnation: Incarnation
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class MinReached:
    """The rank has done ``min_steps`` of its window and goes on until ``max_steps`` or CloseWindow."""

    rank: RankId
    version: Version


@dataclass(frozen=True, slots=True)
class WindowDone:
    """The rank's window is over; it waits at ``version`` (the consensus it started from) for the round.

    ``samples`` were trained in this window, in grant order. ``delivered_ms`` per full batch runs from the end of the
    first batch to the end of the last and is None with fewer than two steps; ``compute_ms`` per full batch counts only
    the time inside steps. ``window_ms`` is the whole time inside steps. ``scalars`` maps a name to (sum, count).
    ``learning_rate`` is the optimizer's at the window's end (first parameter group); None if it has none.
    ``total_steps`` are the rank's in this run; ``nonfinite_step`` is the first of them in this window whose loss was
    not finite, or 0.
    """

    rank: RankId
    version: Version
    samples: int
    steps: int
    loss_sum: float
    is_finite: bool
    delivered_ms: float | None
    compute_ms: float | None
    window_ms: float
    scalars: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    learning_rate: float | None = None
    total_steps: int = 0
    nonfinite_step: int = 0


@dataclass(frozen=True, slots=True)
class Reduced:
    """This attempt's sum lies in the rank's side buffer, or failed (``error``).

    ``is_finite`` is False when the rank sent zeros because its parameters were not finite. ``divergence`` is
    ``‖pre − post‖ / ‖post‖``; ``reduce_ms`` the time spent.
    """

    rank: RankId
    key: RoundKey
    digest: str
    is_finite: bool
    divergence: float
    reduce_ms: float
    error: str


@dataclass(frozen=True, slots=True)
class SumDescribed:
    """The answer to DescribeSum: 8 bytes of digest per tensor, in the order of ``names``; at most 4,096 of them."""

    rank: RankId
    key: RoundKey
    names: tuple[str, ...]
    digests: bytes


@dataclass(frozen=True, slots=True)
class EvalDone:
    """The elected rank's evaluation: sample-weighted mean, or the callback's error."""

    rank: RankId
    epoch: int
    value: float
    error: str


@dataclass(frozen=True, slots=True)
class CallbackDone:
    """The answer to RunCallback: the function has returned, or raised ``error``."""

    rank: RankId
    kind: CallbackKind
    epoch: int
    error: str


@dataclass(frozen=True, slots=True)
class StateSent:
    """The state that ``transfer`` asks for has been handed to the daemon for streaming (``error`` empty), or could
    not be.
    """

    rank: RankId
    transfer: int
    size_bytes: int
    error: str


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The rank has taken the state of ``transfer`` into model, optimizer and schedule, or could not (``error``).

    ``warnings``: what its script asks for by now, and what goes on instead; a sentence each.
    """

    rank: RankId
    transfer: int
    error: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFinished:
    """Said before the process ends, so that a finished rank is never taken for a dead one."""

    rank: RankId


# --------------------------------------------------------------------------------------------------- to the daemon only
@dataclass(frozen=True, slots=True)
class RankHello:
    """The rank's agent is up; ``pid`` is checked against the spawned process."""

    rank: RankId
    pid: int


@dataclass(frozen=True, slots=True)
class RankAlive:
    """The rank's heartbeat, from a thread of its own."""

    rank: RankId
    steps: int


@dataclass(frozen=True, slots=True)
class RankSignalled:
    """The rank was sent ``signal``, 10 (SIGUSR1) or 15 (SIGTERM); whose it was the daemon knows."""

    rank: RankId
    signal: int


@dataclass(frozen=True, slots=True)
class ContributionWritten:
    """CPU plane: the pre-weighted contribution lies in the rank's slot of the host's shared memory."""

    rank: RankId
    key: RoundKey


@dataclass(frozen=True, slots=True)
class SliceReduced:
    """CPU plane: the rank's slice of the host's sum is complete."""

    rank: RankId
    key: RoundKey
