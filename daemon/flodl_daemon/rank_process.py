"""One rank's process on this host: its tree, its control socket, its outbox and its two log streams."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flodl.core.actions import SpawnRank
from flodl.core.events import HostEvent, RankEnded, RankSaid
from flodl.errors import DeadlineExceeded, PeerLost, ProtocolError
from flodl.launch.bootstrap import Bootstrap
from flodl.messages import DaemonToRank, RankToDaemon
from flodl.runtime.processes import ProcessTree, control_pair, create_memfd
from flodl.runtime.spool import LogSpool
from flodl.runtime.streams import FramedStream
from flodl_daemon.devices import rank_environment

LAST_WORDS_S: Final = 5.0
"""How long a dead rank's socket may take to reach its end; a forked child that holds it open is killed before."""

NEVER_INHERITED: Final = (
    "FLODL_WARDEN_FD",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
)

_log = logging.getLogger(__name__)


class RankProcess:
    """Spawned by ``start``; posts RankSaid and, last, RankEnded."""

    def __init__(self, order: SpawnRank, given: Bootstrap, plane_fd: int, address: str) -> None:
        """``plane_fd`` is the host's shared memory; ``address`` the local address that reaches the controller."""
        self.rank = order.spec.rank
        self.outbox_fd = create_memfd(f"flodl-outbox-{self.rank}")
        self.spools: dict[str, LogSpool] = {}
        self._order, self._given, self._plane_fd, self._address = order, given, plane_fd, address
        self._tree: ProcessTree | None = None
        self._stream: FramedStream | None = None

    @property
    def pid(self) -> int | None:
        """The process's pid, None before its start."""
        return None if self._tree is None else self._tree.pid

    async def live(self, post: Callable[[HostEvent], None]) -> None:
        """Start it, hear it, and report its end after everything it said."""
        try:
            await self._start()
        except OSError as error:
            _log.error("rank %d does not start: %s", self.rank, error)
            post(RankEnded(self.rank, 127, 0))
            return
        assert self._tree is not None
        assert self._stream is not None
        hearing = asyncio.create_task(self._hear(post))
        status = await self._tree.wait()
        with contextlib.suppress(DeadlineExceeded):
            await self._tree.kill_tree()
        for spool in self.spools.values():
            spool.finish()
        await asyncio.wait({hearing}, timeout=LAST_WORDS_S)
        hearing.cancel()
        await asyncio.wait({hearing})
        await self._stream.close(0.0)
        post(RankEnded(self.rank, status.code, status.signal))

    def send(self, message: DaemonToRank) -> None:
        """Send, if it still listens."""
        if self._stream is not None:
            self._stream.send(message)

    def terminate(self) -> None:
        """SIGTERM to the rank's own process."""
        if self._tree is not None:
            self._tree.terminate()

    def kill(self) -> None:
        """SIGKILL to the leader; ``live`` ends the rest of the tree as soon as it is gone."""
        if self._tree is not None:
            self._tree.terminate(signal.SIGKILL)

    def close(self) -> None:
        """Let go of files and memory."""
        for spool in self.spools.values():
            spool.close()
        with contextlib.suppress(OSError):
            os.close(self.outbox_fd)

    async def _start(self) -> None:
        ours, theirs = control_pair()
        with theirs:
            self._tree = ProcessTree.spawn(
                [self._given.python or sys.executable, *self._given.script],
                mark=f"{self._given.run_id}:{self.rank}",
                env=self._environment(theirs.fileno()),
                cwd=self._given.cwd,
                pass_fds=(theirs.fileno(), self._plane_fd, self.outbox_fd),
            )
        self._spool(self._tree)
        peer = f"rank {self.rank}"
        self._stream = await FramedStream.over(ours, peer, RankToDaemon)

    def _spool(self, tree: ProcessTree) -> None:
        # the files are unlinked at once: they live as long as our descriptors, whatever ends this process
        folder = Path(self._given.spool_dir or tempfile.mkdtemp(prefix="fdl-spool-"))
        for name, pipe_fd in (("stdout", tree.stdout_fd), ("stderr", tree.stderr_fd)):
            assert pipe_fd is not None
            spool = LogSpool(folder / f"rank{self.rank}.{name}")
            spool.start(pipe_fd)
            spool.path.unlink()
            self.spools[name] = spool
        tree.stdout_fd = tree.stderr_fd = None
        if not self._given.spool_dir:
            folder.rmdir()

    async def _hear(self, post: Callable[[HostEvent], None]) -> None:
        assert self._stream is not None
        try:
            while True:
                message = await self._stream.receive()
                post(RankSaid(self.rank, message))  # type: ignore[arg-type]  # the stream allows RankToDaemon only
        except PeerLost:
            return
        except ProtocolError as error:
            _log.error("rank %d broke the protocol: %s", self.rank, error)
            self.kill()

    def _environment(self, control_fd: int) -> dict[str, str]:
        spec, order, given = self._order.spec, self._order, self._given
        inherited = {name: value for name, value in os.environ.items() if name not in NEVER_INHERITED}
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
            "address": self._address,
        }
        return {
            "PYTHONUNBUFFERED": "1",
            **inherited,
            **rank_environment(spec.device, order.local_world_size, given.env),
            **given.env,
            "RANK": str(spec.rank),
            "LOCAL_RANK": str(spec.local_rank),
            "WORLD_SIZE": str(order.world_size),
            "LOCAL_WORLD_SIZE": str(order.local_world_size),
            "FDL_RUN_ID": given.run_id,
            "FLODL_ROLE": "rank:" + json.dumps(ticket),
        }
