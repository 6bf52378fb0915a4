"""A daemon started over ssh and here: what it is given, what may stand in the way, and who is told."""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flodl.config.address import split_address
from flodl.errors import HostUnreachable
from flodl.launch import document, local, running, ssh
from flodl.launch.bootstrap import Bootstrap, ReadyScanner
from flodl.launch.plan import HostKind, HostPlan
from tests.unit.launch.ssh_site import SshSite, executable

TIMEOUT_S = 30.0
PORT = 4711


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await body()

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def started(site: SshSite, host: HostPlan, bootstrap: Bootstrap, log: Path) -> AsyncIterator[ssh.SshDaemon]:
    daemon = await ssh.start_host(host, bootstrap, log, asyncio.Semaphore(8), PORT, [].append)
    try:
        yield daemon
    finally:
        await daemon.close()


def start_failure(site: SshSite, host: Callable[[], HostPlan], bootstrap: Bootstrap, log: Path) -> HostUnreachable:
    async def body() -> HostUnreachable:
        async with site.serving():
            site.trust()
            with pytest.raises(HostUnreachable) as caught:
                async with started(site, host(), bootstrap, log):
                    pass
            return caught.value

    error = run(body)
    assert isinstance(error, HostUnreachable)
    return error


@pytest.mark.parametrize("folder", ["plain", "with space", "q'uo\"te", "new\nline", "é漢 $HOME;*"])
def test_bootstrap_arrives_byte_for_byte_in_the_hosts_folder(
    site: SshSite, fake_python: Path, bootstrap: Bootstrap, tmp_path: Path, folder: str
) -> None:
    (tmp_path / folder).mkdir()

    async def body() -> None:
        async with site.serving():
            site.trust()
            host = site.host(tmp_path / folder, str(fake_python))
            async with started(site, host, bootstrap, tmp_path / "log"):
                assert bootstrap.secret not in "".join(site.commands)

    run(body)
    got = document.load(Bootstrap, (tmp_path / "got.json").read_text())
    assert got == dataclasses.replace(bootstrap, controllers=(f"127.0.0.1:{PORT}",))


@pytest.mark.parametrize("noise", [b"Welcome!\nFDL1 ready nobody\n\x1b[31m\xff\xfe", b"x" * (1 << 20)])
def test_login_noise_is_log_and_never_data(
    site: SshSite, fake_python: Path, bootstrap: Bootstrap, tmp_path: Path, noise: bytes
) -> None:
    site.noise, site.noise_stderr = noise, b"stty: standard input: \xff not a tty\n"

    async def body() -> None:
        async with site.serving():
            site.trust()
            async with started(site, site.host(tmp_path, str(fake_python)), bootstrap, tmp_path / "log"):
                pass

    run(body)
    assert noise in (tmp_path / "log").read_bytes()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("stream", "noise"),
    [
        (b"\nFDL1 ready box\nlater\n", b"later\n"),
        (b"banner\n\nFDL1 ready box\nlater", b"banner\nlater"),
        (b"banner\nFDL1 ready box\nlater", b"banner\nlater"),
        (b"\n\n\nFDL1 ready bo\nFDL1 ready b", b"\n\n\nFDL1 ready bo\nFDL1 ready b"),
    ],
)
def test_ready_line_is_taken_out_of_the_log(tmp_path: Path, stream: bytes, noise: bytes, size: int) -> None:
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]

    async def read(_: int) -> bytes:
        return pieces.pop(0) if pieces else b""

    async def body() -> bool:
        ready = asyncio.Event()
        await running.pump(read, running.HostLog(tmp_path / "log"), ReadyScanner("box"), ready)
        return ready.is_set()

    assert run(body) == (b"ready box\n" in stream)
    assert (tmp_path / "log").read_bytes() == noise


def test_end_of_a_daemon_is_told_with_its_code(site: SshSite, bootstrap: Bootstrap, tmp_path: Path) -> None:
    python = executable(tmp_path / "py", "head -c 5 >/dev/null; printf '\\nFDL1 ready 20261129-213045-ab12\\n'; exit 7")

    async def body() -> running.DaemonEnded:
        async with site.serving():
            site.trust()
            async with started(site, site.host(tmp_path, str(python)), bootstrap, tmp_path / "log") as daemon:
                return await daemon.wait()

    assert run(body) == running.DaemonEnded(7, "ended with code 7")


