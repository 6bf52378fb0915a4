"""From arrivals to lines, for one reader of a ``LogStore``, or of what one left behind.

Characters and lines that were split between arrivals come out whole, wherever the reader starts. A progress bar's
carriage returns become at most one line a second and, in the end, the bar as it stood. A cursor is opaque to who
follows: it names an arrival and how many of its lines have been told, so that a reader that comes back misses nothing
and sees nothing twice.
"""

import asyncio
import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from flodl.ids import RankId
from flodl.monitor.log_store import Arrival

MAX_LINE_BYTES: Final = 64 * 1024
"""A longer line is cut there, with a mark; the raw file keeps all of it."""

CUT_MARK: Final = " … [cut]"
UPDATE_EVERY_MS: Final = 1000
"""A progress bar becomes at most one line in this time."""

PIECE_ARRIVALS: Final = 256
PIECE_BYTES: Final = 256 * 1024
"""What ``lines`` reads at once: some milliseconds of work, so that a reader of gigabytes holds nobody up."""

_TOLD_BITS: Final = 17
"""Room for every line of one arrival: 64 KiB of newlines, and a mark."""

Wants = Callable[[RankId, str], bool]


class Logs(Protocol):
    """What a reader needs of ``LogStore`` or ``StoredLogs``."""

    @property
    def count(self) -> int:
        """Arrivals so far."""

    def arrivals(self, start: int, stop: int) -> Iterator[Arrival]:
        """The arrivals ``start`` to ``stop``, as far as there are."""

    def read(self, rank: RankId, stream: str, offset: int, size: int) -> bytes:
        """Bytes of one stream's file."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of output. ``cursor`` continues behind it; ``ts_ms`` is the controller's wall clock at its arrival."""

    cursor: int
    ts_ms: int
    rank: RankId
    stream: str
    text: str


class LineReader:
    """See the module docstring."""

    def __init__(self, store: Logs, cursor: int, wants: Wants, skip: int = 0) -> None:
        """Starts behind ``cursor`` (0: at the beginning; ``cursor_at``: at an arrival) and leaves out the first
        ``skip`` lines; ``wants(rank, stream)`` chooses.
        """
        self._store = store
        self._wants = wants
        self._next, self._told = cursor >> _TOLD_BITS, cursor & (1 << _TOLD_BITS) - 1
        self._skip = skip
        self._parts: dict[tuple[RankId, str], _Partial] = {}

    @property
    def next_arrival(self) -> int:
        """The number of the next arrival to read."""
        return self._next

    def lines(self, stop: int | None = None) -> list[LogLine]:
        """The lines of the next arrivals, up to arrival ``stop`` and about ``PIECE_BYTES``; ``next_arrival`` tells
        how far it got, for there may be no line in them.
        """
        limit = min(self._next + PIECE_ARRIVALS, self._store.count if stop is None else stop)
        found: list[LogLine] = []
        taken = 0
        for arrival in self._store.arrivals(self._next, limit):
            number, told, self._told = self._next, self._told, 0
            self._next += 1
            if not self._wants(arrival.rank, arrival.stream):
                continue
            data = self._store.read(arrival.rank, arrival.stream, arrival.offset, arrival.size)
            texts = self._part(arrival).feed(data, arrival.ts_ms)
            for count, text in enumerate(texts[told:], told + 1):
                cursor = cursor_at(number) | count
                found.append(LogLine(cursor, arrival.ts_ms, arrival.rank, arrival.stream, text))
            taken += arrival.size
            if taken >= PIECE_BYTES:
                break
        return self._unskipped(found)

    def updates(self, now_ms: int) -> list[LogLine]:
        """Progress bars that have stood still for a second and were not shown as they stand; now is wall time."""
        return self._unskipped(
            [
                LogLine(cursor_at(self._next), part.heard_ms, rank, stream, text)
                for (rank, stream), part in self._parts.items()
                for text in part.standing(now_ms)
            ]
        )

    def rest(self) -> list[LogLine]:
        """The unfinished lines, at the end."""
        parts, self._parts = self._parts, {}
        return self._unskipped(
            [
                LogLine(cursor_at(self._next), part.heard_ms, rank, stream, text)
                for (rank, stream), part in parts.items()
                for text in part.rest()
            ]
        )

    def _part(self, arrival: Arrival) -> "_Partial":
        key = (arrival.rank, arrival.stream)
        part = self._parts.get(key)
        if part is None:
            start = max(0, arrival.offset - MAX_LINE_BYTES - 1)
            part = self._parts[key] = _Partial(self._store.read(*key, start, arrival.offset - start))
        return part

    def _unskipped(self, lines: list[LogLine]) -> list[LogLine]:
        skipped = min(self._skip, len(lines))
        self._skip -= skipped
        return lines[skipped:]


