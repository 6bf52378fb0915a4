"""Checkpoints of one process: the same files as a cluster's, written and checked on a thread of their own.

States of a save: *open* → (the rank has put its state into the outbox) → *making*: the thread copies it into the
checkpoint and commits → settled, or dropped. The training goes on meanwhile: it fills the outbox again only for the
next save, which comes behind this one or behind its drop, and a dropped save is never committed. One thread does all
work with the disk, in the order in which it was asked for.

What a checkpoint says of the settings is what the user chose, not the one window that solo makes of every cadence; and
solo has learned nothing about cadences. So a cluster that goes on from there starts at Probe, with the user's words.
"""

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from flodl import __version__
from flodl.checkpoint.bundle import MODEL_SUFFIX, Stem
from flodl.checkpoint.keeping import keep
from flodl.checkpoint.locking import StemLock
from flodl.checkpoint.place import check_place
from flodl.checkpoint.reader import find, opened
from flodl.checkpoint.writer import BundleWriter
from flodl.core.actions import OpenSave
from flodl.core.events import BundleRead, PlaceTried, SaveSettled
from flodl.core.position import ResumePoint
from flodl.core.resume import misfit
from flodl.errors import CheckpointError
from flodl.messages import Settings, StateSent
from flodl.runtime.processes import create_memfd

COPY_BYTES: Final = 1 << 20

CLOSE_S: Final = 30.0
"""How long the end of the run waits for a save. What is left behind then is swept by the next save there."""

ABANDON_S: Final = 1.0
"""The same where nothing is being saved: what is still read then is of no use to anybody."""

_log = logging.getLogger(__name__)


