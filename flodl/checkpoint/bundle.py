"""What a checkpoint is on disk, and what its ``.meta.json`` says.

A bundle belongs to a *stem*, a path without its ending. There lie ``<stem>.fdl``, the one file with tensors (model,
optimizer and outer optimizer, in the safetensors format), perhaps ``<stem>.config.json``, and ``<stem>.meta.json``,
which names the exact parts it belongs to by size and SHA-256. Parts come first, under a name that carries the save's
id; renaming the meta file is the commit; then the parts get their plain names. So at every moment the meta file on disk
describes parts that are there:

    <stem>.<id>.fdl      written and synced          (the bundle before is whole)
    <stem>.meta.json     renamed over the old one    (this bundle is whole)
    <stem>.fdl           renamed from <stem>.<id>.fdl

The meta file is one JSON object: ``format``, ``save_id``, ``reason``, ``saved_at_s``, ``parts``, ``versions``,
``kept_of``, and the resume point (``checkpoint/point.py``). Every one since format 1 can be read for ever: fields are
added with a default, never taken away.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flodl.checkpoint.plain import expect, lift, lower
from flodl.checkpoint.point import point_from_json, point_to_json
from flodl.core.position import ResumePoint, SaveReason
from flodl.errors import CheckpointError

RESUME_VARIABLE: Final = "FDL_RESUME"
"""In a run's environment: the stem that it goes on from, whatever its script says and whatever ranks there are."""
FORMAT: Final = 1
MODEL_SUFFIX: Final = ".fdl"
META_SUFFIX: Final = ".meta.json"
OPTIONAL_SUFFIXES: Final = (".config.json",)
"""The model's own configuration. A bundle may have it or not."""
MAX_META_BYTES: Final = 16 << 20
"""Coverage is spans, and a run has thousands of them at most: beyond, it is another file."""
MAX_PARTS: Final = 16
MAX_VERSIONS: Final = 64
MAX_TIME_S: Final = 253_402_300_799
"""The end of the year 9999, the last that a calendar knows."""
SAVE_ID_HEX: Final = 12
MAX_NAME_BYTES: Final = 255 - max(len(suffix) for suffix in (META_SUFFIX, *OPTIONAL_SUFFIXES)) - 1 - SAVE_ID_HEX
"""Of a stem, so that a file system takes the names of all its files."""

