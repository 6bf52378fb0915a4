"""Checkpoints on the controller's disk: made out of a state that comes up, read and sent down again.

States of a save: *opening* (its folder is made, an earlier writer's leavings are swept) → *receiving* (the bulk link
writes the file) → *committing* → settled, or dropped. Nothing here blocks the event loop: all work with the disk is
done by one thread, in the order in which it was asked for, so that a save is taken back before the next one of the same
stem begins. Every save that was opened and not dropped is settled once.
"""

import contextlib
import errno
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from flodl.checkpoint.bundle import MODEL_SUFFIX, Stem
from flodl.checkpoint.keeping import keep
from flodl.checkpoint.locking import StemLock
from flodl.checkpoint.place import check_place
from flodl.checkpoint.reader import find, opened
from flodl.checkpoint.writer import BundleWriter
from flodl.controller.bulk import BulkHub
from flodl.controller.states import Arrived
from flodl.core.actions import OpenSave
from flodl.core.events import BundleRead, PlaceTried, SaveSettled
from flodl.core.saving import HANDOVER_STEM
from flodl.errors import CheckpointError
from flodl.ids import HostName

OPENING_S: Final = 30.0
"""How long a state may wait for its folder: a disk that takes longer would hold up the host's sums behind it."""

CLOSE_S: Final = 5.0
"""How long the end of the run waits for the disk. What is left behind then is swept by the next save there."""

_log = logging.getLogger(__name__)


class _Save:
    """One save. ``path`` is there once ``is_open`` is set, unless it could not be opened or was dropped before."""

    def __init__(self, order: OpenSave, versions: Mapping[str, str]) -> None:
        self.order = order
        self.versions = versions
        self.held = contextlib.ExitStack()
        self.writer: BundleWriter | None = None
        self.path: Path | None = None
        self.is_open = threading.Event()
        self.is_dropped = False

    def place(self) -> Path:
        """Where the state goes; waits for it. Raises OSError."""
        if not self.is_open.wait(OPENING_S):
            raise OSError(errno.ETIMEDOUT, f"the folder was not ready within {OPENING_S:g} s")
        if self.path is None:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        return self.path