def test_lost_session_is_told_without_a_code(
    site: SshSite, fake_python: Path, bootstrap: Bootstrap, tmp_path: Path
) -> None:
    async def body() -> running.DaemonEnded:
        async with site.serving():
            site.trust()
            async with started(site, site.host(tmp_path, str(fake_python)), bootstrap, tmp_path / "log") as daemon:
                daemon._login.connection.abort()
                return await daemon.wait()

    assert run(body).code is None


def test_missing_interpreter_is_named(site: SshSite, bootstrap: Bootstrap, tmp_path: Path) -> None:
    error = start_failure(site, lambda: site.host(tmp_path, "/opt/no/python"), bootstrap, tmp_path / "log")
    assert (error.host, error.stage) == ("box", "start")
    assert error.reason == "interpreter /opt/no/python not found"
    assert "`python` of worker box" in error.remedy


def test_missing_folder_is_named(site: SshSite, fake_python: Path, bootstrap: Bootstrap, tmp_path: Path) -> None:
    host = lambda: site.host(tmp_path / "gone", str(fake_python))  # noqa: E731 - the port is known only later
    error = start_failure(site, host, bootstrap, tmp_path / "log")
    assert error.reason == f"folder {tmp_path / 'gone'} not found"


def test_interpreter_without_flodl_names_what_to_install(site: SshSite, bootstrap: Bootstrap, tmp_path: Path) -> None:
    python = executable(tmp_path / "bare", "echo \"Error: No module named 'flodl_daemon'\" >&2; exit 1")
    error = start_failure(site, lambda: site.host(tmp_path, str(python)), bootstrap, tmp_path / "log")
    assert "has no flodl" in error.reason
    assert f"{python} -m pip install ./flodl-" in error.remedy


def test_interpreter_that_is_too_old_is_named(site: SshSite, bootstrap: Bootstrap, tmp_path: Path) -> None:
    python = executable(tmp_path / "old", 'echo "Unknown option: -P" >&2; exit 2')
    error = start_failure(site, lambda: site.host(tmp_path, str(python)), bootstrap, tmp_path / "log")
    assert "older than Python 3.11" in error.reason


def test_early_end_shows_the_hosts_last_words(site: SshSite, bootstrap: Bootstrap, tmp_path: Path) -> None:
    python = executable(tmp_path / "bad", 'echo "Illegal instruction" >&2; exit 132')
    error = start_failure(site, lambda: site.host(tmp_path, str(python)), bootstrap, tmp_path / "log")
    assert "code 132" in error.reason
    assert "Illegal instruction" in error.reason


def test_daemon_that_never_gets_ready_meets_its_deadline(
    site: SshSite, bootstrap: Bootstrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ssh, running):
        monkeypatch.setattr(module, "START_TIMEOUT_S", 0.3)
    python = executable(tmp_path / "slow", "exec cat")
    error = start_failure(site, lambda: site.host(tmp_path, str(python)), bootstrap, tmp_path / "log")
    assert "not ready within 0.3 s" in error.reason


def test_without_an_interpreter_the_login_shells_python3_is_taken(
    site: SshSite, fake_python: Path, bootstrap: Bootstrap, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(fake_python)
    (site.home / ".profile").write_text(f'echo hello from the profile\nPATH="{folder}:$PATH"\ncd /\n')

    async def body() -> None:
        async with site.serving():
            site.trust()
            async with started(site, site.host(tmp_path, ""), bootstrap, tmp_path / "log"):
                pass

    run(body)
    assert b"hello from the profile" in (tmp_path / "log").read_bytes()


def test_configured_address_comes_first_and_is_kept_verbatim(
    site: SshSite, fake_python: Path, bootstrap: Bootstrap, tmp_path: Path
) -> None:
    given = dataclasses.replace(bootstrap, controllers=("head.lab:1337",))

    async def body() -> None:
        async with site.serving():
            site.trust()
            async with started(site, site.host(tmp_path, str(fake_python)), given, tmp_path / "log"):
                pass

    run(body)
    got = document.load(Bootstrap, (tmp_path / "got.json").read_text())
    assert got.controllers == ("head.lab:1337", f"127.0.0.1:{PORT}")


# ------------------------------------------------------------------------------------------------------------- a tunnel
def test_daemon_behind_a_tunnel_dials_its_own_loopback_and_reaches_us(
    site: SshSite, fake_python: Path, bootstrap: Bootstrap, tmp_path: Path
) -> None:
    given = dataclasses.replace(bootstrap, controllers=("head.lab:1337",), tunnelled=True)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(4))
        writer.close()

    async def body() -> bytes:
        controller = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = controller.sockets[0].getsockname()[1]
        async with site.serving(), controller:
            site.trust()
            host = dataclasses.replace(site.host(tmp_path, str(fake_python)), tunnel=True)
            logins = asyncio.Semaphore(8)
            daemon = await ssh.start_host(host, given, tmp_path / "log", logins, port, [].append)
            try:
                got = document.load(Bootstrap, (tmp_path / "got.json").read_text())
                ((address, far_port),) = [split_address(each, 0) for each in got.controllers]
                assert (address, got.tunnelled, far_port != port) == ("127.0.0.1", True, True)
                reader, writer = await asyncio.open_connection(address, far_port)
                writer.write(b"ping")
                answer = await reader.read()
                writer.close()
                return answer
            finally:
                await daemon.close()

    assert run(body) == b"ping"


