"""Logs in to a host, hop by hop, each stage with its own deadline: resolve, connect, host key, auth.

Nothing is ever asked for: keys come from files and the agent. Host keys are always checked, each hop's by its own
known-hosts files and options; what the user's own options switch off is warned about each time.
"""

import asyncio
import base64
import dataclasses
import hashlib
import hmac
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import asyncssh

from flodl.errors import HostUnreachable
from flodl.launch.plan import SshSpec
from flodl.launch.ssh_config import (
    ConfigFile,
    HostKeyPolicy,
    KnownKeys,
    ResolvedHost,
    config_paths,
    jump_spec,
    known_keys,
    resolve,
)
from flodl.runtime.reason import reason_of

logger = logging.getLogger(__name__)

RESOLVE_TIMEOUT_S: Final = 10.0
HOST_KEY_TIMEOUT_S: Final = 15.0
AUTH_TIMEOUT_S: Final = 30.0
"""Slow logins (LDAP, home directories on the network) take many seconds."""

MAX_PARALLEL_LOGINS: Final = 8
"""OpenSSH's MaxStartups begins to drop logins at 10."""

RESET_RETRIES: Final = 5
RETRY_BACKOFF_S: Final = 0.5
MAX_HOPS: Final = 8


@dataclass(slots=True)
class Login:
    """An open session with a host: the connection, and those of the jump hosts that carry it, outermost first.

    ``local_address`` is this machine's address on the way there and ``peer_address`` the first hop's, empty behind a
    proxy command. ``warnings`` are to be shown to the user.
    """

    connection: asyncssh.SSHClientConnection
    hops: list[asyncssh.SSHClientConnection] = field(default_factory=list)
    local_address: str = ""
    peer_address: str = ""
    warnings: list[str] = field(default_factory=list)

    async def close(self) -> None:
        """Close all connections, the innermost first."""
        for connection in (self.connection, *reversed(self.hops)):
            connection.abort()
            try:
                await asyncio.wait_for(connection.wait_closed(), 2.0)
            except (OSError, asyncssh.Error, TimeoutError):
                continue


async def log_in(spec: SshSpec, host: str) -> Login:
    """Open a session with ``host``.

    Args:
        spec: how to reach it.
        host: its name in the roster, for messages.

    Raises:
        ConfigError: an ssh option that cannot be honoured.
        HostUnreachable: with the stage that failed and a remedy.
    """
    return await _through_hops(spec, host, hop="", seen=())


async def _through_hops(spec: SshSpec, host: str, hop: str, seen: tuple[str, ...]) -> Login:
    resolved = await _resolve(spec, host)
    name = f"{resolved.user}@{resolved.host}:{resolved.port}"
    if name in seen or len(seen) >= MAX_HOPS:
        raise HostUnreachable(host, "resolve", f"ProxyJump goes in circles or too far: {' → '.join((*seen, name))}")
    login: Login | None = None
    for jump in map(jump_spec, resolved.jumps):
        jump = dataclasses.replace(jump, patience_s=spec.patience_s, reopens=spec.reopens, is_typed=spec.is_typed)
        label = f"jump host {jump.target}"
        if login is None:
            login = await _through_hops(jump, host, label, (*seen, name))
        else:
            login = await _one_more(login, await _resolve(jump, host), host, label)
    return await _one_more(login, resolved, host, hop)


async def _one_more(login: Login | None, resolved: ResolvedHost, host: str, hop: str) -> Login:
    try:
        opened = await _with_lasting_key(login, resolved, host, hop)
    except BaseException:
        if login is not None:
            await login.close()
        raise
    if login is None:
        return opened
    login.hops.append(login.connection)
    login.connection = opened.connection
    login.warnings += opened.warnings
    return login


