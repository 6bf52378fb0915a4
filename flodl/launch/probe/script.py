"""The script as it is here: what each host has to have of it."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Final

from flodl.launch.plan import NO_SCRIPT, HostKind, HostPlan, RunSpec, SyncMode
from flodl.launch.probe.collect import import_folders
from flodl.launch.probe.imports import Vital, code_of, needed_modules, vital_of

MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Needed:
    """``modules`` are those to be found there, by name, but for the project's own that are copied or are in ``code``;
    ``code`` are files of the project, by path relative to where the script runs,
    with the SHA-256 of their content in hex; ``vital`` says by the same paths what must be there.
    """

    modules: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    vital: Vital = field(default_factory=Vital)

    def code_for(self, host: HostPlan) -> dict[str, str]:
        """What to compare on ``host``: nothing where it has these very files."""
        return {} if host.kind is HostKind.LOCAL else dict(self.code)


def needed_by(spec: RunSpec) -> Needed:
    """What the script of ``spec`` needs. Its modules are compared where nobody copies them there (``sync.mode``)."""
    if spec.script[0] == NO_SCRIPT:
        return Needed()
    is_copied = spec.sync.mode is not SyncMode.OFF
    is_compared = not is_copied and any(host.kind is HostKind.SSH for host in spec.hosts)
    files = code_of(spec.script, spec.cwd, _read) if is_compared else _alone(spec)
    names = needed_modules(next(iter(files.values()), b""))
    folders = import_folders(spec.cwd, spec.script, spec.env)
    own = frozenset(name for name in names if _is_own(name, folders))
    if not is_compared:
        return Needed(tuple(name for name in names if not is_copied or name not in own), vital=Vital(own=own))
    project = spec.project or spec.cwd
    inside = {path: content for path, content in files.items() if os.path.commonpath([path, project]) == project}
    code = {os.path.relpath(path, spec.cwd): hashlib.sha256(content).hexdigest() for path, content in inside.items()}
    vital = vital_of(spec.script, spec.cwd, files)
    scripts, imported = (
        frozenset(os.path.relpath(path, spec.cwd) for path in paths) for paths in (vital.script, vital.imported)
    )
    compared = {os.path.relpath(path, folders[0]).split(os.sep)[0].removesuffix(".py") for path in inside}
    modules = tuple(name for name in names if name not in own or name not in compared)
    return Needed(modules, code, Vital(scripts, imported, own))


def imported_by(spec: RunSpec) -> tuple[str, ...]:
    """The modules that the script of ``spec`` needs, its own and others."""
    return () if spec.script[0] == NO_SCRIPT else needed_modules(next(iter(_alone(spec).values()), b""))


def _is_own(module: str, folders: list[str]) -> bool:
    """A folder without ``__init__.py`` counts only where no package has its name: wandb leaves one that does."""
    found = PathFinder.find_spec(module, folders)
    return found is not None and (found.origin is not None or PathFinder.find_spec(module) is None)


def _alone(spec: RunSpec) -> dict[str, bytes]:
    path = os.path.join(spec.cwd, spec.script[0])
    content = None if spec.script[0] == "-m" else _read(path)
    return {} if content is None else {path: content}


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    return content if len(content) <= MAX_FILE_BYTES else None
