"""A project's files as data: what a folder holds, one hash over it, and where two folders differ. Pure.

A ``Tree`` is the files and links that a launch copies, or compares, in the order of their paths' bytes. Folders are
implied: an empty one is no part of a tree. Paths are relative, with ``/`` between the names; bytes that are no UTF-8
are lone surrogates in them (``path_bytes`` gives the bytes back), whatever this machine's locale is.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from flodl.spec.words import printable

LINK: Final = "->"
FOLDER: Final = "/"
SPECIAL: Final = "?"
BLOCKED: Final = "!"

EXECUTABLE: Final = 0o100
FILES_PER_GB: Final = 20_000
"""A project of code has a few thousand files of some kB; copying one costs as much as 50 kB of data."""

HOLDS_MOST: Final = 0.8
SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or link. ``mode`` are a file's permission bits; ``content`` is the SHA-256 of a file in hex, empty while
    it has not been read, or ``->`` and where a link points.
    """

    path: str
    mode: int
    size: int
    content: str = ""

    @property
    def is_link(self) -> bool:
        """A link, and no file."""
        return self.content.startswith(LINK)

    @property
    def is_executable(self) -> bool:
        """A program for its owner."""
        return bool(self.mode & EXECUTABLE)


@dataclass(frozen=True, slots=True)
class Found:
    """What is at a path elsewhere. ``content`` as in ``Entry``; empty where nothing is, ``/`` for a folder, ``?`` for
    what is neither file, link nor folder or cannot be read, ``!`` and a path for what is on the way and is no folder.
    """

    content: str
    is_executable: bool = False

    def matches(self, entry: Entry) -> bool:
        """The same file, as far as a run can tell."""
        return self.content == entry.content and (entry.is_link or self.is_executable == entry.is_executable)


@dataclass(frozen=True, slots=True)
class Tree:
    """Files and links, in the order of ``path_bytes``."""

    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(entry.size for entry in self.entries)

    @property
    def hash(self) -> str:
        """SHA-256, in hex, over every entry's kind, owner's x bit, content and path: equal for equal projects."""
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(b"x" if entry.is_executable else b"-")
            digest.update(path_bytes(entry.content) + b"\0" + path_bytes(entry.path) + b"\0")
        return digest.hexdigest()

    def __str__(self) -> str:
        return f"{amount(self.size_bytes, len(self.entries))}, tree {self.hash[:12]}"


def tree_of(entries: Iterable[Entry]) -> Tree:
    """The tree of ``entries`` in any order."""
    return Tree(tuple(sorted(entries, key=lambda entry: path_bytes(entry.path))))


def path_bytes(path: str) -> bytes:
    """The bytes of a name in a tree."""
    return path.encode("utf-8", "surrogateescape")


def path_text(path: bytes) -> str:
    """How a name of these bytes stands in a tree."""
    return path.decode("utf-8", "surrogateescape")


def differences(tree: Tree, found: Sequence[Found]) -> list[str]:
    """What is wrong elsewhere, one text each, in the order of the tree; ``found`` belongs to its entries one by one."""
    pairs = zip(tree.entries, found, strict=True)
    return [f"{printable(entry.path)} {_fault(entry, other)}" for entry, other in pairs if not other.matches(entry)]


def first_few(faults: Sequence[str]) -> str:
    """The first of ``faults`` in a sentence, and how many there are."""
    more = len(faults) - SHOWN
    return ", ".join(faults[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def over_limit(tree: Tree, limit_gb: float) -> str:
    """Why this is too much to copy, with the folders that make it so; empty when it is not.

    Args:
        tree: whose contents need not be known.
        limit_gb: in GB; each allows ``FILES_PER_GB`` files.
    """
    max_bytes, max_files = limit_gb * 1e9, limit_gb * FILES_PER_GB
    if tree.size_bytes <= max_bytes and len(tree.entries) <= max_files:
        return ""
    by_size = tree.size_bytes > max_bytes
    folders = _heavy_folders(tree, by_size)
    return (
        f"{amount(tree.size_bytes, len(tree.entries))}, more than the {limit_gb:g} GB or {max_files:,.0f} files of "
        f"sync.limit_gb; most is in {folders}"
    )


def amount(size_bytes: int, count: int) -> str:
    """Files and bytes, for people."""
    return f"{count:,} file{'' if count == 1 else 's'}, {size_words(size_bytes)}"


def size_words(size_bytes: int) -> str:
    """Bytes with a decimal unit."""
    size, units = float(size_bytes), ["bytes", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.1f} {units[0]}" if units[0] != "bytes" else f"{size_bytes} bytes"


def _fault(entry: Entry, found: Found) -> str:
    match found.content:
        case "":
            return "is missing"
        case "/":
            return "is a folder there"
        case "?":
            return "is there, and cannot be read as a file"
        case content if content.startswith(BLOCKED):
            return f"cannot be there: {printable(content[1:])} is no folder"
        case content if content == entry.content:
            return "is executable there" if found.is_executable else "is not executable there"
        case _:
            return "differs"


def _heavy_folders(tree: Tree, by_size: bool) -> str:
    weights: dict[str, tuple[int, int]] = {}
    for entry in tree.entries:
        for folder in (str(parent) for parent in PurePosixPath(entry.path).parents if str(parent) != "."):
            size, count = weights.get(folder, (0, 0))
            weights[folder] = (size + entry.size, count + 1)
    which = 0 if by_size else 1
    tops = sorted((name for name in weights if "/" not in name), key=lambda name: -weights[name][which])
    shown = [_deepest(name, weights, which) for name in tops[:SHOWN]]
    loose = [entry for entry in tree.entries if "/" not in entry.path]
    if loose:
        shown.append(own := "the project's own folder")
        weights[own] = sum(entry.size for entry in loose), len(loose)
    shown.sort(key=lambda name: -weights[name][which])
    return "; ".join(f"{printable(name)} ({amount(*weights[name])})" for name in shown)


def _deepest(folder: str, weights: Mapping[str, tuple[int, int]], which: int) -> str:
    """Down into the one folder that holds most of it, and again."""
    while True:
        inside = [name for name in weights if name.startswith(f"{folder}/") and "/" not in name[len(folder) + 1 :]]
        heaviest = max(inside, key=lambda name: weights[name][which], default="")
        if not heaviest or weights[heaviest][which] < HOLDS_MOST * weights[folder][which]:
            return folder
        folder = heaviest
