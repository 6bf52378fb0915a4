"""Every word that crosses a wire, as frozen dataclasses; ``flodl.wire.codec`` turns them into bytes and back.

Fields are ints, floats, strings, bytes, bools, None where stated, tuples of those, string-keyed mappings of scalars
and nested dataclasses of this module or ``flodl.ids``. The codec checks every field against its annotation.

Who may say what is fixed by the unions at the end: a message of another union on a connection is a protocol error.
A message whose first field is ``rank`` travels through the rank's daemon in both directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from flodl.ids import Grant, HostName, Incarnation, RankId, RoundKey, Version

Scalar: TypeAlias = int | float | str | bool | None


# --------------------------------------------------------------------------------------------------------- settings
class Mode(StrEnum):
    """When a round fires and how parameters are averaged (docs/engine.md)."""

    NCCL_SYNC = "nccl_sync"
    NCCL_CADENCE = "nccl_cadence"
    CPU_SYNC = "cpu_sync"
    CPU_CADENCE = "cpu_cadence"
    CPU_ASYNC = "cpu_async"

    @property
    def is_sync(self) -> bool:
        """A round after every live rank's first step, samples split equally."""
        return self in (Mode.NCCL_SYNC, Mode.CPU_SYNC)

    @property
    def is_async(self) -> bool:
        """No rank waits for an averaging: it trains on, and blends the consensus in when that is published."""
        return self is Mode.CPU_ASYNC

    @property
    def is_collective(self) -> bool:
        """Averaged by torch.distributed between the ranks; else on the CPU plane."""
        return self in (Mode.NCCL_SYNC, Mode.NCCL_CADENCE)


class Precision(StrEnum):
    """What ``train_step`` computes in; parameters keep their own dtype."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class GuardKind(StrEnum):
    """Which convergence guard judges the rounds (``flodl.core.guards``); a user's own lives in the head."""

    NONE = "none"
    TREND = "trend"
    MSF = "msf"
    USER = "user"


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """A convergence guard and its numbers: ``threshold`` is TrendGuard's, the rest is MsfGuard's."""

    kind: GuardKind = GuardKind.TREND
    threshold: float = 0.05
    suppress_above: float = 1e-3
    suppress_rounds: int = 3
    nudge_above: float = 1e-2
    nudge_rounds: int = 3
    nudge_factor: float = 0.5


@dataclass(frozen=True, slots=True)
class CadenceSettings:
    """What ElChe needs to know; the defaults are the reference's.

    ``anchor`` None takes the mode's default (10; sync 1). ``max_batch_diff`` None means no cap. Of the asynchronous
    mode are ``easgd_alpha``, the weight of the consensus in a blend, in (0, 1], and ``max_overshoot``, the steps that a
    rank may do beyond its count before it waits for the round: None is one more window. ``partition_ratios`` are sync
    modes' fixed shares of an epoch by rank; None deals equally.
    """

    mode: Mode = Mode.NCCL_CADENCE
    anchor: int | None = None
    min_anchor: int = 1
    max_anchor: int = 1000
    overhead_target: float = 0.05
    max_batch_diff: int | None = None
    gamma: float = 1.0
    easgd_alpha: float = 0.5
    max_overshoot: int | None = None
    guard: GuardSettings = GuardSettings()
    meta_controller: bool = True
    relax_up: bool = False
    partition_ratios: tuple[float, ...] | None = None
    bf16_wire: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What every participant must agree on before training starts; compared field by field.

    ``eval_samples`` is 0 without an evaluation. ``callback_rank`` None elects the fastest rank.
    ``num_epochs`` counts passes over the data, each delivered as ``epoch_splits`` epochs. ``accumulate`` says how many
    micro-batches make a full batch.
    """

    dataset_size: int
    batch_size: int
    num_epochs: int
    seed: int
    cadence: CadenceSettings
    max_grad_norm: float | None = None
    eval_samples: int = 0
    callback_rank: RankId | None = None
    epoch_splits: int = 1
    lr_scale_ratio: float = 0.0
    precision: Precision = Precision.FP32
    accumulate: int = 1
    max_nonfinite: int = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat image of a model: float32 sums, float64 sums, then raw bytes of integer and bool buffers.

    Each region starts at a multiple of 64 bytes in the order f32, f64, raw.
    """

    f32_count: int
    f64_count: int
    raw_bytes: int

    @property
    def f64_offset(self) -> int:
        """Byte offset of the float64 region."""
        return _align(self.f32_count * 4)

    @property
    def raw_offset(self) -> int:
        """Byte offset of the raw region."""
        return self.f64_offset + _align(self.f64_count * 8)

    @property
    def total_bytes(self) -> int:
        """Size of the whole image, a multiple of 64."""
        return self.raw_offset + _align(self.raw_bytes)


