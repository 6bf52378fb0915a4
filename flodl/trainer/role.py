"""Which part this process plays, from the one-time ticket in its environment.

The spawner writes ``FLODL_ROLE=rank:<json>`` or ``head:<json>``; the first ``Trainer.run`` replaces it by
``taken:<pid>``. A process that inherits a taken ticket is a loader worker that imported the script again, or the like:
it must not start a second training. Without a ticket the process is solo, or promotes itself to a head.
"""

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flodl.config.builder import ClusterBuilder
from flodl.config.model import ClusterSpec
from flodl.errors import ConfigError, ProtocolError, UsageError
from flodl.spec.context import ROLE_VARIABLE

_TAKEN = "taken:"
_PLAIN = "plain"
_GUARD = (
    "this process imported the script again (a DataLoader worker or another child process does that); put the code "
    'that calls Trainer.run under `if __name__ == "__main__":`'
)


@dataclass(frozen=True, slots=True)
class Solo:
    """One device, no other process."""


@dataclass(frozen=True, slots=True)
class RankRole:
    """A rank of a run, with its daemon's ticket."""

    ticket: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HeadRole:
    """The head of a run, with the controller's ticket."""

    ticket: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Promoted:
    """This process starts the run itself and becomes its head.

    ``cluster`` comes from the config, or is the path of a cluster file, or None for all GPUs of this machine.
    """

    cluster: ClusterBuilder | ClusterSpec | str | None


Role: TypeAlias = Solo | RankRole | HeadRole | Promoted


def take_role(
    cluster: ClusterBuilder | ClusterSpec | None,
    environ: MutableMapping[str, str],
    pid: int,
    visible_gpus: Callable[[], Sequence[object]],
) -> Role:
    """Decide this process's role and use up its ticket.

    Args:
        cluster: the config's ``cluster`` knob.
        environ: the process's environment; its ticket is replaced.
        pid: of this process.
        visible_gpus: lists this machine's GPUs; asked only when everything else allows a promotion.

    Raises:
        UsageError: the ticket is taken, by this process (a second call) or by another one (a missing guard), or the
            run is a plain one.
        ConfigError: a cluster in code beside a cluster file.
        ProtocolError: the ticket cannot be read.
    """
    text = environ.get(ROLE_VARIABLE, "")
    if not text:
        return _without_ticket(cluster, environ, visible_gpus)
    if text.startswith(_TAKEN):
        if text == f"{_TAKEN}{pid}":
            raise UsageError("Trainer.run was called twice; one launch runs one training, keep one call")
        raise UsageError(f"Trainer.run: {_GUARD}")
    if text == _PLAIN:
        raise UsageError(
            "this script calls Trainer.run and was launched with --plain, which is for scripts that train without "
            "flodl's engine; leave --plain out"
        )
    kind, _, body = text.partition(":")
    try:
        ticket = json.loads(body)
    except ValueError:
        ticket = None
    if kind not in ("rank", "head") or not isinstance(ticket, dict):
        raise ProtocolError(f"{ROLE_VARIABLE} holds no role ticket; unset it to run {sys.argv[0]} by itself")
    _refuse_two_clusters(cluster, str(ticket.get("cluster_file", "")))
    environ[ROLE_VARIABLE] = f"{_TAKEN}{pid}"
    return RankRole(ticket) if kind == "rank" else HeadRole(ticket)


def refuse_wrong_place() -> None:
    """Raise UsageError in a thread, or while a spawned child is importing the script."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("Trainer.run was called in a thread; call it in the main thread, for signals arrive there")
    # The flag behind multiprocessing's own "before the current process has finished its bootstrapping phase".
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(f"Trainer.run: {_GUARD}")


def _without_ticket(
    cluster: ClusterBuilder | ClusterSpec | None,
    environ: Mapping[str, str],
    visible_gpus: Callable[[], Sequence[object]],
) -> Role:
    cluster_file = environ.get("FDL_CLUSTER", "")
    _refuse_two_clusters(cluster, cluster_file)
    if environ.get("FLODL_SOLO", "") not in ("", "0"):
        return Solo()
    if cluster is not None or cluster_file:
        return Promoted(cluster if cluster is not None else cluster_file)
    may_promote = "pytest" not in sys.modules and not _is_interactive()
    return Promoted(None) if may_promote and len(visible_gpus()) > 1 else Solo()


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or not hasattr(sys.modules["__main__"], "__file__")


def _refuse_two_clusters(cluster: object, cluster_file: str) -> None:
    if cluster is not None and cluster_file:
        raise ConfigError(
            f"the script sets a cluster, and {os.path.basename(cluster_file)} names one too; "
            "drop .cluster(...) from the script, or start it without -c and FDL_CLUSTER"
        )
