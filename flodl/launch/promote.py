"""Auto-promotion: a script that was started by itself becomes the head of a run of its own.

The controller is started as ``fdl launch`` would start it; the ranks' output is echoed here by threads, for no viewer
watches. The script's own signals stay its own.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flodl.config.address import format_address
from flodl.errors import PeerLost
from flodl.launch.control import ControllerClient
from flodl.launch.launcher import LaunchOptions, StartedRun, local_request, start_controller
from flodl.launch.plan import plan
from flodl.launch.progress import epoch_line, log_line
from flodl.launch.terminal import Terminal

if TYPE_CHECKING:
    from flodl.config.model import ClusterSpec

RETRY_S: Final = 0.2


def promote(cluster: object) -> Mapping[str, Any]:
    """Start the controller of a run whose head is this process.

    Args:
        cluster: a ``ClusterBuilder``, the path of a cluster file, or None for all GPUs of this machine.

    Returns:
        The head's ticket: run id, the controller's address, the file with the run's token.

    Raises:
        ConfigError: the cluster cannot be used.
        PreflightError: the port is taken, or the state folder cannot be written.
        FlodlError: the controller did not start.
    """
    options = LaunchOptions(tuple(sys.orig_argv[1:]), name=Path(sys.argv[0]).stem, spawns_head=False)
    started = start_controller(plan(_spec(cluster), local_request(options)))
    terminal = Terminal()
    for path in ("/logs", "/events"):
        threading.Thread(target=_echo, args=(started, path, terminal), daemon=True, name=f"fdl{path}").start()
    return {
        "run_id": started.run.run_id,
        "address": format_address(started.info.address, started.info.port),
        "token_file": str(started.run.token_path),
    }


def _spec(cluster: object) -> "ClusterSpec":
    from flodl.config.builder import ClusterBuilder
    from flodl.config.cluster import load_cluster, unsupported
    from flodl.config.problems import ClusterError

    if isinstance(cluster, (str, os.PathLike)):
        spec = load_cluster(Path(cluster))
    else:
        builder = cluster if isinstance(cluster, ClusterBuilder) else ClusterBuilder.all_local_gpus()
        spec = builder.build()
    problems = unsupported(spec)
    if problems:
        raise ClusterError(problems)
    return spec


def _echo(started: StartedRun, path: str, terminal: Terminal) -> None:
    client, cursor = ControllerClient.of(started.run, started.info), 0
    while started.process.poll() is None:
        with contextlib.suppress(PeerLost):
            for line in client.follow(path, {"cursor": cursor, "follow": 1}):
                cursor = int(line.get("cursor", line.get("seq", cursor)))
                if path == "/logs":
                    terminal.result(log_line(line))
                elif line.get("event") == "epoch":
                    terminal.result(epoch_line(line.get("fields") or {}))
                elif line.get("severity") in ("warning", "critical"):
                    terminal.result(f"fdl: {line.get('event')}: {line.get('detail')}")
        time.sleep(RETRY_S)
