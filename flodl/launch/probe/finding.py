"""What preflight says about a host: one finding for each check. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from flodl.core.ending import EXIT_OK, EXIT_PREFLIGHT, EXIT_UNREACHABLE

CHECKS: Final = (
    "ssh",
    "clock",
    "python",
    "flodl",
    "torch",
    "packages",
    "modules",
    "devices",
    "driver",
    "arch",
    "busy",
    "cores",
    "memory",
    "disk",
    "shm",
    "limits",
    "project",
    "script",
    "code",
    "data",
    "interface",
    "mtu",
    "controller",
    "peers",
    "port",
    "stale runs",
)
"""Every check, in the order of the table; docs/operations.md says what each means."""


class Level(StrEnum):
    """``ok``; ``warn``: the run may start and may suffer; ``error``: the host cannot take part."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one host: what was ``read`` there, what was ``expected`` where it is not that, and what to do."""

    check: str
    host: str
    level: Level
    read: str
    expected: str = ""
    remedy: str = ""


def ok(check: str, host: str, read: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, host, Level.OK, read)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 without an error, 4 when a host cannot be reached, else 3."""
    errors = {finding.check for finding in findings if finding.level is Level.ERROR}
    if not errors:
        return EXIT_OK
    return EXIT_UNREACHABLE if "ssh" in errors else EXIT_PREFLIGHT


def sentence(finding: Finding) -> str:
    """What is wrong, in one line, without the host."""
    expected = f" (expected {finding.expected})" if finding.expected else ""
    return f"{finding.check}: {finding.read}{expected}"
