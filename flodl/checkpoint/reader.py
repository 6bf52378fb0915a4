"""Reading a bundle: the meta file first, then exactly the parts that it names.

``find`` reads every byte of them, ``look`` only their sizes.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from flodl.checkpoint.bundle import MAX_META_BYTES, META_SUFFIX, MODEL_SUFFIX, BundleMeta, Part, Stem
from flodl.checkpoint.tensor_file import TensorFile, read_tensor_file
from flodl.errors import CheckpointError

ATTEMPTS: Final = 5
"""A save that is committed between two of our reads makes us begin again; so often in a row is no coincidence."""


_Check: TypeAlias = Callable[[Path, Part], None]


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle as it was found: its meta file, and where each part lies, by suffix."""

    stem: Stem
    meta: BundleMeta
    paths: dict[str, Path]


def read_meta(stem: Stem) -> BundleMeta:
    """The content of the meta file.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        with _regular(stem.meta) as file:
            text = file.read(MAX_META_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(_absent(stem)) from None
    except OSError as error:
        raise CheckpointError(f"{stem.meta} cannot be read: {error.strerror}") from error
    if len(text) > MAX_META_BYTES:
        raise CheckpointError(
            f"{stem.meta} has more than {MAX_META_BYTES} bytes; it is not the meta file of a checkpoint"
        )
    return BundleMeta.from_json(text, str(stem.meta))


def find(path: str | os.PathLike[str]) -> Bundle:
    """The whole bundle at a stem, every byte of it checked.

    Raises:
        CheckpointError: there is none, it cannot be read, or a part is missing or damaged, which is named.
    """
    return _found(Stem.of(path), _check_bytes)


def look(path: str | os.PathLike[str]) -> Bundle:
    """The bundle at a stem; of its parts only the sizes are checked.

    Raises:
        CheckpointError: as ``find``.
    """
    return _found(Stem.of(path), _check_size)


@contextmanager
def opened(bundle: Bundle) -> Iterator[tuple[BinaryIO, TensorFile]]:
    """The bundle's tensor file, open for reading, and what its header says.

    Raises:
        CheckpointError: it cannot be read, is no safetensors file of flodl's, or another save has replaced it since
            ``bundle`` was found.
    """
    path = bundle.paths[MODEL_SUFFIX]
    with _open(bundle.stem, path) as file:
        # A part is renamed over only behind the meta file that names it: this file is still the bundle's.
        if read_meta(bundle.stem).save_id != bundle.meta.save_id:
            raise CheckpointError(_replaced(bundle.stem))
        yield file, _header_of(file, path)


def _regular(path: Path) -> BufferedReader:
    """Opened without waiting for anybody: where somebody has put a pipe or a device, reading might never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_special(path, os.fstat(fd))
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise CheckpointError(f"{path} is {kind}, expected a file")


def _open(stem: Stem, path: Path) -> BinaryIO:
    try:
        return _regular(path)
    except FileNotFoundError:
        raise CheckpointError(_replaced(stem)) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _header_of(file: BinaryIO, path: Path) -> TensorFile:
    try:
        return read_tensor_file(file, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _found(stem: Stem, check: _Check) -> Bundle:
    fault: CheckpointError | None = None
    save_id = ""
    for _ in range(ATTEMPTS):
        meta = read_meta(stem)
        if fault is not None and meta.save_id == save_id:
            raise fault  # nobody has saved in between: it is as it looks
        save_id = meta.save_id
        try:
            return Bundle(stem, meta, {part.suffix: _locate(stem, meta, part, check) for part in meta.parts})
        except CheckpointError as error:
            fault = error
    raise CheckpointError(_replaced(stem))


def _locate(stem: Stem, meta: BundleMeta, part: Part, check: _Check) -> Path:
    """Where ``part`` lies: under the name of its save until the writer has renamed it."""
    for path in (stem.staged(meta.save_id, part.suffix), stem.plain(part.suffix)):
        try:
            check(path, part)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        return path
    raise CheckpointError(f"{stem.plain(part.suffix)} is missing; {stem.meta.name} says that it belongs there")


def _check_size(path: Path, part: Part) -> None:
    status = os.stat(path)
    _refuse_special(path, status)
    _compare_size(path, part, status.st_size)


def _check_bytes(path: Path, part: Part) -> None:
    with _regular(path) as file:
        _compare_size(path, part, os.fstat(file.fileno()).st_size)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != part.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is {sha256}, expected {part.sha256}")


def _compare_size(path: Path, part: Part, size_bytes: int) -> None:
    if size_bytes != part.size_bytes:
        raise CheckpointError(f"{path} is damaged: it has {size_bytes} bytes, expected {part.size_bytes}")


def _replaced(stem: Stem) -> str:
    return f"{stem}: the checkpoint is replaced while it is read; try again"


def _absent(stem: Stem) -> str:
    alone = stem.plain(MODEL_SUFFIX)
    if alone.is_file():
        return _without_meta(stem, alone)
    try:
        found = sorted(name for name in os.listdir(stem.folder) if name.endswith(META_SUFFIX))
    except OSError as error:
        return f"{stem.folder} cannot be read: {error.strerror}"
    near = ", ".join(name.removesuffix(META_SUFFIX) for name in found[:5])
    there = f"; in {stem.folder} there is {near}" if near else ""
    return f"there is no checkpoint {stem}: {stem.meta.name} does not exist{there}"


def _without_meta(stem: Stem, alone: Path) -> str:
    try:
        with _open(stem, alone) as file:
            _header_of(file, alone)
    except CheckpointError as error:
        return str(error)
    return f"{stem.meta} does not exist; {alone.name} alone is a model's weights, and no checkpoint to go on from"
