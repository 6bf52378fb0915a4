"""Log spools: every byte on disk at once, whoever reads; an end that is told; a disk that takes nothing."""

import asyncio
import fcntl
import os
import resource
import stat
import subprocess
import sys
import termios
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.runtime.spool import KEPT_BYTES, READ_BYTES, LogSpool

LIMIT_S = 20.0


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await scenario()

    return asyncio.run(bounded())


async def read_all(spool: LogSpool, step_bytes: int = 1000) -> bytes:
    """As a daemon ships: wait for more, read a piece from the disk, until the end."""
    shipped = b""
    while await spool.wait_beyond(len(shipped)):
        shipped += spool.read_from(len(shipped), step_bytes)
    return shipped


async def until_taken(reader: int) -> None:
    while int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder):
        await asyncio.sleep(0)


def test_bytes_are_kept_exactly_and_shipped_from_any_offset(tmp_path: Path) -> None:
    data = b"\xff\xfe\0 bar 10%\rbar 20%\r\n" + bytes(range(256)) * 40 + "ü".encode()[:1]

    async def scenario() -> tuple[bytes, bytes, bytes]:
        reader, writer = os.pipe()
        with LogSpool(tmp_path / "rank0.stdout.log") as spool:
            spool.start(reader)
            os.write(writer, data)
            os.close(writer)
            return await read_all(spool), spool.read_from(5, 7), spool.read_from(10**9, 7)

    shipped, middle, beyond = run(scenario)

    assert shipped == data == (tmp_path / "rank0.stdout.log").read_bytes()
    assert middle == data[5:12]
    assert beyond == b""
    assert stat.S_IMODE((tmp_path / "rank0.stdout.log").stat().st_mode) == 0o600


def test_one_line_of_50_mb_needs_no_reader_and_no_memory(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write('x' * 50_000_000)"

    async def scenario() -> tuple[int, int]:
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with LogSpool(tmp_path / "log") as spool:
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, bufsize=0)
            assert process.stdout is not None
            spool.start(os.dup(process.stdout.fileno()))
            process.stdout.close()
            while not spool.has_ended:
                await spool.wait_beyond(spool.size_bytes)
            process.wait(LIMIT_S)
            return spool.size_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib

    size_bytes, grown_kib = run(scenario)

    assert size_bytes == 50_000_000
    assert grown_kib < 10_000


def test_wait_ends_with_the_stream(tmp_path: Path) -> None:
    async def scenario() -> tuple[bool, bool, bool]:
        reader, writer = os.pipe()
        with LogSpool(tmp_path / "log") as spool:
            spool.start(reader)
            waiting = asyncio.create_task(spool.wait_beyond(0))
            os.write(writer, b"line\n")
            first = await waiting
            waiting = asyncio.create_task(spool.wait_beyond(5))
            os.close(writer)
            return first, await waiting, spool.has_ended

    assert run(scenario) == (True, False, True)


def test_finish_takes_what_a_dead_rank_left_although_the_pipe_is_still_held(tmp_path: Path) -> None:
    async def scenario() -> tuple[bytes, bool]:
        reader, writer = os.pipe()
        with LogSpool(tmp_path / "log") as spool:
            spool.start(reader)
            os.write(writer, b"x" * 60_000 + b"last words")
            spool.finish()
            os.close(writer)
            return (await read_all(spool))[-10:], spool.has_ended

    assert run(scenario) == (b"last words", True)


def test_disk_that_takes_nothing_does_not_block_the_rank_and_the_loss_is_marked(tmp_path: Path) -> None:
    async def scenario() -> tuple[bytes, int]:
        reader, writer = os.pipe()
        _, hard = soft_and_hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with LogSpool(tmp_path / "log") as spool:
            spool.start(reader)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
            try:
                for word in (b"12345", b"67890", b"abcde"):
                    os.write(writer, word)
                    await until_taken(reader)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)
            os.write(writer, b"there again")
            os.close(writer)
            return await read_all(spool), spool.lost_bytes

    shipped, lost_bytes = run(scenario)

    assert shipped == b"12345678\n[flodl: 7 bytes of output lost: File too large]\nthere again"
    assert lost_bytes == 7


def test_what_has_been_shipped_leaves_the_disk_and_offsets_go_on(tmp_path: Path) -> None:
    path, data = tmp_path / "log", os.urandom(5 * KEPT_BYTES)

    async def scenario() -> tuple[bytes, list[int]]:
        reader, writer = os.pipe()
        shipped, sizes = b"", []
        with LogSpool(path) as spool:
            spool.start(reader)
            writing = asyncio.create_task(asyncio.to_thread(write_all, writer, data))
            while await spool.wait_beyond(len(shipped)):
                shipped += spool.read_from(len(shipped), READ_BYTES)
                spool.forget(len(shipped))
                sizes.append(path.stat().st_size)
            await writing
            with pytest.raises(OSError, match="argument"):
                spool.read_from(0, 1)
        return shipped, sizes

    def write_all(fd: int, left: bytes) -> None:
        with open(fd, "wb", buffering=0) as file:
            file.write(left)

    shipped, sizes = run(scenario)

    assert shipped == data
    assert max(sizes) <= KEPT_BYTES + 2 * READ_BYTES  # a reader that keeps up has no more there than that


def test_more_than_the_file_may_hold_is_dropped_and_the_loss_is_marked(tmp_path: Path) -> None:
    async def scenario() -> tuple[bytes, int]:
        reader, writer = os.pipe()
        with LogSpool(tmp_path / "log", max_bytes=2 * KEPT_BYTES) as spool:
            spool.start(reader)
            for _ in range(2 * KEPT_BYTES // READ_BYTES + 1):
                os.write(writer, b"x" * READ_BYTES)
                await until_taken(reader)
            assert spool.size_bytes == 2 * KEPT_BYTES
            spool.forget(spool.size_bytes)
            os.write(writer, b"there again")
            os.close(writer)
            await spool.wait_beyond(2 * KEPT_BYTES)
            return spool.read_from(2 * KEPT_BYTES, READ_BYTES), spool.lost_bytes

    shipped, lost_bytes = run(scenario)

    assert (
        shipped
        == b"\n[flodl: 65536 bytes of output lost: the spool is full, 2097152 bytes, and not all are sent]\nthere again"
    )
    assert lost_bytes == READ_BYTES


@pytest.mark.parametrize("obstacle", ["folder", "link"])
def test_file_that_cannot_be_made_is_an_error_and_the_pipe_is_closed(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "missing" / "log"
    if obstacle == "link":
        path = tmp_path / "log"
        path.symlink_to(tmp_path / "elsewhere")
    reader, writer = os.pipe()

    async def scenario() -> None:
        LogSpool(path).start(reader)

    with pytest.raises(OSError, match="log"):
        run(scenario)
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"nobody reads")
    os.close(writer)