def _align(size: int) -> int:
    return (size + 63) // 64 * 64


# -------------------------------------------------------------------------------------------------------- handshake
@dataclass(frozen=True, slots=True)
class Hello:
    """First word of a connecting peer. ``role`` is daemon, head or client; ``channel`` control or bulk."""

    protocol: int
    run_id: str
    role: str
    channel: str
    host: HostName
    nonce: bytes
    flodl_version: str


@dataclass(frozen=True, slots=True)
class Challenge:
    """The server's fresh nonce and its proof over both nonces, so that trust is mutual."""

    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The peer's proof."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is open. ``controller_version`` is flodl's version at the controller."""

    controller_version: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection closes after this; ``reason`` is written for a person."""

    reason: str


# ------------------------------------------------------------------------------------------------- daemon → controller
@dataclass(frozen=True, slots=True)
class Device:
    """One device as offered. ``kind`` is cpu or cuda, ``index`` the local ordinal, ``id`` the opaque pin (UUID)."""

    kind: str
    index: int
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class HostHello:
    """A daemon introduces its host. ``address`` is the local address that reached the controller."""

    host: HostName
    pid: int
    machine_id: str
    address: str
    devices: tuple[Device, ...]
    cores: int
    python: str
    torch: str
    flodl: str


@dataclass(frozen=True, slots=True)
class RankBeat:
    """One rank as its daemon sees it: ``age_ms`` since its own heartbeat, its step counter.

    ``has_beaten`` is False until the rank's agent has spoken once (imports and model building come before).
    """

    rank: RankId
    has_beaten: bool
    age_ms: int
    steps: int
    rss_bytes: int


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
    """Bytes of a rank's stdout or stderr. ``offset`` counts from the stream's first byte: repeats are dropped."""

    rank: RankId
    stream: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class HostStopped:
    """All ranks of the host are gone and the daemon is about to leave."""

    host: HostName
    reason: str


# ------------------------------------------------------------------------------------------- rank → daemon → controller
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
class StateSent:
    """The final state has been handed to the daemon for streaming (``error`` empty), or could not be."""

    rank: RankId
    size_bytes: int
    error: str


@dataclass(frozen=True, slots=True)
class RankFinished:
    """Said before the process ends, so that a finished rank is never taken for a dead one."""

    rank: RankId


# ------------------------------------------------------------------------------------------------- rank ↔ daemon only
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
class ContributionWritten:
    """CPU plane: the pre-weighted contribution lies in the rank's slot of the host's shared memory."""

    rank: RankId
    key: RoundKey


@dataclass(frozen=True, slots=True)
class SliceReduced:
    """CPU plane: the rank's slice of the host's sum is complete."""

    rank: RankId
    key: RoundKey


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


# ------------------------------------------------------------------------------------------------- controller → daemon
@dataclass(frozen=True, slots=True)
class RankSpec:
    """One process to spawn."""

    rank: RankId
    local_rank: int
    device: Device


@dataclass(frozen=True, slots=True)
class SpawnRanks:
    """Start these ranks. Interpreter, script, arguments, environment and folder came with the bootstrap."""

    world_size: int
    ranks: tuple[RankSpec, ...]


