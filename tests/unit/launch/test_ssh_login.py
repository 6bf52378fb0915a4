"""Stages of a login against a real ssh server in this process."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from flodl.errors import ConfigError, HostUnreachable
from flodl.launch import ssh_login
from flodl.launch.plan import SshSpec
from flodl.launch.ssh_config import resolve
from tests.unit.launch.ssh_site import USER, SshSite

TIMEOUT_S = 30.0


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await body()

    return asyncio.run(limited())


async def failure(spec: SshSpec) -> HostUnreachable:
    with pytest.raises(HostUnreachable) as caught:
        await ssh_login.log_in(spec, "box")
    return caught.value


async def opens(spec: SshSpec) -> list[str]:
    login = await ssh_login.log_in(spec, "box")
    try:
        result = await login.connection.run("echo in", encoding="utf-8")
        assert str(result.stdout).strip() == "in"
        return login.warnings
    finally:
        await login.close()


@contextlib.asynccontextmanager
async def answering(
    reply: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def test_known_host_and_key_file_open_a_session(site: SshSite) -> None:
    async def body() -> None:
        async with site.serving():
            site.trust()
            assert await opens(site.spec()) == []

    run(body)


def test_hashed_known_hosts_entry_is_found(site: SshSite) -> None:
    async def body() -> None:
        async with site.serving():
            site.trust(name=ssh_login._hashed(f"[127.0.0.1]:{site.port}"))
            assert await opens(site.spec()) == []

    run(body)


def test_unreadable_lines_of_known_hosts_are_passed_over(site: SshSite) -> None:
    async def body() -> None:
        async with site.serving():
            site.known_hosts.write_text("|1|broken entry\n@nonsense a b c\n\udcff\n", errors="surrogateescape")
            site.trust()
            assert await opens(site.spec()) == []

    run(body)


def test_unknown_host_key_is_refused_with_fingerprint_and_command(site: SshSite) -> None:
    async def body() -> HostUnreachable:
        async with site.serving():
            return await failure(site.spec())

    error = run(body)
    assert error.stage == "host key"
    assert site.host_key.get_fingerprint("sha256") in error.reason
    assert f"ssh-keyscan -p {site.port} 127.0.0.1 >> {site.known_hosts}" in error.remedy
    assert "mkdir" not in error.remedy
    assert not site.known_hosts.exists()


def test_place_for_a_host_key_is_made_where_there_is_none(site: SshSite, tmp_path: Path) -> None:
    known = tmp_path / "new" / "known_hosts"

    async def body() -> HostUnreachable:
        async with site.serving():
            return await failure(site.spec(options=(f"UserKnownHostsFile={known}",)))

    remedy = run(body).remedy
    assert f"mkdir -pm700 {known.parent} && ssh-keyscan -p {site.port} 127.0.0.1 >> {known}" in remedy


@pytest.mark.parametrize("kind", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
def test_changed_host_key_is_refused_as_changed(site: SshSite, kind: str) -> None:
    async def body() -> HostUnreachable:
        async with site.serving():
            site.trust(asyncssh.generate_private_key(kind))
            return await failure(site.spec(options=("StrictHostKeyChecking=accept-new",)))

    error = run(body)
    assert error.stage == "host key"
    assert "is not the one in your known hosts" in error.reason
    assert "ssh-keygen -R" in error.remedy


def test_checking_switched_off_by_the_user_is_warned_about(site: SshSite) -> None:
    async def body() -> list[str]:
        async with site.serving():
            return await opens(site.spec(options=("StrictHostKeyChecking=no",)))

    (warning,) = run(body)
    assert "is not checked" in warning


def test_the_users_config_file_switches_checking_off_too(site: SshSite) -> None:
    async def body() -> list[str]:
        async with site.serving():
            config = site.home / ".ssh" / "config"
            config.write_text(
                f"Host box-alias\n  HostName 127.0.0.1\n  Port {site.port}\n  User {USER}\n  StrictHostKeyChecking no\n"
            )
            return await opens(SshSpec("box-alias"))

    assert len(run(body)) == 1


@pytest.mark.parametrize("hashed", [False, True])
def test_accept_new_adds_the_key_and_knows_it_next_time(site: SshSite, hashed: bool) -> None:
    options = ("StrictHostKeyChecking=accept-new", f"HashKnownHosts={'yes' if hashed else 'no'}")

    async def body() -> tuple[list[str], list[str]]:
        async with site.serving():
            return await opens(site.spec(options=options)), await opens(site.spec())

    first, second = run(body)
    assert len(first) == 1
    assert second == []
    assert ("127.0.0.1" in site.known_hosts.read_text()) is not hashed


def test_refused_key_is_an_auth_failure_that_names_what_was_tried(site: SshSite) -> None:
    async def body() -> HostUnreachable:
        async with site.serving():
            site.trust()
            asyncssh.generate_private_key("ssh-ed25519").write_private_key(site.key)
            return await failure(site.spec(identity_file=str(site.key)))

    error = run(body)
    assert error.stage == "auth"
    assert str(error).count(f"tried {site.key}; no ssh agent is running") == 1
    assert error.remedy.endswith("or set `ssh.user` and `ssh.identity_file`")


def test_remedy_for_what_was_typed_names_the_options(site: SshSite) -> None:
    async def body() -> HostUnreachable:
        async with site.serving():
            site.trust()
            asyncssh.generate_private_key("ssh-ed25519").write_private_key(site.key)
            return await failure(site.spec(identity_file=str(site.key), is_typed=True))

    assert run(body).remedy.endswith("or set USER@ before the host and -i")


def test_key_with_a_passphrase_names_ssh_add(site: SshSite) -> None:
    async def body() -> HostUnreachable:
        async with site.serving():
            site.trust()
            subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", site.key], check=True, timeout=20)
            return await failure(site.spec(identity_file=str(site.key)))

    error = run(body)
    assert error.stage == "auth"
    assert f"ssh-add {site.key}" in error.remedy


def test_missing_identity_file_is_named(site: SshSite) -> None:
    async def body() -> HostUnreachable:
        async with site.serving():
            site.trust()
            asyncssh.generate_private_key("ssh-ed25519").write_private_key(site.key)
            return await failure(site.spec(identity_file="/no/such/key"))

    error = run(body)
    assert error.stage == "auth"
    assert "/no/such/key does not exist; tried no key file; no ssh agent is running" in error.reason
    assert "tried" not in error.remedy


@contextlib.contextmanager
def agent_with(key: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """An ssh agent that holds ``key``, in the environment of this process."""
    path = folder / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it listens
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        subprocess.run(["ssh-add", "-q", key], check=True, stdin=subprocess.DEVNULL)
        yield
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(("reopens", "has_file", "warns"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_tunnel_that_hangs_on_the_agent_is_warned_about_once(
    site: SshSite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reopens: bool,
    has_file: bool,
    warns: int,
) -> None:
    async def body() -> list[str]:
        async with site.serving():
            site.trust()
            return await opens(site.spec(reopens=reopens))

    with agent_with(site.key, monkeypatch, tmp_path):
        if not has_file:
            site.key.unlink()
        warnings = run(body)
    assert ["only a key of your ssh agent opens 127.0.0.1" in warning for warning in warnings] == [True] * warns


def test_tunnel_that_nobody_opens_is_refused_with_what_was_tried(
    site: SshSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(other)
    other.chmod(0o600)
    site.key.unlink()

    async def body() -> HostUnreachable:
        async with site.serving():
            site.trust()
            return await failure(site.spec(reopens=True))

    with agent_with(other, monkeypatch, tmp_path):
        error = run(body)
    assert error.stage == "auth"
    assert "and the agent" in error.reason + error.remedy


@pytest.mark.parametrize(
    ("spec", "limit_s"),
    [
        (SshSpec("box"), (5.0, 3)),
        (SshSpec("box", patience_s=30.0), (5.0, 6)),
        (SshSpec("box", patience_s=30.0, options=("ServerAliveCountMax=2",)), (5.0, 2)),
        (SshSpec("box", patience_s=60.0, options=("ServerAliveInterval=7",)), (7.0, 9)),
    ],
)
def test_sessions_life_is_asked_for_as_often_as_it_has_to_be(
    site: SshSite, spec: SshSpec, limit_s: tuple[float, int]
) -> None:
    resolved = resolve(spec, "box")
    assert (resolved.alive_interval_s, resolved.alive_count) == limit_s


def test_name_that_does_not_resolve_is_a_resolve_failure(site: SshSite) -> None:
    error = run(lambda: failure(SshSpec("no-such-host.invalid")))
    assert error.stage == "resolve"
    assert "no-such-host.invalid" in error.reason


def test_closed_port_is_a_connect_failure(site: SshSite) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        error = run(lambda: failure(site.spec(port=port)))
    assert error.stage == "connect"
    assert "127.0.0.1" in error.reason


def test_server_that_never_speaks_ends_at_the_stages_deadline(site: SshSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_login, "HOST_KEY_TIMEOUT_S", 0.3)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def body() -> HostUnreachable:
        async with answering(silent) as port:
            return await failure(site.spec(port=port))

    error = run(body)
    assert error.stage == "connect"
    assert "did not finish the ssh greeting" in error.reason


def test_dropped_logins_are_tried_again(site: SshSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_login, "RETRY_BACKOFF_S", 0.01)
    seen = []

    async def body() -> None:
        async with site.serving():
            site.trust()
            inner = site.port

            async def dropping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                seen.append(1)
                if len(seen) <= 2:
                    writer.close()
                    return
                await relay(reader, writer, inner)

            async with answering(dropping) as port:
                site.trust(name=f"[127.0.0.1]:{port}")
                await opens(site.spec(port=port))

    run(body)
    assert len(seen) == 3


def test_server_that_always_drops_is_named_with_maxstartups(site: SshSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_login, "RETRY_BACKOFF_S", 0.001)

    async def dropping(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def body() -> HostUnreachable:
        async with answering(dropping) as port:
            return await failure(site.spec(port=port))

    error = run(body)
    assert error.stage == "connect"
    assert "MaxStartups" in error.remedy


def test_jump_host_carries_the_login_and_is_checked_by_its_own_entry(site: SshSite) -> None:
    async def body() -> tuple[str, list[str]]:
        jump = SshSite(site.home)
        async with site.serving(), jump.serving():
            site.trust()
            hop = f"{USER}@127.0.0.1:{jump.port}"
            error = await failure(site.spec(proxy_jump=hop))
            jump.trust()
            warnings = await opens(site.spec(proxy_jump=hop))
            assert jump.connections == 2
            return str(error), warnings

    error, warnings = run(body)
    assert "jump host 127.0.0.1" in error
    assert "host key" in error
    assert warnings == []


def test_jump_that_leads_to_itself_is_refused(site: SshSite) -> None:
    (site.home / ".ssh" / "config").write_text("Host *\n  ProxyJump bastion\n")
    error = run(lambda: failure(SshSpec("target", user=USER)))
    assert error.stage == "resolve"
    assert "circles" in error.reason


def test_option_that_cannot_be_honoured_is_refused_by_name(site: SshSite) -> None:
    with pytest.raises(ConfigError, match="ControlMaster"):
        run(lambda: ssh_login.log_in(site.spec(options=("ControlMaster=auto",)), "box"))


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))
