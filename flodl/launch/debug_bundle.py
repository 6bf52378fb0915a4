"""``fdl debug bundle``: one archive that somebody else can find a fault with, and no secret of the run.

What is in it: what was asked, the cluster file's values, snapshot, outcome, the last events and the last lines of every
log, and the versions of this machine. Values of environment variables and of arguments that may be secrets are left
out; the run's token, what is derived from it, and private keys are blotted out wherever they may stand. What the script
itself printed is in it as it is.
"""

import base64
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flodl import __version__
from flodl.errors import ConfigError, FlodlError
from flodl.launch.rundir import RunDir, read_token_file
from flodl.wire.handshake import derive_host_secret, derive_join_secret, derive_read_token, is_host_name

DEFAULT_LINES: Final = 1000
LOG_BYTES: Final = 256 << 10
"""Of one log, and of the events."""

MARGIN_BYTES: Final = 8 << 10
"""Read before what is taken, so that a secret does not lie across its edge."""

TOTAL_BYTES: Final = 16 << 20
"""Of all files before compression: what a bug tracker takes."""

REDACTED: Final = "<redacted>"
PLAIN_VARIABLES: Final = re.compile(r"(NCCL|GLOO|OMP|MKL|CUDA|TORCH)_\w+|FDL_RUN_ID")
"""Variables whose values are settings that faults come from."""

_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_PACKAGES: Final = ("torch", "numpy", "asyncssh", "click", "cryptography", "h11", "msgpack", "psutil", "pydantic")


@dataclass(frozen=True, slots=True)
class Bundled:
    """What was written: ``size_bytes`` of the archive; ``left_out`` names what found no room."""

    path: Path
    names: tuple[str, ...]
    size_bytes: int
    left_out: tuple[str, ...]


def write_bundle(run: RunDir, target: Path, lines: int, facts: Mapping[str, Any] | None = None) -> Bundled:
    """Write the archive of ``run``, a tar.gz of mode 0600.

    Args:
        run: its directory; parts that are not there are left out.
        target: the file to make; an existing one is refused.
        lines: of each log and of the events, at most.
        facts: more documents, by the name of their file: what was found out about this machine and the hosts.

    Raises:
        ConfigError: the file exists already, or cannot be written.
    """
    blot, left_out, names, room = Blot.of(run), [], [], TOTAL_BYTES
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{target} exists already; -o names another file") from None
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}; -o names another file") from None
    try:
        with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, data in _files(run, lines, facts or {}, blot):
                clean = blot(data)
                if len(clean) > room:
                    left_out.append(name)
                    continue
                room -= len(clean)
                _add(archive, f"{run.run_id}/{name}", clean)
                names.append(name)
            _add(archive, f"{run.run_id}/contents.json", _document({"files": names, "left_out": left_out}))
        return Bundled(target, tuple(names), target.stat().st_size, tuple(left_out))
    except OSError as error:
        target.unlink(missing_ok=True)
        raise ConfigError(f"{target}: {error.strerror}; -o names another file") from None


class Blot:
    """Replaces a run's secrets in bytes, in every form that they may have been written in."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        """``secrets`` as raw bytes."""
        self._forms = [form for secret in secrets for form in forms_of(secret)]

    @classmethod
    def of(cls, run: RunDir) -> "Blot":
        """That of ``run``: its token, the join token of its walk-ins, and what hosts and readers are given of them; as
        far as they are there.
        """
        hosts, secrets = tuple(dict.fromkeys(_hosts(run))), list[bytes]()
        with contextlib.suppress(FlodlError):
            token = run.read_token()
            secrets += [token, bytes.fromhex(derive_read_token(token))]
            secrets += [derive_host_secret(token, host) for host in hosts]
        with contextlib.suppress(FlodlError):
            join = (run.read_json("run.json") or {}).get("join")
            token = read_token_file(Path(str(join.get("token_file") if isinstance(join, dict) else "")))
            secrets += [token, *(derive_join_secret(token, host) for host in hosts)]
        return cls(secrets)

    def __call__(self, data: bytes) -> bytes:
        """``data`` without them, and without private keys."""
        for form in self._forms:
            data = data.replace(form, REDACTED.encode())
        return _PRIVATE_KEY.sub(REDACTED.encode(), data)


def _hosts(run: RunDir) -> Iterator[str]:
    """Every host that the run's documents name."""
    for name, key in (("run.json", "name"), ("state.json", "host")):
        hosts = (run.read_json(name) or {}).get("hosts")
        for host in hosts if isinstance(hosts, list) else ():
            found = host.get(key) if isinstance(host, dict) else None
            if isinstance(found, str) and is_host_name(found):
                yield found


