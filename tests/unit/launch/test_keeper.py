"""What the managed daemon says while it waits."""

import asyncio

import pytest

from flodl.launch import keeper
from flodl.launch.keeper import KeeperRequest
from flodl.runtime.service import Service
from tests.unit.launch.ssh_site import SshSite
from tests.unit.launch.test_forward import unused_port


def test_controller_that_is_not_there_behind_ssh_is_named_by_its_own_address_and_reason(
    site: SshSite, capsys: pytest.CaptureFixture[str]
) -> None:
    port = unused_port()
    words = f"fdl: box: waiting for a controller at 127.0.0.1:{port} through 127.0.0.1: tunnel: no way to "

    async def body() -> str:
        said = ""
        async with asyncio.timeout(30), site.serving():
            site.trust()
            request = KeeperRequest("127.0.0.1", port, "box", b"\x5e" * 32, ("cpu",), ssh=site.spec(reopens=True))
            waiting = asyncio.create_task(keeper._live(request, Service()))
            try:
                while words not in said:
                    await asyncio.sleep(0.01)
                    said += capsys.readouterr().err
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        return said

    said = asyncio.run(body())
    assert "\n  check that a run listens there" in said
    assert "join: " not in said
