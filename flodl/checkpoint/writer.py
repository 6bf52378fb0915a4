"""Writing a bundle: whatever happens at whatever moment, the one before stays whole until the new one is.

Files are written beside their targets, synced, and renamed; the folder is synced after every rename. Nothing is
replaced before ``commit``. A writer that is killed leaves files that the next one sweeps; ``StemLock`` sees to it that
they are no living one's.
"""

import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from flodl.checkpoint.bundle import (
    META_SUFFIX,
    MODEL_SUFFIX,
    OPTIONAL_SUFFIXES,
    SAVE_ID_HEX,
    BundleMeta,
    Part,
    Stem,
)
from flodl.checkpoint.locking import StemLock
from flodl.checkpoint.reader import read_meta
from flodl.core.position import ResumePoint, SaveReason
from flodl.errors import CheckpointError

_REMEDIES: Final = {
    errno.ENOSPC: "free some space there, or save elsewhere",
    errno.EDQUOT: "your quota there is used up: delete something, or save elsewhere",
    errno.EROFS: "it is mounted read-only: save elsewhere",
    errno.EACCES: "you may not write there: save to a folder of your own",
    errno.EPERM: "you may not write there: save to a folder of your own",
    errno.ENOENT: "the folder is not there, or not any more: create it, or save elsewhere",
    errno.EEXIST: "a folder on the way there is a file: save elsewhere",
    errno.ENAMETOOLONG: "take a shorter one",
    errno.ENOTDIR: "a folder on the way there is a file: save elsewhere",
}


class PartWriter:
    """One part while it is written; made by ``BundleWriter.part``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        """Of what was written so far, in hex."""
        return self._digest.hexdigest()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Raises OSError; ``BundleWriter.part`` says it in words."""
        rest = memoryview(data).cast("B")
        self._digest.update(rest)
        self.size_bytes += len(rest)
        while rest:
            rest = rest[os.write(self._fd, rest) :]


