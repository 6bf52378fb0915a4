"""What a terminal shows of a run's logs and events, and on which stream.

stdout has what the script prints on its own stdout, and the run's results: epochs, evaluations, alerts. stderr has what
the script prints on its stderr, and everything else that flodl says.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from flodl.launch.last_words import Held, LastWords
from flodl.launch.progress import epoch_line, is_shown, log_line
from flodl.launch.terminal import Terminal
from flodl.spec.words import printable

QUIET_EVENTS: Final = frozenset({"commit", "stray", "called_back"})
ROUND_EVENTS: Final = frozenset({"cadence", "growth_vetoed"})
ROUND_EVERY_S: Final = 5.0
"""Rounds may be milliseconds apart; events.jsonl has what each of them decided."""

ALERTS: Final = frozenset({"critical", "warning"})
MAX_NAMED: Final = 8


class Narrator:
    """Writes to one terminal what comes from a controller's two streams."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._held = Held()
        self._latest = ""
        self._said_at_s = -math.inf

    def log(self, line: Mapping[str, Any], now_s: float) -> None:
        """A line of the script's output, on the stream that it was written to; last words wait for ``tick``."""
        if not is_shown(str(line.get("text", ""))) or self._held.take(line, now_s):
            return
        write = self._terminal.say if line.get("stream") == "stderr" else self._terminal.result
        write(log_line(line))

    def tick(self, now_s: float) -> None:
        """Show the last words that have waited long enough for the run's end."""
        self._tell(self._held.due(now_s))

    def end(self, failure: Mapping[str, Any] | None) -> None:
        """Nothing comes any more; what the headline of ``failure`` shows need not be shown here."""
        self._tell(self._held.rest(failure))

    def event(self, line: Mapping[str, Any], now_s: float) -> None:
        """An event of the run. Of those that come with every round the latest is shown, now and then."""
        event, detail = str(line.get("event", "")), printable(str(line.get("detail", "")))
        if event == "eval":
            self._terminal.result(f"fdl: {detail}")
        elif event == "epoch":
            self._say_latest(now_s)
            self._terminal.result(epoch_line(line.get("fields") or {}))
        elif event == "preflight":
            self._terminal.say(f"fdl: warning: {detail}")
        elif line.get("severity") in ALERTS:
            self._terminal.result(f"fdl: {event}: {detail}")
        elif event in ROUND_EVENTS:
            self._latest = f"fdl: {detail}"
            if now_s - self._said_at_s >= ROUND_EVERY_S:
                self._say_latest(now_s)
        elif event not in QUIET_EVENTS:
            self._terminal.say(f"fdl: {detail or event}")

    def _say_latest(self, now_s: float) -> None:
        if self._latest:
            self._terminal.say(self._latest)
            self._latest, self._said_at_s = "", now_s

    def _tell(self, told: list[LastWords]) -> None:
        for words in told:
            for line in () if words.is_known else words.lines:
                self._terminal.say(log_line(line))
            same = words.speakers if words.is_known else words.speakers[1:]
            if same:
                named = ", ".join(same[:MAX_NAMED]) + (f" and {len(same) - MAX_NAMED} more" if same[MAX_NAMED:] else "")
                self._terminal.say(f"fdl: the same came from {named}")
