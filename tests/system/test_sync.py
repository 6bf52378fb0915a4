"""The project is copied to real hosts before a rank starts: by rsync and by sftp, whole or not at all, and once."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import JOB, Fdl, Launched
from tests.system.lab import Host, Lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

LAUNCH_S = 150
MIDST_S = 30
BACK_S = 60
OVER = 3
"""The script's exit code: a rank says what it has found, and ends; the head waits for that."""

SCRIPT = f"""
import os, signal, sys
from lib.words import WORD
if os.environ["FLODL_ROLE"].startswith("head:"):
    signal.pause()
print(WORD, "in", os.getcwd(), "of", os.uname().nodename)
sys.exit({OVER})
"""

ODD = {b"new\nline": b"1", b"\xff\xfe": b"2", b"q'u\"o`te $HOME": b"3", b"-n": b"4", "é漢".encode(): b""}


@pytest.fixture
def project(fdl: Fdl) -> Path:
    folder = fdl.folder / "my project"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "lib" / "words.py").write_text('WORD = "first"\n')
    return folder


def without_rsync(folder: Path) -> str:
    """An interpreter that finds no other program."""
    path = folder / "python without rsync"
    path.write_text(f'#!/bin/sh\nPATH=/nowhere exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def copied(text: str, host: Host) -> list[str]:
    """What a launch said of the files for ``host``."""
    return re.findall(rf"^fdl: sync: {host.name}: (.*) to copy", text, re.MULTILINE)


def said(run: Launched) -> str:
    """By the ranks."""
    return "".join(run.log(f"rank{rank}.stdout.log") for rank in (0, 1))


def names(folder: Path) -> set[bytes]:
    """Every file and link below, but for what interpreters and syncs write."""
    found = set()
    for where, folders, files in os.walk(os.fsencode(folder)):
        folders[:] = [each for each in folders if each not in (b"__pycache__", b".fdl-sync")]
        found |= {os.path.relpath(os.path.join(where, each), os.fsencode(folder)) for each in files}
    return found


def holds_lock(there: Path) -> bool:
    """Whether a sync to ``there`` is under way."""
    with (there / ".fdl-sync" / "lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextlib.contextmanager
def small_disk(host: Host, there: Path, room: str) -> Iterator[Path]:
    """``there`` is a disk of its own on ``host``, with so much ``room``; the path is where this machine sees it."""
    assert host.sshd is not None
    there.mkdir()
    inside = ["nsenter", "-m", "-t", str(host.sshd.pid)]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", room, "tmpfs", there], check=True, timeout=30)
    try:
        yield Path(f"/proc/{host.sshd.pid}/root{there}")
    finally:
        subprocess.run([*inside, "umount", "-l", there], check=True, timeout=30)


def test_project_is_copied_once_and_then_only_what_has_changed(
    hosts: Lab, fdl: Fdl, project: Path, tmp_path: Path
) -> None:
    there = [tmp_path / "host a's copy", tmp_path / "b" / "$HOME é;*"]
    for name, content in ODD.items():
        (project / os.fsdecode(name)).write_bytes(content)
    (project / "link").symlink_to("lib/words.py")
    (project / ".gitignore").write_text("*.pt\n")
    (project / "weights.pt").write_bytes(b"heavy")
    pythons = [sys.executable, without_rsync(tmp_path)]
    workers = [
        hosts.worker(host, 1, path=str(path), python=python)
        for host, path, python in zip(hosts.hosts, there, pythons, strict=True)
    ]
    cluster = hosts.cluster(fdl.folder / "c.yml", workers, sync={"mode": "rsync"})

    first = fdl.launch("-c", cluster, "train.py", folder=project)
    assert first.wait(LAUNCH_S) == OVER, first.story()
    assert re.findall(r"done in .* by (\w+)$", first.stderr, re.MULTILINE).count("rsync") == 1, first.stderr
    for host, path in zip(hosts.hosts, there, strict=True):
        assert f"first in {path} of {host.name}" in said(first)
        assert [what.split(",")[0] for what in copied(first.stderr, host)] == ["8 files"]
        assert names(path) == names(project) - {b"weights.pt"}
        assert {name: (path / os.fsdecode(name)).read_bytes() for name in ODD} == ODD
        assert os.readlink(path / "link") == "lib/words.py"
        (path / "weights.pt").write_bytes(b"its own")

    second = fdl.launch("-c", cluster, "train.py", folder=project)
    assert second.wait(LAUNCH_S) == OVER, second.story()
    assert [copied(second.stderr, host) for host in hosts.hosts] == [[], []]
    assert second.stderr.count("up to date") == 2

    (project / "lib" / "words.py").write_text('WORD = "second"\n')
    (project / "-n").unlink()
    third = fdl.launch("-c", cluster, "train.py", folder=project)
    assert third.wait(LAUNCH_S) == OVER, third.story()
    for host, path in zip(hosts.hosts, there, strict=True):
        assert f"second in {path} of {host.name}" in said(third)
        assert f"{host.name}: 1 file, 16 bytes to copy, 1 file to remove" in third.stderr
        assert not (path / "-n").exists()
        assert (path / "weights.pt").read_bytes() == b"its own"
    for run in (first, second, third):
        run.wait_until_clean()


@pytest.mark.parametrize(("mode", "number"), [("rsync", signal.SIGKILL), ("sftp", signal.SIGINT)])
def test_launch_that_ends_in_mid_copy_leaves_the_old_project_whole_and_the_next_one_goes_on(
    hosts: Lab, fdl: Fdl, project: Path, tmp_path: Path, mode: str, number: signal.Signals
) -> None:
    there = tmp_path / "there"
    cluster = hosts.cluster(
        fdl.folder / "c.yml", [hosts.worker(hosts.hosts[0], 1, path=str(there))], sync={"mode": mode}
    )
    (there / "lib").mkdir(parents=True)
    (there / "lib" / "words.py").write_text('WORD = "old"\n')
    for each in range(20):
        (project / f"data{each}").write_bytes(os.urandom(2_000_000))

    killed = fdl.launch("-c", cluster, "train.py", folder=project)
    new = there / ".fdl-sync" / "new"
    fdl.wait_until(lambda: new.exists() and len(list(new.iterdir())) > 2, MIDST_S, killed.story)
    assert killed.process is not None
    killed.process.send_signal(number)
    assert killed.wait(MIDST_S) == {signal.SIGKILL: -number, signal.SIGINT: 130}[number]
    fdl.wait_until(lambda: not holds_lock(there), MIDST_S, "the host's part does not end")

    assert names(there) == {b"lib/words.py"}
    assert (there / "lib" / "words.py").read_text() == 'WORD = "old"\n'
    assert not new.exists()
    last = fdl.launch("-c", cluster, "train.py", folder=project)
    assert last.wait(LAUNCH_S) == OVER, last.story()
    assert names(there) == names(project)
    assert f"first in {there}" in said(last)


@pytest.mark.parametrize("mode", ["rsync", "sftp"])
def test_disk_of_a_host_that_fills_up_is_named_and_nothing_there_is_half(
    hosts: Lab, fdl: Fdl, project: Path, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "there"
    with small_disk(hosts.hosts[0], path, "size=9m,nr_inodes=30") as there:
        (there / "train.py").write_text("old")
        for number in range(50):
            (project / f"small{number}").write_text("x")
        workers = [hosts.worker(hosts.hosts[0], 1, path=str(path))]
        cluster = hosts.cluster(fdl.folder / "c.yml", workers, sync={"mode": mode})
        run = fdl.launch("-c", cluster, "train.py", folder=project)
        assert run.wait(LAUNCH_S) == 4, run.story()
        assert f"host {hosts.hosts[0].name}: sync: " in run.stderr
        assert {"rsync": "No space left on device", "sftp": f"see the disk at {path}"}[mode] in run.stderr
        fdl.wait_until(lambda: not holds_lock(there), MIDST_S, "the host's part does not end")
        assert {path.name for path in there.iterdir()} == {"train.py", ".fdl-sync"}
        assert {path.name for path in (there / ".fdl-sync").iterdir()} == {"lock"}
        assert (there / "train.py").read_text() == "old"


def test_host_with_too_little_room_is_told_before_anything_is_sent(
    hosts: Lab, fdl: Fdl, project: Path, tmp_path: Path
) -> None:
    path = tmp_path / "there"
    with small_disk(hosts.hosts[0], path, "size=2m") as there:
        (project / "big").write_bytes(bytes(3_000_000))
        workers = [hosts.worker(hosts.hosts[0], 1, path=str(path))]
        run = fdl.launch(
            "-c", hosts.cluster(fdl.folder / "c.yml", workers, sync={"mode": "rsync"}), "train.py", folder=project
        )
        assert run.wait(LAUNCH_S) == 4, run.story()
        assert re.search(rf"sync: \S+ MB are free at {path}, too few for this copy\n  free space there", run.stderr), (
            run.stderr
        )
        assert not (there / "train.py").exists()


@pytest.mark.long
def test_host_that_comes_back_gets_the_project_of_the_launch_and_no_other(
    hosts: Lab, fdl: Fdl, project: Path, tmp_path: Path
) -> None:
    there = [tmp_path / "a", tmp_path / "b"]
    workers = [hosts.worker(host, 1, path=str(path)) for host, path in zip(hosts.hosts, there, strict=True)]
    cluster = hosts.cluster(fdl.folder / "c.yml", workers, is_elastic=True, sync={"mode": "sftp"})
    words = project / "lib" / "words.py"
    flags = ["--mode", "cpu_cadence", "--epochs", "1000", "--step-ms", "20"]
    run = fdl.launch("--stop-timeout", 5, "-c", cluster, JOB, *flags, folder=project)
    run.wait_for_training()

    (there[1] / "lib" / "words.py").unlink()
    words.write_text('WORD = "written while it trains"\n')
    run.kill("daemon", hosts.hosts[1].namespace)
    run.wait_for_event("host_not_back", BACK_S)
    (refused,) = run.events("host_not_back")
    assert (refused["fields"]["host"], refused["fields"]["stage"]) == (hosts.hosts[1].name, "sync")
    assert "changed here since the launch: lib/words.py" in refused["detail"]
    assert not (there[1] / "lib" / "words.py").exists()

    words.write_text('WORD = "first"\n')
    fdl.wait_until(lambda: len(run.events("host_joined")) == 3, BACK_S, run.story)
    assert (there[1] / "lib" / "words.py").read_text() == 'WORD = "first"\n'
    assert "1 file, 15 bytes to copy" in "".join(event["detail"] for event in run.events("sync"))
    assert fdl.call("stop", run.run_id).returncode == 0
    assert run.wait(LAUNCH_S) == 143, run.story()
    run.wait_until_clean()
