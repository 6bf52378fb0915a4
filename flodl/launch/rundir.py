"""A run's directory and the registry of runs, which is the set of these directories. Per user, 0700, files 0600.

    $XDG_STATE_HOME/fdl/runs/<run_id>/        (FDL_STATE_HOME replaces $XDG_STATE_HOME/fdl)
        run.json         what was asked: a ``flodl.launch.plan.RunSpec``, without secrets
        tree.json        where the launch copied the project: its ``flodl.launch.tree.Tree``
        token            the run's secret, 64 hex digits
        controller.json  written by the controller once it listens: a ``ControllerInfo``
        state.json       the last snapshot            outcome.json   how the run ended
        events.jsonl     what happened                logs/          controller.log, daemon-HOST.log, rankR.STREAM.log
        .reserve         room for the last two documents, until they are written

Processes are known by pid and start time, never by name: a number that the kernel has given to somebody else is dead.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flodl.config.address import parse_host
from flodl.config.tls import TlsMode
from flodl.errors import ConfigError, PreflightError
from flodl.launch import private_files
from flodl.launch.document import dump, load
from flodl.launch.reported import reported
from flodl.runtime.ports import PORT_REMEDY
from flodl.spec.words import printable

CONTROLLER_START_S: Final = 30.0
"""From the controller's start to its announcement; measured at 0.3 s, a cold network file system takes many more."""

LAST_WORDS_S: Final = 60.0
"""A controller whose run has ended serves those who still read its end for some seconds, never this long."""

MAX_DOCUMENT_BYTES: Final = 64 << 20
"""Far more than run.json, tree.json or a snapshot of any run takes."""

REPORTS: Final = frozenset({"state.json", "outcome.json"})
MAX_PORT: Final = 65535

MAX_WALL_S: Final = 1e11
"""Some three thousand years."""

TOKEN_BYTES: Final = 32
TOKEN_TEXT: Final = re.compile(rb"[0-9A-Fa-f]{%d}(\r?\n)?" % (2 * TOKEN_BYTES))
RUNS_NAME: Final = "runs"
"""The folder of all runs in the state folder."""

