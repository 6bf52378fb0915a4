"""The head's process: the user's script on this machine, in head role.

Either we start it, under a warden that ends it if we vanish, or it has started us (auto-promotion) and is not ours to
end.
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flodl.core.events import HeadExited, JobEvent
from flodl.errors import DeadlineExceeded
from flodl.launch.plan import RunSpec
from flodl.monitor.log_store import HEAD, LogStore
from flodl.runtime.processes import ProcessId, ProcessTree

PARENT_GONE_GRACE_S: Final = 5.0
PIPE_BYTES: Final = 64 * 1024

LOOK_S: Final = 0.5
"""Between two looks at a head that may be frozen."""

TOLD_S: Final = 2.0
"""A head that has been told how the run ended leaves by itself, mostly at once; only then it gets a signal."""

_log = logging.getLogger(__name__)


class HeadProcess:
    """Started by ``live``; its end is an event."""

    def __init__(self, spec: RunSpec, address: str, token_path: Path, logs: LogStore) -> None:
        """``address`` is ``host:port`` of this controller."""
        self._spec, self._address, self._token_path, self._logs = spec, address, token_path, logs
        self._tree: ProcessTree | None = None
        self._script: ProcessId | None = None
        self._offsets = {"stdout": 0, "stderr": 0}

    async def live(self, post: Callable[[JobEvent], None]) -> None:
        """Start the script, keep its output, report its end."""
        reader, writer = os.pipe()
        try:
            self._tree = self._spawn(reader)
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument or variable
            os.close(writer)
            self._say(f"flodl: the head does not start: {error}\n")
            _log.error("the head does not start: %s", error)
            post(HeadExited(127, 0))
            return
        finally:
            os.close(reader)
        pipes = [
            asyncio.create_task(self._read(name, fd))
            for name, fd in (("stdout", self._tree.stdout_fd), ("stderr", self._tree.stderr_fd))
            if fd is not None
        ]
        self._tree.stdout_fd = self._tree.stderr_fd = None
        try:
            status = await self._tree.wait()
            with contextlib.suppress(DeadlineExceeded):
                await self._tree.kill_tree()
            await asyncio.wait(pipes, timeout=1.0)
            post(HeadExited(status.code, status.signal))
        finally:
            os.close(writer)
            for pipe in pipes:
                pipe.cancel()

    async def stop(self, grace_s: float, *, is_told: bool) -> None:
        """SIGTERM to the script, ``grace_s``, then SIGKILL to its tree; without a grace SIGKILL alone.

        ``is_told``: it was sent how the run ended, and would take a signal on its way for somebody else's wish.
        """
        tree = self._tree
        if tree is not None and grace_s > 0:
            if is_told:
                await _ended_within(tree, min(TOLD_S, grace_s))
            tree.terminate()
            await _ended_within(tree, grace_s)
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the whole tree."""
        if self._tree is not None:
            with contextlib.suppress(DeadlineExceeded):
                await self._tree.kill_tree()

    @property
    def script(self) -> ProcessId | None:
        """The script's own process, below its warden; None before it is there."""
        if self._script is None and self._tree is not None and self._tree.exit_status is None:
            self._script = self._tree.first_child()
        return self._script

    async def watch(self, grace_s: float, tell: Callable[[str], None]) -> None:
        """Wait for its end; end it when its script has been frozen for ``grace_s``, and ``tell`` so before."""
        if self._tree is None:
            return
        standing = _Standing(grace_s)
        while self._tree.exit_status is None:
            if standing.is_over(self.script):
                tell(standing.words(self.script))
                await self.kill()
            await _ended_within(self._tree, LOOK_S)

    def disconnected(self) -> None:
        """Its connection has ended, which says nothing: its process is our child and tells by its end."""

    def _spawn(self, parent_fd: int) -> ProcessTree:
        spec = self._spec
        ticket = {
            "run_id": spec.run_id,
            "address": self._address,
            "token_file": str(self._token_path),
            "tls": str(spec.tls),
        }
        if spec.cluster_file:
            ticket["cluster_file"] = spec.cluster_file
        env = {
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            **spec.env,
            "FDL_RUN_ID": spec.run_id,
            "FLODL_ROLE": "head:" + json.dumps(ticket),
        }
        warden = [spec.python, "-P", "-m", "flodl_daemon.warden", "--parent-fd", str(parent_fd)]
        argv = [*warden, "--grace", f"{PARENT_GONE_GRACE_S:g}", "--", spec.python, *spec.script]
        return ProcessTree.spawn(argv, mark=f"{spec.run_id}:head", env=env, cwd=spec.cwd, pass_fds=(parent_fd,))

    async def _read(self, name: str, fd: int) -> None:
        """Move the pipe's bytes into the store until its end, one read at a time: others run in between."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(fd, readable.set)
        try:
            data = None
            while data != b"":
                await readable.wait()
                readable.clear()
                with contextlib.suppress(BlockingIOError):
                    data = os.read(fd, PIPE_BYTES)
                    self._keep(name, data)
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def _say(self, text: str) -> None:
        self._keep("stderr", text.encode("utf-8", "backslashreplace"))

    def _keep(self, name: str, data: bytes) -> None:
        self._logs.append(HEAD, name, self._offsets[name], data)
        self._offsets[name] += len(data)


class PromotedHead:
    """The script that started this controller. It may do anything after its run, so we only stop waiting for it."""

    def __init__(self, pid: int, is_told: Callable[[], bool]) -> None:
        """``is_told``: whether the head knows how the run ended; one that leaves before has failed."""
        self._pid, self._is_told = pid, is_told
        self._identity = ProcessId.of(pid)
        self._has_left = asyncio.Event()

    async def live(self, post: Callable[[JobEvent], None]) -> None:
        """Report that it has left: its connection or its process has ended, or nobody waits for it any more."""
        try:
            fd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            post(HeadExited(1, 0))
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, self._has_left.set)
        try:
            await self._has_left.wait()
            post(HeadExited(0 if self._is_told() else 1, 0))
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    async def stop(self, grace_s: float, *, is_told: bool) -> None:
        """Give it ``grace_s`` to leave by itself, whether it ``is_told`` or not."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_left.wait(), grace_s)
        self._has_left.set()

    @property
    def script(self) -> ProcessId | None:
        """The script's process; None when it has left."""
        return self._identity

    async def watch(self, grace_s: float, tell: Callable[[str], None]) -> None:
        """As for the other kind of head, but one that stands still is only not waited for."""
        standing = _Standing(grace_s)
        while not self._has_left.is_set():
            if standing.is_over(self.script):
                tell(standing.words(self.script))
                self._has_left.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_left.wait(), LOOK_S)

    async def kill(self) -> None:
        """Nothing: the script, with all that it started, is its user's."""

    def disconnected(self) -> None:
        """Its connection has ended: the run is of no more interest to it."""
        self._has_left.set()


class _Standing:
    """How long a script has been frozen without a break."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since_s: float | None = None

    def is_over(self, script: ProcessId | None) -> bool:
        """Whether ``script``, looked at now, has been frozen for the whole grace."""
        if script is None or not script.is_frozen:
            self._since_s = None
            return False
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        return now_s - self._since_s >= self._grace_s

    def words(self, script: ProcessId | None) -> str:
        """What the event log says of it."""
        pid = "" if script is None else f" (pid {script.pid})"
        return f"the script in the head{pid} was frozen by a signal for {self._grace_s:g} s; it is not waited for"


async def _ended_within(tree: ProcessTree, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(tree.wait(), limit_s)
