"""The launcher's terminal: stdout, stderr, and one live line that never mixes with them. What goes where, ``narrator``
says.

Log text is written as it came, but for carriage returns: of a progress bar's updates the last one is shown.
"""

import os
import sys
import time
from functools import cached_property
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REFRESH_S: Final = 0.2
"""Least time between two drawings of the live line."""


class Terminal:
    """Writes lines; holds the live line below them while stderr is a terminal."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self._err = err if err is not None else sys.stderr
        self.is_live = self._err.isatty() and os.environ.get("TERM", "") != "dumb"
        self.is_interactive = self.is_live and self._out.isatty()
        self._live: Live | None = None
        self._line = ""
        self._drawn = ""
        self._drawn_at_s = 0.0

    def result(self, text: str) -> None:
        """A line for stdout."""
        self._draw("")
        _write(self._out, text)
        self.refresh()

    def say(self, text: str, style: str = "") -> None:
        """A line for stderr. ``style`` is one of rich's, such as ``red``, for a terminal that shows colours."""
        if self.is_live and style:
            from rich.text import Text

            self._console.print(Text(_encodable(text, self._err), style), soft_wrap=True)
            return
        self._draw("")
        _write(self._err, text)
        self.refresh()

    def show(self, line: str) -> None:
        """Replace the live line; does nothing without a terminal."""
        self._line = line
        self.refresh()

    def refresh(self) -> None:
        """Draw the live line where it has changed, if that was not done just now; to be called again soon."""
        if self.is_live and self._line != self._drawn and time.monotonic() - self._drawn_at_s >= REFRESH_S:
            self._draw(self._line)
            self._drawn_at_s = time.monotonic()

    def close(self) -> None:
        """Remove the live line."""
        self._line = ""
        self._draw("")
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, line: str) -> None:
        if line == self._drawn:
            return
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        self._drawn = line

    @cached_property
    def _console(self) -> "Console":
        from rich.console import Console  # a run that nobody watches does not load it

        return Console(file=self._err, force_terminal=True, highlight=False)


def last_update(text: str) -> str:
    """Of a line that was rewritten with carriage returns, what stood there at last."""
    parts = [part for part in text.split("\r") if part]
    return parts[-1] if parts else ""


def _write(stream: TextIO, text: str) -> None:
    stream.write(_encodable(text, stream) + "\n")
    stream.flush()


def _encodable(text: str, stream: TextIO) -> str:
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