_SAVE_ID: Final = re.compile(rf"[0-9a-f]{{{SAVE_ID_HEX}}}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SUFFIX: Final = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A part lies beside the meta file, whatever that says."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the bundle: ``suffix`` behind the stem, size in bytes, SHA-256 in hex."""

    suffix: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BundleMeta:
    """The content of ``<stem>.meta.json``.

    ``saved_at_s`` is Unix time; ``versions`` are those of flodl, torch, Python. ``kept_of`` names the stem for which
    flodl keeps this bundle, and will remove it (``checkpoint/keeping.py``); empty for any other.
    """

    save_id: str
    reason: SaveReason
    saved_at_s: float
    parts: tuple[Part, ...]
    point: ResumePoint
    versions: Mapping[str, str] = field(default_factory=dict)
    kept_of: str = ""

    def to_json(self) -> str:
        """The file's text: one line for each value, so that a person finds it.

        Raises:
            CheckpointError: ``from_json`` would not take it; the message names the field.
        """
        names = ("save_id", "reason", "saved_at_s", "parts", "versions", "kept_of")
        own = {name: lower(getattr(self, name)) for name in names}
        data = {"format": FORMAT, **own, **point_to_json(self.point)}
        _lift(data)
        return "{\n" + ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in data.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> "BundleMeta":
        """Read it back.

        Raises:
            CheckpointError: not a meta file, damaged, or of a later format; the message begins with ``name``.
        """
        try:
            data = json.loads(text)
            found = data["format"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CheckpointError(
                f"{name} was not written by this flodl: it is not the meta file of a checkpoint"
            ) from None
        if type(found) is not int or not 1 <= found <= FORMAT:
            raise CheckpointError(f"{name} has format {found!r:.40}, this flodl reads up to {FORMAT}; upgrade flodl")
        try:
            return _lift(data)
        except CheckpointError as error:
            raise CheckpointError(f"{name} is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class Stem:
    """A bundle's place: ``folder`` and the ``name`` without an ending."""

    folder: Path
    name: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "Stem":
        """From a path with or without ``.fdl`` or ``.meta.json``.

        Raises:
            CheckpointError: the path names a folder, or nothing, or cannot be a file's.
        """
        whole = Path(path)
        name = name_of(str(whole))
        if not name:
            raise CheckpointError(f"{os.fspath(path)!r} names no checkpoint; give a path such as ckpts/run43")
        if fault := name_fault(str(whole)):
            raise CheckpointError(f"{os.fspath(path)!r:.200} {fault}")
        if os.path.isdir(whole):
            raise CheckpointError(f"{whole} is a folder; name a checkpoint in it, such as {whole / 'run'}")
        return cls(whole.parent, name)

    def __str__(self) -> str:
        return str(self.folder / self.name)

    @property
    def meta(self) -> Path:
        """``<stem>.meta.json``."""
        return self.folder / f"{self.name}{META_SUFFIX}"

    def plain(self, suffix: str) -> Path:
        """Where a part lies when all is done."""
        return self.folder / f"{self.name}{suffix}"

    def staged(self, save_id: str, suffix: str) -> Path:
        """Where a part lies until its bundle is committed."""
        return self.folder / f"{self.name}.{save_id}{suffix}"


def name_of(path: str) -> str:
    """The name without an ending of the checkpoint that ``path`` stands for; empty where it names none."""
    name = os.path.basename(path).removesuffix(META_SUFFIX).removesuffix(MODEL_SUFFIX)
    return "" if name in (".", "..") else name


def name_fault(path: str) -> str:
    """Why no checkpoint can have the name in ``path``; empty where one can."""
    try:
        size_bytes = len(os.fsencode(name_of(path)))
    except UnicodeEncodeError:
        size_bytes = -1
    if size_bytes < 0 or "\0" in path:
        return "holds a character that no file's name can have"
    if size_bytes > MAX_NAME_BYTES:
        return f"names a file with {size_bytes} bytes in its name; it may have at most {MAX_NAME_BYTES}"
    return ""


def _lift(data: Mapping[str, Any]) -> BundleMeta:
    for name in ("save_id", "reason", "saved_at_s", "parts"):
        if name not in data:
            raise CheckpointError(f"{name} is missing")
    saved_at_s = lift(float, data["saved_at_s"], "saved_at_s", {})
    if saved_at_s > MAX_TIME_S:
        raise CheckpointError(f"saved_at_s is {saved_at_s:g}, expected a time before the year 10000")
    versions = expect(dict, data.get("versions", {}), "versions")
    if len(versions) > MAX_VERSIONS:
        raise CheckpointError(f"versions has {len(versions)} entries, expected at most {MAX_VERSIONS}")
    return BundleMeta(
        _matching(_SAVE_ID, data["save_id"], "save_id"),
        lift(SaveReason, data["reason"], "reason", {}),
        saved_at_s,
        _parts(data["parts"]),
        point_from_json(data),
        lift(Mapping[str, str], versions, "versions", {}),
        lift(str, data.get("kept_of", ""), "kept_of", {}),
    )


def _parts(value: object) -> tuple[Part, ...]:
    parts: tuple[Part, ...] = lift(tuple[Part, ...], value, "parts", {})
    for place, part in enumerate(parts):
        _matching(_SUFFIX, part.suffix, f"parts[{place}].suffix")
        _matching(_SHA256, part.sha256, f"parts[{place}].sha256")
    suffixes = [part.suffix for part in parts]
    is_usable = len(set(suffixes)) == len(suffixes) <= MAX_PARTS and META_SUFFIX not in suffixes
    if not is_usable or MODEL_SUFFIX not in suffixes:
        raise CheckpointError(f"parts does not fit, expected {MODEL_SUFFIX} and at most {MAX_PARTS - 1} others")
    return parts


def _matching(pattern: re.Pattern[str], value: object, where: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise CheckpointError(f"{where} is {value!a:.80}, expected {pattern.pattern}")
    return value
