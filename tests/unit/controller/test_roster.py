"""Bringing up hosts: what people must be told of on the way."""

import asyncio
import dataclasses
import os
from pathlib import Path

from flodl.config.builder import local_cluster
from flodl.controller.hosts import Roster
from flodl.core.actions import Record, Severity
from flodl.core.events import JobEvent
from flodl.launch.plan import LaunchRequest, plan
from tests.unit.launch.conftest import fake_python, site
from tests.unit.launch.ssh_site import SshSite

__all__ = ["fake_python", "site"]

LIMIT_S = 30.0


def test_host_key_that_the_user_leaves_unchecked_is_a_warning_event(
    site: SshSite, fake_python: Path, tmp_path: Path
) -> None:
    notes: asyncio.Queue[Record] = asyncio.Queue()
    posted: list[JobEvent] = []

    async def body() -> Record:
        async with asyncio.timeout(LIMIT_S), site.serving():
            host = site.host(tmp_path, str(fake_python), options=("StrictHostKeyChecking=no",))
            names = frozenset({"localhost"})
            request = LaunchRequest("20260101-000000-aaaa", 0.0, ("t.py",), os.fspath(tmp_path), "python3", names)
            spec = dataclasses.replace(plan(local_cluster(1), request), hosts=(host,))
            roster = Roster(spec, "5e" * 32, (), "127.0.0.1:1", tmp_path, posted.append, notes.put_nowait)
            bringing = asyncio.create_task(roster.bring_up(host))
            try:
                return await notes.get()
            finally:
                roster.joined(host.name)
                await bringing
                await roster.close()

    note = asyncio.run(body())
    assert (note.event, note.severity, note.fields) == ("ssh_warning", Severity.WARNING, {"host": "box"})
    assert note.detail.startswith("host box: the host key of ")
    assert posted == []
