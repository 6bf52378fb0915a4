"""Starts the daemon of a host that is this machine: a child process, with the same bootstrap on its standard input."""

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Final

import psutil

from flodl.launch.bootstrap import Bootstrap, ReadyScanner, encode
from flodl.launch.commands import FOLDER_MISSING, INTERPRETER_MISSING, daemon_argv
from flodl.launch.plan import HostPlan
from flodl.launch.running import START_TIMEOUT_S, DaemonEnded, HostLog, pump, start_failure

CLOSE_TIMEOUT_S: Final = 5.0
LAST_WORDS_S: Final = 1.0


class LocalDaemon:
    """A daemon that is a child of this process. ``start_local`` makes it."""

    def __init__(self, host: str, process: asyncio.subprocess.Process, pumps: list[asyncio.Task[None]]) -> None:
        self.host = host
        self._process = process
        self._pumps = pumps

    async def wait(self) -> DaemonEnded:
        """Wait for its end."""
        code = await self._process.wait()
        if code < 0:
            return DaemonEnded(128 - code, f"ended by {signal.Signals(-code).name}")
        return DaemonEnded(code, f"ended with code {code}")

    def terminate(self) -> None:
        """SIGTERM, by way of its warden; what that means it says itself."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def kill(self) -> None:
        """End it at once; its warden clears what it leaves behind."""
        self.end_now()
        with contextlib.suppress(TimeoutError):  # a signal to it now would reap it behind asyncio's back
            await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_S)
        await self.close()

    async def close(self) -> None:
        """Ask it to end, wait a moment, then end it; its warden clears what it leaves behind.

        What is killed first is the daemon below the warden, which may be frozen: the warden then ends the whole tree.
        """
        for end in (self._process.terminate, self.end_now, self._process.kill):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    end()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_S)
        await asyncio.wait(self._pumps, timeout=LAST_WORDS_S)
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def end_now(self) -> None:
        """SIGKILL to the daemon below the warden, which then ends the whole tree."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                child.kill()


async def start_local(
    host: HostPlan,
    bootstrap: Bootstrap,
    log_path: Path | None,
    bound_grace_s: float | None = None,
    pulse_fd: int = -1,
) -> LocalDaemon:
    """Start the daemon of ``host`` here and hand it its bootstrap; returns once it has read it.

    Args:
        host: of kind ``local``.
        bootstrap: with the host's secret and the controller's address.
        log_path: where the daemon's own output goes; None puts it among our own words on stderr.
        bound_grace_s: None lets it live on when this process dies; else it ends with us, within so many seconds.
        pulse_fd: where it writes a byte for each of its beats, the number of ranks that run; -1: nowhere.

    Raises:
        HostUnreachable: stage start: no such folder or interpreter, no flodl in it, or not ready in time.
    """
    log = HostLog(log_path)
    _check(host, log)
    process = await asyncio.create_subprocess_exec(
        *daemon_argv(host.python, bound_grace_s, pulse_fd),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=host.cwd,
        pass_fds=() if pulse_fd < 0 else (pulse_fd,),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    ready = asyncio.Event()
    scanner = ReadyScanner(bootstrap.run_id)
    pumps = [
        asyncio.create_task(pump(process.stdout.read, log, scanner, ready)),
        asyncio.create_task(pump(process.stderr.read, log, None, ready)),
    ]
    daemon = LocalDaemon(host.name, process, pumps)
    try:
        process.stdin.write(encode(bootstrap))
        await _until_ready(host, process, ready, log, pumps)
    except BaseException:
        await daemon.close()
        raise
    return daemon


def _check(host: HostPlan, log: HostLog) -> None:
    if not os.path.isdir(host.cwd):
        raise start_failure(host, FOLDER_MISSING, log)
    if shutil.which(host.python) is None:
        raise start_failure(host, INTERPRETER_MISSING, log)


async def _until_ready(
    host: HostPlan,
    process: asyncio.subprocess.Process,
    ready: asyncio.Event,
    log: HostLog,
    pumps: list[asyncio.Task[None]],
) -> None:
    is_ready, has_ended = asyncio.create_task(ready.wait()), asyncio.create_task(process.wait())
    try:
        await asyncio.wait({is_ready, has_ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            return
        if has_ended.done():
            await asyncio.wait(pumps, timeout=1.0)
            raise start_failure(host, has_ended.result() & 0xFF, log)
        raise start_failure(host, None, log)
    finally:
        is_ready.cancel()
        has_ended.cancel()
