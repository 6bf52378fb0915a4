"""Where a run stands at one published version: all that a checkpoint must say so that another run can go on from there.

Values only. Work that is in no published version is not mentioned: it is not done, and is done again after a resume.
"""

from dataclasses import dataclass
from enum import StrEnum

from flodl.core.elche import ElCheState
from flodl.ids import Span, Version
from flodl.messages import Settings


class SaveReason(StrEnum):
    """Why a checkpoint was taken."""

    CHECKPOINT = "Checkpoint"
    GRACEFUL_SHUTDOWN = "GracefulShutdown"
    MAX_FAILURE_EXCEEDED = "MaxFailureExceeded"
    SINGLE_SURVIVOR = "SingleSurvivor"
    ALL_RANKS_LOST = "AllRanksLost"
    REDUCE_STALL = "ReduceStall"
    HANDOVER = "Handover"


@dataclass(frozen=True, slots=True)
class CadenceState:
    """What a resume needs for no second warm-up. MsfGuard's average and every streak warm up again, by design."""

    elche: ElCheState
    trend_history: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Covered:
    """``spans`` of the order of ``epoch``'s pass are in the weights; of an epoch that is not complete yet."""

    epoch: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Where the consensus ``version`` stands.

    ``epoch`` (0-based) is the first that is not complete, or the number of epochs when none is left; ``covered`` are
    those epochs beyond the complete ones of which something is merged. ``global_step`` counts the optimizer steps of
    all ranks that are in the weights, ``world_size`` the ranks alive at the save.
    """

    version: Version = 0
    epoch: int = 0
    covered: tuple[Covered, ...] = ()
    global_step: int = 0
    world_size: int = 1


START = Position()
"""Of a run that goes on from nothing."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A position, the cadence there (None: it starts afresh) and the settings under which it was reached."""

    position: Position
    cadence: CadenceState | None
    settings: Settings
