"""What a daemon shall do: the output of HostCore."""

from dataclasses import dataclass
from typing import TypeAlias

from flodl.core.actions.record import Record
from flodl.ids import RankId, RoundKey
from flodl.messages import DaemonToRank, FromDaemon, Layout, PlainGroup, RankSpec


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
