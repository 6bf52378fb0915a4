"""Reads the tree of a folder of this machine: first what is there, then, file by file, what is in it."""

import hashlib
import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flodl.errors import ConfigError
from flodl.launch.ignore import GIT_FILE, OWN_FILE, IgnoreRules, patterns
from flodl.launch.tree import LINK, Entry, Tree, path_bytes, path_text, tree_of
from flodl.spec.words import printable

MAX_LISTED: Final = 1_000_000
"""Files that are listed before a folder is called too large for good: some seconds, and some hundred MB of memory."""

MAX_IGNORE_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Listing:
    """What is in a folder: files not read yet and links, in a ``Tree``; ``skipped`` are paths of pipes, sockets and
    devices, which are no part of it. ``strays`` are the links, with where they point, that lead out of the folder.
    """

    tree: Tree
    skipped: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()


def scan(folder: str, exclude: Sequence[str] = (), private: Collection[str] = ()) -> Listing:
    """List what a launch copies of ``folder``; reads no file but those that say what is ignored.

    Args:
        folder: absolute.
        exclude: patterns as in ``.gitignore``, relative to ``folder``.
        private: paths of files and folders that are left out whatever the patterns say, and under whatever name they
            are met, for what is meant is the file; the path counts too, where a disk makes inode numbers up.

    Raises:
        ConfigError: a folder cannot be read, a pattern is none, or there are more than ``MAX_LISTED`` files.
    """
    above = _above(folder)
    rules = IgnoreRules(patterns(exclude, "sync.exclude"), above)
    for upper in _uppers(above):
        _add(rules, GIT_FILE, os.path.join(folder[: -len(above)], upper), f"/{upper}")
    paths = frozenset(map(os.path.abspath, filter(None, private)))
    return _Scan(folder, rules, paths, frozenset(map(_identity, private))).run()


def read(folder: str, listing: Tree) -> Tree:
    """``listing`` with the hash of every file in it.

    Raises:
        ConfigError: a file cannot be read, or changes meanwhile.
    """
    return tree_of(entry if entry.is_link else _read(folder, entry) for entry in listing.entries)


def is_file_here(folder: str, path: str) -> bool:
    """Whether ``path`` of ``folder`` is a file or a link, and all on the way to it folders and no links."""
    names, where = path_bytes(path).split(b"/"), os.fsencode(folder)
    for number, name in enumerate(names, 1):
        where = os.path.join(where, name)
        try:
            is_folder = stat.S_ISDIR(os.lstat(where).st_mode)
        except OSError:
            return False
        if is_folder == (number == len(names)):
            return False
    return True


class _Scan:
    def __init__(
        self, folder: str, rules: IgnoreRules, private: Collection[str], identities: Collection[tuple[int, int] | None]
    ) -> None:
        self._folder, self._rules, self._private, self._identities = folder, rules, private, identities
        self._entries: list[Entry] = []
        self._skipped: list[str] = []
        self._strays: list[str] = []

    def run(self) -> Listing:
        """Folder by folder."""
        waiting = [""]
        while waiting:
            waiting += self._list(waiting.pop())
        return Listing(tree_of(self._entries), tuple(sorted(self._skipped)), tuple(sorted(self._strays)))

    def _list(self, below: str) -> list[str]:
        """The folders in this one. ``below`` is empty or ends in ``/``."""
        where = os.path.join(os.fsencode(self._folder), path_bytes(below))
        for name in (OWN_FILE, GIT_FILE):
            _add(self._rules, name, os.fsdecode(where), below)
        try:
            with os.scandir(where) as found:
                names = sorted(found, key=lambda each: each.name)
        except OSError as error:
            raise _unreadable(os.fsdecode(where), error) from None
        folders: list[str] = []
        for each in names:
            path = below + path_text(each.name)
            is_folder = each.is_dir(follow_symlinks=False)
            if self._rules.is_ignored(path, is_folder):
                continue
            try:
                self._take(each, path, folders)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _unreadable(os.fsdecode(each.path), error) from None
        return folders

    def _take(self, each: "os.DirEntry[bytes]", path: str, folders: list[str]) -> None:
        """Raises OSError."""
        found = os.lstat(each.path)  # the entry's own inode number is another one where something is mounted
        if (found.st_dev, found.st_ino) in self._identities or os.fsdecode(each.path) in self._private:
            return
        target = path_text(os.readlink(each.path)) if stat.S_ISLNK(found.st_mode) else ""
        if stat.S_ISDIR(found.st_mode):
            folders.append(f"{path}/")
        elif target:
            self._entries.append(Entry(path, 0, 0, LINK + target))
            if _leads_out(path, target):
                self._strays.append(f"{printable(path)} -> {printable(target)}")
        elif stat.S_ISREG(found.st_mode):
            self._entries.append(Entry(path, stat.S_IMODE(found.st_mode) & 0o777, found.st_size))
        else:
            self._skipped.append(path)
        if len(self._entries) > MAX_LISTED:
            raise ConfigError(
                f"{self._folder} holds more than {MAX_LISTED:,} files; name the folders that ranks do not need in "
                f"{OWN_FILE}, such as /data/"
            )


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode number of what stands there, links followed; None where nothing does."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _read(folder: str, entry: Entry) -> Entry:
    path = os.path.join(os.fsencode(folder), path_bytes(entry.path))
    digest, size = hashlib.sha256(), 0
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            mode = os.fstat(file.fileno()).st_mode
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise _unreadable(os.fsdecode(path), error) from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{printable(os.fsdecode(path))} changes while it is read; launch again")
    return replace(entry, mode=stat.S_IMODE(mode) & 0o777, size=size, content=digest.hexdigest())


def _leads_out(path: str, target: str) -> bool:
    if target.startswith("/"):
        return True
    end = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return end == ".." or end.startswith("../")


def _above(folder: str) -> str:
    """From the folder that holds ``.git`` down to ``folder``, ending in ``/``; empty where there is none."""
    upper = folder
    while not os.path.exists(os.path.join(upper, ".git")):
        if upper == os.path.dirname(upper):
            return ""
        upper = os.path.dirname(upper)
    below = os.path.relpath(folder, upper)
    return "" if below == "." else f"{below}/"


def _uppers(above: str) -> list[str]:
    """The folders on the way ``above``, without its last: ``""``, ``a/`` for ``a/b/``."""
    names = above.split("/")[:-1]
    return ["".join(f"{name}/" for name in names[:count]) for count in range(len(names))]


def _add(rules: IgnoreRules, name: str, where: str, folder: str) -> None:
    path = os.path.join(where, name)
    if not os.path.isfile(path):
        return
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_IGNORE_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from None
    rules.add(name, folder, path_text(content))


def _unreadable(path: str, error: OSError) -> ConfigError:
    remedy = f"fix its permissions, or name it in {OWN_FILE} so that it stays behind"
    return ConfigError(f"{printable(path)}: {error.strerror}; {remedy}")
