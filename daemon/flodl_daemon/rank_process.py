"""One rank's process on this host: its tree, its control socket, its outbox and its two log streams."""

import asyncio
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from flodl.core.actions import SpawnRank
from flodl.core.events import HostEvent, RankEnded, RankSaid
from flodl.errors import DeadlineExceeded, PeerLost, ProtocolError
from flodl.launch.bootstrap import Bootstrap
from flodl.messages import DaemonToRank, RankToDaemon
from flodl.runtime.processes import ExitStatus, ProcessTree, control_pair, create_memfd
from flodl.runtime.spool import LogSpool
from flodl.runtime.streams import FramedStream
from flodl_daemon.devices import rank_environment
from flodl_daemon.plain import plain_environment

LAST_WORDS_S: Final = 5.0
"""How long a dead rank's socket may take to reach its end; a forked child that holds it open is killed before."""

NEVER_INHERITED: Final = (
    "CREDENTIALS_DIRECTORY",
    "FLODL_WARDEN_FD",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)

Put = Callable[[HostEvent], Awaitable[None]]

_log = logging.getLogger(__name__)


class RankProcess:
    """``start`` it, then ``live`` hears it and, last, says how it ended."""

    def __init__(self, order: SpawnRank, given: Bootstrap, plane_fd: int, inbox_fd: int, address: str) -> None:
        """``plane_fd`` is the host's shared memory, ``inbox_fd`` where states for its ranks come to lie; both stay the
        caller's. ``address``: the local address that reaches the controller.
        """
        self.rank = order.spec.rank
        self.outbox_fd = -1
        self.spools: dict[str, LogSpool] = {}
        self._order, self._given, self._address = order, given, address
        self._plane_fd, self._inbox_fd = plane_fd, inbox_fd
        self._tree: ProcessTree | None = None
        self._control: socket.socket | None = None
        self._stream: FramedStream | None = None
        self._killing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process's pid; None before its start and after its end."""
        return None if self._tree is None or self._tree.exit_status is not None else self._tree.pid

    def start(self) -> None:
        """Start the process and the spooling of its output.

        Raises:
            OSError: the interpreter, the folder or room for its files is missing.
            ValueError: a NUL in an argument or a variable.
        """
        self.outbox_fd = create_memfd(f"flodl-outbox-{self.rank}")
        # the folder goes first and the files are unlinked at once: whatever ends this process, nothing is left of them
        folder = Path(tempfile.mkdtemp(prefix="fdl-spool-", dir=self._given.spool_dir or None))
        try:
            self._control, theirs = control_pair()
            with theirs:
                is_plain = self._order.plain is not None
                inherited = (theirs.fileno(), self._plane_fd, self._inbox_fd, self.outbox_fd)
                self._tree = ProcessTree.spawn(
                    [self._given.python or sys.executable, *self._given.script],
                    mark=f"{self._given.run_id}:{self.rank}",
                    env=self._environment(theirs.fileno()),
                    cwd=self._given.cwd,
                    pass_fds=() if is_plain else inherited,
                )
            self._spool(self._tree, folder)
        except BaseException:
            self.kill()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def live(self, put: Put) -> None:
        """Hear it, and put its end last, after everything it said and with all its output spooled.

        ``put`` waits where the daemon cannot keep up, and leaves a flood with the rank.
        """
        assert self._tree is not None, "started"
        assert self._control is not None, "started"
        self._stream = await FramedStream.over(self._control, f"rank {self.rank}", RankToDaemon)
        self._control = None
        hearing = asyncio.create_task(self._hear(put))
        try:
            status = await self._end_tree(self._tree)
            for spool in self.spools.values():
                spool.finish()
            await asyncio.wait({hearing}, timeout=LAST_WORDS_S)
        finally:
            hearing.cancel()
        await asyncio.wait({hearing})
        self._stream.abort()
        await put(RankEnded(self.rank, status.code, status.signal))

    async def clean_up(self) -> None:
        """End what a ``start`` that failed has left."""
        if self._tree is not None:
            await self._end_tree(self._tree)
            self._tree.close_pipes()

    def send(self, message: DaemonToRank) -> None:
        """Send, if it still listens."""
        if self._stream is not None:
            self._stream.send(message)

    def terminate(self) -> None:
        """SIGTERM to the rank's own process."""
        if self._tree is not None:
            self._tree.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole tree, while the leader's death has not yet scattered it."""
        if self._tree is not None and self._killing is None:
            self._killing = asyncio.create_task(self._kill_tree(self._tree), name=f"kill rank {self.rank}")

    def close(self) -> None:
        """Let go of files and memory; again does nothing."""
        for spool in self.spools.values():
            spool.close()
        if self._control is not None:
            self._control.close()
        if self.outbox_fd >= 0:
            os.close(self.outbox_fd)
            self.outbox_fd = -1

    async def _end_tree(self, tree: ProcessTree) -> ExitStatus:
        status = await tree.wait()
        if self._killing is not None:
            await self._killing
        await self._kill_tree(tree)
        return status

    async def _kill_tree(self, tree: ProcessTree) -> None:
        try:
            await tree.kill_tree()
        except DeadlineExceeded as error:
            _log.error("rank %d: %s", self.rank, error)

    def _spool(self, tree: ProcessTree, folder: Path) -> None:
        pipe_fd, tree.stdout_fd = tree.stdout_fd, None
        self._spool_pipe("stdout", pipe_fd, folder)
        pipe_fd, tree.stderr_fd = tree.stderr_fd, None
        self._spool_pipe("stderr", pipe_fd, folder)

    def _spool_pipe(self, name: str, pipe_fd: int | None, folder: Path) -> None:
        assert pipe_fd is not None, "spawned with pipes"
        spool = LogSpool(folder / name)
        spool.start(pipe_fd)
        self.spools[name] = spool

    async def _hear(self, put: Put) -> None:
        assert self._stream is not None
        try:
            while True:
                message = await self._stream.receive()
                await put(RankSaid(self.rank, message))  # type: ignore[arg-type]  # the stream allows RankToDaemon only
        except PeerLost:
            return
        except ProtocolError as error:
            _log.error("rank %d broke the protocol: %s", self.rank, error)
            self.kill()

    def _environment(self, control_fd: int) -> dict[str, str]:
        spec, order, given = self._order.spec, self._order, self._given
        inherited = {name: value for name, value in os.environ.items() if name not in NEVER_INHERITED}
        around = {"PYTHONUNBUFFERED": "1", **inherited, **given.env}
        if order.plain is not None:
            return {**around, **plain_environment(order, order.plain, given.run_id, around)}
        ticket = {
            "run_id": given.run_id,
            "rank": spec.rank,
            "local_rank": spec.local_rank,
            "world_size": order.world_size,
            "host": given.host,
            "device": {"kind": spec.device.kind, "index": spec.device.index, "id": spec.device.id},
            "control_fd": control_fd,
            "plane_fd": self._plane_fd,
            "slots": order.local_world_size,
            "slot": spec.local_rank,
            "outbox_fd": self.outbox_fd,
            "inbox_fd": self._inbox_fd,
            "address": self._address,
        }
        return {
            **around,
            **rank_environment(spec.device, order.local_world_size, around),
            "RANK": str(spec.rank),
            "LOCAL_RANK": str(spec.local_rank),
            "WORLD_SIZE": str(order.world_size),
            "LOCAL_WORLD_SIZE": str(order.local_world_size),
            "FDL_RUN_ID": given.run_id,
            "FLODL_ROLE": "rank:" + json.dumps(ticket),
        }
