"""What happened, in order: ``events.jsonl`` on disk and a ring for followers.

A follower is a cursor, never a queue: a slow reader costs nothing and is told what it missed. Every line is strict
JSON. A disk that takes nothing stops the file, not the run, and is warned about once.
"""

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from flodl.core.actions import Record, Severity

RING_EVENTS: Final = 20_000
"""Events kept for followers; a commit per second makes five hours."""

MAX_FILE_BYTES: Final = 256 << 20
"""The file's end of growth: later events are only in the ring, and a last line says so."""

_LEVELS: Final = {Severity.INFO: logging.INFO, Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.ERROR}
_QUIET: Final = frozenset({"commit"})

_log = logging.getLogger(__name__)


class EventLog:
    """One run's events."""

    def __init__(self, path: Path) -> None:
        """``path``: events.jsonl; opened for appending by the first event."""
        self._path = path
        self._file: TextIO | None = None
        self._written_bytes = 0
        self._is_writable = True
        self._ring: deque[dict[str, Any]] = deque(maxlen=RING_EVENTS)
        self._seq = 0
        self._news = asyncio.Event()
        self._has_ended = False

    def add(self, record: Record) -> None:
        """Keep ``record``."""
        self._seq += 1
        line = {
            "seq": self._seq,
            "ts": int(time.time() * 1e3),
            "event": record.event,
            "severity": str(record.severity),
            "detail": record.detail,
            "fields": strict(record.fields),
        }
        self._ring.append(line)
        self._write(json.dumps(line, allow_nan=False) + "\n")
        level = logging.DEBUG if record.event in _QUIET else _LEVELS[record.severity]
        _log.log(level, "%s: %s", record.event, record.detail)
        self._wake()

    def after(self, cursor: int, limit: int) -> list[dict[str, Any]]:
        """Up to ``limit`` events with ``seq`` > ``cursor``, oldest first; the ring may have dropped some before."""
        if not self._ring:
            return []
        skipped = max(0, cursor - self._ring[0]["seq"] + 1)
        return [self._ring[index] for index in range(skipped, min(len(self._ring), skipped + limit))]

    async def wait(self, cursor: int) -> bool:
        """Wait for an event behind ``cursor``; False when there will be none."""
        while self._seq <= cursor and not self._has_ended:
            self._news.clear()
            await self._news.wait()
        return self._seq > cursor

    def end(self) -> None:
        """Nothing more will happen."""
        self._has_ended = True
        self._wake()
        if self._file is not None:
            self._file.close()
            self._file = None
            self._is_writable = False

    def _wake(self) -> None:
        self._news.set()

    def _write(self, line: str) -> None:
        if not self._is_writable:
            return
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
                self._path.chmod(0o600)
            self._file.write(line)
            self._file.flush()
            self._written_bytes += len(line)
        except OSError as error:
            self._is_writable = False
            _log.warning("events are not written any more: path=%s error=%s", self._path, error)
            return
        if self._written_bytes > MAX_FILE_BYTES:
            self._is_writable = False
            _log.warning("events are not written any more: path=%s limit_bytes=%d", self._path, MAX_FILE_BYTES)


def strict(value: Any) -> Any:
    """``value`` as JSON takes it: NaN and infinities become None, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(each) for each in value]
    return value
