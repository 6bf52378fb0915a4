"""Which modules a script cannot do without, as far as its text says. Pure."""

import ast
from collections.abc import Iterator

KNOWN = frozenset({"flodl", "torch"})
"""They have checks of their own."""


def needed_modules(source: str) -> tuple[str, ...]:
    """Top-level names of what ``source`` imports on its way down: not what stands under ``if``, ``try`` or in a
    function, for the script may do without it. Empty where it cannot be parsed: the script itself will say so.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    names = (name.partition(".")[0] for statement in body for name in _imported(statement))
    return tuple(dict.fromkeys(name for name in names if name not in KNOWN))


def _imported(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module