def cursor_at(arrival: int) -> int:
    """The cursor in front of an arrival."""
    return arrival << _TOLD_BITS


async def tail_reader(store: Logs, wants: Wants, lines: int, first: int, with_rest: bool) -> LineReader:
    """A reader that starts exactly ``lines`` lines before the present end, but not before arrival ``first``.

    ``with_rest`` counts unfinished lines too. It looks back ever further, in small pieces between which others run.
    """
    end, look_back = store.count, PIECE_ARRIVALS
    while True:
        start = max(first, end - look_back) if lines else end
        counting = LineReader(store, cursor_at(start), wants)
        count = 0
        while counting.next_arrival < end:
            count += len(counting.lines(end))
            await asyncio.sleep(0)
        if with_rest:
            count += len(counting.rest())
        if count >= lines or start <= first:
            return LineReader(store, cursor_at(start), wants, max(0, count - lines))
        look_back *= 4


class _Partial:
    """One stream's unfinished line: the bytes since the last line feed, or since the last carriage return in it."""

    def __init__(self, before: bytes) -> None:
        """``before``: what the stream holds before the first bytes to be fed, at least a longest line of it."""
        self.heard_ms = 0
        self._tail = b""
        self._bar: bytes | None = None
        self._shown: bytes | None = None
        self._shown_ms = 0
        self._is_cut = False
        for _ in self._extend(before.rpartition(b"\n")[2]):
            pass  # told to whoever read it then

    def feed(self, data: bytes, ts_ms: int) -> list[str]:
        """The lines that ``data`` completes."""
        self.heard_ms = ts_ms
        found: list[bytes] = []
        *whole, rest = data.split(b"\n")
        for piece in whole:
            found += self._extend(piece.rstrip(b"\r"))
            found += self._end_line()
        found += self._extend(rest)
        if self._bar is not None and ts_ms - self._shown_ms >= UPDATE_EVERY_MS:
            found += self._show(self._bar, ts_ms)
        return [_text(line) for line in found]

    def standing(self, now_ms: int) -> list[str]:
        """The bar, if it has stood still for a second and was not shown like this."""
        bar = self._tail if self._tail.strip() else self._bar
        is_due = now_ms - max(self.heard_ms, self._shown_ms) >= UPDATE_EVERY_MS
        if self._bar is None or bar is None or not is_due:
            return []
        return [_text(line) for line in self._show(bar, now_ms)]

    def rest(self) -> list[str]:
        """The unfinished line."""
        return [_text(line) for line in self._end_line() if line]

    def _extend(self, piece: bytes) -> Iterator[bytes]:
        if b"\r" in piece:
            *bars, piece = (self._tail + piece).split(b"\r")
            self._tail, self._is_cut = b"", False
            self._bar = next((bar for bar in reversed(bars) if bar.strip()), self._bar or b"")
        if self._is_cut:
            return
        self._tail += piece
        if len(self._tail) > MAX_LINE_BYTES:
            yield self._tail
            self._tail, self._is_cut = b"", True

    def _end_line(self) -> list[bytes]:
        line = self._tail or self._bar or b""
        is_told = self._is_cut or (not self._tail and self._bar is not None and line == self._shown)
        self._tail, self._bar, self._shown, self._is_cut = b"", None, None, False
        return [] if is_told else [line]

    def _show(self, bar: bytes, ts_ms: int) -> list[bytes]:
        if not bar or bar == self._shown:
            return []
        self._shown, self._shown_ms = bar, ts_ms
        return [bar]


def _text(line: bytes) -> str:
    if len(line) <= MAX_LINE_BYTES:
        return line.decode("utf-8", "backslashreplace")
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    return decoder.decode(line[:MAX_LINE_BYTES]) + CUT_MARK  # a character that the cut splits is left out
