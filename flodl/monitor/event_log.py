"""What happened, in order: ``events.jsonl`` on disk and a ring for followers.

A follower is a cursor, never a queue: a slow reader costs nothing, and sees by a gap in ``seq`` that it missed
something. Every line is strict JSON and whole. A disk that takes nothing stops the file, not the run, and is warned
about once.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flodl.core.actions import Record, Severity

RING_EVENTS: Final = 20_000
"""Events kept for followers; a commit per second makes five hours."""

MAX_FILE_BYTES: Final = 256 << 20
"""The file's end of growth: a last line says so, and later events are only in the ring."""

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LEVELS: Final = {Severity.INFO: logging.INFO, Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.ERROR}
_QUIET: Final = frozenset({"commit", "cadence"})

_log = logging.getLogger(__name__)


class EventLog:
    """One run's events; used from one event loop."""

    def __init__(self, path: Path, ring_events: int = RING_EVENTS, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """``path``: events.jsonl; made by the first event, never taken over."""
        self._path = path
        self._max_file_bytes = max_file_bytes
        self._fd: int | None = None
        self._written_bytes = 0
        self._is_writable = True
        self._ring: deque[dict[str, Any]] = deque(maxlen=ring_events)
        self._seq = 0
        self._news = asyncio.Event()
        self._has_ended = False

    @property
    def last_seq(self) -> int:
        """The number of the latest event, 0 before the first."""
        return self._seq

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
        self._write(line)
        level = logging.DEBUG if record.event in _QUIET else _LEVELS[record.severity]
        _log.log(level, "%s: %s", record.event, record.detail)
        self._ring_bell()

    def after(self, cursor: int, limit: int) -> list[dict[str, Any]]:
        """Up to ``limit`` events with ``seq`` > ``cursor``, oldest first; the ring may have dropped some before."""
        if not self._ring:
            return []
        skipped = max(0, cursor - self._ring[0]["seq"] + 1)
        return list(islice(self._ring, skipped, skipped + limit))

    async def wait(self, cursor: int, timeout_s: float) -> bool:
        """Wait for an event behind ``cursor``, at most ``timeout_s``; False once there will be none."""
        if self._seq <= cursor and not self._has_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        return self._seq > cursor or not self._has_ended

    def end(self) -> None:
        """Nothing more will happen."""
        self._has_ended = True
        self._close()
        self._ring_bell()

    def _ring_bell(self) -> None:
        """Wake everyone who waits now; who waits later waits for another bell."""
        self._news.set()
        self._news = asyncio.Event()

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self._is_writable:
            return
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        if self._written_bytes + len(data) > self._max_file_bytes:
            detail = f"the file has reached {self._max_file_bytes} bytes; later events are not in it"
            data = (json.dumps({**line, "event": "events_end", "detail": detail, "fields": {}}) + "\n").encode()
            _log.warning("events are not written any more: path=%s limit_bytes=%d", self._path, self._max_file_bytes)
            self._put(data)
            self._close()
            return
        self._put(data)

    def _put(self, data: bytes) -> None:
        """Append a whole line or nothing of it."""
        try:
            if self._fd is None:
                self._fd = os.open(self._path, _FLAGS, 0o600)
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            self._written_bytes += len(data)
        except OSError as error:
            _log.warning("events are not written any more: path=%s error=%s", self._path, error)
            if self._fd is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._written_bytes)
            self._close()

    def _close(self) -> None:
        self._is_writable = False
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def strict(value: Any) -> Any:
    """``value`` as JSON takes it: NaN and infinities become None, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(each) for each in value]
    return value
