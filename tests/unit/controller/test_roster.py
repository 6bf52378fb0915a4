"""Bringing up hosts: what people must be told of on the way."""

import asyncio
import dataclasses
import os
from pathlib import Path

from flodl.config.builder import local_cluster
from flodl.controller.hosts import MAX_SEARCHES, Roster
from flodl.core.actions import Record, Severity
from flodl.core.events import JobEvent
from flodl.errors import HostUnreachable
from flodl.launch.plan import HostKind, HostPlan, LaunchRequest, plan
from flodl.launch.running import DaemonEnded
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
            roster = Roster(spec, b"\x5e" * 32, (), "127.0.0.1:1", tmp_path, posted.append, notes.put_nowait)
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


# ------------------------------------------------------------------------------------------------- hosts that were lost
class Daemon:
    host = "localhost"

    async def wait(self) -> DaemonEnded:
        await asyncio.Event().wait()
        return DaemonEnded(0, "")

    async def close(self) -> None:
        raise OSError("its session is gone")


class Search:
    """``roster.restore("localhost")`` over a start that fails as planned; ``pauses`` are the seconds it slept."""

    def __init__(self, folder: Path, plan_of: list[str]) -> None:
        request = LaunchRequest("r", 0.0, ("t.py",), os.fspath(folder), "python3", frozenset({"localhost"}))
        self.notes: list[Record] = []
        self.posted: list[JobEvent] = []
        self.pauses: list[float] = []
        self.is_wanted = True
        self._results = plan_of
        spec = plan(local_cluster(1), request)
        self.roster = Roster(spec, b"\x5e" * 32, (), "127.0.0.1:1", folder, self.posted.append, self.notes.append)
        self.roster._start = self._start  # type: ignore[method-assign]

    async def _start(self, host: HostPlan) -> Daemon:
        result = self._results.pop(0)
        if result:
            raise HostUnreachable(host.name, result, "no answer")
        self.roster.joined(host.name)
        return Daemon()

    async def _sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)

    def run(self) -> list[str]:
        """The notes' events."""
        asyncio.run(self.roster.restore("localhost", lambda: self.is_wanted, self._sleep))
        assert self.posted == []
        return [note.event for note in self.notes]


def test_lost_host_is_looked_for_with_longer_pauses_until_it_has_joined(tmp_path: Path) -> None:
    search = Search(tmp_path, ["connect", "connect", "auth", "connect", "connect", ""])
    assert search.run() == ["host_sought", "host_not_back", "host_not_back"]
    assert search.pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert [note.severity for note in search.notes] == [Severity.INFO] * 3


def test_lost_host_is_given_up_after_so_many_tries(tmp_path: Path) -> None:
    search = Search(tmp_path, ["connect"] * (MAX_SEARCHES + 1))
    assert search.run() == ["host_sought", "host_not_back", "host_given_up"]
    assert len(search.pauses) == MAX_SEARCHES


def test_nobody_looks_for_a_host_that_is_not_wanted_any_more(tmp_path: Path) -> None:
    search = Search(tmp_path, [])
    search.is_wanted = False
    assert search.run() == ["host_sought"]


def test_session_of_the_lost_daemon_is_let_go_whatever_state_it_is_in(tmp_path: Path) -> None:
    search = Search(tmp_path, ["", ""])
    assert search.run() == search.run()[:1] == ["host_sought"]


def test_managed_host_is_waited_for_and_never_started_or_sought(tmp_path: Path) -> None:
    search = Search(tmp_path, [])
    (known,) = search.roster._spec.hosts
    host = dataclasses.replace(known, kind=HostKind.MANAGED)
    search.roster._spec = dataclasses.replace(search.roster._spec, hosts=(host,))

    asyncio.run(search.roster.bring_up(host))

    assert [(note.event, note.fields) for note in search.notes] == [("host_awaited", {"host": "localhost"})]
    assert search.run() == ["host_awaited"]
    assert search.pauses == []
