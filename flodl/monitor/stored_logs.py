"""The output of a run that has ended, as its ``LogStore`` left it on disk: the same reading, without a controller."""

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flodl.ids import RankId
from flodl.monitor.log_store import HEAD, RECORD, STREAMS, Arrival, log_name

PIECE_RECORDS: Final = 4096


class StoredLogs:
    """See the module docstring. Every record is checked before any is used."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the run's logs.

        Raises:
            OSError: the index, or a file that it tells of, cannot be read.
            ValueError: the index does not tell exactly what lies in the files.
        """
        self._folder = folder
        self._index = folder / "index"
        self._count = self._index.stat().st_size // RECORD.size
        self._check()

    @property
    def count(self) -> int:
        """Arrivals."""
        return self._count

    def arrivals(self, start: int, stop: int) -> Iterator[Arrival]:
        """The arrivals ``start`` to ``stop``, as far as there are."""
        with self._index.open("rb") as file:
            file.seek(start * RECORD.size)
            data = file.read(max(0, min(stop, self._count) - start) * RECORD.size)
        for ts_ms, rank, stream, offset, length in RECORD.iter_unpack(data):
            if rank < HEAD or stream >= len(STREAMS):
                raise ValueError("it names what is no stream of a rank")
            yield Arrival(ts_ms, rank, STREAMS[stream], offset, length)

    def read(self, rank: RankId, stream: str, offset: int, size: int) -> bytes:
        """Bytes of one stream's file."""
        with (self._folder / log_name(rank, stream)).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def first_since(self, ts_ms: int) -> int:
        """The number of the first arrival not before ``ts_ms``."""
        return bisect_left(range(self._count), ts_ms, key=lambda at: next(self.arrivals(at, at + 1)).ts_ms)

    def _check(self) -> None:
        ends: dict[str, int] = {}
        last_ms = 0
        for start in range(0, self._count, PIECE_RECORDS):
            for arrival in self.arrivals(start, start + PIECE_RECORDS):
                name = log_name(arrival.rank, arrival.stream)
                if arrival.offset != ends.get(name, 0) or arrival.ts_ms < last_ms:
                    raise ValueError("its records do not follow each other")
                ends[name], last_ms = arrival.offset + arrival.size, arrival.ts_ms
        told = {name: (self._folder / name).stat().st_size for name in ends}
        there = {path.name: path.stat().st_size for path in self._folder.glob("*.std???.log")}
        if ends != told or ends != {name: size for name, size in there.items() if size}:
            raise ValueError("it does not tell all that is in the logs, or more")
