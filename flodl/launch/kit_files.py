"""Makes a walk-in's kit on disk, and the join token from which its token comes; idempotent, and never over what is not
its own.

    $XDG_STATE_HOME/fdl/join.token            the join token, unless cluster file or FDL_JOIN_TOKEN_FILE name another
    $XDG_STATE_HOME/fdl/walk-ins/<host>/      0700: daemon.token and id_ed25519 (0600), and what is no secret

A file is *kept* when it holds what it should, *made* when it is missing. What holds something else is refused, but for
what is of no use any more and is made anew: a host's token of an earlier join token, what names another address of the
controller and was edited by nobody, and everything of the host with ``regenerate``. That makes what is damaged anew,
too: the beginning of a secret, as a full disk or a crash leaves it. Everything is looked at before anything is written,
and a join token is replaced last: what fails on the way leaves the old one, by which every host can still walk in.
"""

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl.errors import ConfigError, PreflightError
from flodl.launch import kit, private_files, units
from flodl.launch.join_token import TOKEN_OR_PIECE
from flodl.launch.join_token import read as read_join_token
from flodl.launch.kit import KitRequest
from flodl.launch.rundir import TOKEN_BYTES, read_token_file, state_home
from flodl.wire.handshake import derive_join_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FOLDER: Final = "walk-ins"
MAX_FILE_BYTES: Final = 1 << 16
ATTEMPTS: Final = 10
"""More than there are files in a kit: each failed attempt has met one more that another process has made."""

_KEY_BEGIN: Final = b"-----BEGIN OPENSSH PRIVATE KEY-----"
_KEY_END: Final = b"-----END OPENSSH PRIVATE KEY-----"


@dataclass(slots=True)
class KitReport:
    """What has been done: ``(made, kept or made anew, path)`` of each file, and the public key of the host's pair.
    ``stale`` are other hosts whose token has been made anew, too; ``left`` says whose could not be, and why.
    ``moved`` are the files that were made for another address: name, that address, and the one of now.
    """

    folder: Path
    public_key: str = ""
    done: list[tuple[str, Path]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    moved: list[tuple[str, str, str]] = field(default_factory=list)


def folder_of(host: str) -> Path:
    """Where the kit of ``host`` stands."""
    return state_home() / FOLDER / host


def make(request: KitRequest, token_path: Path, *, regenerate: bool, dry_run: bool) -> KitReport:
    """Make what is missing of the kit, or with ``regenerate`` all of it and the join token, too. ``dry_run`` looks and
    writes nothing; of a key that is not there it shows ``<public key>``.

    Raises:
        ConfigError: a file that is in the way, or a folder that others may write to; nothing has been changed.
        PreflightError: a file or folder that cannot be written; it says what has been done before.
    """
    if dry_run:
        return _make(request, token_path, regenerate, dry_run)
    home = state_home()
    _check_folder(home)
    try:
        private_files.make_folders(home)
        with private_files.alone_in(home):  # two new join tokens at once would leave hosts with tokens of the other one
            return _make(request, token_path, regenerate, dry_run)
    except OSError as error:
        raise PreflightError(f"{error.filename or home}: {error.strerror}") from None


def _make(request: KitRequest, token_path: Path, regenerate: bool, dry_run: bool) -> KitReport:
    done: dict[Path, str] = {}
    for _ in range(ATTEMPTS):
        report = KitReport(folder_of(request.host))
        try:
            steps = _planned(request, token_path, report, regenerate, dry_run)
        except FileExistsError:
            continue
        except OSError as error:
            raise PreflightError(f"{error.filename or report.folder}: {error.strerror}{_told(done)}") from None
        if not dry_run and not _carried_out(steps, report.folder, token_path.parent, done):
            continue  # another process makes the same kit: what it has made is kept
        report.done = [(done.get(step.path, step.what), step.path) for step in steps]
        return report
    raise PreflightError(f"{folder_of(request.host)}: other processes change it at the same time; run it again")


@dataclass(frozen=True, slots=True)
class _Step:
    """What is to become of one file: ``made``, ``made anew`` or ``kept``."""

    what: str
    path: Path
    data: bytes = field(default=b"", repr=False)
    mode: int = 0o600


def _planned(request: KitRequest, token_path: Path, report: KitReport, regenerate: bool, dry_run: bool) -> list[_Step]:
    """Every file of the kit, looked at. Raises ConfigError, OSError; FileExistsError where another process makes it."""
    folder = report.folder
    if folder.is_symlink():
        raise ConfigError(f"{folder}: a link, not a folder; move it away")
    for each in (state_home(), folder.parent, folder):
        _check_folder(each)
    token_step, join_token = _join_token(token_path, regenerate)
    key_step, report.public_key = _key(folder / kit.KEY_NAME, regenerate, dry_run)
    steps = [key_step, _host_token(request.host, join_token, regenerate)]
    try:
        steps += _texts(request, report, regenerate)
    except ConfigError:
        if key_step.what == "made" and key_step.path.exists():  # both are there since we looked for the key
            raise FileExistsError from None
        raise
    if regenerate:
        steps += _others(request.host, join_token, report)
    return [*steps, token_step] if token_step.what == "made anew" else [token_step, *steps]


def _carried_out(steps: list[_Step], folder: Path, token_folder: Path, done: dict[Path, str]) -> bool:
    """Write the files and note each in ``done``; False where another process has made one of them meanwhile."""
    path = folder
    try:
        for path in (folder, token_folder):
            private_files.make_folders(path)
        for step in steps:
            path = step.path
            if step.what == "made":
                try:
                    private_files.write_new(path, step.data, step.mode)
                except FileExistsError:
                    return False
            elif step.what == "made anew":
                private_files.replace(path, step.data, step.mode)
            if step.what != "kept":
                done.setdefault(path, step.what)
        private_files.keep_at_home(folder.parent)
    except OSError as error:
        raise PreflightError(f"{path}: {error.strerror}{_told(done)}") from None
    return True


def _told(done: dict[Path, str]) -> str:
    lines = "".join(f"\n  {what}: {path}" for path, what in done.items())
    return f"\n  run it again once that is mended; this has been done:{lines}" if lines else ""


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: not a folder; move it away")
    if private_files.is_open_to_others(folder):
        raise ConfigError(f"{folder}: others may write to it, and so change tokens there; run: chmod go-w {folder}")


def _join_token(path: Path, regenerate: bool) -> tuple[_Step, bytes]:
    """The join token, read or made."""
    is_there = _is_there(path)
    if is_there:
        _check_token_or_piece(path)
    if is_there and not regenerate:
        return _Step("kept", path), read_join_token(path)
    token = secrets.token_bytes(TOKEN_BYTES)
    return _Step(_making(is_there), path, token.hex().encode()), token


def _host_token(host: str, join_token: bytes, regenerate: bool) -> _Step:
    """The host's token, of this join token. What cannot be one is of no use to anybody, and made anew."""
    path, secret = folder_of(host) / units.TOKEN_NAME, derive_join_secret(join_token, host)
    is_there = _is_there(path)
    if is_there:
        _check_token_or_piece(path)
    is_whole = is_there and path.stat().st_size >= 2 * TOKEN_BYTES and not _read(path).startswith(b"\0")
    if is_whole and not regenerate and secrets.compare_digest(read_token_file(path), secret):
        return _Step("kept", path)
    return _Step(_making(is_there), path, secret.hex().encode())


def _others(own: str, join_token: bytes, report: KitReport) -> list[_Step]:
    """The other hosts' tokens come from the join token, too. What is in the way of one stops nobody else's."""
    steps = list[_Step]()
    for folder in sorted(folder_of(own).parent.iterdir()) if folder_of(own).parent.is_dir() else ():
        if folder.name == own or not os.path.lexists(folder / units.TOKEN_NAME):
            continue
        try:
            steps.append(_host_token(folder.name, join_token, regenerate=True))
            report.stale.append(folder.name)
        except (ConfigError, OSError) as error:
            report.left.append(f"{folder.name}: {error}")
    return steps


def _key(path: Path, regenerate: bool, dry_run: bool) -> tuple[_Step, str]:
    """The private key, and its public half."""
    is_there = _is_there(path)
    if is_there and not regenerate:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path}: readable by others; run: chmod 600 {path}")
        if _is_piece_of_key(path):
            raise ConfigError(f"{path}: not a whole key; --regen makes a new one, and a new join token")
        return _Step("kept", path), _public_key(_load_key(path))
    if is_there and not _is_piece_of_key(path):
        _load_key(path)
    if dry_run:
        return _Step(_making(is_there), path), "<public key>"
    key = _new_key()
    return _Step(_making(is_there), path, _private_bytes(key)), _public_key(key)