class SoloSaves:
    """See the module docstring. Everything but ``post`` is called from the training thread.

    ``outbox_fd`` is the memfd in which the rank puts its state, within the ``with`` block. Leaving it finishes what was
    handed over; that waits for the disk, but not for ever.
    """

    def __init__(
        self, settings: Settings, cwd: Path, post: Callable[[PlaceTried | SaveSettled | BundleRead], None]
    ) -> None:
        """Assigns only.

        Args:
            settings: as the user chose them.
            cwd: where relative stems count from.
            post: takes what came of it; called from another thread.
        """
        self._settings, self._cwd, self._post = settings, cwd, post
        self._orders: dict[int, OpenSave] = {}
        self._locks: dict[Stem, StemLock] = {}
        self.outbox_fd = self._bundle_fd = -1
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "SoloSaves":
        """Make the outbox."""
        self.outbox_fd = create_memfd("flodl-outbox")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See the class."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(CLOSE_S if self._orders else ABANDON_S)
        os.close(self.outbox_fd)

    def try_place(self, stem: str, resume_from: str = "") -> None:
        """Find out whether a checkpoint can be written at ``stem``, and which one, other than that at ``resume_from``,
        lies there; PlaceTried follows.
        """
        self._submit(lambda: self._try_place(stem, resume_from))

    def open(self, order: OpenSave) -> None:
        """The rank will put a state into the outbox that shall become a checkpoint; SaveSettled follows."""
        self._orders[order.transfer] = order

    def on_sent(self, message: StateSent) -> None:
        """The rank has put a state into the outbox. Another one than a save's is nobody's here."""
        order = self._orders.get(message.transfer)
        if order is not None and not message.error:
            fd = os.dup(self.outbox_fd)  # the thread may outlive the run by a slow disk
            self._submit(lambda: self._make(order, fd, message.size_bytes))

    def drop(self, transfer: int) -> None:
        """Take back what there is of a save. Nothing follows; a checkpoint that is complete by now stays."""
        self._orders.pop(transfer, None)

    def read(self, stem: str, settings: Settings) -> None:
        """Find a checkpoint, check every byte of it, and whether the run may go on from it; BundleRead follows.

        ``settings``: under which solo trains; those of the resume point will be these.
        """
        self._submit(lambda: self._read(stem, settings))

    def load(self, take: Callable[[int], None]) -> None:
        """Let ``take`` load the checkpoint that was read, by its descriptor: those very bytes, whatever lies there."""
        try:
            take(self._bundle_fd)
        finally:
            self._let_go()

    # ----------------------------------------------------------------------------------------------- the disk's thread
    def _submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._do_all, name="flodl-saves", daemon=True)
            self._thread.start()

    def _do_all(self) -> None:
        while (work := self._work.get()) is not None:
            work()
        self._let_go()
        for lock in self._locks.values():
            lock.release()

    def _try_place(self, stem: str, resume_from: str) -> None:
        try:
            holds = check_place(Stem.of(self._cwd / stem), self._cwd / resume_from if resume_from else None)
        except Exception as fault:  # noqa: BLE001  # the run ends and says why
            self._post(PlaceTried(_words(fault, stem)))
        else:
            self._post(PlaceTried("", holds))

    def _make(self, order: OpenSave, state_fd: int, size_bytes: int) -> None:
        path = error = warning = ""
        try:
            path, warning = self._write(order, state_fd, size_bytes)
        except Exception as fault:  # noqa: BLE001  # a save that fails is told of, and training goes on
            error = _words(fault, order.stem)
        finally:
            os.close(state_fd)
        if self._orders.pop(order.transfer, None) is not None:
            self._post(SaveSettled(order.transfer, path, error, warning))

    def _write(self, order: OpenSave, state_fd: int, size_bytes: int) -> tuple[str, str]:
        """Where it lies, and what could not be done beside it."""
        stem = Stem.of(self._cwd / order.stem)
        lock = self._locks.setdefault(stem, StemLock(stem))  # held until the end of the run
        with BundleWriter(stem, lock) as writer:
            keep(stem, order.keep_last)  # what a killed run had no time for
            with writer.part(MODEL_SUFFIX) as part:
                for chunk in _chunks(state_fd, size_bytes):
                    part.write(chunk)
            if order.transfer in self._orders:  # else the next state may have come into the outbox meanwhile
                writer.commit(order.reason, _under(self._settings, order.point), _versions())
        return str(stem.plain(MODEL_SUFFIX)), keep(stem, order.keep_last)

    def _read(self, stem: str, settings: Settings) -> None:
        path = self._cwd / stem
        try:
            bundle = find(path)
            place, point = bundle.paths[MODEL_SUFFIX], bundle.meta.point
            refusal = misfit(point, self._settings, 1)
            if refusal:
                raise CheckpointError(f"{place} does not fit this run: {refusal}")
            with opened(bundle) as (file, _):
                self._bundle_fd = os.dup(file.fileno())
        except Exception as fault:  # noqa: BLE001  # the run ends and says why
            self._post(BundleRead(str(path), None, _words(fault, stem)))
        else:
            self._post(BundleRead(str(place), _under(settings, point), ""))

    def _let_go(self) -> None:
        if self._bundle_fd >= 0:
            os.close(self._bundle_fd)
            self._bundle_fd = -1


def _under(settings: Settings, point: ResumePoint) -> ResumePoint:
    """``point`` with the cadence of ``settings``, of which nothing is learned yet."""
    return replace(point, cadence=None, settings=replace(point.settings, cadence=settings.cadence))


def _chunks(fd: int, size_bytes: int) -> Iterator[bytes]:
    for offset in range(0, size_bytes, COPY_BYTES):
        yield os.pread(fd, min(COPY_BYTES, size_bytes - offset), offset)


def _versions() -> dict[str, str]:
    """What a checkpoint is made with, for its meta file."""
    return {"flodl": __version__, "python": sys.version.split()[0], "torch": torch.__version__}


def _words(fault: Exception, stem: str) -> str:
    if not isinstance(fault, CheckpointError):
        _log.error("checkpoint failed: stem=%s", stem, exc_info=fault)
    return str(fault)
