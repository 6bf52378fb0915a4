"""The launcher's terminal: the run's output on stdout, chatter on stderr, and one live line that never mixes with them.

Log text is written as it came, but for carriage returns: of a progress bar's updates the last one is shown.
"""

import os
import sys
import time
from typing import Final, TextIO

REFRESH_S: Final = 0.2
"""Least time between two drawings of the live line."""


class Terminal:
    """Writes lines; holds the live line below them while stderr is a terminal."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self._err = err if err is not None else sys.stderr
        self.is_live = self._err.isatty() and os.environ.get("TERM", "") != "dumb"
        self.has_colour = self.is_live and not os.environ.get("NO_COLOR")
        self._line = ""
        self._is_drawn = False
        self._drawn_at_s = 0.0

    def result(self, text: str) -> None:
        """A line of the run's output."""
        self._erase()
        _write(self._out, text)
        self._redraw()

    def say(self, text: str, colour: str = "") -> None:
        """A line of chatter. ``colour`` is an ANSI code such as ``31``."""
        self._erase()
        _write(self._err, f"\x1b[{colour}m{text}\x1b[0m" if colour and self.has_colour else text)
        self._redraw()

    def show(self, line: str) -> None:
        """Replace the live line; does nothing without a terminal."""
        self._line = line
        now_s = time.monotonic()
        if self.is_live and now_s - self._drawn_at_s >= REFRESH_S:
            self._erase()
            self._redraw()
            self._drawn_at_s = now_s

    def close(self) -> None:
        """Remove the live line."""
        self._erase()
        self._line = ""

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            _write(self._err, "\r\x1b[K", end="")

    def _redraw(self) -> None:
        if self.is_live and self._line:
            width = _width(self._err)
            _write(self._err, self._line[: max(width - 1, 10)], end="")
            self._is_drawn = True


def last_update(text: str) -> str:
    """Of a line that was rewritten with carriage returns, what stood there at last."""
    parts = [part for part in text.split("\r") if part]
    return parts[-1] if parts else ""


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 80


def _write(stream: TextIO, text: str, end: str = "\n") -> None:
    try:
        stream.write(text + end)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
    stream.flush()