@dataclass(frozen=True, slots=True)
class OpenRound:
    """CPU plane: a round starts on this host with these local ranks; with ``hosts`` > 1 the sum goes upstream, and with
    ``bf16`` its float32 region crosses the network as bfloat16.
    """

    key: RoundKey
    ranks: tuple[RankId, ...]
    layout: Layout
    hosts: int
    bf16: bool = False


@dataclass(frozen=True, slots=True)
class CloseRound:
    """CPU plane: drop all work on this key; its buffers may be used again."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class KillRank:
    """End this rank's process tree now (stuck, replaced or evicted)."""

    rank: RankId
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """The controller's answer to a Beat: it is alive."""


@dataclass(frozen=True, slots=True)
class StopHost:
    """End all ranks (SIGTERM, ``grace_s``, SIGKILL to the trees), ship the logs, say HostStopped, leave."""

    reason: str
    grace_s: float


# ------------------------------------------------------------------------------------------- controller → daemon → rank
@dataclass(frozen=True, slots=True)
class Admitted:
    """All ranks agreed; ``ranks`` are the live ones. Training follows."""

    rank: RankId
    world_size: int
    ranks: tuple[RankId, ...]


@dataclass(frozen=True, slots=True)
class StoreReply:
    """Answer to a StoreRequest; ``found`` False where a key or the wait failed."""

    rank: RankId
    request: int
    found: bool
    values: tuple[bytes, ...]
    number: int


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Form the collective group of ``ranks`` for this incarnation; abandon any earlier attempt or group."""

    rank: RankId
    incarnation: Incarnation
    attempt: int
    ranks: tuple[RankId, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The next window on top of ``version``: at least ``min_steps``, at most ``max_steps``; ``grants`` are new leases.

    Grants are consumed in order of arrival and outlive the window. With ``max_steps`` 0 the rank is done at once.
    ``progress_samples`` are merged so far, over all epochs and ranks; ``stride`` is how many batches all ranks together
    train while this one does a step.
    """

    rank: RankId
    version: Version
    min_steps: int
    max_steps: int
    grants: tuple[Grant, ...]
    progress_samples: int = 0
    stride: float = 1.0


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """End the window on top of ``version`` at the next batch boundary."""

    rank: RankId
    version: Version


@dataclass(frozen=True, slots=True)
class StartRound:
    """Go: reduce now. ``weight`` is this rank's share for parameters (0: it sends zeros), ``buffer_weight`` for float
    buffers; ``raw_source`` is the rank whose integer and bool buffers everyone takes (None: each keeps its own).
    """

    rank: RankId
    key: RoundKey
    weight: float
    buffer_weight: float
    raw_source: RankId | None


@dataclass(frozen=True, slots=True)
class DescribeSum:
    """The digests of this attempt differ: say what the rank holds, tensor by tensor. The abort of it follows."""

    rank: RankId
    key: RoundKey


@dataclass(frozen=True, slots=True)
class AbortRound:
    """This attempt never was: drop its sum, keep the parameters untouched, wait for the next StartRound."""

    rank: RankId
    key: RoundKey
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The round is published: adopt the side buffer as ``key.version``."""

    rank: RankId
    key: RoundKey


@dataclass(frozen=True, slots=True)
class RunEval:
    """The elected rank evaluates the consensus it holds; asked between Commit and the next WindowPlan."""

    rank: RankId
    epoch: int


@dataclass(frozen=True, slots=True)
class SendState:
    """Hand the consensus to the daemon for streaming to the controller."""

    rank: RankId


@dataclass(frozen=True, slots=True)
class FinishRank:
    """The work is done: say RankFinished and end."""

    rank: RankId
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """The rank is no member any more: end without a word."""

    rank: RankId
    reason: str


# ----------------------------------------------------------------------------------------------------- head and client
@dataclass(frozen=True, slots=True)
class HeadReady:
    """The script's settings as the head sees them; compared with the ranks'."""

    settings: Settings
    fingerprint: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HeadError:
    """The head's own exception, before it ends."""

    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Orderly stop (one more round, then everything ends), or ``abort`` at once. ``source`` says who asked."""

    source: str
    abort: bool
    exit_code: int


@dataclass(frozen=True, slots=True)
class StopAccepted:
    """The controller has heard a StopRequest; ``phase`` is the run's phase then."""

    phase: str


