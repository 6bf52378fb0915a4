"""Whether checkpoints can be written at a stem, found out before anything is trained. Nothing of the trial stays.

What a save does first is done here, but for its lock and its folders: another run that saves there now may have ended
by then, and a folder that is missing is made when there is something to put into it.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from flodl.checkpoint.bundle import MODEL_SUFFIX, SAVE_ID_HEX, BundleMeta, Stem
from flodl.checkpoint.reader import read_meta
from flodl.checkpoint.writer import reason_of, refuse_foreign, refuse_special
from flodl.errors import CheckpointError


def check_place(stem: Stem, resume_from: Path | None = None) -> str:
    """Return if a checkpoint can be written at ``stem`` now, as far as can be seen.

    Args:
        stem: where.
        resume_from: the path of the checkpoint that the run goes on from; None where it starts afresh.

    Returns:
        Which checkpoint lies there, in words; empty where there is none, or it is the one that the run goes on from.

    Raises:
        CheckpointError: it cannot, or what lies in a file's place is no checkpoint's; the message names the remedy.
    """
    try:
        refuse_special(stem)
        meta = read_meta(stem) if os.path.lexists(stem.meta) else None
        refuse_foreign(stem)
        _try_to_write(stem)
    except OSError as error:
        raise CheckpointError(f"save_path {stem} cannot be used: {reason_of(error)}") from error
    return "" if meta is None or (resume_from is not None and _is_at(resume_from, stem)) else _words(meta)


def _is_at(path: Path, stem: Stem) -> bool:
    with contextlib.suppress(CheckpointError, OSError):  # what cannot be gone on from is refused when it is read
        return os.path.samefile(Stem.of(path).meta, stem.meta)
    return False


def _words(meta: BundleMeta) -> str:
    position, settings = meta.point.position, meta.point.settings
    saved_at = datetime.fromtimestamp(meta.saved_at_s, UTC)
    epochs = settings.num_epochs * settings.epoch_splits
    return f"a checkpoint of {saved_at:%Y-%m-%d %H:%M} UTC, {position.epoch} of {epochs} epochs"


def _try_to_write(stem: Stem) -> None:
    save_id = secrets.token_hex(SAVE_ID_HEX // 2)
    place, missing = _nearest(stem.folder)
    with contextlib.ExitStack() as traces:
        if missing:
            _refuse_long(place, missing)
            place = place / f".{save_id}"  # a name of its own: the folder's may be another run's by the next moment
            os.mkdir(place)
            traces.callback(_vanish, os.rmdir, place)
        file = Stem(place, stem.name).staged(save_id, MODEL_SUFFIX)  # one that a save sweeps, should we be killed now
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        traces.callback(_vanish, os.unlink, file)
        try:
            os.write(fd, bytes(1))
            os.fsync(fd)
        finally:
            os.close(fd)


def _nearest(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """What there is of the way to ``folder``, and the names that are missing."""
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path) or path == path.parent)
    return place, folder.relative_to(place).parts


def _refuse_long(place: Path, names: tuple[str, ...]) -> None:
    for name in names:  # each by itself, for the system looks at none behind one that is missing
        with contextlib.suppress(FileNotFoundError):
            os.lstat(place / name)


def _vanish(remove: Callable[[Path], None], path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # a save of another run has swept it
        remove(path)