def _texts(request: KitRequest, report: KitReport, regenerate: bool) -> list[_Step]:
    """The files without a secret."""
    steps, foreign = list[_Step](), list[Path]()
    for name, text in kit.texts(request, report.public_key).items():
        path, wanted = report.folder / name, text.encode()
        is_there = _is_there(path)
        found = _read(path) if is_there else b""
        if is_there and found == wanted:
            steps.append(_Step("kept", path))
            continue
        was, now = (
            kit.made_for(name, each.decode(errors="replace"), request.host, report.public_key)
            for each in (found, wanted)
        )
        if was:
            report.moved.append((name, was, now))
        elif is_there and not regenerate:
            foreign.append(path)
        steps.append(_Step(_making(is_there), path, wanted, 0o644))
    if foreign:
        names = "\n".join(f"{path}: holds something else than what belongs there" for path in foreign)
        raise ConfigError(f"{names}; move {'it' if len(foreign) == 1 else 'them'} away, or give --regen")
    return steps


def _making(is_there: bool) -> str:
    return "made anew" if is_there else "made"


def _check_token_or_piece(path: Path) -> None:
    if TOKEN_OR_PIECE.fullmatch(_read(path)) is None:
        raise ConfigError(f"{path}: not a token; move it away")


def _is_piece_of_key(path: Path) -> bool:
    data = _read(path)
    begins = data.startswith(_KEY_BEGIN) or _KEY_BEGIN.startswith(data)
    return not data.strip(b"\0") or (begins and _KEY_END not in data)


def _is_there(path: Path) -> bool:
    """Whether there is a regular file of this user.

    Raises:
        ConfigError: there is something else.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path}: no regular file; move it away")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path}: belongs to another user; move it away")
    return True


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return file.read(MAX_FILE_BYTES)


def _new_key() -> "Ed25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # 30 ms, and only this needs it

    return Ed25519PrivateKey.generate()


def _load_key(path: Path) -> "Ed25519PrivateKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(_read(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: not an ed25519 key without a passphrase; move it away")
    return key


def _private_bytes(key: "Ed25519PrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def _public_key(key: "Ed25519PrivateKey") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")
