"""The newest checkpoints of a run, each under a stem of its own beside the one that is replaced again and again.

``<stem>`` is the newest one, always. Once it is committed it is kept under ``<stem>-e0005`` as well, where 5 epochs are
complete, or ``<stem>-e0005-v000123`` where it was made for another reason than that an epoch was complete. That is a
bundle like any other, whose parts are the same files by hard links: its meta file says in ``kept_of`` for which stem it
is kept. Behind its commit the oldest of these are removed, so that n are left.

Invariants: at any moment each meta file describes parts that are there; nothing is removed, and nothing replaced, but
what says itself that it is kept for this stem.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from flodl.checkpoint.bundle import META_SUFFIX, SAVE_ID_HEX, BundleMeta, Part, Stem
from flodl.checkpoint.locking import StemLock
from flodl.checkpoint.reader import read_meta
from flodl.checkpoint.writer import BundleWriter, reason_of, sweep, sync_folder
from flodl.core.position import SaveReason
from flodl.errors import CheckpointError

_NUMBERS: Final = r"-e[0-9]{4,}(?:-v[0-9]{6,})?"


def kept_stem(stem: Stem, meta: BundleMeta) -> Stem:
    """Where the checkpoint ``meta`` of ``stem`` is kept."""
    position = meta.point.position
    version = "" if meta.reason is SaveReason.CHECKPOINT else f"-v{position.version:06d}"
    return Stem(stem.folder, f"{stem.name}-e{position.epoch:04d}{version}")


def keep(stem: Stem, count: int) -> str:
    """Keep the committed checkpoint at ``stem`` under its own stem too, and only the ``count`` newest of these.

    With ``count`` 1, and where there is no checkpoint, nothing is done: ``stem`` itself is the newest. Twice is as good
    as once. The caller holds the lock of ``stem``. Returns why it could not be done, with the remedy; else nothing.
    """
    if count <= 1 or not os.path.lexists(stem.meta):
        return ""
    try:
        meta = read_meta(stem)
        kept = kept_stem(stem, meta)
        if _is_kept(kept, meta, stem):
            with StemLock(kept):
                sweep(kept)
        else:
            _link(stem, meta, kept)
        _prune(stem, count, kept)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{stem}: older checkpoints cannot be kept in order: {reason_of(error)}"
    return ""


def _is_kept(kept: Stem, meta: BundleMeta, stem: Stem) -> bool:
    if os.path.lexists(kept.meta):
        there = read_meta(kept)
        if there.kept_of != stem.name:
            raise CheckpointError(f"{kept} is another checkpoint and is left alone: move it away, or save elsewhere")
        return (there.point, there.parts) == (meta.point, meta.parts)
    for part in meta.parts:
        if os.path.lexists(kept.plain(part.suffix)):
            raise CheckpointError(
                f"{kept.plain(part.suffix)} belongs to no checkpoint and is left alone: move it away, or save elsewhere"
            )
    return False


def _link(stem: Stem, meta: BundleMeta, kept: Stem) -> None:
    with BundleWriter(kept) as writer:
        for part in meta.parts:
            path = writer.stage(part.suffix)
            _same(_place(stem, meta, part), path)
            writer.adopt(part.suffix, part.size_bytes, part.sha256)
        writer.commit(meta.reason, meta.point, meta.versions, kept_of=stem.name)


def _place(stem: Stem, meta: BundleMeta, part: Part) -> Path:
    staged = stem.staged(meta.save_id, part.suffix)
    return staged if os.path.lexists(staged) else stem.plain(part.suffix)


def _same(source: Path, target: Path) -> None:
    """Make the empty file ``target`` the file ``source`` under another name; a copy where the disk knows no links.

    No part is ever changed in place, so both stay what they are.
    """
    os.unlink(target)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# ------------------------------------------------------------------------------------------------------------- pruning
def _prune(stem: Stem, count: int, newest: Stem) -> None:
    """``newest`` is one of those that stay, whatever the clock said when the others were made."""
    mine = _mine(stem)
    others = sorted((meta.saved_at_s, name) for name, meta in mine.items() if name != newest.name)
    for _, name in others[: max(0, len(others) - (count - 1))]:
        _remove(Stem(stem.folder, name), mine.pop(name))
    _sweep(stem, mine)


def _mine(stem: Stem) -> dict[str, BundleMeta]:
    """Every checkpoint that is kept for ``stem``, by its stem's name."""
    pattern = re.compile(rf"({re.escape(stem.name)}{_NUMBERS}){re.escape(META_SUFFIX)}")
    found: dict[str, BundleMeta] = {}
    for name in os.listdir(stem.folder):
        if match := pattern.fullmatch(name):
            with suppress(CheckpointError):  # whatever it is, it is not ours
                meta = read_meta(Stem(stem.folder, match[1]))
                if meta.kept_of == stem.name:
                    found[match[1]] = meta
    return found


def _remove(kept: Stem, meta: BundleMeta) -> None:
    """Until the meta file has gone to the save's name the checkpoint is whole; that name tells ``_sweep`` whose it was.

    The parts go there first: under its plain name a file without a meta file could be anybody's.
    """
    for part in meta.parts:
        plain = kept.plain(part.suffix)
        if os.path.lexists(plain):
            os.rename(plain, kept.staged(meta.save_id, part.suffix))
    sync_folder(kept.folder)
    os.rename(kept.meta, kept.staged(meta.save_id, META_SUFFIX))
    sync_folder(kept.folder)
    _clear(kept, meta)


def _clear(kept: Stem, meta: BundleMeta) -> None:
    for suffix in (*(part.suffix for part in meta.parts), META_SUFFIX):  # what says whose it was goes last
        with suppress(FileNotFoundError):
            os.unlink(kept.staged(meta.save_id, suffix))


def _sweep(stem: Stem, mine: dict[str, BundleMeta]) -> None:
    """Finish removals that were broken off."""
    ending = re.escape(META_SUFFIX)
    pattern = re.compile(rf"({re.escape(stem.name)}{_NUMBERS})\.([0-9a-f]{{{SAVE_ID_HEX}}}){ending}")
    for name in os.listdir(stem.folder):
        if match := pattern.fullmatch(name):
            with suppress(CheckpointError):  # as above
                meta = read_meta(Stem(stem.folder, f"{match[1]}.{match[2]}"))
                is_current = match[1] in mine and mine[match[1]].save_id == match[2]
                if (meta.kept_of, meta.save_id) == (stem.name, match[2]) and not is_current:
                    _clear(Stem(stem.folder, match[1]), meta)
