"""The ranks' output on the controller's disk: raw files, and one index that tells their order.

``logs/rank{r}.{stream}.log`` hold the exact bytes. ``logs/index`` holds one fixed record per arrival (when, whose,
where, how much), so that the lines of all ranks can be told in the order in which they came, from any point, by any
number of readers, without keeping a line in memory. A disk that takes nothing loses output, never the run.
"""

import asyncio
import codecs
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from flodl.ids import RankId

HEAD: Final = -1
"""The head's place among the ranks."""

STREAMS: Final = ("stdout", "stderr")
MAX_LINE_BYTES: Final = 64 * 1024
"""A longer line is cut there, with a mark; the raw file keeps all of it."""

CUT_MARK: Final = " … [cut]"
UPDATE_EVERY_MS: Final = 1000
"""A progress bar's carriage returns become at most one line in this time."""

_RECORD: Final = Struct(">QiBQI")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of output. ``cursor`` continues behind it; ``ts_ms`` is the controller's wall clock at its arrival."""

    cursor: int
    ts_ms: int
    rank: RankId
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class _Arrival:
    ts_ms: int
    rank: RankId
    stream: str
    offset: int
    size: int


class LogStore:
    """All output of one run; used from one event loop."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the run's logs; exists."""
        self._folder = folder
        self._files: dict[tuple[RankId, str], int] = {}
        self._sizes: dict[tuple[RankId, str], int] = {}
        self._index_fd = _open(folder / "index")
        self._count = 0
        self._news = asyncio.Event()
        self._has_ended = False
        self._has_warned = False

    @property
    def count(self) -> int:
        """Arrivals so far: the cursor behind the last one."""
        return self._count

    def append(self, rank: RankId, stream: str, offset: int, data: bytes) -> None:
        """Bytes of a stream from ``offset`` on; what is there already is dropped, a gap is marked."""
        key = (rank, stream)
        if stream not in STREAMS:
            return
        size = self._sizes.get(key, 0)
        data = data[max(0, size - offset) :] if offset <= size else data
        if not data:
            return
        try:
            if key not in self._files:
                self._files[key] = _open(self._folder / f"{_source(rank)}.{stream}.log")
            written = os.write(self._files[key], data)
            arrival = _RECORD.pack(int(time.time() * 1e3), rank, STREAMS.index(stream), size, written)
            os.write(self._index_fd, arrival)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("output is lost: folder=%s error=%s", self._folder, error)
            return
        self._sizes[key] = size + written
        self._count += 1
        self._news.set()

    async def wait(self, cursor: int, timeout_s: float) -> bool:
        """Wait for arrivals behind ``cursor``, at most ``timeout_s``; False once there will be none."""
        if self._count <= cursor and not self._has_ended:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
        return self._count > cursor or not self._has_ended

    def end(self) -> None:
        """No more output will come."""
        self._has_ended = True
        self._news.set()

    def close(self) -> None:
        """Close all files."""
        for descriptor in (*self._files.values(), self._index_fd):
            os.close(descriptor)
        self._files.clear()
        self._index_fd = -1

    def arrivals(self, start: int, stop: int) -> Iterator[_Arrival]:
        """The index records ``start`` to ``stop``."""
        size = _RECORD.size
        raw = os.pread(self._index_fd, (stop - start) * size, start * size)
        for ts_ms, rank, stream, offset, count in _RECORD.iter_unpack(raw[: len(raw) // size * size]):
            yield _Arrival(ts_ms, rank, STREAMS[stream], offset, count)

    def read(self, arrival: _Arrival) -> bytes:
        """The bytes of one arrival."""
        descriptor = self._files.get((arrival.rank, arrival.stream))
        return b"" if descriptor is None else os.pread(descriptor, arrival.size, arrival.offset)


class LineReader:
    """Turns arrivals into lines, for one follower: characters split between arrivals come out whole."""

    def __init__(self, store: LogStore, cursor: int, wants: Callable[[RankId, str], bool]) -> None:
        """Starts behind ``cursor``; ``wants(rank, stream)`` chooses."""
        self._store = store
        self._wants = wants
        self._parts: dict[tuple[RankId, str], _Partial] = {}
        self.cursor = cursor

    def lines(self, limit: int = 256) -> list[LogLine]:
        """The lines of up to ``limit`` further arrivals."""
        stop = min(self._store.count, self.cursor + limit)
        found: list[LogLine] = []
        for arrival in self._store.arrivals(self.cursor, stop):
            self.cursor += 1
            if not self._wants(arrival.rank, arrival.stream):
                continue
            part = self._parts.setdefault((arrival.rank, arrival.stream), _Partial())
            texts = part.feed(self._store.read(arrival), arrival.ts_ms)
            found += [LogLine(self.cursor, arrival.ts_ms, arrival.rank, arrival.stream, text) for text in texts]
        self.cursor = max(self.cursor, stop)
        return found

    def rest(self) -> list[LogLine]:
        """The unfinished lines, at the end."""
        found = []
        for (rank, stream), part in self._parts.items():
            if text := part.finish():
                found.append(LogLine(self.cursor, part.ts_ms, rank, stream, text))
        self._parts.clear()
        return found


class _Partial:
    """One stream's unfinished line."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._text = ""
        self._is_cut = False
        self.ts_ms = 0

    def feed(self, data: bytes, ts_ms: int) -> list[str]:
        *whole, rest = (self._text + self._decoder.decode(data)).split("\n")
        lines = []
        for line in whole:
            if not self._is_cut:
                lines.append(_shorten(line))
            self._is_cut = False
        if "\r" in rest and ts_ms - self.ts_ms >= UPDATE_EVERY_MS:
            updates = [update for update in rest.split("\r")[:-1] if update.strip()]
            lines += updates[-1:]
            rest = rest.rpartition("\r")[2]
            self.ts_ms = ts_ms
        if len(rest) > MAX_LINE_BYTES:
            if "\r" in rest:
                rest = rest.rpartition("\r")[2]
            elif not self._is_cut:
                lines.append(_shorten(rest))
                self._is_cut = True
        self._text = "" if self._is_cut else rest
        return lines

    def finish(self) -> str:
        return "" if self._is_cut else _shorten(self._text + self._decoder.decode(b"", final=True))


def tail_cursor(store: LogStore, wants: Callable[[RankId, str], bool], lines: int) -> int:
    """Where a reader must start to see at least the last ``lines`` lines of what it wants."""
    cursor = store.count
    while cursor > 0 and lines > 0:
        start = max(0, cursor - 256)
        for arrival in reversed(list(store.arrivals(start, cursor))):
            cursor -= 1
            if wants(arrival.rank, arrival.stream):
                lines -= store.read(arrival).count(b"\n")
                if lines <= 0:
                    break
    return cursor


def since_cursor(store: LogStore, ts_ms: int) -> int:
    """The first arrival not before ``ts_ms``; arrivals are in order of time."""
    low, high = 0, store.count
    while low < high:
        middle = (low + high) // 2
        if next(store.arrivals(middle, middle + 1)).ts_ms < ts_ms:
            low = middle + 1
        else:
            high = middle
    return low


def _shorten(line: str) -> str:
    line = line.rstrip("\r")
    if len(line) <= MAX_LINE_BYTES:
        return line
    return line[:MAX_LINE_BYTES] + CUT_MARK


def _source(rank: RankId) -> str:
    return "head" if rank == HEAD else f"rank{rank}"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
