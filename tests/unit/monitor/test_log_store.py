"""Output on the controller's disk: exact bytes, an order that holds, and disks that take nothing."""

import asyncio
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flodl.monitor import log_store
from flodl.monitor.log_store import ARRIVAL_BYTES, HEAD, Arrival, LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    made = LogStore(tmp_path)
    yield made
    made.close()


def told(store: LogStore) -> bytes:
    """All bytes in the order of arrival."""
    return b"".join(store.read(a.rank, a.stream, a.offset, a.size) for a in store.arrivals(0, store.count))


def test_a_new_store_leaves_no_file_and_has_no_arrivals(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    assert (store.count, list(store.arrivals(0, 10)), store.first_since(0)) == (0, [], 0)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_files_keep_the_exact_bytes_and_are_private(store: LogStore, tmp_path: Path) -> None:
    data = b"\xff\xfe\0 10%\r20%\r\n" + bytes(range(256))
    store.append(3, "stderr", 0, data[:100])
    store.append(3, "stderr", 100, data[100:])
    path = tmp_path / "rank3.stderr.log"
    assert path.read_bytes() == data
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


def test_arrivals_of_many_streams_keep_their_order(store: LogStore) -> None:
    store.append(0, "stdout", 0, b"a")
    store.append(HEAD, "stdout", 0, b"b")
    store.append(0, "stderr", 0, b"c")
    store.append(0, "stdout", 1, b"d")
    assert told(store) == b"abcd"
    assert [(a.rank, a.stream, a.offset) for a in store.arrivals(1, 4)] == [
        (HEAD, "stdout", 0),
        (0, "stderr", 0),
        (0, "stdout", 1),
    ]


def test_repeated_bytes_are_dropped(store: LogStore, tmp_path: Path) -> None:
    store.append(0, "stdout", 0, b"abc")
    store.append(0, "stdout", 0, b"abc")
    store.append(0, "stdout", 1, b"bcde")
    assert (tmp_path / "rank0.stdout.log").read_bytes() == b"abcde"
    assert store.count == 2


def test_another_daemon_goes_on_where_the_last_one_ended(store: LogStore, tmp_path: Path) -> None:
    store.append(0, "stdout", 0, b"abc")
    store.append(1, "stdout", 0, b"x")
    store.rebase(0)
    store.rebase(7)
    for _ in range(2):
        store.append(0, "stdout", 0, b"de")
        store.append(1, "stdout", 0, b"x")
    store.append(0, "stdout", 2, b"f")
    store.append(0, "stderr", 0, b"new")
    assert (tmp_path / "rank0.stdout.log").read_bytes() == b"abcdef"
    assert (tmp_path / "rank0.stderr.log").read_bytes() == b"new"
    assert (tmp_path / "rank1.stdout.log").read_bytes() == b"x"


def test_a_gap_is_marked_and_what_follows_keeps_its_place_in_the_stream(store: LogStore, tmp_path: Path) -> None:
    store.append(0, "stdout", 0, b"abc")
    store.append(0, "stdout", 10, b"def\n")
    store.append(0, "stdout", 10, b"def\n")
    store.append(0, "stdout", 14, b"ghi\n")
    mark = b"[flodl: 7 bytes of output lost on the controller's disk]\n"
    assert (tmp_path / "rank0.stdout.log").read_bytes() == b"abc\n" + mark + b"def\nghi\n"


def test_a_long_piece_becomes_several_arrivals(store: LogStore) -> None:
    store.append(0, "stdout", 0, b"x" * (2 * ARRIVAL_BYTES + 1))
    assert [(a.offset, a.size) for a in store.arrivals(0, 9)] == [
        (0, ARRIVAL_BYTES),
        (ARRIVAL_BYTES, ARRIVAL_BYTES),
        (2 * ARRIVAL_BYTES, 1),
    ]


@pytest.mark.parametrize("stream", ["../stdout", "stdin", "", "stdout\0"])
def test_an_unknown_stream_makes_no_file(store: LogStore, tmp_path: Path, stream: str) -> None:
    store.append(0, stream, 0, b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["index", "rank0.stdout.log"])
def test_a_stray_file_or_link_is_not_written_to(store: LogStore, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / name).symlink_to(victim)
    store.append(0, "stdout", 0, b"x")
    assert (victim.read_bytes(), store.count) == (b"precious", 0)


def test_time_never_goes_back_in_the_index(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for offset, wall_s in enumerate((1000.0, 4600.0, 1001.0)):
        monkeypatch.setattr(log_store.time, "time", lambda wall_s=wall_s: wall_s)
        store.append(0, "stdout", offset, b"x")
    assert [a.ts_ms for a in store.arrivals(0, 3)] == [1_000_000, 4_600_000, 4_600_000]
    assert [store.first_since(ts_ms) for ts_ms in (0, 1_000_000, 1_000_001, 4_600_001)] == [0, 0, 1, 3]


def test_everyone_who_waits_is_woken_by_one_arrival(store: LogStore) -> None:
    async def scenario() -> list[bool]:
        waiting = [asyncio.create_task(store.wait(0, 20.0)) for _ in range(50)]
        await asyncio.sleep(0)
        store.append(0, "stdout", 0, b"x")
        return await asyncio.wait_for(asyncio.gather(*waiting), 10.0)

    assert asyncio.run(scenario()) == [True] * 50


def test_waiting_ends_with_the_store_or_after_its_time(store: LogStore) -> None:
    async def scenario() -> tuple[bool, bool]:
        timed_out = await store.wait(0, 0.01)
        waiting = asyncio.create_task(store.wait(0, 20.0))
        await asyncio.sleep(0)
        store.end()
        return timed_out, await asyncio.wait_for(waiting, 10.0)

    assert asyncio.run(scenario()) == (True, False)


def test_what_comes_after_the_end_of_the_store_is_dropped(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    store.append(0, "stdout", 0, b"x")
    store.close()
    store.append(0, "stdout", 1, b"y")
    assert (tmp_path / "rank0.stdout.log").read_bytes() == b"x"


# Written by a child of its own: a limit on file sizes plays the full disk, first for the raw file, then for the index.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from flodl.monitor.log_store import LogStore

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = LogStore(Path(sys.argv[1]))
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
store.append(0, "stdout", 0, b"a" * 90 + b"\\n")
limit(int(sys.argv[2]))
store.append(0, "stdout", 91, b"b" * 50 + b"\\n")
store.append(1, "stdout", 0, b"c" * int(sys.argv[3]) + b"\\n")
limit(resource.RLIM_INFINITY)
store.append(0, "stdout", 142, b"d\\n")
for a in store.arrivals(0, 99):
    sys.stdout.buffer.write(store.read(a.rank, a.stream, a.offset, a.size))
"""


def full_disk(tmp_path: Path, limit_bytes: int, other_bytes: int) -> list[str]:
    argv = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit_bytes), str(other_bytes)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def test_a_full_disk_loses_whole_arrivals_and_says_how_much(tmp_path: Path) -> None:
    mark = "[flodl: 51 bytes of output lost on the controller's disk]"
    assert full_disk(tmp_path, 100, 2) == ["a" * 90, "ccc"[:2], mark, "d"]
    assert (tmp_path / "rank0.stdout.log").read_text().splitlines() == ["a" * 90, mark, "d"]


def test_bytes_without_room_for_their_record_are_taken_back(tmp_path: Path) -> None:
    lines = full_disk(tmp_path, 30, 1)  # the second record would end at 50
    assert lines == ["a" * 90, "[flodl: 51 bytes of output lost on the controller's disk]", "d"]
    assert (tmp_path / "rank1.stdout.log").read_bytes() == b""


def test_short_writes_are_continued(store: LogStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(log_store.os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    store.append(0, "stdout", 0, b"0123456789")
    assert (tmp_path / "rank0.stdout.log").read_bytes() == b"0123456789"
    assert list(store.arrivals(0, 2)) == [Arrival(next(store.arrivals(0, 1)).ts_ms, 0, "stdout", 0, 10)]


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = LogStore(tmp_path)
    for rank in range(20):
        store.append(rank, "stdout", 0, b"x")
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
