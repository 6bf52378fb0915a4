"""The project brought to a host over ssh: by rsync, by sftp, beside another launch, past liars and faults."""

import asyncio
import os
import shutil
import stat
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flodl.errors import HostUnreachable
from flodl.launch.plan import SyncMode
from flodl.launch.ssh_login import log_in
from flodl.launch.sync import session
from flodl.launch.sync.host import bring
from flodl.launch.sync.project import Brought, Project, Telling
from flodl.launch.tree_scan import read, scan
from tests.unit.launch.ssh_site import SshSite, executable

TIMEOUT_S = 60.0

ODD = (b"new\nline", b"\xff\xfe", b"q'u\"o`te $HOME", b"-n", b"#x", b";y", b" ", "é漢".encode(), b"deep/a/b/c")

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
MODES = [pytest.param(SyncMode.RSYNC, marks=needs_rsync), SyncMode.SFTP]


@dataclass
class Heard:
    """What a sync says."""

    said: list[str] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)

    @property
    def telling(self) -> Telling:
        return Telling(self.said.append, lambda done, whole: self.moved.append((done, whole)))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project here"
    for name in ODD:
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name)
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o750)
    (folder / "link").symlink_to("deep/a")
    (folder / "big").write_bytes(bytes(range(256)) * 2000)
    return folder


def stock(folder: Path, mode: SyncMode) -> Project:
    return Project(str(folder), read(str(folder), scan(str(folder)).tree), mode)


def run(site: SshSite, body: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(TIMEOUT_S), site.serving():
            site.trust()
            return await body()

    return asyncio.run(limited())


async def brought(site: SshSite, there: Path, project: Project, heard: Heard, python: str = sys.executable) -> Brought:
    login = await log_in(site.spec(), "box")
    try:
        return await bring(login, site.host(there, python), project, heard.telling)
    finally:
        await login.close()


def sync(
    site: SshSite, there: Path, project: Project, heard: Heard | None = None, python: str = sys.executable
) -> Brought:
    done = run(site, lambda: brought(site, there, project, heard or Heard(), python))
    assert isinstance(done, Brought)
    return done


def refusal(site: SshSite, there: Path, project: Project, python: str = sys.executable) -> HostUnreachable:
    with pytest.raises(HostUnreachable) as caught:
        sync(site, there, project, python=python)
    assert (caught.value.host, caught.value.stage) == ("box", "sync")
    return caught.value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["plain", "q'u\"o te $HOME;*é"])
def test_every_file_arrives_as_it_is_and_the_second_sync_sends_nothing(
    site: SshSite, project: Path, tmp_path: Path, mode: SyncMode, name: str
) -> None:
    there, given, heard = tmp_path / name, stock(project, mode), Heard()
    site.noise = b"Welcome!\nFDL1 sync? {}\n\xff"

    first = sync(site, there, given, heard)

    assert (first.by, len(first.plan.send), len(first.plan.links)) == (mode, 11, 1)
    assert stock(there, mode).tree == given.tree
    assert stat.S_IMODE((there / "tool").stat().st_mode) == 0o750
    assert heard.said == [f"{first.plan}"]
    assert heard.moved[-1][1] == given.tree.size_bytes
    second = sync(site, there, given)
    assert (second.plan.is_empty, second.wire_bytes) == (True, 0)


@pytest.mark.parametrize("mode", MODES)
def test_only_changes_travel_and_foreign_files_stay(
    site: SshSite, project: Path, tmp_path: Path, mode: SyncMode
) -> None:
    there = tmp_path / "there"
    sync(site, there, stock(project, mode))
    (there / "foreign").write_text("not ours")
    (there / "-n").write_text("changed there, and gone here")
    for name in ("deep/a/b/c", "-n", "link"):
        (project / name).unlink()
    with (project / "big").open("r+b") as file:
        file.seek(1000)
        file.write(b"changed")
    given, heard = stock(project, mode), Heard()

    done = sync(site, there, given, heard)

    assert [entry.path for entry in done.plan.send] == ["big"]
    assert sorted(done.plan.remove) == ["deep/a/b/c", "link"]
    assert heard.said[1:] == ["left there, changed since it was copied and gone here: -n"]
    assert not (there / "deep").exists()
    (there / "foreign").unlink()
    (there / "-n").unlink()
    assert stock(there, mode).tree == given.tree