def forms_of(secret: bytes) -> tuple[bytes, ...]:
    """How the bytes of a secret may stand somewhere: as they are, as a log shows them, in hex, in base64."""
    shown = secret.decode("utf-8", "backslashreplace")
    texts = (shown, secret.hex(), secret.hex().upper(), *(_base64(secret[offset:]) for offset in range(3)))
    return (secret, *(text.encode() for text in texts))


def _base64(data: bytes) -> str:
    """Whole groups only: what stands around them depends on the neighbours."""
    return base64.b64encode(data[: len(data) // 3 * 3]).decode()


# ------------------------------------------------------------------------------------------------------------ contents
def _files(run: RunDir, lines: int, facts: Mapping[str, Any], blot: Blot) -> Iterator[tuple[str, bytes]]:
    """Every file, the most telling first: where there is no room the last ones are left out."""
    yield "versions.json", _document(_versions())
    asked = run.read_json("run.json")
    if asked is not None:
        yield "run.json", _document(redacted(asked))
        yield from _cluster_file(str(asked.get("cwd") or ""), str(asked.get("cluster_file") or ""))
    for name in ("state.json", "outcome.json", "controller.json"):
        found = run.read_json(name)
        if found is not None:
            yield name, _document(found)
    for name, fact in facts.items():
        yield name, _document(fact)
    yield from _tail(run.path / "events.jsonl", "events.jsonl", lines, blot)
    for path in sorted(run.logs.glob("*.log"), key=_is_of_a_script):
        yield from _tail(path, f"logs/{path.name}", lines, blot)


def redacted(asked: Mapping[str, Any]) -> dict[str, Any]:
    """run.json without values that may be secrets: those of variables, and of arguments that sound like one."""
    kept = {key: _without_values(value) if key == "env" else value for key, value in asked.items()}
    if isinstance(asked.get("script"), list):
        kept["script"] = _arguments(asked["script"])
    if isinstance(asked.get("hosts"), list):
        kept["hosts"] = [redacted(host) if isinstance(host, dict) else host for host in asked["hosts"]]
    return kept


def _without_values(env: object) -> object:
    if not isinstance(env, dict):
        return REDACTED
    return {name: value if PLAIN_VARIABLES.fullmatch(name) else REDACTED for name, value in env.items()}


def _arguments(words: Iterable[object]) -> list[str]:
    """``--api-key=x`` and ``--api-key x`` without the value."""
    kept: list[str] = []
    is_value = False
    for word in map(str, words):
        option, has_value, _ = word.partition("=")
        is_secret = option.startswith("-") and _SECRET.search(option) is not None
        if is_value and not word.startswith("-"):
            kept.append(REDACTED)
        else:
            kept.append(f"{option}={REDACTED}" if is_secret and has_value else word)
        is_value = is_secret and not has_value
    return kept


def _cluster_file(cwd: str, path: str) -> Iterator[tuple[str, bytes]]:
    """The values of the cluster file with their places; of one that has become invalid, what is wrong with it."""
    if not path:
        return
    from flodl.config.cluster import load_cluster, show  # pydantic takes longer to import than all else here
    from flodl.config.relations import resolve_nothing

    try:
        rows = show(load_cluster(Path(cwd, path), resolve_nothing))
    except FlodlError as error:
        yield "cluster.json", _document({"file": path, "error": str(error)})
        return
    values = [
        {"key": row.key, "value": row.value if _is_plain(row.key) else REDACTED, "origin": row.origin} for row in rows
    ]
    yield "cluster.json", _document({"file": path, "values": values})


def _is_plain(key: str) -> bool:
    """Whether the value of this key path is none of an environment variable that may be a secret."""
    before, _, name = key.rpartition(".")
    return before.rpartition(".")[2] != "env" or PLAIN_VARIABLES.fullmatch(name) is not None


def _versions() -> dict[str, Any]:
    """What runs here. The hosts' versions are in state.json."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {
        "flodl": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": found,
        "bundled_s": time.time(),
    }


def _tail(path: Path, name: str, lines: int, blot: Blot) -> Iterator[tuple[str, bytes]]:
    """Secrets are blotted out before anything is cut, or half of one might be left."""
    if not path.is_file():  # a pipe would be waited for
        return
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES - MARGIN_BYTES))
            data = file.read(LOG_BYTES + MARGIN_BYTES)
    except OSError:
        return
    found = blot(data)[-LOG_BYTES:].rstrip(b"\n").split(b"\n")[-lines:] if lines else []
    if any(found):
        yield name, b"\n".join(found) + b"\n"


def _is_of_a_script(path: Path) -> tuple[bool, bool, str]:
    """Flodl's own logs first, then what scripts said on stderr."""
    name = path.name
    return (not name.startswith(("controller.", "daemon-")), ".stdout." in name, name)


def _document(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=1).encode("utf-8", "backslashreplace")


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(data))
