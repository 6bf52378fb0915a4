"""``flodl.save_checkpoint``: a model's weights as one file, whole or not at all."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch

from flodl.checkpoint.bundle import MODEL_SUFFIX, SAVE_ID_HEX, Stem
from flodl.checkpoint.writer import reason_of, sync_folder
from flodl.errors import CheckpointError
from flodl.spec import context
from flodl.spec.state import StateInfo, write_state


def save_checkpoint(model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights of ``model`` to ``path``: a safetensors file, on the machine where it is called.

    Parameters and buffers stand there under their state-dict names, without the ``_orig_mod.`` of ``torch.compile``; a
    tensor with several names (tied weights) is stored once, under the first. What was at ``path`` is replaced when the
    new file is whole. No run can go on from it: it has no optimizer and no position (``save_path`` makes such ones).

    Args:
        model: on any device.
        path: with or without ``.fdl``; missing folders are made.

    Raises:
        CheckpointError: a tensor cannot be stored, the file cannot be written, a run's checkpoint lies there, or the
            run of this process saves there.
    """
    stem = Stem.of(path)
    target = stem.plain(MODEL_SUFFIX)
    if os.path.lexists(stem.meta):
        raise CheckpointError(f"{target} is part of a run's checkpoint; choose another name, or remove {stem.meta}")
    if _is_the_runs(stem):
        raise CheckpointError(f"{target} is where this run saves its checkpoints (save_path); choose another name")
    try:
        stem.folder.mkdir(parents=True, exist_ok=True)
        _replace(model, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {reason_of(error)}") from error


def _is_the_runs(stem: Stem) -> bool:
    """Whether the run of this process will save there; it would refuse to, once the file is there."""
    own = context.save_path()
    return bool(own) and os.path.realpath(Stem.of(own).meta) == os.path.realpath(stem.meta)


def _replace(model: torch.nn.Module, target: Path) -> None:
    staged = target.with_name(f"{target.name}.{secrets.token_hex(SAVE_ID_HEX // 2)}.tmp")
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            write_state(model, StateInfo(epochs=0, version=0), fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(staged, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged)
        raise
    sync_folder(target.parent)
