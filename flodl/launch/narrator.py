"""What a terminal shows of a run's logs and events, and on which stream.

stdout has what the script prints on its own stdout, and the run's results: epochs, evaluations, alerts. stderr has what
the script prints on its stderr, and everything else that flodl says.
"""

from collections.abc import Mapping
from typing import Any, Final

from flodl.launch.progress import epoch_line, is_shown, log_line
from flodl.launch.terminal import Terminal
from flodl.spec.words import printable

QUIET_EVENTS: Final = frozenset({"commit", "stray", "called_back"})
ALERTS: Final = frozenset({"critical", "warning"})


class Narrator:
    """Writes to one terminal what comes from a controller's two streams."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def log(self, line: Mapping[str, Any]) -> None:
        """A line of the script's output, on the stream that it was written to."""
        if not is_shown(str(line.get("text", ""))):
            return
        write = self._terminal.say if line.get("stream") == "stderr" else self._terminal.result
        write(log_line(line))

    def event(self, line: Mapping[str, Any]) -> None:
        """An event of the run."""
        event, detail = str(line.get("event", "")), printable(str(line.get("detail", "")))
        if event == "eval":
            self._terminal.result(f"fdl: {detail}")
        elif event == "epoch":
            self._terminal.result(epoch_line(line.get("fields") or {}))
        elif line.get("severity") in ALERTS:
            self._terminal.result(f"fdl: {event}: {detail}")
        elif event not in QUIET_EVENTS:
            self._terminal.say(f"fdl: {detail or event}")
