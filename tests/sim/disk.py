"""The controller's disk: real files in memory, written by the real writer, that fill up or end the process mid-way."""

import errno
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flodl.checkpoint import writer as real
from flodl.checkpoint.bundle import MODEL_SUFFIX, Stem
from flodl.checkpoint.locking import StemLock
from flodl.checkpoint.reader import find
from flodl.checkpoint.writer import BundleWriter
from flodl.core.position import ResumePoint, SaveReason
from flodl.core.saving import HANDOVER_STEM
from flodl.errors import CheckpointError
from tests.sim.faults import Effect
from tests.sim.model import Model

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
PIECES = 3
"""Writes of one payload."""

FILLING = ("open", "write", "fsync")
CHANGING = (*FILLING, "rename", "unlink")


class Crash(BaseException):
    """The process ends here, and does nothing any more."""


@dataclass
class _Planned:
    """A fault of the ``left``-th operation from now, counted from 0, of those named."""

    operations: tuple[str, ...]
    left: int
    error: int
    effect: Effect


class Disk:
    """Bundles by stem. ``committed`` are the versions of which the writer has said that they are there."""

    def __init__(self) -> None:
        self.committed: dict[str, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="flodl-sim-", dir=MEMORY, ignore_cleanup_errors=True)
        self._planned: list[_Planned] = []
        self._has_crashed = False
        self._locks: dict[str, StemLock] = {}

    def __del__(self) -> None:
        self._release()

    # ------------------------------------------------------------------------------------------------------- faults
    def fill(self, at: int, effect: Effect) -> None:
        """No space left at the ``at``-th operation that takes space, in the middle of it if it is a write."""
        self._planned.append(_Planned(FILLING, at, errno.ENOSPC, effect))

    def tear(self, at: int, effect: Effect) -> None:
        """The process ends within the ``at``-th write."""
        self._planned.append(_Planned(("write",), at, 0, effect))

    def crash(self, at: int, effect: Effect) -> None:
        """The process ends at the ``at``-th operation."""
        self._planned.append(_Planned(CHANGING, at, 0, effect))

    def strike(self, operation: str, half: Callable[[], object] | None = None) -> None:
        """What happens at this operation. Raises OSError or Crash."""
        if self._has_crashed:
            raise Crash
        for planned in self._planned:
            if operation not in planned.operations:
                continue
            if planned.left:
                planned.left -= 1
                continue
            self._planned.remove(planned)
            planned.effect.bite()
            if half is not None:
                half()
            if planned.error:
                raise OSError(planned.error, os.strerror(planned.error))
            self._has_crashed = True
            raise Crash

    def restart(self) -> None:
        """Another process comes, and finds what lies there."""
        self._has_crashed, self._planned = False, []
        self._release()

    # ------------------------------------------------------------------------------------------------------- bundles
    def begin(self, stem: str) -> BundleWriter:
        with self._faulty():
            lock = self._locks.setdefault(stem, StemLock(self._stem(stem)))
            return BundleWriter(self._stem(stem), lock).__enter__()

    def receive(self, writer: BundleWriter, model: Model) -> None:
        rows = [[*sample, count] for sample, count in model.samples.items()]
        data = json.dumps([model.origin, model.bits, rows]).encode()
        size = -(-len(data) // PIECES)
        with self._faulty(), writer.part(MODEL_SUFFIX) as part:
            for start in range(0, len(data), size):
                part.write(data[start : start + size])

    def commit(self, writer: BundleWriter, stem: str, reason: SaveReason, point: ResumePoint) -> None:
        with self._faulty():
            writer.commit(reason, point)
        self.committed[stem] = point.position.version

    def drop(self, writer: BundleWriter) -> None:
        with self._faulty():
            writer.__exit__(None, None, None)

    def holds(self, stem: str) -> bool:
        """Whether a bundle must be there."""
        return stem in self.committed or self._stem(stem).meta.exists()

    def read(self, stem: str) -> tuple[ResumePoint, Model]:
        """The bundle, every byte checked. Raises CheckpointError."""
        bundle = find(self._stem(stem).folder / self._stem(stem).name)
        origin, bits, rows = json.loads(bundle.paths[MODEL_SUFFIX].read_bytes())
        point = bundle.meta.point
        newest = self.committed.get(stem, 0)
        assert point.position.version >= newest, f"version {newest} of {stem} was saved, and an older one is found"
        return point, Model(origin, Counter({(epoch, place): count for epoch, place, count in rows}), bits)

    def words(self, error: CheckpointError) -> str:
        """What is said of it, the same in every run."""
        return str(error).replace(f"{self._folder.name}/", "")

    def _release(self) -> None:
        """The locks of a process go with it."""
        for lock in self._locks.values():
            lock.release()
        self._locks = {}

    def _stem(self, stem: str) -> Stem:
        return Stem(Path(self._folder.name), "handover" if stem == HANDOVER_STEM else stem)

    @contextmanager
    def _faulty(self) -> Iterator[None]:
        """The writer's operations go through us."""
        real.os = _Os(self)  # type: ignore[assignment]
        try:
            yield
        finally:
            real.os = os


class _Os:
    """The module ``os`` of a process with this disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._disk.strike("open")
        return os.open(path, flags, mode)

    def write(self, fd: int, data: memoryview) -> int:
        self._disk.strike("write", lambda: os.write(fd, data[: len(data) // 2]))
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        self._disk.strike("fsync")

    def rename(self, source: str, target: str) -> None:
        self._disk.strike("rename")
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        self._disk.strike("unlink")
        os.unlink(path)