@needs_rsync
def test_rsync_sends_of_a_changed_file_only_what_has_changed(site: SshSite, project: Path, tmp_path: Path) -> None:
    (project / "noise").write_bytes(os.urandom(2_000_000))
    sync(site, tmp_path / "there", stock(project, SyncMode.RSYNC))
    with (project / "noise").open("ab") as file:
        file.write(b"and more")
    done = sync(site, tmp_path / "there", stock(project, SyncMode.RSYNC))
    assert 0 < done.wire_bytes < 100_000


def test_host_without_rsync_gets_it_by_sftp(site: SshSite, project: Path, tmp_path: Path) -> None:
    python = executable(tmp_path / "py", f'PATH=/nowhere exec "{sys.executable}" "$@"')
    heard = Heard()
    done = sync(site, tmp_path / "there", stock(project, SyncMode.RSYNC), heard, str(python))
    assert done.by is SyncMode.SFTP
    assert heard.said[-1].startswith("by sftp, for there is no rsync")


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a python3 of the system")
def test_without_an_interpreter_the_login_shells_python_does(site: SshSite, project: Path, tmp_path: Path) -> None:
    assert sync(site, tmp_path / "there", stock(project, SyncMode.SFTP), python="").by is SyncMode.SFTP


def test_host_without_sftp_is_told_with_the_remedy(site: SshSite, project: Path, tmp_path: Path) -> None:
    site.has_sftp = False
    error = refusal(site, tmp_path / "there", stock(project, SyncMode.SFTP))
    assert error.reason.startswith("no sftp: ")
    assert "Subsystem sftp" in error.remedy


@pytest.mark.parametrize("mode", MODES)
def test_file_that_changes_while_it_is_copied_spoils_nothing(
    site: SshSite, project: Path, tmp_path: Path, mode: SyncMode
) -> None:
    there, old = tmp_path / "there", stock(project, mode)
    sync(site, there, old)
    (project / "tool").write_text("newer")
    given = stock(project, mode)
    (project / "tool").write_text("newest, after the tree was read")

    error = refusal(site, there, given)

    assert error.reason == "changed here since the launch: tool"
    assert stock(there, mode).tree == old.tree
    assert not (there / ".fdl-sync" / "new").exists()


@pytest.mark.parametrize("mode", MODES)
def test_file_that_is_gone_before_it_is_copied_is_told(
    site: SshSite, project: Path, tmp_path: Path, mode: SyncMode
) -> None:
    given = stock(project, mode)
    (project / "tool").unlink()
    error = refusal(site, tmp_path / "there", given)
    assert "tool" in error.reason
    assert os.listdir(tmp_path / "there") == [".fdl-sync"]


def test_what_is_in_the_way_is_named_before_anything_is_written(site: SshSite, project: Path, tmp_path: Path) -> None:
    (tmp_path / "there" / "tool").mkdir(parents=True)
    (tmp_path / "there" / "tool" / "foreign").touch()
    (tmp_path / "there" / "deep").symlink_to(tmp_path)
    error = refusal(site, tmp_path / "there", stock(project, SyncMode.SFTP))
    assert error.reason == "deep is no folder there; tool is a folder there"
    assert not (tmp_path / "there" / ".fdl-sync").exists()


def test_hosts_own_file_outlives_ours_though_both_were_the_same(site: SshSite, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "data").write_text("same")
    (here / "t.py").touch()
    assert len(sync(site, there, stock(here, SyncMode.SFTP)).plan.send) == 1
    (here / "data").unlink()
    sync(site, there, stock(here, SyncMode.SFTP))
    (here / "t.py").unlink()
    sync(site, there, stock(here, SyncMode.SFTP))
    assert sorted(os.listdir(there)) == [".fdl-sync", "data"]


