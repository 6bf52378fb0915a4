"""What is wrong with a cluster file: findings (where in the tree) and problems (where in the file)."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flodl.errors import ConfigError

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the top of the file: ``("cluster", "workers", 0, "host")``."""

MAX_SHOWN_PROBLEMS = 50
"""A person fixes the first few; a file of another kind would fill the screen."""

MAX_READ_CHARS = 72
"""A value longer than this is cut where it is quoted."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Finding:
    """One violated rule. ``read`` None means: what the source has at ``path``.

    ``at_key`` says that the key is wrong, not its value. ``fix`` is what to write instead, empty when that is plain.
    """

    path: KeyPath
    expected: str
    fix: str = ""
    read: str | None = None
    at_key: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One error of a cluster file, for a person.

    ``line`` and ``column`` count from 1; both are None where no place applies. ``key`` is the key path
    (``cluster.workers[0].host``, empty for the file as a whole), ``read`` the text as written in the file.
    """

    file: str
    line: int | None
    column: int | None
    key: str
    read: str
    expected: str
    fix: str = ""

    @property
    def position(self) -> str:
        """``file:line:column``, as editors understand it."""
        return self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"

    def __str__(self) -> str:
        """One block: place and key, then what was read, what was expected, what to write."""
        lines = [f"{self.position}: {self.key}" if self.key else self.position]
        if self.read:
            lines.append(f"  read:     {self.read}")
        lines.append(f"  expected: {self.expected}")
        if self.fix:
            lines.append(f"  fix:      {self.fix}")
        return "\n".join(lines)


class ClusterError(ConfigError):
    """A cluster that cannot be used as described; ``problems`` has every reason, in the order of the source."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        """``problems`` holds at least one."""
        self.problems = tuple(problems)
        blocks = [str(problem) for problem in self.problems[:MAX_SHOWN_PROBLEMS]]
        if len(self.problems) > MAX_SHOWN_PROBLEMS:
            blocks.append(f"… and {len(self.problems) - MAX_SHOWN_PROBLEMS} more")
        super().__init__("\n".join(blocks))


class ClusterFileError(ClusterError):
    """A cluster *file* that cannot be used; every problem names file, line and column where it has one."""


def format_path(path: KeyPath) -> str:
    """Write a key path as a person would: ``cluster.workers[0].host``."""
    text = ""
    for step in path:
        if isinstance(step, str) and _BARE_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{json.dumps(step)}]"
    return text


def shorten(text: str) -> str:
    """Put ``text`` on one line of at most ``MAX_READ_CHARS`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_READ_CHARS else line[: MAX_READ_CHARS - 1] + "…"
