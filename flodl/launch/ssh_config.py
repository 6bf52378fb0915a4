"""What the user's OpenSSH configuration says about a host, with ``ssh.options`` on top.

asyncssh reads these files too, but ignores in silence what it does not know (StrictHostKeyChecking among it), expects
every known-hosts file to exist and knows no system-wide defaults. Here the values are read by its own parser, with the
missing options added, so that what ``ssh HOST true`` accepts is accepted.
"""

import getpass
import math
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, cast

from asyncssh.config import ConfigParseError, SSHClientConfig, SSHConfig
from asyncssh.known_hosts import SSHKnownHosts
from asyncssh.public_key import SSHKey

from flodl.errors import HostUnreachable
from flodl.launch.plan import SshSpec
from flodl.launch.ssh_options import parse_options

USER_CONFIG: Final = "~/.ssh/config"
SYSTEM_CONFIG: Final = "/etc/ssh/ssh_config"
USER_KNOWN_HOSTS: Final = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
SYSTEM_KNOWN_HOSTS: Final = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
CONNECT_TIMEOUT_S: Final = 10
ALIVE_INTERVAL_S: Final = 5
ALIVE_COUNT: Final = 3


class HostKeyPolicy(StrEnum):
    """What happens with a host key that no known-hosts file holds. A changed key is refused by all but ``OFF``."""

    STRICT = "strict"
    ACCEPT_NEW = "accept-new"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """What the known-hosts files hold for one host."""

    trusted: tuple[SSHKey, ...]
    authorities: tuple[SSHKey, ...]
    revoked: tuple[SSHKey, ...]


@dataclass(frozen=True, slots=True)
class ResolvedHost:
    """One hop, fully resolved. ``label`` is what the user wrote, ``host`` the name or address that is dialled.

    ``identity_files`` are the existing ones, None when the defaults apply; ``missing_identities`` do not exist.
    ``known_hosts`` are the user's files (the first is the one to add to), then the system's. ``jumps`` come in the
    order in which they are passed. ``prefers_files``: a key from a file is better than one of the agent, which may be
    gone when the session has to be opened anew. ``is_typed`` as in ``SshSpec``.
    """

    label: str
    host: str
    port: int
    user: str
    alias: str | None
    policy: HostKeyPolicy
    hash_known_hosts: bool
    known_hosts: tuple[str, ...]
    identity_files: tuple[str, ...] | None
    missing_identities: tuple[str, ...]
    agent: str
    jumps: tuple[str, ...]
    proxy_command: bool
    connect_timeout_s: float
    alive_interval_s: float
    alive_count: int
    config_text: str
    prefers_files: bool
    is_typed: bool

    @property
    def known_name(self) -> str:
        """The name under which a known-hosts file lists this host."""
        if self.alias:
            return self.alias
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"


class _UserConfig(SSHClientConfig):
    _handlers = {  # noqa: RUF012 - as its base class does
        **SSHClientConfig._handlers,
        "stricthostkeychecking": ("StrictHostKeyChecking", SSHConfig._set_string),
        "hashknownhosts": ("HashKnownHosts", SSHConfig._set_bool),
    }


def option_lines(spec: SshSpec, host: str) -> str:
    """The spec as lines of an ssh configuration file, which come before the user's files and so win over them.

    Raises:
        ConfigError: an option that cannot be honoured.
    """
    lines = [f"{name} {value}" for name, value in parse_options(spec.options, host).items()]
    if spec.identity_file:
        lines.insert(0, f"IdentityFile {shlex.quote(os.path.expanduser(spec.identity_file))}")
    if spec.proxy_jump:
        lines.insert(0, f"ProxyJump {spec.proxy_jump}")
    return "".join(f"{line}\n" for line in lines)


def config_paths(options_path: str) -> list[str]:
    """The files in the order in which OpenSSH would obey them: the first that sets an option wins."""
    files = [os.path.expanduser(USER_CONFIG), SYSTEM_CONFIG]
    return [options_path, *(path for path in files if os.access(path, os.R_OK))]