def test_sshd_that_forwards_nothing_is_named(
    site: SshSite, fake_python: Path, bootstrap: Bootstrap, tmp_path: Path
) -> None:
    site.forwards = False
    host = lambda: dataclasses.replace(site.host(tmp_path, str(fake_python)), tunnel=True)  # noqa: E731
    error = start_failure(site, host, bootstrap, tmp_path / "log")
    assert (error.host, error.stage) == ("box", "tunnel")
    assert "AllowTcpForwarding" in error.remedy
    assert not (tmp_path / "got.json").exists()


# --------------------------------------------------------------------------------------------------------- this machine
def local_host(folder: Path, python: str) -> HostPlan:
    return HostPlan("localhost", HostKind.LOCAL, ("cpu",), python, str(folder), ("t.py",))


def test_local_daemon_is_given_the_same_bootstrap(fake_python: Path, bootstrap: Bootstrap, tmp_path: Path) -> None:
    async def body() -> None:
        daemon = await local.start_local(local_host(tmp_path, str(fake_python)), bootstrap, tmp_path / "log")
        await daemon.close()

    run(body)
    assert document.load(Bootstrap, (tmp_path / "got.json").read_text()) == bootstrap


def test_local_daemons_end_is_told_as_a_shell_would(bootstrap: Bootstrap, tmp_path: Path) -> None:
    python = executable(tmp_path / "py", "printf '\\nFDL1 ready 20261129-213045-ab12\\n'; kill -9 $$")

    async def body() -> running.DaemonEnded:
        daemon = await local.start_local(local_host(tmp_path, str(python)), bootstrap, tmp_path / "log")
        try:
            return await daemon.wait()
        finally:
            await daemon.close()

    assert run(body) == running.DaemonEnded(137, "ended by SIGKILL")


def test_frozen_local_daemon_is_ended_with_all_that_hangs_on_it(
    bootstrap: Bootstrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "CLOSE_TIMEOUT_S", 1.0)

    async def body() -> list[psutil.Process]:
        others = set(psutil.Process().children(recursive=True))
        daemon = await local.start_local(local_host(tmp_path, sys.executable), bootstrap, tmp_path / "log")
        tree = [each for each in psutil.Process().children(recursive=True) if each not in others]
        tree[-1].suspend()
        async with asyncio.timeout(10):
            while tree[-1].status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        await daemon.close()
        return tree

    tree = run(body)
    assert len(tree) == 2
    assert psutil.wait_procs(tree, timeout=10)[1] == []


@pytest.mark.parametrize(
    ("folder", "python", "words"),
    [
        ("gone", "/bin/sh", "folder"),
        (".", "/no/python", "interpreter /no/python not found"),
        (".", "/bin/false", "code 1"),
    ],
)
def test_local_daemon_that_cannot_start_says_why(
    bootstrap: Bootstrap, tmp_path: Path, folder: str, python: str, words: str
) -> None:
    async def body() -> HostUnreachable:
        with pytest.raises(HostUnreachable) as caught:
            await local.start_local(local_host(tmp_path / folder, python), bootstrap, tmp_path / "log")
        return caught.value

    error = run(body)
    assert error.stage == "start"
    assert words in error.reason


def test_hosts_log_is_bounded_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_LOG_BYTES", 10)
    log = running.HostLog(tmp_path / "log")
    log.write(b"12345678")
    log.write(b"9abcdef\x1b[31m last\n")
    assert (tmp_path / "log").read_bytes() == b"123456789a"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert log.last_lines() == "123456789abcdef [31m last"
