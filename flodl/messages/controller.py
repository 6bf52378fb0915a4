"""What the controller says: to daemons, through them to ranks, to the head, to a client."""

from collections.abc import Mapping
from dataclasses import dataclass

from flodl.ids import Grant, HostName, Incarnation, RankId, RoundKey, Version
from flodl.messages.daemon import Device
from flodl.messages.settings import CallbackKind, Layout


# ---------------------------------------------------------------------------------------------------------- to a daemon
@dataclass(frozen=True, slots=True)
class RankSpec:
    """One process to spawn."""

    rank: RankId
    local_rank: int
    device: Device


@dataclass(frozen=True, slots=True)
class PlainGroup:
    """What the ranks of a plain run on one host are told of each other, in torchrun's words.

    ``group_rank`` is the host's place among ``group_world_size`` hosts; ``gpus`` are the pins of its GPUs, in the order
    of local ranks. ``restart`` counts from 0.
    """

    master_addr: str
    master_port: int
    group_rank: int
    group_world_size: int
    restart: int
    max_restarts: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpawnRanks:
    """Start these ranks. Interpreter, script, arguments, environment and folder came with the bootstrap.

    With ``plain`` they run without the engine, and may be started again under the same numbers once all have ended.
    """

    world_size: int
    ranks: tuple[RankSpec, ...]
    plain: PlainGroup | None = None


@dataclass(frozen=True, slots=True)
class PickPort:
    """Plain runs: keep a port free at which the ranks of this ``start`` can meet; PortPicked answers.

    ``peer``: say which address of yours reaches this one, too; empty when that is known.
    """

    start: int
    peer: str


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Plain runs: end all ranks (SIGTERM, ``grace_s``, SIGKILL to the trees); the host stays."""

    reason: str
    grace_s: float


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


# ------------------------------------------------------------------------------------------------------------ to a rank
@dataclass(frozen=True, slots=True)
class Admitted:
    """All ranks agreed; ``ranks`` are the live ones. The first round publishes ``version`` + 1."""

    rank: RankId
    world_size: int
    ranks: tuple[RankId, ...]
    version: Version = -1


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
class RunCallback:
    """The elected rank calls this function of the script with the consensus; asked when RunEval is."""

    rank: RankId
    kind: CallbackKind
    epoch: int


@dataclass(frozen=True, slots=True)
class SendState:
    """Hand the consensus that you hold to the daemon, which streams it to the controller as ``transfer``.

    ``whole``: for a checkpoint, with optimizer, schedule, loss scaler and outer optimizer; the rank trains on.
    """

    rank: RankId
    transfer: int
    whole: bool


@dataclass(frozen=True, slots=True)
class LoadState:
    """Take the state of ``transfer``, which is streamed to the host's inbox, before you train."""

    rank: RankId
    transfer: int


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


# ---------------------------------------------------------------------------------------------------------- to the head
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
    """Training is over. ``state_path`` names the file with the final state on the head's machine, empty without one;
    ``epochs`` of the run are complete in it. ``exit_code`` is the run's, as far as it is known by then.
    """

    outcome: str
    message: str
    state_path: str
    epochs: int
    exit_code: int = 0


# ---------------------------------------------------------------------------------------------------------- to a client
@dataclass(frozen=True, slots=True)
class StopAccepted:
    """The controller has heard a StopRequest; ``phase`` is the run's phase then."""

    phase: str


@dataclass(frozen=True, slots=True)
class StartAccepted:
    """The controller has heard a StartRequest; so many ``ranks`` start on these ``hosts``."""

    ranks: int
    hosts: tuple[HostName, ...]


@dataclass(frozen=True, slots=True)
class DrainAccepted:
    """The controller has heard a DrainRequest; these ranks leave at the next commit."""

    ranks: tuple[RankId, ...]


@dataclass(frozen=True, slots=True)
class BootstrapGiven:
    """The answer to AskBootstrap: ``document`` is a bootstrap as JSON, but for what only the other side knows: secret,
    addresses, devices, and the folder of its copy of the project.
    """

    document: str


@dataclass(frozen=True, slots=True)
class Declined:
    """What a client asked for cannot be; ``reason`` is written for a person. ``is_early``: it can be later."""

    reason: str
    is_early: bool