class Saves:
    """See the module docstring. Call it from one thread; ``post`` is called from others."""

    def __init__(
        self, hub: BulkHub, cwd: str, own_folder: Path, post: Callable[[PlaceTried | SaveSettled | BundleRead], None]
    ) -> None:
        """``cwd``: where relative stems count from. ``own_folder``: where versions lie that are handed over; they are
        gone at the end.
        """
        self._hub, self._cwd, self._post = hub, Path(cwd), post
        self._handover = Stem(own_folder, "handover")
        self._saves: dict[int, _Save] = {}
        self._locks: dict[Stem, StemLock] = {}
        self._bundle_fd = -1
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def try_place(self, stem: str, resume_from: str = "") -> None:
        """Find out whether a checkpoint can be written at ``stem``, and which one, other than that at ``resume_from``,
        lies there; PlaceTried follows.
        """
        self._submit(lambda: self._try_place(stem, resume_from))

    def open(self, order: OpenSave, versions: Mapping[str, str]) -> None:
        """Make the state that will come the checkpoint at the order's stem; SaveSettled follows.

        ``versions``: of flodl, Python and torch, for the meta file.
        """
        save = _Save(order, versions)
        self._saves[order.transfer] = save
        self._hub.expect(order.transfer, order.host, save.place, lambda arrived: self._on_arrived(save, arrived))
        self._submit(lambda: self._open(save))

    def drop(self, transfer: int) -> None:
        """Take back what there is of a save. Nothing follows; a checkpoint that is complete by now stays."""
        save = self._saves.pop(transfer, None)
        if save is None:
            return
        save.is_dropped = True
        self._hub.forget(transfer)
        save.is_open.set()  # nobody need wait for it any more
        self._submit(save.held.close)

    def read(self, stem: str) -> None:
        """Find a checkpoint and check every byte of it; BundleRead follows."""
        self._submit(lambda: self._read(stem))

    def send(self, transfer: int, hosts: Sequence[HostName]) -> None:
        """Send the state of the checkpoint that was read down, once: those very bytes, whatever lies there by now."""
        self._submit(lambda: self._send(transfer, hosts))

    def close(self) -> None:
        """Take back every save that is not settled; waits for the disk, but not for long."""
        for transfer in list(self._saves):
            self.drop(transfer)
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(CLOSE_S)

    # ----------------------------------------------------------------------------------------------- the disk's thread
    def _submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._do_all, name="saves", daemon=True)
            self._thread.start()

    def _do_all(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001  # the next work is another one's
                _log.exception("saves")
        self._let_go()
        for lock in self._locks.values():
            lock.release()
        for path in (self._handover.meta, self._handover.plain(MODEL_SUFFIX)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _try_place(self, stem: str, resume_from: str) -> None:
        try:
            holds = check_place(self._stem(stem), self._cwd / resume_from if resume_from else None)
        except Exception as error:  # noqa: BLE001  # the run ends and says why
            if not isinstance(error, CheckpointError):
                _log.error("place not tried: stem=%s", stem, exc_info=error)
            self._post(PlaceTried(str(error)))
        else:
            self._post(PlaceTried("", holds))

    def _open(self, save: _Save) -> None:
        if save.is_dropped:
            return
        try:
            stem = self._stem(save.order.stem)
            lock = self._locks.setdefault(stem, StemLock(stem))  # held until the end of the run
            writer = save.held.enter_context(BundleWriter(stem, lock))
            keep(stem, save.order.keep_last)  # what a killed run had no time for
            save.path = writer.stage(MODEL_SUFFIX)
            save.writer = writer
        except Exception as error:  # noqa: BLE001  # a save that fails is told of, and training goes on
            self._hub.forget(save.order.transfer)
            self._settle(save, "", error)
        finally:
            save.is_open.set()

    def _on_arrived(self, save: _Save, arrived: Arrived) -> None:
        """From a thread of the bulk link."""
        self._submit(lambda: self._commit(save, arrived))

    def _commit(self, save: _Save, arrived: Arrived) -> None:
        order, writer = save.order, save.writer
        if save.is_dropped or writer is None:
            return
        try:
            if arrived.error is not None:
                raise writer.failure(arrived.error)
            writer.adopt(MODEL_SUFFIX, arrived.size_bytes, arrived.sha256)
            writer.commit(order.reason, order.point, save.versions)
        except Exception as error:  # noqa: BLE001  # as above
            self._settle(save, "", error)
        else:
            stem = self._stem(order.stem)
            self._settle(save, str(stem.plain(MODEL_SUFFIX)), None, keep(stem, order.keep_last))

    def _settle(self, save: _Save, path: str, error: Exception | None, warning: str = "") -> None:
        save.held.close()
        self._saves.pop(save.order.transfer, None)
        if error is not None and not isinstance(error, CheckpointError):
            _log.error("checkpoint not saved: stem=%s", save.order.stem, exc_info=error)
        if not save.is_dropped:
            self._post(SaveSettled(save.order.transfer, path, "" if error is None else str(error), warning))

    def _read(self, stem: str) -> None:
        self._let_go()
        path = self._cwd / stem
        try:
            bundle = find(str(self._stem(stem)))
            with opened(bundle) as (file, _):
                self._bundle_fd = os.dup(file.fileno())
        except Exception as error:  # noqa: BLE001  # the run ends and says why
            if not isinstance(error, CheckpointError):
                _log.error("checkpoint not read: stem=%s", stem, exc_info=error)
            self._post(BundleRead(str(path), None, str(error)))
        else:
            self._post(BundleRead(str(bundle.paths[MODEL_SUFFIX]), bundle.meta.point, ""))

    def _send(self, transfer: int, hosts: Sequence[HostName]) -> None:
        if self._bundle_fd < 0:
            _log.error("checkpoint not sent: transfer=%d reason=none was read", transfer)
            return
        self._hub.send_state(transfer, hosts, self._bundle_fd, os.fstat(self._bundle_fd).st_size)
        self._let_go()

    def _let_go(self) -> None:
        if self._bundle_fd >= 0:
            os.close(self._bundle_fd)
            self._bundle_fd = -1

    def _stem(self, stem: str) -> Stem:
        return self._handover if stem == HANDOVER_STEM else Stem.of(self._cwd / stem)
