"""The one error tree. Errors carry fields; the message says what, where, expected and got, and the next step.

``exit_code`` belongs to the class (docs/operations.md has the table).
"""

from typing import ClassVar


class FlodlError(Exception):
    """Every error that flodl raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(FlodlError):
    """A cluster file, a setting or a command line that cannot be used as it is."""

    exit_code: ClassVar[int] = 2


class UsageError(ConfigError):
    """The script uses the API in a way that cannot work; the message names the line to change."""


class UnknownArgument(UsageError, TypeError):
    """A call of flodl with an argument that is missing, or that nobody knows."""


class UnknownSetting(UsageError, AttributeError):
    """A setting that nobody knows; an AttributeError too, so that ``hasattr`` answers False."""


class PreflightError(FlodlError):
    """Something that the run needs is not there: a port, a file, a folder, a package."""

    exit_code: ClassVar[int] = 3


class HostUnreachable(FlodlError):
    """A host could not be reached, or refused us. Carries the stage at which it failed."""

    exit_code: ClassVar[int] = 4

    def __init__(self, host: str, stage: str, reason: str, remedy: str = "") -> None:
        """``stage`` is one of resolve, connect, host key, auth, sync, start, join."""
        self.host, self.stage, self.reason, self.remedy = host, stage, reason, remedy
        super().__init__(f"host {host}: {stage}: {reason}" + (f"\n  {remedy}" if remedy else ""))


class ProtocolError(FlodlError):
    """Bytes or messages that break the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol: drop it, never trust what follows."""


class LocalProtocolError(ProtocolError):
    """We tried to send what the protocol forbids: a bug on our side."""


class JoinRefused(FlodlError):
    """A host may not take part, or a peer is not let in; the message names what differs. ``is_wrong_token``: the two
    sides hold different tokens, or someone sits in between; trying again changes nothing.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, *, is_wrong_token: bool = False) -> None:
        self.is_wrong_token = is_wrong_token
        super().__init__(message)


class PeerLost(FlodlError):
    """A peer that we need is gone."""


class RankFailed(FlodlError):
    """The run failed: a rank ended by its script's own error, or what the message says."""


class TooFewRanks(RankFailed):
    """Too few ranks to start or to go on, a round that stalled, or values that are not finite."""

    exit_code: ClassVar[int] = 5


class CheckpointError(FlodlError):
    """A checkpoint cannot be used, or not be written."""

    exit_code: ClassVar[int] = 6


class DeadlineExceeded(FlodlError):
    """A wait ran past its deadline; the message names the wait."""


class CoverageError(FlodlError):
    """A sample would be trained twice or never."""


class InvariantViolation(FlodlError):
    """A core found itself in a state that must not exist: a bug in flodl."""


def run_failed(exit_code: int, message: str) -> RankFailed | CheckpointError:
    """What ``join()`` raises for a run that failed with ``exit_code``: alike with and without ``fdl``."""
    kinds: dict[int, type[RankFailed] | type[CheckpointError]] = {
        kind.exit_code: kind for kind in (TooFewRanks, CheckpointError)
    }
    return kinds.get(exit_code, RankFailed)(message)