async def _with_lasting_key(login: Login | None, resolved: ResolvedHost, host: str, hop: str) -> Login:
    """With a key from a file where that is preferred and possible; else it is said that the agent has to stay."""
    if not resolved.prefers_files or not resolved.agent:
        return await _with_retries(login, resolved, host, hop)
    try:
        return await _with_retries(login, dataclasses.replace(resolved, agent=""), host, hop)
    except HostUnreachable as error:
        if error.stage != "auth":
            raise
    opened = await _with_retries(login, resolved, host, hop)
    opened.warnings.append(
        f"host {host}: only a key of your ssh agent opens {hop or resolved.host}: should the tunnel break when the "
        f"agent is gone (you have logged out), the host is lost; {_named(resolved, 'identity_file', '-i')} names a key "
        "without a passphrase"
    )
    return opened


async def _with_retries(login: Login | None, resolved: ResolvedHost, host: str, hop: str) -> Login:
    attempt = _Attempt(resolved, host, hop, login.connection if login else None)
    for retry in range(RESET_RETRIES + 1):
        try:
            return await attempt.run()
        except _Dropped as dropped:
            if retry == RESET_RETRIES:
                remedy = "its sshd drops logins: see MaxStartups in sshd_config there, and its log"
                raise HostUnreachable(host, "connect", f"{attempt.where}: {dropped}", remedy) from None
        backoff_s = RETRY_BACKOFF_S * 2**retry
        await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


class _Dropped(Exception):
    """The server closed before it showed its host key: too many logins at a time, or a restart."""


class _Client(asyncssh.SSHClient):
    """Follows a connection's progress and decides about keys that no file holds."""

    def __init__(self, judge: "Callable[[asyncssh.SSHKey], bool]", on_auth: Callable[[], None]) -> None:
        self._judge = judge
        self._on_auth = on_auth

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        return self._judge(key)

    def begin_auth(self, username: str) -> None:
        self._on_auth()


