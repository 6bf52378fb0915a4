"""What a checkpoint is on disk, and what its ``.meta.json`` says.

A bundle belongs to a *stem*, a path without its ending. There lie the parts (``<stem>.fdl``, a safetensors file, and
others by their suffix) and ``<stem>.meta.json``, which names the exact parts it belongs to by size and SHA-256. Parts
come first, under a name that carries the save's id; renaming the meta file is the commit; then the parts get their
plain names. So at every moment the meta file on disk describes parts that are there:

    <stem>.<id>.fdl      written and synced          (the bundle before is whole)
    <stem>.meta.json     renamed over the old one    (this bundle is whole)
    <stem>.fdl           renamed from <stem>.<id>.fdl

Every meta file since format 1 can be read for ever: fields are added with a default, never taken away.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from flodl.errors import CheckpointError
from flodl.ids import Span, Version

FORMAT: Final = 1
MODEL_SUFFIX: Final = ".fdl"
META_SUFFIX: Final = ".meta.json"
OPTIONAL_SUFFIXES: Final = (".outer.fdl", ".config.json")
"""Momentum of an outer optimizer; the model's own config. A bundle may have them or not."""
MAX_META_BYTES: Final = 64 << 20
"""Coverage is spans, and a run has thousands of them at most: beyond, it is another file."""
SAVE_ID_HEX: Final = 12


class SaveReason(StrEnum):
    """Why a checkpoint was taken."""

    CHECKPOINT = "Checkpoint"
    GRACEFUL_SHUTDOWN = "GracefulShutdown"
    MAX_FAILURE_EXCEEDED = "MaxFailureExceeded"
    SINGLE_SURVIVOR = "SingleSurvivor"
    ALL_RANKS_LOST = "AllRanksLost"
    REDUCE_STALL = "ReduceStall"


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the bundle: ``suffix`` behind the stem, size in bytes, SHA-256 in hex."""

    suffix: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Position:
    """Where in its run the consensus ``version`` stands.

    ``epoch`` (0-based) is the one in progress, or the number of epochs when none is left; ``merged`` are the spans of
    ``pass_index``'s order whose samples are in the weights, beyond the epochs that are complete. ``global_step`` counts
    the optimizer steps of all ranks that are in the weights, ``world_size`` the ranks alive at the save.
    """

    version: Version = 0
    epoch: int = 0
    pass_index: int = 0
    merged: tuple[Span, ...] = ()
    global_step: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class BundleMeta:
    """The content of ``<stem>.meta.json``. ``saved_at_s`` is Unix time; ``versions`` those of flodl, torch, Python."""

    save_id: str
    reason: SaveReason
    saved_at_s: float
    parts: tuple[Part, ...]
    position: Position = Position()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> "BundleMeta":
        """Read it back.

        Raises:
            CheckpointError: not a meta file, damaged, or of a later format; the message begins with ``name``.
        """
        try:
            data = json.loads(text)
            found = data["format"]
        except (ValueError, TypeError, KeyError):
            raise CheckpointError(f"{name} is not the meta file of a checkpoint") from None
        if type(found) is not int or not 1 <= found <= FORMAT:
            raise CheckpointError(f"{name} has format {found!r}, this flodl reads up to {FORMAT}; upgrade flodl")
        try:
            return _lift(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{name} is damaged: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Stem:
    """A bundle's place: ``folder`` and the ``name`` without an ending."""

    folder: Path
    name: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "Stem":
        """From a path with or without ``.fdl`` or ``.meta.json``.

        Raises:
            CheckpointError: the path names a folder, or nothing.
        """
        whole = Path(path)
        name = whole.name.removesuffix(META_SUFFIX).removesuffix(MODEL_SUFFIX)
        if not name or name in (".", ".."):
            raise CheckpointError(f"{os.fspath(path)!r} names no checkpoint; give a path such as ckpts/run43")
        if whole.is_dir():
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


def _lift(data: Mapping[str, Any]) -> BundleMeta:
    save_id, saved_at_s = data["save_id"], data["saved_at_s"]
    if not (isinstance(save_id, str) and len(save_id) == SAVE_ID_HEX and set(save_id) <= set("0123456789abcdef")):
        raise ValueError("save_id")
    if type(saved_at_s) not in (int, float):
        raise TypeError("saved_at_s")
    parts = tuple(Part(_suffix(p["suffix"]), _count(p["size_bytes"]), str(p["sha256"])) for p in data["parts"])
    place = data.get("position", {})
    position = Position(
        **{name: _count(place[name]) for name in place if name in Position.__slots__ and name != "merged"},
        merged=tuple(Span(_count(span["start"]), _count(span["count"])) for span in place.get("merged", ())),
    )
    versions = {str(name): str(version) for name, version in data.get("versions", {}).items()}
    settings = dict(data.get("settings", {}).items())
    return BundleMeta(save_id, SaveReason(data["reason"]), float(saved_at_s), parts, position, settings, versions)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _suffix(value: Any) -> str:
    """A part lies beside the meta file, whatever that says."""
    if not isinstance(value, str) or not value.startswith(".") or "/" in value or "\0" in value:
        raise ValueError(f"{value!r} is no suffix")
    return value
