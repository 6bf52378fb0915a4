"""What a rank shall do: the output of RankCore."""

from dataclasses import dataclass
from typing import TypeAlias

from flodl.ids import Grant, Incarnation, RankId, RoundKey
from flodl.messages import CallbackKind, RankToDaemon


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