def lay(folder: Path, what: dict[str, str]) -> None:
    """Make ``folder`` hold just this: files that hold their text, and links where that begins with ``->``."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in what.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(text[2:]) if text.startswith("->") else path.write_text(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"model": "1"}, {"model/__init__.py": "1"}),
        ({"lib": "->lib2", "lib2/x.py": "1"}, {"lib/x.py": "1"}),
        ({"lib/x.py": "1", "lib/in/y.py": "2"}, {"lib": "->lib2", "lib2/x.py": "1", "lib2/in/y.py": "2"}),
        ({"lib/x.py": "1"}, {"lib": "1"}),
        ({"a": "->b", "b": "1"}, {"a": "1", "b": "->a"}),
    ],
)
def test_files_folders_and_links_may_take_each_others_names(
    site: SshSite, tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for step in (before, after, before):
        lay(here, step)
        given = stock(here, SyncMode.SFTP)
        sync(site, there, given)
        assert stock(there, SyncMode.SFTP).tree == given.tree
        if (there / "lib").is_dir():
            (there / "lib/__pycache__").mkdir(exist_ok=True)
            (there / "lib/__pycache__/x.pyc").touch()


def test_two_launches_at_once_wait_for_each_other_and_copy_once(site: SshSite, project: Path, tmp_path: Path) -> None:
    given, heard = stock(project, SyncMode.SFTP), Heard()

    async def both() -> list[Brought]:
        return await asyncio.gather(*(brought(site, tmp_path / "there", given, heard) for _ in range(2)))

    first, second = run(site, both)

    assert sorted((len(first.plan.send), len(second.plan.send))) == [0, 11]
    assert stock(tmp_path / "there", SyncMode.SFTP).tree == given.tree


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/opt/no/python", "interpreter /opt/no/python not found"),
        ("exit 3", "the copying there has ended with code 3"),
        ("echo no such module >&2; exit 1", "it said: no such module"),
        ("printf '\\nFDL1 sync\\n'; echo '[]'; cat >/dev/null", session.NONSENSE),
        ("printf '\\nFDL1 sync\\n'; echo nonsense; cat >/dev/null", session.NONSENSE),
        ("printf '\\nFDL1 sync\\n'; head -c 200000 /dev/zero; cat >/dev/null", session.NONSENSE),
        ("head -c 200000 /dev/zero; cat >/dev/null", "its login shell prints without end"),
        ('printf \'\\nFDL1 sync\\n{"done": 1}\\n{"done": 1}\\n\'; cat >/dev/null', session.NONSENSE),
        ('printf \'\\nFDL1 sync\\n{"fault": "no \\\\u001b[31m"}\\n\'; cat >/dev/null', "no \\x1b[31m"),
    ],
)
def test_host_that_cannot_or_lies_is_named(
    site: SshSite, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, words: str
) -> None:
    monkeypatch.setattr(session, "MAX_NOISE_BYTES", 100_000)
    monkeypatch.setattr(session, "MAX_LINE_BYTES", 100_000)
    path = python if python.startswith("/opt") else str(executable(tmp_path / "py", python))
    assert words in refusal(site, tmp_path / "there", stock(project, SyncMode.SFTP), path).reason


def test_host_that_falls_silent_is_given_up(
    site: SshSite, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "STALL_S", 0.2)
    python = executable(tmp_path / "py", "printf '\\nFDL1 sync\\n'; cat >/dev/null")
    error = refusal(site, tmp_path / "there", stock(project, SyncMode.SFTP), str(python))
    assert error.reason == "silent for 0.2 s"


def test_interpreter_that_never_begins_is_given_up(
    site: SshSite, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "START_S", 0.2)
    python = executable(tmp_path / "py", "echo waiting; cat >/dev/null")
    error = refusal(site, tmp_path / "there", stock(project, SyncMode.SFTP), str(python))
    assert error.reason == "its interpreter was not ready within 0.2 s"


def test_copy_of_which_no_byte_moves_is_given_up_and_one_that_goes_on_is_not(
    site: SshSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "STALL_S", 0.05)
    moved = iter(range(5))

    async def body() -> None:
        login = await log_in(site.spec(), "box")
        talk = session.SyncSession(login, site.host(tmp_path, sys.executable))
        never = asyncio.Event()
        try:
            with pytest.raises(HostUnreachable, match="no byte has moved"):
                await talk.unless_stalled(never.wait(), lambda: next(moved, 4))
            assert next(moved, None) is None
        finally:
            await login.close()

    run(site, body)
