"""What a sync does on one host, decided from the tree here and what is there. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flodl.core.counted import counted
from flodl.launch.tree import BLOCKED, FOLDER, Entry, Found, Tree, amount, first_few
from flodl.spec.words import printable


@dataclass(frozen=True, slots=True)
class There:
    """What a host has. ``found`` belongs to the tree's entries one by one. ``stale`` are files of earlier syncs that
    the tree does not hold, and ``altered`` those that somebody has changed since. ``mark`` is the ledger's.
    """

    found: tuple[Found, ...]
    stale: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    mark: str = ""


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """``send`` are files whose bytes travel, ``links`` and ``modes`` (x bits) are set there, ``remove`` goes.

    ``retain`` are files of earlier syncs that stay because they are here, too, though excluded. ``obstacles`` are words
    for what is in the way there: with any, nothing may be done.
    """

    send: tuple[Entry, ...] = ()
    links: tuple[Entry, ...] = ()
    modes: tuple[Entry, ...] = ()
    remove: tuple[str, ...] = ()
    retain: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = field(default=())

    @property
    def is_empty(self) -> bool:
        """Nothing is to be done."""
        return not (self.send or self.links or self.modes or self.remove)

    @property
    def send_bytes(self) -> int:
        """Of the files that travel."""
        return sum(entry.size for entry in self.send)

    def __str__(self) -> str:
        parts = [amount(self.send_bytes, len(self.send)) + " to copy"]
        rest = {"link": (self.links, "to set"), "x bit": (self.modes, "to set"), "file": (self.remove, "to remove")}
        parts += [f"{counted(len(what), noun)} {word}" for noun, (what, word) in rest.items() if what]
        return ", ".join(parts)


def plan_sync(tree: Tree, there: There, here: Collection[str]) -> SyncPlan:
    """What makes the host's folder hold ``tree``.

    Args:
        tree: with contents.
        there: what the host has.
        here: of ``there.stale`` and ``there.altered`` the paths that exist on this machine.
    """
    remove = tuple(path for path in there.stale if path not in here)
    wrong = [(e, f) for e, f in zip(tree.entries, there.found, strict=True) if not f.matches(e)]
    sent = [(entry, found) for entry, found in wrong if entry.content != found.content]
    return SyncPlan(
        send=tuple(entry for entry, _ in sent if not entry.is_link),
        links=tuple(entry for entry, _ in sent if entry.is_link),
        modes=tuple(entry for entry, found in wrong if entry.content == found.content),
        remove=remove,
        retain=tuple(path for path in (*there.stale, *there.altered) if path in here),
        altered=tuple(path for path in there.altered if path not in here),
        obstacles=_obstacles(sent, frozenset(remove)),
    )


def _obstacles(sent: Sequence[tuple[Entry, Found]], remove: Collection[str]) -> tuple[str, ...]:
    """Files where folders have to be, and the other way round, that this sync does not remove itself."""
    words = dict[str, None]()
    leaving = {f"{path[: index + 1]}" for path in remove for index, char in enumerate(path) if char == "/"}
    for entry, found in sent:
        if found.content.startswith(BLOCKED) and found.content[1:] not in remove:
            words[f"{printable(found.content[1:])} is no folder there"] = None
        if found.content == FOLDER and f"{entry.path}/" not in leaving:
            words[f"{printable(entry.path)} is a folder there"] = None
    return tuple(words)


def altered_words(paths: Sequence[str]) -> str:
    """What is said of files that stay because somebody has changed them; empty for none."""
    if not paths:
        return ""
    named = first_few([printable(path) for path in paths])
    return f"left there, changed since it was copied and gone here: {named}"


def ledger_of(tree: Tree) -> Mapping[str, str]:
    """What a host notes of this tree, as far as syncs have put it there."""
    return {entry.path: entry.content for entry in tree.entries}