class _Attempt:
    """One hop: from the resolved configuration to an authenticated connection."""

    def __init__(
        self, resolved: ResolvedHost, host: str, hop: str, tunnel: asyncssh.SSHClientConnection | None
    ) -> None:
        self._to = resolved
        self._host = host
        self._tunnel = tunnel
        self.where = hop or f"{resolved.host} port {resolved.port}"
        self._stage = "connect"
        self._refused_key: asyncssh.SSHKey | None = None
        self._warnings: list[str] = []
        self._keys = known_keys(
            resolved.known_hosts,
            resolved.alias or resolved.host,
            None if resolved.alias or resolved.port == 22 else resolved.port,
        )

    async def run(self) -> Login:
        self._stage, self._refused_key = "connect", None
        sock: socket.socket | None = None
        if self._tunnel is None and not self._to.proxy_command:
            sock = await self._connected_socket()
        local = sock.getsockname()[0] if sock else ""
        peer = sock.getpeername()[0] if sock else ""
        connection = await self._negotiate(sock)
        return Login(connection, local_address=local, peer_address=peer, warnings=self._warnings)

    async def _connected_socket(self) -> socket.socket:
        loop, to = asyncio.get_running_loop(), self._to
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await loop.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise self._fail("resolve", f"{to.host}: no answer within {RESOLVE_TIMEOUT_S:g} s") from None
        except (OSError, UnicodeError) as error:
            given = _named(to, "target", "--ssh")
            remedy = f"check the name, or give {given} (a name, an address, or an alias of your ssh config)"
            raise self._fail("resolve", f"{to.host}: {_words(error)}", remedy) from None
        reasons = []
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                async with asyncio.timeout(to.connect_timeout_s):
                    await loop.sock_connect(sock, address)
                return sock
            except TimeoutError:
                reasons.append(f"{address[0]}: no answer within {to.connect_timeout_s:g} s")
                sock.close()
            except OSError as error:
                reasons.append(f"{address[0]}: {_words(error)}")
                sock.close()
            except BaseException:
                sock.close()
                raise
        remedy = "check that the host is up, its address, its ssh port and the firewall"
        raise self._fail("connect", f"port {to.port}: " + "; ".join(reasons[:4]), remedy)

    async def _negotiate(self, sock: socket.socket | None) -> asyncssh.SSHClientConnection:
        to = self._to
        try:
            with ConfigFile(to.config_text) as options_path:
                async with asyncio.timeout(HOST_KEY_TIMEOUT_S) as limit:

                    def authenticating() -> None:
                        self._stage = "auth"
                        limit.reschedule(asyncio.get_running_loop().time() + AUTH_TIMEOUT_S)

                    return await self._asyncssh_connect(sock, options_path, authenticating)
        except TimeoutError:
            raise self._timed_out() from None
        except asyncssh.HostKeyNotVerifiable as error:
            raise self._key_refused(error) from None
        except asyncssh.PermissionDenied:
            raise self._denied() from None
        except asyncssh.KeyExchangeFailed as error:
            raise self._fail("connect", f"{self.where}: no common algorithm: {error.reason}") from None
        except asyncssh.ChannelOpenError as error:
            raise self._fail("connect", f"{to.host} port {to.port} through the jump host: {error.reason}") from None
        except (asyncssh.Error, OSError, ValueError) as error:
            if self._stage == "connect" and isinstance(error, (asyncssh.ConnectionLost, ConnectionError)):
                raise _Dropped(_words(error)) from None
            raise self._fail(self._stage, f"{self.where}: {_words(error)}") from None

    async def _asyncssh_connect(
        self, sock: socket.socket | None, options_path: str, authenticating: Callable[[], None]
    ) -> asyncssh.SSHClientConnection:
        to = self._to
        extra: dict[str, object] = {}
        if self._keys.trusted or self._keys.authorities:
            extra["server_host_key_algs"] = _algorithms(self._keys)
        if to.identity_files is not None:
            extra["client_keys"] = list(to.identity_files)
        if not to.agent:
            extra["agent_path"] = ""
        return await asyncssh.connect(
            to.label,
            to.port,
            username=to.user,
            sock=sock,
            tunnel=self._tunnel,
            config=config_paths(options_path),
            client_factory=lambda: _Client(self._is_trusted, authenticating),
            known_hosts=(list(self._keys.trusted), list(self._keys.authorities), list(self._keys.revoked)),
            ignore_encrypted=True,
            password_auth=False,
            kbdint_auth=False,
            host_based_auth=False,
            connect_timeout=None,
            login_timeout=0,
            keepalive_interval=to.alive_interval_s,
            keepalive_count_max=to.alive_count,
            canonicalize_hostname=False,
            x509_trusted_certs=None,
            request_pty=False,
            command=None,
            env=None,
            send_env=None,
            agent_forwarding=False,
            **extra,
        )

    def _is_trusted(self, key: asyncssh.SSHKey) -> bool:
        to = self._to
        if to.policy is HostKeyPolicy.OFF:
            self._warnings.append(
                f"host {self._host}: the host key of {to.known_name} ({_fingerprint(key)}) is not checked: "
                "your ssh options say StrictHostKeyChecking=no"
            )
            return True
        if to.policy is HostKeyPolicy.ACCEPT_NEW and not self._keys.trusted and self._remember(key):
            return True
        self._refused_key = key
        return False

    def _remember(self, key: asyncssh.SSHKey) -> bool:
        to = self._to
        if not to.known_hosts:
            return False
        name = _hashed(to.known_name) if to.hash_known_hosts else to.known_name
        line = f"{name} {key.export_public_key().decode().strip()}\n"
        try:
            os.makedirs(os.path.dirname(to.known_hosts[0]), mode=0o700, exist_ok=True)
            with open(to.known_hosts[0], "a", encoding="ascii", opener=_private) as file:
                file.write(line)
        except OSError:
            return False
        self._warnings.append(
            f"host {self._host}: new host key of {to.known_name} ({_fingerprint(key)}) added to {to.known_hosts[0]}: "
            "your ssh options say StrictHostKeyChecking=accept-new"
        )
        return True

    def _key_refused(self, error: asyncssh.HostKeyNotVerifiable) -> HostUnreachable:
        to, key = self._to, self._refused_key
        if key is None:
            return self._fail("host key", f"{self.where}: {error.reason}")
        shown = f"{self.where}: its {key.get_algorithm()} key {_fingerprint(key)}"
        port = "" if to.port == 22 else f"-p {to.port} "
        file = to.known_hosts[0] if to.known_hosts else "~/.ssh/known_hosts"
        if self._keys.trusted:
            known = ", ".join(_fingerprint(trusted) for trusted in self._keys.trusted[:3])
            remedy = (
                f"somebody may be in between, or the host was set up anew; if you know why it changed: "
                f"ssh-keygen -R '{to.known_name}' -f {file}, then trust the new key"
            )
            return self._fail("host key", f"{shown} is not the one in your known hosts ({known})", remedy)
        folder = os.path.dirname(os.path.expanduser(file))
        making = "" if os.path.isdir(folder) else f"mkdir -pm700 {folder} && "
        remedy = (
            f"compare the fingerprint with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub there), then: "
            f"{making}ssh-keyscan {port}{to.host} >> {file}"
        )
        return self._fail("host key", f"{shown} is not in your known hosts", remedy)

    def _denied(self) -> HostUnreachable:
        to = self._to
        named = ", ".join(to.identity_files or ()) or "no key file"
        tried = "the default keys of ~/.ssh" if to.identity_files is None else named
        notes = [f"{path} does not exist" for path in to.missing_identities]
        notes.append(f"tried {tried}" + (" and the agent" if to.agent else "; no ssh agent is running"))
        user, key = _named(to, "user", "USER@ before the host"), _named(to, "identity_file", "-i")
        remedy = f"add your public key there (ssh-copy-id), or set {user} and {key}"
        locked = _encrypted(to.identity_files or ())
        if locked:
            remedy = f"{locked[0]} has a passphrase and flodl never asks for one: run ssh-add {locked[0]} first"
        return self._fail("auth", f"{self.where}: {to.user} is refused ({'; '.join(notes)})", remedy)

    def _timed_out(self) -> HostUnreachable:
        if self._stage == "auth":
            return self._fail("auth", f"{self.where}: no verdict within {AUTH_TIMEOUT_S:g} s", "see sshd's log there")
        reason = f"{self.where}: it accepts connections but did not finish the ssh greeting within "
        return self._fail("connect", f"{reason}{HOST_KEY_TIMEOUT_S:g} s", "check that an ssh server listens there")

    def _fail(self, stage: str, reason: str, remedy: str = "") -> HostUnreachable:
        return HostUnreachable(self._host, stage, reason, remedy)


