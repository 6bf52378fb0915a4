"""Makes a walk-in's kit on disk, and the join token from which its token comes; idempotent, and never over what is not
its own.

    $XDG_STATE_HOME/fdl/join.token            the join token, unless cluster file or FDL_JOIN_TOKEN_FILE name another
    $XDG_STATE_HOME/fdl/walk-ins/<host>/      0700: daemon.token and id_ed25519 (0600), and what is no secret

A file is *kept* when it holds what it should, *made* when it is missing. What holds something else is refused, but for
two: a host's token of an earlier join token, which is of no use any more, is made anew, and so is everything of the
host with ``regenerate``.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl.errors import ConfigError, PreflightError
from flodl.launch import kit, units
from flodl.launch.kit import KitRequest
from flodl.launch.rundir import TOKEN_BYTES, read_token_file, state_home, write_token_file
from flodl.wire.handshake import derive_join_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FOLDER: Final = "walk-ins"
MAX_FILE_BYTES: Final = 1 << 16


@dataclass(slots=True)
class KitReport:
    """What has been done: ``(made, kept or made anew, path)`` of each file, and the public key of the host's pair.
    ``stale`` are other hosts whose token has been made anew, too.
    """

    folder: Path
    public_key: str = ""
    done: list[tuple[str, Path]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


def folder_of(host: str) -> Path:
    """Where the kit of ``host`` stands."""
    return state_home() / FOLDER / host


def make(request: KitRequest, token_path: Path, *, regenerate: bool, dry_run: bool) -> KitReport:
    """Make what is missing of the kit, or with ``regenerate`` all of it and the join token, too. ``dry_run`` looks and
    writes nothing; of a key that is not there it shows ``<public key>``.

    Raises:
        ConfigError: a file that is in the way.
        PreflightError: a folder that cannot be written.
    """
    report = KitReport(folder_of(request.host))
    maker = _Maker(report, dry_run)
    try:
        maker.make_folder(report.folder)
        join_token = maker.make_join_token(token_path, regenerate)
        maker.make_key(report.folder / kit.KEY_NAME, regenerate)
        maker.make_host_token(request.host, join_token)
        for name, text in kit.texts(request, report.public_key).items():
            maker.make_text(report.folder / name, text, regenerate)
        if regenerate:
            _refresh_others(maker, request.host, join_token)
    except OSError as error:
        raise PreflightError(f"{error.filename or report.folder}: {error.strerror}") from None
    return report


def _refresh_others(maker: "_Maker", host: str, join_token: bytes) -> None:
    """The other hosts' tokens come from the join token, too."""
    for folder in sorted(folder_of(host).parent.iterdir()) if folder_of(host).parent.is_dir() else ():
        if folder.name != host and (folder / units.TOKEN_NAME).exists():
            maker.make_host_token(folder.name, join_token)
            maker.report.stale.append(folder.name)


class _Maker:
    """One call of ``make``."""

    def __init__(self, report: KitReport, dry_run: bool) -> None:
        self.report, self._dry_run = report, dry_run

    def make_folder(self, folder: Path) -> None:
        """The host's own."""
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise ConfigError(f"{folder}: not a folder; move it away")
        if not self._dry_run:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)

    def make_join_token(self, path: Path, regenerate: bool) -> bytes:
        """The join token, read or made."""
        is_there = _is_there(path)
        if is_there and not regenerate:
            self._did("kept", path)
            return read_token_file(path)
        token = secrets.token_bytes(TOKEN_BYTES)
        if is_there:
            read_token_file(path)  # whatever else lies there is not ours to replace
        elif not self._dry_run:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(path, is_there, lambda target: write_token_file(target, token))
        return token

    def make_host_token(self, host: str, join_token: bytes) -> None:
        """The host's token, of this join token."""
        path, secret = folder_of(host) / units.TOKEN_NAME, derive_join_secret(join_token, host)
        is_there = _is_there(path)
        if is_there and secrets.compare_digest(read_token_file(path), secret):
            self._did("kept", path)
            return
        self._write(path, is_there, lambda target: write_token_file(target, secret))

    def make_key(self, path: Path, regenerate: bool) -> None:
        """The private key; its public half goes into the report."""
        is_there = _is_there(path)
        if is_there and not regenerate:
            self.report.public_key = _public_key(_load_key(path))
            self._did("kept", path)
            return
        if is_there:
            _load_key(path)
        if self._dry_run:
            self.report.public_key = "<public key>"
            self._did("made anew" if is_there else "made", path)
            return
        key = _new_key()
        self._write(path, is_there, lambda target: _write_new(target, _private_bytes(key), 0o600))
        self.report.public_key = _public_key(key)

    def make_text(self, path: Path, text: str, regenerate: bool) -> None:
        """A file without a secret."""
        is_there = _is_there(path)
        if is_there and _read(path) == text.encode():
            self._did("kept", path)
            return
        if is_there and not regenerate:
            raise ConfigError(f"{path}: holds something else than what belongs there; move it away, or give --regen")
        self._write(path, is_there, lambda target: _write_new(target, text.encode(), 0o644))

    def _write(self, path: Path, is_there: bool, write_new: Callable[[Path], None]) -> None:
        """Make the file, or replace it in one step."""
        self._did("made anew" if is_there else "made", path)
        if self._dry_run:
            return
        if not is_there:
            write_new(path)
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        write_new(temporary)
        temporary.replace(path)

    def _did(self, what: str, path: Path) -> None:
        self.report.done.append((what, path))


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


def _write_new(path: Path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "wb") as file:
        file.write(data)


def _new_key() -> "Ed25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # 30 ms, and only this needs it

    return Ed25519PrivateKey.generate()


def _load_key(path: Path) -> "Ed25519PrivateKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    if path.lstat().st_mode & 0o077:
        raise ConfigError(f"{path}: readable by others; run: chmod 600 {path}")
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
