"""What a launch does not copy: ``sync.exclude``, ``.fdlignore`` and ``.gitignore``, with git's rules. Pure.

The first that says anything of a path decides, ``!`` in front of a pattern for the opposite: ``sync.exclude``, then
the ``.fdlignore`` of its own folder, of the folder above, and so on, then the ``.gitignore`` files in that order, up to
the folder that holds ``.git``. What is in an ignored folder is ignored. Unlike git, this knows nothing of files that
are tracked although a ``.gitignore`` names them, ``?`` is one character, not one byte, brackets know no escapes and no
classes such as ``[:alpha:]``, and a tab at a line's end is dropped.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore import GitIgnorePatternError

from flodl.errors import ConfigError

GIT_FILE: Final = ".gitignore"
OWN_FILE: Final = ".fdlignore"
ALWAYS: Final = frozenset({".git", "__pycache__", ".fdl-sync"})
"""Names that are never copied: git's own, what interpreters write anew, and what a sync keeps on a host."""


@dataclass(slots=True)
class IgnoreRules:
    """Grows as folders are entered. ``above`` leads to the project from where the outermost ``.gitignore`` counts,
    empty or ending in ``/``.
    """

    exclude: GitIgnoreSpec
    above: str = ""
    _own: dict[str, GitIgnoreSpec] = field(default_factory=dict)
    _git: dict[str, GitIgnoreSpec] = field(default_factory=dict)

    def add(self, name: str, folder: str, text: str) -> None:
        """The file ``name`` (``GIT_FILE``, ``OWN_FILE``) in ``folder`` says this. ``folder`` is empty for the project
        itself, else relative to it, ending in ``/``; for one above the project it begins with ``/`` and is relative to
        where ``above`` begins.

        Raises:
            ConfigError: a pattern of ``OWN_FILE`` that cannot be one; in ``GIT_FILE`` it is passed over, as git does.
        """
        lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
        if name == OWN_FILE:
            self._own[folder] = patterns(lines, f"{folder}{OWN_FILE}")
        else:
            self._git[folder] = _compiled(_readable(lines))

    def is_ignored(self, path: str, is_folder: bool) -> bool:
        """Whether ``path``, whose folder is not ignored, stays behind."""
        name = path.rpartition("/")[2]
        if name in ALWAYS:
            return True
        ending = "/" if is_folder else ""
        for spec, relative in self._applying(path):
            verdict = spec.check_file(relative + ending).include
            if verdict is not None:
                return verdict
        return False

    def _applying(self, path: str) -> Iterator[tuple[GitIgnoreSpec, str]]:
        """Every set of patterns that may speak of ``path``, the strongest first, and the path seen from its folder."""
        yield self.exclude, path
        for specs in (self._own, self._git):
            for folder in _folders(path):
                if folder in specs:
                    yield specs[folder], path[len(folder) :]
        for folder in _folders(self.above):
            if f"/{folder}" in self._git:
                yield self._git[f"/{folder}"], (self.above + path)[len(folder) :]


def patterns(lines: Iterable[str], where: str) -> GitIgnoreSpec:
    """Patterns that their owner wrote for us: each has to be one.

    Raises:
        ConfigError: it names the one that is none, and ``where`` it stands.
    """
    lines = list(lines)
    for number, line in enumerate(lines, 1):
        try:
            _compiled([line])
        except (GitIgnorePatternError, re.error):
            raise ConfigError(f"{where}: pattern {number}, {line!r}, is none; the syntax is .gitignore's") from None
    return _compiled(lines)


def _compiled(lines: Iterable[str]) -> GitIgnoreSpec:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of ``[[:alpha:]]``, which is no class here
        return GitIgnoreSpec.from_lines(lines)


def _readable(lines: Iterable[str]) -> list[str]:
    found = []
    for line in lines:
        try:
            _compiled([line])
        except (GitIgnorePatternError, re.error):
            continue
        found.append(line)
    return found


def _folders(path: str) -> Iterator[str]:
    """The folders of ``path``, innermost first: ``a/b/``, ``a/``, and the empty one."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield f"{path}/"
    yield ""