RESERVE_NAME: Final = ".reserve"
RESERVE_BYTES: Final = 64 * 1024
"""Kept free for the outcome of a run whose disk its own logs have filled."""


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """Where a run's controller listens. ``started`` is its process's start time in clock ticks since boot, the number
    of ``/proc/PID/stat``; ``address`` is one to dial from this machine. ``certificate`` is the SHA-256 of the run's
    TLS certificate in hex, empty without TLS.
    """

    pid: int
    started: int
    address: str
    port: int
    tls: TlsMode = TlsMode.AUTO
    certificate: str = ""


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run's directory. The paths need not exist."""

    path: Path

    @property
    def run_id(self) -> str:
        """The directory's name is the run's id."""
        return self.path.name

    @property
    def run_json(self) -> Path:
        """What was asked."""
        return self.path / "run.json"

    @property
    def token_path(self) -> Path:
        """The run's secret."""
        return self.path / "token"

    @property
    def controller_json(self) -> Path:
        """Where the controller listens."""
        return self.path / "controller.json"

    @property
    def tree_json(self) -> Path:
        """The project's files and their hashes at the launch."""
        return self.path / "tree.json"

    @property
    def state_json(self) -> Path:
        """The last snapshot."""
        return self.path / "state.json"

    @property
    def outcome_json(self) -> Path:
        """How the run ended."""
        return self.path / "outcome.json"

    @property
    def logs(self) -> Path:
        """The folder of all logs."""
        return self.path / "logs"

    def write(self, name: str, text: str) -> Path:
        """Replace the file ``name`` in one step, mode 0600: a reader sees the old text or the new."""
        target = self.path / name
        temporary = self.path / f".{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return target

    def release_reserve(self) -> None:
        """Give back the room that was kept for the run's last words: they are about to be written."""
        with contextlib.suppress(OSError):
            (self.path / RESERVE_NAME).unlink(missing_ok=True)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in the file ``name``; None where there is none (yet), or something else. What the run reports
        of itself comes as it can be shown (``launch.reported``); what was asked may hold the bytes of paths.
        """
        try:
            data = json.loads(read_document(self.path / name))
            if name in REPORTS:
                return reported(data)
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None

    def read_token(self) -> bytes:
        """The run's secret.

        Raises:
            ConfigError: missing, readable by others, or not 64 hex digits.
        """
        return read_token_file(self.token_path)

    def controller(self) -> ControllerInfo | None:
        """Where the controller listens, None before it does, or where what is announced can be no such place."""
        try:
            info = load(ControllerInfo, read_document(self.controller_json))
            parse_host(info.address)
            bytes.fromhex(info.certificate)
        except (OSError, ValueError, ConfigError):
            return None
        return info if 1 <= info.port <= MAX_PORT else None

    def announce(self, info: ControllerInfo) -> None:
        """Publish where the controller listens; called by the controller."""
        self.write("controller.json", dump(info))

    def is_live(self) -> bool:
        """Whether the controller that announced itself is still that very process."""
        info = self.controller()
        return info is not None and process_started(info.pid) == info.started


def read_document(path: Path) -> bytes:
    """A regular file, which is neither waited for nor read without an end.

    Raises:
        OSError: it cannot be read, is no regular file or a link, or larger than ``MAX_DOCUMENT_BYTES``.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def wall_time_s(value: object) -> float | None:
    """``value`` where it can be a wall time, in seconds; None for all else that a document may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_WALL_S:
        return None
    return float(value)


def read_token_file(path: Path, *, is_credential: bool = False) -> bytes:
    """The secret in a token file. ``is_credential``: it lies where systemd put it, which may let the service's user in
    by an entry that shows as the group's right to read.

    Raises:
        ConfigError: missing, readable by others, or not 64 hex digits.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the token cannot be read") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: no regular file; the token cannot be read")
        text = os.read(descriptor, 2 * TOKEN_BYTES + len("\r\n") + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the token cannot be read") from None
    finally:
        os.close(descriptor)
    if mode & (0o037 if is_credential else 0o077):
        raise ConfigError(f"{path}: readable by others (mode {stat.S_IMODE(mode):03o}); run: chmod 600 {path}")
    if TOKEN_TEXT.fullmatch(text) is None:
        raise ConfigError(f"{path}: not a token (expected {2 * TOKEN_BYTES} hex digits and nothing else)")
    return bytes.fromhex(text.decode("ascii"))


def write_token_file(path: Path, secret: bytes) -> None:
    """Make a token file, whole and mode 0600 from its first moment on; nothing that is there is followed or replaced.

    Raises:
        OSError: it exists, or cannot be made; nothing is left then.
    """
    private_files.write_new(path, secret.hex().encode("ascii"))


def state_home() -> Path:
    """The folder of everything that fdl keeps for this user."""
    override = os.environ.get("FDL_STATE_HOME")
    if override:
        return Path(override)
    xdg = os.environ.get("XDG_STATE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".local" / "state") / "fdl"


def open_folders() -> list[Path]:
    """Those of this user's state folders in which others may put files of theirs in the place of ours."""
    return [folder for folder in (state_home(), state_home() / RUNS_NAME) if private_files.is_open_to_others(folder)]


def new_run_id(wall_s: float | None = None) -> str:
    """A short id that sorts by time: ``20261129-213045-ab12`` (UTC)."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(wall_s)) + "-" + secrets.token_hex(2)


def place(run_id: str) -> RunDir:
    """Where the run's directory is, or will be."""
    return RunDir(state_home() / RUNS_NAME / run_id)


def create(run_id: str) -> RunDir:
    """Make the directory of a new run, with its token and its logs folder.

    Raises:
        PreflightError: the state folder cannot be written.
    """
    run = place(run_id)
    try:
        private_files.make_folders(run.path.parent)
        private_files.keep_at_home(run.path.parent)
        run.path.mkdir(mode=0o700)
        try:
            _furnish(run)
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)  # half a run would be taken for the latest one
            raise
    except OSError as error:
        raise PreflightError(
            f"{run.path}: {error.strerror}; runs are kept there, FDL_STATE_HOME names another folder"
        ) from None
    return run


def try_to_create(run_id: str) -> None:
    """Find out whether ``create`` can make the directory; nothing of the trial stays.

    Raises:
        PreflightError: as ``create``.
    """
    shutil.rmtree(create(run_id).path, ignore_errors=True)


def _furnish(run: RunDir) -> None:
    """What every run's directory has from the start. Raises OSError."""
    run.logs.mkdir(mode=0o700)
    write_token_file(run.token_path, secrets.token_bytes(TOKEN_BYTES))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    reserve = os.open(run.path / RESERVE_NAME, flags, 0o600)
    try:
        os.posix_fallocate(reserve, 0, RESERVE_BYTES)
    finally:
        os.close(reserve)


def all_runs() -> list[RunDir]:
    """Every run of this user, the newest first. Reads no file of theirs: there may be ten thousand."""
    folder = state_home() / RUNS_NAME
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [
            RunDir(folder / name) for name in sorted((each.name for each in entries if each.is_dir()), reverse=True)
        ]
    return []


def live_runs() -> list[RunDir]:
    """Those that are live, the newest first; where one still goes on, without those that only serve their last words.

    What ended long ago is told by the age of its outcome, at the cost of one look at the directory each.
    """
    return _living(all_runs())


def port_remedy(port: int) -> str:
    """What to do where ``port`` is taken: most often one's own run has it."""
    for run in live_runs() if port else ():
        info = run.controller()
        if info is not None and info.port == port:
            return f"run {run.run_id} ({run_name(run)}) is live: fdl stop {run.run_id}"
    return PORT_REMEDY


def run_name(run: RunDir) -> str:
    """The run's name as a terminal may show it, empty when run.json is not there."""
    return printable(str((run.read_json("run.json") or {}).get("name", "")))


def find(wanted: str | None = None, *, must_be_live: bool = False) -> RunDir:
    """The run that ``wanted`` names: an id, a name (the latest of it), or an id's unique beginning.

    None means the latest live run, else the latest of all. ``must_be_live`` is for whoever changes a run: None and a
    name mean the only live one then, and nobody guesses which of several.

    Raises:
        ConfigError: there is none, or it is one of several.
    """
    if wanted is not None and not wanted.strip():
        raise ConfigError("an empty word names no run; give an id, its beginning, or a name")
    runs = all_runs()
    if wanted is None:
        return _latest(runs, must_be_live)
    exact = [run for run in runs if run.run_id == wanted]
    living = [] if exact else [run for run in _living(runs) if run_name(run) == wanted]
    if must_be_live:
        _check_alone(living)
    candidates = exact or living[:1] or [run for run in runs if run.run_id.startswith(wanted)]
    candidates = candidates or list(itertools.islice((run for run in runs if run_name(run) == wanted), 1))
    if len(candidates) == 1:
        return _checked_live(candidates[0], must_be_live)
    if candidates:
        raise ConfigError(f"run {wanted!r} is not unique: " + ", ".join(run.run_id for run in candidates[:5]))
    known = ", ".join(f"{run.run_id} ({run_name(run)})" for run in runs[:5]) or "none"
    raise ConfigError(f"no run {wanted!r} under {state_home() / 'runs'}; the latest are: {known}")


def _latest(runs: list[RunDir], must_be_live: bool) -> RunDir:
    living = _living(runs)
    if must_be_live:
        _check_alone(living)
    if living:
        return living[0]
    if must_be_live or not runs:
        raise ConfigError(f"no run is live under {state_home() / 'runs'}; start one with: fdl launch train.py")
    return runs[0]


def _living(runs: list[RunDir]) -> list[RunDir]:
    living = [run for run in runs if not _is_long_over(run) and run.is_live()]
    return [run for run in living if not run.outcome_json.exists()] or living


def _is_long_over(run: RunDir) -> bool:
    try:
        return time.time() - os.stat(f"{run.path}/outcome.json").st_mtime > LAST_WORDS_S
    except OSError:
        return False


def _check_alone(living: list[RunDir]) -> None:
    if len(living) > 1:
        named = "".join(f"\n  {run.run_id} ({run_name(run)})" for run in living)
        raise ConfigError(f"{len(living)} runs are live; which one? give its id, or its beginning:{named}")


def _checked_live(run: RunDir, must_be_live: bool) -> RunDir:
    if must_be_live and not run.is_live():
        raise ConfigError(f"run {run.run_id} is not live any more; see: fdl status {run.run_id}")
    return run


def process_started(pid: int) -> int | None:
    """The start time of a live process in clock ticks since boot; None when there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def own_info(address: str, port: int) -> ControllerInfo:
    """What this process announces when it is the controller."""
    return ControllerInfo(os.getpid(), process_started(os.getpid()) or 0, address, port)


def outcome_exit_code(outcome: Mapping[str, Any]) -> int:
    """The exit code in an outcome document; 1 when it holds none that can be one."""
    code = outcome.get("exit_code")
    return code if isinstance(code, int) and 0 <= code <= 255 else 1
