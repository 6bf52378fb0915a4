"""The script as it is here: what each host has to have of it."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flodl.launch.plan import NO_SCRIPT, HostKind, HostPlan, RunSpec, SyncMode
from flodl.launch.probe.imports import Vital, code_of, needed_modules, vital_of

MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Needed:
    """``modules`` are packages by name; ``code`` are files of the project, by path relative to where the script runs,
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
    is_compared = spec.sync.mode is SyncMode.OFF and any(host.kind is HostKind.SSH for host in spec.hosts)
    files = code_of(spec.script, spec.cwd, _read) if is_compared else _alone(spec)
    modules = needed_modules(next(iter(files.values()), b""))
    if not is_compared:
        return Needed(modules)
    project = spec.project or spec.cwd
    inside = {path: content for path, content in files.items() if os.path.commonpath([path, project]) == project}
    code = {os.path.relpath(path, spec.cwd): hashlib.sha256(content).hexdigest() for path, content in inside.items()}
    vital = vital_of(spec.script, spec.cwd, files)
    own, imported = (
        frozenset(os.path.relpath(path, spec.cwd) for path in paths) for paths in (vital.script, vital.imported)
    )
    return Needed(modules, code, Vital(own, imported))


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
