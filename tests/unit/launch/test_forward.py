"""A port here that leads to the controller through an ssh login: once, and for good."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from flodl.errors import HostUnreachable
from flodl.launch import forward
from flodl.launch.forward import forwarded, kept_open
from tests.unit.launch.ssh_site import SshSite

TIMEOUT_S = 30.0


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await body()

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """A server that sends back four bytes and hangs up; yields its port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            writer.write(await reader.readexactly(4))
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def asked(port: int) -> bytes:
    """What comes back for ``ping``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"ping")
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_port_leads_to_the_controller(site: SshSite) -> None:
    async def body() -> bytes:
        async with site.serving(), echoing() as port:
            site.trust()
            async with forwarded(site.spec(), "127.0.0.1", port, [].append) as way:
                assert way.is_open
                answer = await asked(way.port)
                way.login.connection.abort()
                await way.login.connection.wait_closed()
                assert not way.is_open
                return answer

    assert run(body) == b"ping"


def test_address_at_which_nobody_listens_is_told_at_once(site: SshSite) -> None:
    port = unused_port()

    async def body() -> HostUnreachable:
        async with site.serving():
            site.trust()
            with pytest.raises(HostUnreachable) as caught:
                async with forwarded(site.spec(), "127.0.0.1", port, [].append):
                    pass
            return caught.value

    error = run(body)
    assert (error.host, error.stage) == ("127.0.0.1", "tunnel")
    assert f"no way to 127.0.0.1:{port} there" in error.reason
    assert "fdl join ADDRESS:PORT --ssh" in error.remedy


def test_key_that_may_not_go_there_is_told_what_it_needs(site: SshSite) -> None:
    line = (site.home / "authorized.pub").read_text()
    (site.home / "authorized.pub").write_text(f'permitopen="127.0.0.1:1" {line}')

    async def body() -> HostUnreachable:
        async with site.serving(), echoing() as port:
            site.trust()
            with pytest.raises(HostUnreachable) as caught:
                async with forwarded(site.spec(), "127.0.0.1", port, [].append):
                    pass
            return caught.value

    assert 'permitopen="127.0.0.1:' in run(body).remedy


def test_broken_session_is_opened_anew_behind_the_same_port(site: SshSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FIRST_PAUSE_S", 0.05)
    said: asyncio.Queue[str] = asyncio.Queue()

    async def until(words: str) -> None:
        while words not in await said.get():
            pass

    async def body() -> list[bytes]:
        async with echoing() as port, site.serving():
            site.trust()
            async with kept_open(site.spec(), "127.0.0.1", port, said.put_nowait) as way:
                await until("is open")
                answers = [await asked(way.port)]
                site.hang_up()
                await until("was lost; it is opened anew")
                await until("is open")
                return [*answers, await asked(way.port)]

    assert run(body) == [b"ping", b"ping"]


def test_who_dials_while_the_session_is_broken_is_hung_up_on(site: SshSite) -> None:
    said: list[str] = []

    async def body() -> tuple[bytes, str]:
        spec = site.spec(port=unused_port())
        async with kept_open(spec, "127.0.0.1", 1, said.append) as way:
            return await asked(way.port), str(way.fault)

    answer, fault = run(body)
    assert answer == b""
    assert "the session with 127.0.0.1 is not open yet" in fault or "Connection refused" in fault


def test_who_dials_where_nobody_listens_is_hung_up_on_and_told_why(site: SshSite) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()

    async def body() -> list[HostUnreachable | None]:
        async with site.serving(), echoing() as port:
            site.trust()
            refused = unused_port()
            async with kept_open(site.spec(), "127.0.0.1", refused, said.put_nowait) as way:
                while "is open" not in await said.get():
                    pass
                assert await asked(way.port) == b""
                assert way.where == f"127.0.0.1:{refused} through 127.0.0.1"
                assert f"no way to 127.0.0.1:{refused} there: " in str(way.fault)
                faults = [way.fault]
            async with kept_open(site.spec(), "127.0.0.1", port, said.put_nowait) as way:
                while "is open" not in await said.get():
                    pass
                assert await asked(way.port) == b"ping"
                return [*faults, way.fault]

    refused, none = run(body)
    assert refused.stage == "tunnel"
    assert "check that a run listens there" in refused.remedy
    assert none is None
