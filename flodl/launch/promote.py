"""Auto-promotion: a script that was started by itself becomes the head of a run of its own.

The controller is started as ``fdl launch`` would start it; the ranks' output is echoed here by threads, for no viewer
watches. The script's own signals stay its own.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flodl.config.address import format_address
from flodl.errors import FlodlError
from flodl.launch import preflight, standard_streams
from flodl.launch.control import ControllerClient
from flodl.launch.launcher import LaunchOptions, StartedRun, local_request, spread, start_controller
from flodl.launch.narrator import ALERTS, Narrator
from flodl.launch.plan import plan
from flodl.launch.rundir import run_name
from flodl.launch.terminal import Terminal

if TYPE_CHECKING:
    from flodl.config.model import ClusterSpec

RETRY_S: Final = 0.2
QUIET_S: Final = 0.3
DRAIN_S: Final = 1.0
"""When the script ends, lines of the run are still shown until none came for ``QUIET_S``, for ``DRAIN_S`` at most."""


def promote(cluster: object) -> Mapping[str, Any]:
    """Start the controller of a run whose head is this process.

    Args:
        cluster: a ``ClusterBuilder``, the path of a cluster file, or None for all GPUs of this machine.

    Returns:
        The head's ticket: run id, the controller's address, the file with the run's token, and where TLS is wanted.

    Raises:
        ConfigError: the cluster, the join token or the project cannot be used.
        PreflightError: the port is taken, or the state folder cannot be written.
        HostUnreachable: hosts cannot be brought the project.
        FlodlError: the controller did not start.
    """
    standard_streams.open_closed()
    options = LaunchOptions(tuple(sys.orig_argv[1:]), name=Path(sys.argv[0]).stem, spawns_head=False)
    spec = plan(_spec(cluster), local_request(options))
    preflight.check_join_token(spec)
    started = start_controller(spec, lambda: spread(spec, Terminal()))
    _Echo(started).start()
    return {
        "run_id": started.run.run_id,
        "address": format_address(started.info.address, started.info.port),
        "token_file": str(started.run.token_path),
        "tls": str(started.info.tls),
    }


def _spec(cluster: object) -> "ClusterSpec":
    from flodl.config.builder import ClusterBuilder
    from flodl.config.cluster import load_cluster

    if isinstance(cluster, (str, os.PathLike)):
        return load_cluster(Path(cluster))
    builder = cluster if isinstance(cluster, ClusterBuilder) else ClusterBuilder.all_local_gpus()
    return builder.build()


class _Echo:
    """Shows the run's output in the script's own, until the script ends."""

    def __init__(self, started: StartedRun) -> None:
        self._started = started
        self._terminal = Terminal()
        self._narrator = Narrator(self._terminal)
        self._lock = threading.Lock()
        self._shown_at_s = 0.0
        self._has_ended = False

    def start(self) -> None:
        """Name the run, and show what comes from now on."""
        run, info = self._started.run, self._started.info
        self._terminal.say(f"fdl: run {run.run_id} ({run_name(run)}) on {info.address}:{info.port}")
        for path in ("/logs", "/events"):
            threading.Thread(target=self._follow, args=(path,), daemon=True, name=f"fdl{path}").start()
        atexit.register(self._end)

    def _end(self) -> None:
        """Let the last lines arrive, then be silent: a thread that prints while the interpreter ends can abort it."""
        deadline_s = time.monotonic() + DRAIN_S
        while (now_s := time.monotonic()) < deadline_s and now_s - self._shown_at_s < QUIET_S:
            time.sleep(RETRY_S / 4)
        with self._lock:
            self._has_ended = True
            self._narrator.end(None)

    def _follow(self, path: str) -> None:
        client, cursor = ControllerClient.of(self._started.run, self._started.info), 0
        while self._started.process.poll() is None:
            with contextlib.suppress(FlodlError, ValueError, TypeError):
                for line in client.follow(path, {"cursor": cursor, "follow": 1}):
                    cursor = int(line.get("cursor", line.get("seq", cursor)))
                    self._show(path, line)
            time.sleep(RETRY_S)

    def _show(self, path: str, line: Mapping[str, Any]) -> None:
        is_told = path == "/logs" or line.get("event") == "epoch" or line.get("severity") in ALERTS
        with self._lock:
            if self._has_ended:
                return
            now_s = time.monotonic()
            self._narrator.tick(now_s)
            if not is_told:
                return
            self._shown_at_s = now_s
            if path == "/logs":
                self._narrator.log(line, now_s)
            else:
                self._narrator.event(line, now_s)
