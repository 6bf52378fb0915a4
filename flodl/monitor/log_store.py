"""The ranks' output on the controller's disk: raw files, and one index that tells their order.

``logs/rank{r}.{stream}.log`` hold the exact bytes. ``logs/index`` holds one fixed record per arrival (when, whose,
where, how much), so that the lines of all ranks can be told in the order in which they came, from any point, by any
number of readers, without keeping a line in memory (``flodl.monitor.log_lines``).

An arrival is kept whole or not at all: bytes and record are written at places that only this object knows, so what a
full disk took of them is overwritten by the next. Lost output never stops a run; a line in the file says how much.
"""

import asyncio
import contextlib
import logging
import os
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from flodl.ids import RankId

HEAD: Final = -1
"""The head's place among the ranks."""

STREAMS: Final = ("stdout", "stderr")

ARRIVAL_BYTES: Final = 64 * 1024
"""A longer piece becomes several arrivals, so that a reader can stop in between."""

RECORD: Final = Struct(">QiBQI")
"""One arrival in the index: when, whose, which stream, from where, how much."""

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """``size`` bytes at ``offset`` of one stream's file, at ``ts_ms`` on the controller's wall clock."""

    ts_ms: int
    rank: RankId
    stream: str
    offset: int
    size: int


@dataclass(slots=True)
class _Output:
    """One stream's file. ``position`` counts the stream's bytes, those before ``base`` from other daemons; ``size``
    counts the file's, ``lost`` those to be told of.
    """

    fd: int
    size: int = 0
    base: int = 0
    position: int = 0
    lost: int = 0
    ends_line: bool = True


class LogStore:
    """All output of one run; used from one event loop."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the run's logs; exists. Its files are made by the first bytes, never taken over."""
        self._folder = folder
        self._outputs: dict[tuple[RankId, str], _Output] = {}
        self._index_fd: int | None = None
        self._count = 0
        self._last_ms = 0
        self._news = asyncio.Event()
        self._has_ended = False
        self._has_warned = False
        self._is_closed = False

    @property
    def count(self) -> int:
        """Arrivals so far."""
        return self._count

    def append(self, rank: RankId, stream: str, offset: int, data: bytes) -> None:
        """Bytes of a stream from ``offset`` on; what has come before is dropped, and a gap counts as lost."""
        if stream not in STREAMS or self._is_closed:
            return
        try:
            output = self._output(rank, stream)
        except OSError as error:
            self._warn(error)
            return
        offset += output.base
        data = data[max(0, output.position - offset) :]
        if not data:
            return
        output.lost += max(0, offset - output.position)
        output.position = max(offset, output.position) + len(data)
        for start in range(0, len(data), ARRIVAL_BYTES):
            self._keep(output, rank, stream, data[start : start + ARRIVAL_BYTES])
        self._ring()

    def rebase(self, rank: RankId) -> None:
        """Another daemon speaks for the rank now: its offsets count from the end of what has come."""
        for stream in STREAMS:
            if output := self._outputs.get((rank, stream)):
                output.base = output.position

    async def wait(self, count: int, timeout_s: float) -> bool:
        """Wait for more than ``count`` arrivals, at most ``timeout_s``; False once there will be none."""
        if self._count <= count and not self._has_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        return self._count > count or not self._has_ended

    def end(self) -> None:
        """No more output will come."""
        self._has_ended = True
        self._ring()

    def close(self) -> None:
        """Close all files; what comes now is dropped."""
        self._is_closed = True
        for output in self._outputs.values():
            os.close(output.fd)
        self._outputs.clear()
        if self._index_fd is not None:
            os.close(self._index_fd)
            self._index_fd = None

    def arrivals(self, start: int, stop: int) -> Iterator[Arrival]:
        """The arrivals ``start`` to ``stop``, as far as there are."""
        if self._index_fd is None:
            return
        count, size = min(stop, self._count) - start, RECORD.size
        for ts_ms, rank, stream, offset, length in RECORD.iter_unpack(
            os.pread(self._index_fd, max(0, count) * size, start * size)
        ):
            yield Arrival(ts_ms, rank, STREAMS[stream], offset, length)

    def read(self, rank: RankId, stream: str, offset: int, size: int) -> bytes:
        """Bytes of one stream's file."""
        output = self._outputs.get((rank, stream))
        return b"" if output is None else os.pread(output.fd, size, offset)

    def first_since(self, ts_ms: int) -> int:
        """The number of the first arrival not before ``ts_ms``."""
        return bisect_left(range(self._count), ts_ms, key=lambda at: next(self.arrivals(at, at + 1)).ts_ms)

    def _output(self, rank: RankId, stream: str) -> _Output:
        output = self._outputs.get((rank, stream))
        if output is None:
            if self._index_fd is None:
                self._index_fd = os.open(self._folder / "index", _FLAGS, 0o600)
            output = _Output(os.open(self._folder / log_name(rank, stream), _FLAGS, 0o600))
            self._outputs[rank, stream] = output
        return output

    def _keep(self, output: _Output, rank: RankId, stream: str, data: bytes) -> None:
        assert self._index_fd is not None, "opened with the first output"
        kept = _loss_mark(output) + data if output.lost else data
        self._last_ms = max(self._last_ms, int(time.time() * 1e3))  # the wall clock may step back, the order may not
        record = RECORD.pack(self._last_ms, rank, STREAMS.index(stream), output.size, len(kept))
        try:
            _write_at(output.fd, kept, output.size)
            _write_at(self._index_fd, record, self._count * RECORD.size)
        except OSError as error:
            output.lost += len(data)
            self._warn(error)
            with contextlib.suppress(OSError):
                os.ftruncate(output.fd, output.size)
            return
        output.size += len(kept)
        output.lost, output.ends_line = 0, kept.endswith(b"\n")
        self._count += 1

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("output is lost: folder=%s error=%s", self._folder, error)

    def _ring(self) -> None:
        """Wake everyone who waits now; who waits later waits for another bell."""
        self._news.set()
        self._news = asyncio.Event()


def log_name(rank: RankId, stream: str) -> str:
    """The name of one stream's file."""
    return f"{'head' if rank == HEAD else f'rank{rank}'}.{stream}.log"


def _loss_mark(output: _Output) -> bytes:
    start = "" if output.ends_line else "\n"
    return f"{start}[flodl: {output.lost} bytes of output lost on the controller's disk]\n".encode()


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset, view = offset + written, view[written:]
