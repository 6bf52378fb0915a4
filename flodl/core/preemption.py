"""A process of the run was told by somebody else that it must go: what that means for the run.

The words of a daemon become those of whoever asks for an orderly stop: the run saves, then it stops. A walk-in that
must go asks for less (``LeaveWanted``): the run goes on without its host, if it can.
"""

from flodl.core import ending as end
from flodl.core.events import StopAsked
from flodl.ids import RankId
from flodl.messages import StopWanted

DAEMON: RankId = -1
"""In place of a rank: the daemon itself was meant."""

_NAMES = {10: "SIGUSR1", 15: "SIGTERM"}


def signal_name(number: int) -> str:
    """As people say it."""
    return _NAMES.get(number, f"signal {number}")


def stop_asked(message: StopWanted) -> StopAsked:
    """What the controller makes of it; the exit code is that of a process which such a signal ends."""
    number = message.signal
    who = f"the daemon of {message.host}" if message.rank == DAEMON else f"rank {message.rank} on {message.host}"
    code = end.process_exit_code(0, number) if number in _NAMES else end.EXIT_TERMINATED
    return StopAsked(f"{signal_name(number)} to {who}", abort=False, exit_code=code)
