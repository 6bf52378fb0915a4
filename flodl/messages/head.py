"""What the head says, and a client."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from flodl.ids import HostName, Version
from flodl.messages.settings import Settings


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
class StartRequest:
    """A join window that is held shall close now and the run start. ``source`` says who asked."""

    source: str


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """``host`` shall leave the run at the next commit, without loss. ``source`` says who asked."""

    host: HostName
    source: str


@dataclass(frozen=True, slots=True)
class AskBootstrap:
    """Somebody wants to serve the run on a machine that is to be called ``host``: what does a daemon there need?"""

    host: HostName


class GuardVerdict(StrEnum):
    """What a convergence guard says to a round's proposal: commit it, drop a growth, or cut the anchor instead."""

    STABLE = "stable"
    SUPPRESS_GROWTH = "suppress_growth"
    NUDGE_DOWN = "nudge_down"


@dataclass(frozen=True, slots=True)
class RoundJudged:
    """The user's guard has answered, or failed (``error``). ``factor`` counts with ``nudge_down`` only."""

    version: Version
    verdict: GuardVerdict
    factor: float
    error: str