class BundleWriter:
    """One save: parts, then ``commit``; without it everything is taken back at the end of the ``with`` block."""

    def __init__(self, stem: Stem, lock: StemLock | None = None) -> None:
        """Assigns only. ``lock``: the stem's, which the caller releases; with None it is held for this save only."""
        self._stem = stem
        self._lock = lock or StemLock(stem)
        self._is_own_lock = lock is None
        self._save_id = secrets.token_hex(SAVE_ID_HEX // 2)
        self._parts: list[Part] = []
        self._files: list[Path] = []

    def __enter__(self) -> "BundleWriter":
        """Make the folder and sweep what an earlier writer left.

        Raises:
            CheckpointError: another one is saving there, the folder cannot be made or written to, or what lies in a
                target's place is no checkpoint's.
        """
        try:
            with self._in_words():
                self._stem.folder.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()
                refuse_special(self._stem)
                sweep(self._stem)
                refuse_foreign(self._stem)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take back what was not committed."""
        try:
            for path in self._files:
                with suppress(OSError):
                    os.unlink(path)
        finally:
            self._release()

    def _release(self) -> None:
        if self._is_own_lock:
            self._lock.release()

    @contextmanager
    def part(self, suffix: str) -> Iterator[PartWriter]:
        """Write the part ``<stem><suffix>``; it is synced at the end of the block.

        Raises:
            CheckpointError: it cannot be written; the remedy is named. The bundle before is untouched.
        """
        path = self._stem.staged(self._save_id, suffix)
        with self._in_words(), self._new_file(path) as fd:
            writer = PartWriter(fd)
            yield writer
        self._parts.append(Part(suffix, writer.size_bytes, writer.sha256))

    def stage(self, suffix: str) -> Path:
        """Make the empty file of the part ``<stem><suffix>`` for somebody else to write and sync; then ``adopt`` it.

        Raises:
            CheckpointError: it cannot be made.
        """
        path = self._stem.staged(self._save_id, suffix)
        with self._in_words(), self._new_file(path):
            pass
        return path

    def adopt(self, suffix: str, size_bytes: int, sha256: str) -> None:
        """The part that was staged is complete and synced: ``size_bytes`` bytes with the digest ``sha256`` (hex).

        Raises:
            CheckpointError: it is not there, or not as long.
        """
        path = self._stem.staged(self._save_id, suffix)
        with self._in_words():
            found_bytes = path.stat().st_size
        if found_bytes != size_bytes:
            raise CheckpointError(f"{path} has {found_bytes} bytes, expected {size_bytes}: somebody else changed it")
        self._parts.append(Part(suffix, size_bytes, sha256))

    def failure(self, error: OSError) -> CheckpointError:
        """What to say of the ``error`` of somebody who writes a part."""
        kept = "; the checkpoint before is intact" if os.path.lexists(self._stem.meta) else ""
        return CheckpointError(f"{self._stem}: the checkpoint cannot be written: {reason_of(error)}{kept}")

    def commit(
        self, reason: SaveReason, point: ResumePoint, versions: Mapping[str, str] | None = None, kept_of: str = ""
    ) -> BundleMeta:
        """Publish the bundle: from the rename of the meta file on it is the one that a reader finds.

        ``kept_of`` as in ``BundleMeta``.

        Raises:
            CheckpointError: it cannot be written, or no reader would take it; the bundle before is untouched.
        """
        stem, save_id = self._stem, self._save_id
        meta = BundleMeta(save_id, reason, time.time(), tuple(self._parts), point, versions or {}, kept_of)
        text = meta.to_json()
        staged = stem.staged(save_id, META_SUFFIX)
        with self._in_words():
            with self._new_file(staged) as fd:
                PartWriter(fd).write(text.encode())
            _unsettle(stem, {part.suffix for part in meta.parts})
            sync_folder(stem.folder)
            os.rename(staged, stem.meta)
            self._files = []
            sync_folder(stem.folder)
        with suppress(OSError):  # committed: a reader finds the parts under either name, and the next writer sweeps
            _settle(stem, meta)
            _remove_stale(stem, save_id)
        return meta

    @contextmanager
    def _new_file(self, path: Path) -> Iterator[int]:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._files.append(path)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.failure(error) from error


def reason_of(error: OSError) -> str:
    """Why a file cannot be written, with the remedy where one is known."""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{error.strerror or error}{': ' + remedy if remedy else ''}"


def sweep(stem: Stem) -> None:
    """Finish what a writer did not live to finish: parts of the committed bundle get their names, others go.

    The caller holds the stem's lock: what a living writer has staged would go too.

    Raises:
        CheckpointError: there is a meta file that cannot be read; nothing is touched then.
        OSError: the folder cannot be read or changed.
    """
    save_id = ""
    if os.path.lexists(stem.meta):
        meta = read_meta(stem)
        save_id = meta.save_id
        _settle(stem, meta)
    _remove_stale(stem, save_id)


def _remove_stale(stem: Stem, save_id: str) -> None:
    """Remove what belongs to any save of this stem but the committed one."""
    mine = re.compile(re.escape(stem.name) + rf"\.([0-9a-f]{{{SAVE_ID_HEX}}})\.[^/]+")
    with os.scandir(stem.folder) as entries:
        stale = [e.path for e in entries if (match := mine.fullmatch(e.name)) and match[1] != save_id]
    for path in stale:
        os.unlink(path)


def _settle(stem: Stem, meta: BundleMeta) -> None:
    """Give the parts of a committed bundle their plain names."""
    changed = False
    for part in meta.parts:
        staged, plain = stem.staged(meta.save_id, part.suffix), stem.plain(part.suffix)
        if os.path.lexists(staged):
            os.rename(staged, plain)
            changed = True
    if changed:
        sync_folder(stem.folder)


def _unsettle(stem: Stem, kept: Container[str]) -> None:
    """Put those parts of the committed bundle that the next one does not have back under their save's name, where a
    reader finds them, and ``sweep`` after the next commit. A file that no bundle names is not ours to remove.
    """
    if not os.path.lexists(stem.meta):
        return
    meta = read_meta(stem)
    for part in meta.parts:
        if part.suffix not in kept and os.path.lexists(stem.plain(part.suffix)):
            os.rename(stem.plain(part.suffix), stem.staged(meta.save_id, part.suffix))


def refuse_special(stem: Stem) -> None:
    """Renaming would replace a link and leave the file that it names as it was, and fail on a folder too late.

    Raises:
        CheckpointError: naming what lies in the place of a file of the bundle.
        OSError: it cannot be seen.
    """
    for path in (stem.meta, *(stem.plain(suffix) for suffix in (MODEL_SUFFIX, *OPTIONAL_SUFFIXES))):
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link to {os.readlink(path)}; save to that place itself")
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a pipe or a device"
            raise CheckpointError(f"{path} is {kind}; move it, or take another save_path")


def refuse_foreign(stem: Stem) -> None:
    """Weights without a meta file are of no save of ours: the meta file comes first and goes last.

    Raises:
        CheckpointError: there are some.
    """
    path = stem.plain(MODEL_SUFFIX)
    if os.path.lexists(path) and not os.path.lexists(stem.meta):
        raise CheckpointError(
            f"{path} is there already and belongs to no checkpoint ({stem.meta.name} does not exist); it is left as it "
            "is: move it, or take another save_path"
        )


def sync_folder(folder: Path) -> None:
    """Make what was renamed in ``folder`` last. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
