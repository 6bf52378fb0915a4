"""How the bytes of files travel: rsync, or sftp, over the ssh session that is open; both into the host's ``agent.NEW``.

rsync's own ssh is ``relay``, which knows no host and no key: target, jump hosts, keys and known hosts are those of the
session. Whether what has arrived is right, the agent decides.
"""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import asyncssh

from flodl.launch.sync import relay
from flodl.launch.sync.agent import MARKER, NEW
from flodl.launch.sync.session import SyncSession, past_marker
from flodl.launch.tree import Entry, path_bytes
from flodl.spec.words import printable

PARALLEL_FILES: Final = 32
"""Under way at once by sftp: each file costs several answers of the host."""

PIECE_BYTES: Final = 1 << 17
MAX_WORDS: Final = 64
SAID_BYTES: Final = 600

Moved: TypeAlias = Callable[[int], None]
"""Told how many bytes have just moved."""


def rsync_here() -> str:
    """This machine's rsync; empty where there is none."""
    return shutil.which("rsync") or ""


async def send_by_rsync(session: SyncSession, folder: str, files: Sequence[Entry], moved: Moved) -> str:
    """Send ``files`` of ``folder`` under their own names; ``moved`` is told of every piece's bytes on the wire.

    Returns:
        What the host's rsync complained of: it may have left files out, and ended well all the same.

    Raises:
        HostUnreachable: rsync has failed on either side.
    """
    ours, theirs = socket.socketpair()
    words = bytearray()
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *_rsync_command(theirs.fileno()),
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            process_group=0,
        )
        theirs.close()
        names = b"".join(b"./" + path_bytes(entry.path) + b"\0" for entry in files)
        try:
            carrying = asyncio.create_task(_carry(session, ours, moved, words))
            try:
                _, said = await process.communicate(names)
                await asyncio.wait({carrying}, timeout=1.0)
                if not process.returncode:
                    return f"; {_lines(words)}" if words else ""
            finally:
                carrying.cancel()
                await asyncio.wait({carrying})
            failed = carrying.exception() if not carrying.cancelled() else None
            raise session.failure(_last_words(process.returncode, words + said, failed))
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def _rsync_command(descriptor: int) -> list[str]:
    words = (sys.executable, "-I", "-S", str(Path(relay.__file__)), str(descriptor))
    shell = " ".join("'" + word.replace("'", "''") + "'" for word in words)  # rsync's own quoting
    return [
        rsync_here(),
        "--rsh",
        shell,
        "--from0",
        "--files-from=-",
        "--ignore-times",
        "--compress",
        "--compare-dest=../..",  # the file that is there is what a change is a change of
        "--",
        ".",
        "host:.",
    ]


async def _carry(session: SyncSession, ours: socket.socket, moved: Moved, words: bytearray) -> None:
    """Start what rsync asks for on the host, and be the line between the two, until both have ended. ``words`` gets the
    host's complaints.
    """
    reader, writer = await asyncio.open_connection(sock=ours)
    command = await _words(reader)
    command[0] = session.rsync
    new = shlex.quote(f"{session.root}/{NEW}")
    script = f"printf '%s\\n' '' {shlex.quote(MARKER)} && cd -- {new} && exec {shlex.join(command)}"
    line = path_bytes(f"exec /bin/sh -c {shlex.quote(script)}")
    remote = await session.login.connection.create_process(line, encoding=None)
    try:
        writer.write(await past_marker(remote.stdout.read))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_pump(reader.read, remote.stdin, moved))
            tasks.create_task(_pump(remote.stdout.read, writer, moved))
            tasks.create_task(_listen(remote.stderr.read, words))
    finally:
        remote.close()
        writer.close()


async def _pump(read: Any, writer: Any, moved: Moved) -> None:
    while piece := await read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
        moved(len(piece))
    writer.write_eof()


async def _listen(read: Any, words: bytearray) -> None:
    while piece := await read(PIECE_BYTES):
        words += piece[-SAID_BYTES:]
        del words[:-SAID_BYTES]


async def _words(reader: asyncio.StreamReader) -> list[str]:
    count = int((await reader.readuntil(b"\0"))[:-1])
    assert 0 < count <= MAX_WORDS
    return [os.fsdecode((await reader.readuntil(b"\0"))[:-1]) for _ in range(count)]


def _last_words(code: int | None, said: bytes | bytearray, failed: BaseException | None) -> str:
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    reason = f"; {failed}" if failed else ""
    return f"rsync has ended with code {code}{reason}: {_lines(said)}"


def _lines(said: bytes | bytearray) -> str:
    lines = printable(said[-SAID_BYTES:].decode("utf-8", "replace")).strip().splitlines()
    return " | ".join([line for line in lines if "manpage" not in line][-3:])


async def send_by_sftp(session: SyncSession, folder: str, files: Sequence[Entry], moved: Moved) -> str:
    """Send ``files`` of ``folder``, each under its place in the list; ``moved`` is told of every piece's bytes. As
    ``send_by_rsync``, but without complaints.

    Raises:
        HostUnreachable: there is no sftp, or it has failed.
    """
    new = path_bytes(f"{session.root}/{NEW}/")
    waiting = iter(list(enumerate(files)))

    async def work(sftp: asyncssh.SFTPClient) -> None:
        for number, entry in waiting:
            source = os.path.join(os.fsencode(folder), path_bytes(entry.path))
            await _put(sftp, source, b"%b%d" % (new, number), entry.size, moved)

    try:
        sftp = await session.login.connection.start_sftp_client()
    except (OSError, asyncssh.Error) as error:
        raise session.failure(f"no sftp: {error}", "its sshd needs the line: Subsystem sftp internal-sftp") from None
    try:
        async with sftp, asyncio.TaskGroup() as tasks:
            for _ in range(min(PARALLEL_FILES, len(files))):
                tasks.create_task(work(sftp))
    except ExceptionGroup as failed:
        if failed.split((OSError, asyncssh.Error))[1] is not None:
            raise
        reason = f"sftp: {failed.exceptions[0]}"
        raise session.failure(reason, f"see the disk at {session.root} there: space, inodes, quota") from None
    return ""


async def _put(sftp: asyncssh.SFTPClient, source: bytes, target: bytes, size: int, moved: Moved) -> None:
    if size > PIECE_BYTES:  # many pieces under way at once
        done = 0

        def told(_from: bytes, _to: bytes, copied: int, _all: int) -> None:
            nonlocal done
            moved(copied - done)
            done = copied

        await sftp.put(source, target, progress_handler=told)
        return
    piece = _read(source)
    async with sftp.open(target, "wb") as there:
        await there.write(piece)
    moved(len(piece))


def _read(path: bytes) -> bytes:
    """A small file of this machine: a disk that is slow for longer than a thread costs is nobody's project."""
    with open(path, "rb", buffering=0) as file:
        return file.read(PIECE_BYTES)
