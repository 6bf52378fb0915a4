"""The plain weights of a checkpoint as a safetensors file of their own, for whatever tool comes next.

Copied byte by byte without torch. Each name of the state dict stands there, tied ones with a copy each, so that
``model.load_state_dict(safetensors.torch.load_file(path))`` misses nothing; optimizers and buffers that the state dict
leaves out do not.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.reader import find, opened
from flodl.checkpoint.tensor_file import LENGTH_BYTES, StoredTensor, TensorFile
from flodl.checkpoint.writer import reason_of, sync_folder
from flodl.errors import CheckpointError, ConfigError

SUFFIX: Final = ".safetensors"
ALIGNMENT_BYTES: Final = 64
COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written where."""

    path: Path
    tensor_count: int
    size_bytes: int


def export(path: str | os.PathLike[str], target: Path | None = None, *, replace: bool = False) -> Exported:
    """Write the weights of the checkpoint at ``path``, whole or not at all, after checking every byte of it.

    Args:
        path: the checkpoint's stem.
        target: a file that ends in ``.safetensors``; None takes the stem with that ending.
        replace: whether a file that is there may be replaced.

    Raises:
        CheckpointError: the checkpoint cannot be used, or ``target`` not be written.
        ConfigError: ``target`` is there already, or no place for such a file.
    """
    stem = Stem.of(path)
    place = stem.plain(SUFFIX) if target is None else target
    try:
        _check_target(place, replace)
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {reason_of(error)}") from None
    bundle = find(path)
    with opened(bundle) as (file, tensors):
        try:
            return _write(file, tensors, place, replace)
        except OSError as error:
            raise CheckpointError(f"{place} cannot be written: {reason_of(error)}") from error


def _check_target(target: Path, replace: bool) -> None:
    if target.suffix != SUFFIX:
        raise ConfigError(f"{target} does not end in {SUFFIX}, by which others know such a file; add it")
    if target.is_symlink() or target.is_dir():
        kind = "a folder" if target.is_dir() and not target.is_symlink() else "a symbolic link"
        raise ConfigError(f"{target} is {kind}; name a file")
    if target.exists() and not target.is_file():
        raise ConfigError(f"{target} is a pipe or a device; name a file")
    if target.exists() and not replace:
        raise ConfigError(f"{target} is there already; name another file, or replace it with --force")


def _write(file: BinaryIO, source: TensorFile, target: Path, replace: bool) -> Exported:
    chosen = sorted(
        ((name, source.tensors[stored]) for name, stored in source.state_dict.items()),
        key=lambda each: each[1].start,
    )
    staged = target.with_name(f"{target.name}.{secrets.token_hex(6)}")
    try:
        with open(staged, "xb") as out:
            out.writelines(_chunks(file, chosen))
            out.flush()
            os.fsync(out.fileno())
            size_bytes = out.tell()
        _check_target(target, replace)  # somebody may have written it meanwhile
        os.rename(staged, target)
        sync_folder(target.parent)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(staged)
    return Exported(target, len(chosen), size_bytes)


def _chunks(file: BinaryIO, chosen: list[tuple[str, StoredTensor]]) -> Iterator[bytes]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in chosen:
        end = offset + tensor.stop - tensor.start
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    yield len(text).to_bytes(LENGTH_BYTES, "little") + text
    for _, tensor in chosen:
        file.seek(tensor.start)
        for start in range(tensor.start, tensor.stop, COPY_BYTES):
            yield file.read(min(COPY_BYTES, tensor.stop - start))