class GuardVerdict(StrEnum):
    """What a convergence guard says to a round's proposal: commit it, drop a growth, or cut the anchor instead."""

    STABLE = "stable"
    SUPPRESS_GROWTH = "suppress_growth"
    NUDGE_DOWN = "nudge_down"


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """A committed round, as its convergence guard sees it.

    ``divergence`` is the mean of ``‖pre − post‖ / ‖post‖`` over the ranks that trained, ≥ 0 and finite. ``k_max`` is
    the most steps of a rank in the window. ``anchor`` is the window's, ``proposed_anchor`` what the overhead asks for.
    """

    version: Version
    divergence: float
    k_max: int
    anchor: int
    proposed_anchor: int


@dataclass(frozen=True, slots=True)
class JudgeRound:
    """The user's convergence guard shall judge this round, soon: nobody waits for it."""

    figures: RoundFigures


@dataclass(frozen=True, slots=True)
class RoundJudged:
    """The user's guard has answered, or failed (``error``). ``factor`` counts with ``nudge_down`` only."""

    version: Version
    verdict: GuardVerdict
    factor: float
    error: str


@dataclass(frozen=True, slots=True)
class EpochReport:
    """One closed epoch. Per-rank mappings are keyed by the rank as a string; ``epoch_ms`` is the slowest rank's."""

    epoch: int
    avg_loss: float | None
    epoch_ms: float
    samples: int
    version: Version
    scalars: Mapping[str, float]
    per_rank_loss: Mapping[str, float]
    per_rank_samples: Mapping[str, int]
    per_rank_throughput: Mapping[str, float]
    per_rank_batch_share: Mapping[str, float]
    device_indices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The evaluation after ``epoch``."""

    epoch: int
    value: float


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Training is over. ``state_path`` names the file with the final state on the head's machine, empty without one."""

    outcome: str
    message: str
    state_path: str


# --------------------------------------------------------------------------------------------------- who says what
FromRank: TypeAlias = (
    RankReady
    | RankError
    | StoreRequest
    | GroupFormed
    | MinReached
    | WindowDone
    | Reduced
    | SumDescribed
    | EvalDone
    | StateSent
    | RankFinished
)
RankToDaemon: TypeAlias = FromRank | RankHello | RankAlive | ContributionWritten | SliceReduced
ToRank: TypeAlias = (
    Admitted
    | StoreReply
    | FormGroup
    | WindowPlan
    | CloseWindow
    | StartRound
    | DescribeSum
    | AbortRound
    | Commit
    | RunEval
    | SendState
    | FinishRank
    | Evict
)
DaemonToRank: TypeAlias = ToRank | ReduceSlice | ResultReady
FromDaemon: TypeAlias = HostHello | Beat | RankExited | LogChunk | HostStopped | FromRank
ToDaemon: TypeAlias = SpawnRanks | OpenRound | CloseRound | KillRank | Heard | StopHost | ToRank
FromHead: TypeAlias = HeadReady | HeadError | StopRequest | RoundJudged
ToHead: TypeAlias = EpochReport | EvalReport | RunEnded | JudgeRound
FromClient: TypeAlias = StopRequest
ToClient: TypeAlias = StopAccepted
Handshake: TypeAlias = Hello | Challenge | Answer | Welcome | Refused
Message: TypeAlias = (
    Handshake | RankToDaemon | DaemonToRank | FromDaemon | ToDaemon | FromHead | ToHead | FromClient | ToClient
)
