"""Puts the managed daemon's unit and settings where systemd looks for them, and says what systemd knows of it.

What a user has edited is left alone: the settings and the token are never replaced, the unit is flodl's own.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flodl.core.counted import counted
from flodl.errors import PreflightError
from flodl.launch.units import CONFIG_NAME, TOKEN_NAME, UNIT_NAME, Scope

ANSWER_S: Final = 10.0
"""How long systemctl may take."""

PROPERTIES: Final = (
    "LoadState",
    "ActiveState",
    "SubState",
    "StatusText",
    "MainPID",
    "NRestarts",
    "Result",
    "ExecMainStatus",
    "FragmentPath",
)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the files of one scope lie."""

    unit: Path
    config: Path
    token: Path


def places(scope: Scope, environ: Mapping[str, str], home: Path) -> Places:
    """Where they lie for this user, or for the whole machine. Pure."""
    if scope is Scope.SYSTEM:
        units, settings = Path("/etc/systemd/system"), Path("/etc/fdl")
    else:
        named = environ.get("XDG_CONFIG_HOME", "")
        base = Path(named) if os.path.isabs(named) else home / ".config"
        units, settings = base / "systemd" / "user", base / "fdl"
    return Places(units / UNIT_NAME, settings / CONFIG_NAME, settings / TOKEN_NAME)


def install(where: Places, unit: str, config: str) -> list[str]:
    """Write the unit where it differs, and the settings where there are none; doing it again changes nothing.

    Returns:
        One line for each file, for a person.

    Raises:
        PreflightError: a file cannot be written.
    """
    try:
        return [
            _write(where.unit, unit, is_ours=True),
            _write(where.config, config, is_ours=False),
            f"{'kept' if where.token.exists() else 'missing':8} {where.token}",
        ]
    except OSError as error:
        raise PreflightError(f"{error.filename}: {error.strerror}; the unit is not installed") from None


def _write(path: Path, text: str, *, is_ours: bool) -> str:
    if path.exists() and (not is_ours or path.read_text("utf-8") == text):
        return f"kept     {path}"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, "utf-8")
    scratch.replace(path)
    return f"written  {path}"


def next_steps(scope: Scope, where: Places, user: str) -> list[str]:
    """What is left to do, as lines to read and to type. Pure."""
    own = scope is Scope.USER
    systemctl = "systemctl --user" if own else "systemctl"
    lingering = [f"  loginctl enable-linger {user}    # it runs without a login, too"] if own else []
    return [
        f"name the controller in {where.config}",
        f"put this host's token, which fdl join-config makes for the controller, into {where.token}, mode 0600",
        "then:",
        *lingering,
        f"  {systemctl} daemon-reload",
        f"  {systemctl} enable --now {UNIT_NAME.removesuffix('.service')}",
    ]


def ask_systemd(scope: Scope) -> dict[str, str]:
    """What systemd says of the unit: ``PROPERTIES`` by name.

    Raises:
        PreflightError: there is no systemd that answers.
    """
    command = ["systemctl", *(["--user"] if scope is Scope.USER else []), "show", UNIT_NAME, "-p", ",".join(PROPERTIES)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(f"systemctl does not answer: {error}") from None
    if done.returncode:
        raise PreflightError(done.stderr.strip() or f"systemctl ended with code {done.returncode}")
    return parse_properties(done.stdout)


def parse_properties(text: str) -> dict[str, str]:
    """The lines of ``systemctl show``. Pure."""
    return {name: value for name, is_line, value in (line.partition("=") for line in text.splitlines()) if is_line}


def is_active(found: Mapping[str, str]) -> bool:
    """Whether the daemon runs."""
    return found.get("ActiveState") == "active"


def status_line(scope: Scope, found: Mapping[str, str]) -> str:
    """One line for a person. Pure."""
    if found.get("LoadState") != "loaded":
        return f"{scope:7} not installed; fdl daemon install --{scope}"
    state = f"{found.get('ActiveState', 'unknown')} ({found.get('SubState', '')})"
    parts = [f"{scope:7} {state}"]
    if is_active(found):
        parts += [f"pid {found.get('MainPID', '')}", found.get("StatusText", "")]
    elif found.get("Result", "success") != "success":
        parts.append(f"{found['Result']}, exit code {found.get('ExecMainStatus', '')}")
    if found.get("NRestarts", "0") != "0":
        parts.append(f"restarted {counted(int(found['NRestarts']), 'time')}")
    return "  ".join(part for part in parts if part)