def _named(to: ResolvedHost, key: str, option: str) -> str:
    """What a person sets: ``key`` of ``ssh`` in the cluster file, or ``option`` of the command line."""
    return option if to.is_typed else f"`ssh.{key}`"


def _algorithms(keys: KnownKeys) -> list[str]:
    """What to ask the server for: algorithms of known keys first, all others behind them, so that a key of another
    kind shows as changed instead of as a failed negotiation.
    """
    preferred = [name.decode() for key in keys.trusted for name in key.sig_algorithms]
    certificates = [name.decode() for name in asyncssh.public_key.get_default_certificate_algs()]
    plain = [name.decode() for name in asyncssh.public_key.get_default_public_key_algs()]
    ordered = (certificates if keys.authorities else []) + preferred + plain
    return list(dict.fromkeys(ordered))


def _encrypted(paths: tuple[str, ...]) -> list[str]:
    locked = []
    for path in paths:
        try:
            asyncssh.read_private_key(path)
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            if "assphrase" in str(error):
                locked.append(path)
        except OSError:
            continue
    return locked


def _fingerprint(key: asyncssh.SSHKey) -> str:
    return key.get_fingerprint("sha256")


def _hashed(name: str) -> str:
    salt = secrets.token_bytes(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _words(error: BaseException) -> str:
    if isinstance(error, asyncssh.Error):
        return str(error.reason)
    return reason_of(error)


async def _resolve(spec: SshSpec, host: str) -> ResolvedHost:
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            return await asyncio.to_thread(resolve, spec, host)
    except TimeoutError:
        reason = f"the ssh configuration for {spec.target} was not read within {RESOLVE_TIMEOUT_S:g} s"
        raise HostUnreachable(host, "resolve", reason, "see the Match exec lines in your ssh config") from None
