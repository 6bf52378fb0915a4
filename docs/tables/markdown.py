"""What all tables are made with, and where things are."""

import ast
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; `|` inside cells is escaped."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def first_sentence(doc: str | None) -> str:
    """The first sentence of a docstring on one line."""
    text = " ".join((doc or "").split()).replace("``", "`")
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


def documented(body: list[ast.stmt]) -> dict[str, str]:
    """Names assigned in ``body`` that have a string below them, with that string on one line."""
    found: dict[str, str] = {}
    for before, after in pairwise(body):
        target = before.targets[0] if isinstance(before, ast.Assign) else getattr(before, "target", None)
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[target.id] = " ".join(str(after.value.value).split()).replace("``", "`")
    return found
