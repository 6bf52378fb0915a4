"""What a script cannot do without, as far as its text says: packages, and the project's own modules. Pure."""

import ast
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

KNOWN: Final = frozenset({"flodl", "torch"})
"""They have checks of their own."""

MAX_MODULES: Final = 300
MAX_CODE_BYTES: Final = 2 << 20
"""Of all modules together: parsing this much takes about a second."""

Read = Callable[[str], bytes | None]
"""A file's content, None where there is none."""


@dataclass(frozen=True, slots=True)
class Vital:
    """Files without which the script cannot start, by path: its own, and ``imported``, what is imported on the way
    down from there (``needed_modules``). All other code it may do without, for all that its text says. ``own`` are the
    needed modules, by name, that the project itself holds.
    """

    script: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()


def needed_modules(source: bytes) -> tuple[str, ...]:
    """Top-level names of what ``source`` imports on its way down: not what stands under ``if``, ``try`` or in a
    function, for the script may do without it. Empty where it cannot be parsed: the script itself will say so.
    """
    names = (name.partition(".")[0] for statement in _body(source) for name in _imported(statement))
    return tuple(dict.fromkeys(name for name in names if name and name not in KNOWN))


def code_of(script: Sequence[str], folder: str, read: Read) -> dict[str, bytes]:
    """The script and the modules beside it that it imports, wherever in its text, and those that these import.

    Args:
        script: what follows the interpreter: a path, or ``-m`` and a module.
        folder: where it runs; absolute.
        read: reads a file.

    Returns:
        Contents by absolute path, the script's first; cut off at ``MAX_MODULES`` and ``MAX_CODE_BYTES``.
    """
    root, waiting = _start(script, folder)
    found: dict[str, bytes] = {}
    seen, size_bytes = set(waiting), 0
    while waiting and len(found) < MAX_MODULES:
        path = waiting.pop(0)
        content = read(path)
        if content is None:
            continue
        size_bytes += len(content)
        if size_bytes > MAX_CODE_BYTES:
            break
        found[path] = content
        nodes = (node for statement in _body(content) for node in ast.walk(statement))
        fresh = [place for place in _neighbours(nodes, path, root) if place not in seen]
        seen.update(fresh)
        waiting += fresh
    return found


def vital_of(script: Sequence[str], folder: str, code: Mapping[str, bytes]) -> Vital:
    """What of ``code`` (``code_of`` of the same script and folder) the script cannot start without."""
    root, waiting = _start(script, folder)
    own = frozenset(path for path in waiting if path in code)
    found: set[str] = set()
    waiting = list(own)
    while waiting:
        path = waiting.pop()
        found.add(path)
        fresh = {place for place in _neighbours(_body(code[path]), path, root, code) if place in code}
        waiting += fresh - found
    return Vital(own, frozenset(found - own))


def _start(script: Sequence[str], folder: str) -> tuple[str, list[str]]:
    """Where its imports are looked for, and the files that it may be."""
    if script[0] == "-m":
        return folder, _places(folder, script[1]) + _places(folder, f"{script[1]}.__main__")
    path = os.path.normpath(os.path.join(folder, script[0]))
    return os.path.dirname(path), [path]


def _neighbours(nodes: Iterable[ast.AST], path: str, root: str, code: Mapping[str, bytes] = {}) -> Iterator[str]:
    """Where the modules that ``nodes`` of the file ``path`` import would be, if they are the project's. With ``code``:
    without those of which a package's own text speaks, for ``from package import name`` may get the name from there.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _places(root, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = root
            if node.level:
                above = os.path.normpath(os.path.join(os.path.dirname(path), *[".."] * (node.level - 1)))
            package = os.path.join(above, *(node.module or "").split("."), "__init__.py")
            own = b"" if package == path else code.get(package, b"")
            for alias in node.names:
                is_offered = re.search(rb"\b%s\b" % re.escape(alias.name.encode()), own) is not None
                yield from _places(above, ".".join(filter(None, (node.module, "" if is_offered else alias.name))))


def _places(root: str, name: str) -> list[str]:
    """``a.b``: the package a, and b as a module or package in it, or as a name in a module a."""
    parts = list(filter(None, name.split(".")))
    places = []
    for count in range(1, len(parts) + 1):
        stem = os.path.join(root, *parts[:count])
        places += [f"{stem}.py", os.path.join(stem, "__init__.py")]
    return places


def _body(source: bytes) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _imported(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module