def resolve(spec: SshSpec, host: str) -> ResolvedHost:
    """Read the configuration for ``spec``. May block: a ``Match exec`` runs a command.

    Raises:
        ConfigError: an option that cannot be honoured.
        HostUnreachable: a configuration file that cannot be read (stage resolve).
    """
    text = option_lines(spec, host)
    with ConfigFile(text) as options_path:
        try:
            config = _UserConfig.load(
                None,
                config_paths(options_path),
                False,
                False,
                False,
                getpass.getuser(),
                spec.user if spec.user is not None else (),
                spec.target,
                spec.port if spec.port is not None else (),
            )
            return _resolved(spec, cast(SSHClientConfig, config), text)
        except (ConfigParseError, OSError, UnicodeDecodeError) as error:
            raise HostUnreachable(host, "resolve", f"the ssh configuration cannot be used: {error}") from None


class ConfigFile:
    """The text as a file without a name, for a parser that takes paths only; gone with the ``with`` block."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._descriptor = -1

    def __enter__(self) -> str:
        self._descriptor = os.memfd_create("ssh-options", os.MFD_CLOEXEC)
        os.write(self._descriptor, self._text.encode())
        return f"/proc/self/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def known_keys(files: Iterable[str], name: str, port: int | None) -> KnownKeys:
    """The keys that ``files`` hold for ``name`` (without port for 22 and aliases). Missing files and lines that nobody
    can read are passed over, as OpenSSH does.
    """
    known = SSHKnownHosts()
    for path in files:
        try:
            lines = Path(path).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                known.load(line)
            except ValueError:
                continue
    trusted, authorities, revoked, *_ = known.match(name, "", port)
    return KnownKeys(tuple(trusted), tuple(authorities), tuple(revoked))


def _resolved(spec: SshSpec, config: SSHClientConfig, text: str) -> ResolvedHost:
    host = str(config.get("Hostname") or spec.target)
    identities = _strings(config.get("IdentityFile"))
    existing = tuple(path for path in map(os.path.expanduser, identities) if os.access(path, os.R_OK))
    agent = str(config.get("IdentityAgent") or os.environ.get("SSH_AUTH_SOCK", ""))
    user_known = _strings(config.get("UserKnownHostsFile", list(USER_KNOWN_HOSTS)))
    system_known = _strings(config.get("GlobalKnownHostsFile", list(SYSTEM_KNOWN_HOSTS)))
    jump = config.get("ProxyJump")
    alive_interval_s = float(str(config.get("ServerAliveInterval") or ALIVE_INTERVAL_S))
    alive_count = max(ALIVE_COUNT, math.ceil(spec.patience_s / alive_interval_s))
    return ResolvedHost(
        label=spec.target,
        host=host,
        port=int(str(config.get("Port", 22))),
        user=str(config.get("User") or getpass.getuser()),
        alias=None if config.get("HostKeyAlias") is None else str(config.get("HostKeyAlias")),
        policy=_policy(str(config.get("StrictHostKeyChecking", "ask"))),
        hash_known_hosts=bool(config.get("HashKnownHosts", False)),
        known_hosts=tuple(os.path.expanduser(config._expand_val(path)) for path in user_known + system_known),
        identity_files=existing if identities else None,
        missing_identities=tuple(path for path in identities if os.path.expanduser(path) not in existing),
        agent=os.path.expanduser(agent),
        jumps=tuple(part.strip() for part in str(jump).split(",")) if jump else (),
        proxy_command=bool(config.get("ProxyCommand")) and not jump,
        connect_timeout_s=float(str(config.get("ConnectTimeout") or CONNECT_TIMEOUT_S)),
        alive_interval_s=alive_interval_s,
        alive_count=int(str(config.get("ServerAliveCountMax", alive_count))),
        config_text=text,
        prefers_files=spec.reopens,
        is_typed=spec.is_typed,
    )


def _policy(value: str) -> HostKeyPolicy:
    match value.lower():
        case "no" | "off":
            return HostKeyPolicy.OFF
        case "accept-new":
            return HostKeyPolicy.ACCEPT_NEW
        case _:
            return HostKeyPolicy.STRICT


def _strings(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def jump_spec(jump: str) -> SshSpec:
    """One hop of a ProxyJump: ``[user@]host[:port]`` or ``ssh://[user@]host[:port]``."""
    rest = jump.removeprefix("ssh://").rstrip("/")
    user, _, host = rest.rpartition("@")
    name, port = host, ""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    elif host.count(":") == 1:
        name, port = host.split(":")
    return SshSpec(target=name, user=user or None, port=int(port) if port.isdigit() else None)
