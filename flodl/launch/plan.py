"""From a cluster and a request to everything that a run needs, decided before anything starts. Pure.

``plan`` is the only place that knows how paths, devices, environment and addresses of a host follow from the cluster
file; the controller executes a ``RunSpec`` and asks nobody else. ``describe`` prints it for ``--dry-run``.
"""

import os.path
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from flodl.config.address import format_address
from flodl.config.tls import TlsMode
from flodl.core.window import StartRule
from flodl.errors import ConfigError
from flodl.launch import commands
from flodl.launch.bootstrap import Bootstrap, Liveness
from flodl.launch.ssh_options import parse_options

if TYPE_CHECKING:  # pydantic is slow to import, and whoever reads a RunSpec does not need it
    from flodl.config.model import ClusterSpec, WorkerSpec

SCHEMA: Final = 1
"""The number of run.json's shape."""

_TLS_WORDS: Final = {
    TlsMode.AUTO: "for every address that is not loopback",
    TlsMode.ON: "for every address",
    TlsMode.OFF: "off: nothing is encrypted",
}


class HostKind(StrEnum):
    """How a host's daemon comes up: as a child process here, over ssh, or by itself, under its own service manager."""

    LOCAL = "local"
    SSH = "ssh"
    MANAGED = "managed"


@dataclass(frozen=True, slots=True)
class SshSpec:
    """How to reach a host. What is None is left to the user's own ssh configuration.

    ``options`` are OpenSSH ``Key=value`` pairs; they win over the user's files, as with ``ssh -o``.
    So many seconds, ``patience_s``, the session bears at least without a sign of life unless the user's own options say
    otherwise. ``reopens``: it is opened anew when it breaks, perhaps after a logout, so that keys in files are tried
    before those of an agent. ``is_typed``: target, user and key come from a command line, not from a cluster file.
    """

    target: str
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None
    options: tuple[str, ...] = ()
    patience_s: float = 0.0
    reopens: bool = False
    is_typed: bool = False


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One host of the roster: what its daemon runs, where, and how it is started.

    ``python`` is the interpreter there; empty takes ``python3`` of the login shell's PATH. ``cwd`` is the folder in
    which its ranks run and ``script`` what follows the interpreter there. ``ranks`` are the global ranks that the
    cluster file demands, empty where admission decides. ``ssh`` is None for all but ssh hosts. ``tunnel``: the daemon
    reaches the controller through the ssh session that starts it. ``project`` is the project's folder there, ``cwd`` or
    above it.
    """

    name: str
    kind: HostKind
    devices: tuple[str, ...]
    python: str
    cwd: str
    script: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    ssh: SshSpec | None = None
    tunnel: bool = False
    project: str = ""


class SyncMode(StrEnum):
    """How the project gets to the hosts that are reached by ssh: it is there already, or it is copied."""

    OFF = "off"
    RSYNC = "rsync"
    SFTP = "sftp"


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """``exclude`` are patterns of what is not copied; ``limit_gb`` bounds what may be (``tree.over_limit``)."""

    mode: SyncMode = SyncMode.OFF
    exclude: tuple[str, ...] = ()
    limit_gb: float = 1.0


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """The join window: at least ``min_rank_start`` ranks, hopefully ``target_ranks``; 0 means all of the roster.

    ``elastic``: hosts that no roster knows may join, before the start and while the run trains. ``token_file``: the
    join token of walk-ins, empty: there are none. ``start``: who closes the window.
    """

    min_rank_start: int = 0
    target_ranks: int = 0
    join_timeout_s: float = 300.0
    max_join_timeout_s: float = 600.0
    elastic: bool = True
    token_file: str = ""
    start: StartRule = StartRule.AUTO


@dataclass(frozen=True, slots=True)
class PlainPlan:
    """A run whose script trains by itself, as under torchrun: no engine, no head. So often all ranks are started anew
    after a failure, ``max_restarts``.
    """

    max_restarts: int = 0


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything about one run that is decided before it starts; holds no secret. This is ``run.json``.

    ``python``, ``cwd`` and ``script`` are the head's, on this machine. ``env`` is added for the head and for every
    rank; a host's own ``env`` wins over it. ``advertise`` is empty unless the cluster file says what workers dial.
    ``port`` 0 lets the system choose. ``cluster_file`` is the file that described the cluster, empty without one.
    ``spawns_head`` is False where the head is the process that launched the run (auto-promotion). ``project`` is the
    project's folder on this machine, ``cwd`` or above it; empty means ``cwd``. ``plain`` is None for a run with the
    engine. ``preflight``: hosts are looked at before their daemons start.
    """

    schema: int
    run_id: str
    name: str
    created_s: float
    bind_host: str
    port: int
    advertise: str
    python: str
    cwd: str
    script: tuple[str, ...]
    env: Mapping[str, str]
    hosts: tuple[HostPlan, ...]
    liveness: Liveness
    on_disconnect_s: float
    stop_timeout_s: float
    join: JoinPlan
    cluster_file: str = ""
    spawns_head: bool = True
    project: str = ""
    tls: TlsMode = TlsMode.AUTO
    preflight: bool = True
    plain: PlainPlan | None = None
    sync: SyncSettings = SyncSettings()


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What a person asked for, with the facts about this machine that the plan depends on.

    ``script`` is what follows the interpreter, verbatim: ``("train.py", "--epochs", "5")`` or ``("-m", "pkg.mod")``.
    ``cwd`` is absolute. ``local_names`` are the names and addresses of this machine. ``name`` is the run's name, empty
    for the script's. Times are seconds; ``created_s`` is wall time. ``join_token_file`` is what the environment
    names, ``own_join_token_file`` what this user keeps (``launch.join_token``); each empty without one.
    ``own_join_token_fault`` says why the latter cannot be used, empty where it can. ``home`` is this user's folder.
    """

    run_id: str
    created_s: float
    script: tuple[str, ...]
    cwd: str
    python: str
    local_names: frozenset[str]
    name: str = ""
    stop_timeout_s: float = 30.0
    spawns_head: bool = True
    plain: PlainPlan | None = None
    join_token_file: str = ""
    own_join_token_file: str = ""
    own_join_token_fault: str = ""
    preflight: bool = True
    home: str = ""


NO_SCRIPT: Final = "-"
"""Stands for the script where hosts are only looked at."""


def plan(spec: "ClusterSpec", request: LaunchRequest) -> RunSpec:
    """Everything about the run, decided. Performs no I/O.

    Ranks run in the place that corresponds to the working directory: below the project folder of their host when the
    launch happens below the project folder here, else in the project folder itself.

    Raises:
        ConfigError: no script, an ssh option that cannot be honoured, a tunnel to this machine, or a managed worker
            without a join token.
    """
    if not request.script or request.script == ("-m",):
        raise ConfigError("no script to launch; try: fdl launch train.py")
    controller = spec.controller
    token_file = _join_token_file(spec, request)
    project = _project(spec, request)
    below = _below(request.cwd, project)
    env = {**dict(spec.env), "FDL_RUN_ID": request.run_id}
    return RunSpec(
        schema=SCHEMA,
        run_id=request.run_id,
        name=request.name or script_name(request.script),
        created_s=request.created_s,
        bind_host=controller.host,
        port=controller.port,
        advertise=controller.advertise or "",
        python=request.python,
        cwd=os.path.normpath(os.path.join(project, below)),
        script=request.script,
        env=env,
        hosts=tuple(_host(worker, spec, request, project, below) for worker in spec.workers),
        liveness=Liveness(
            spec.liveness.heartbeat_s, spec.liveness.suspect_s, spec.liveness.dead_s, spec.liveness.startup_s
        ),
        on_disconnect_s=spec.on_disconnect_s,
        stop_timeout_s=request.stop_timeout_s,
        join=JoinPlan(
            controller.join.min_rank_start or 0,
            controller.join.target_ranks or 0,
            controller.join.join_timeout,
            controller.join.max_join_timeout,
            controller.join.elastic,
            token_file,
            start=StartRule(controller.join.start),
        ),
        cluster_file=spec.source.file,
        spawns_head=request.spawns_head,
        project=project,
        tls=TlsMode(spec.security.tls),
        preflight=request.preflight,
        plain=request.plain,
        sync=SyncSettings(SyncMode(spec.sync.mode), spec.sync.exclude, spec.sync.limit_gb),
    )


def script_name(script: tuple[str, ...]) -> str:
    """The name that a run takes from its script: the file's stem, or the module's name."""
    if script[0] == "-m":
        return script[1]
    return os.path.splitext(os.path.basename(script[0]))[0] or "run"


def bootstrap_for(spec: RunSpec, host: HostPlan, secret: str, controllers: tuple[str, ...]) -> Bootstrap:
    """What the daemon of ``host`` is given. ``secret`` is the host's, in hex; ``controllers`` are ``host:port``."""
    return Bootstrap(
        run_id=spec.run_id,
        secret=secret,
        controllers=controllers,
        host=host.name,
        devices=host.devices,
        script=host.script,
        cwd="." if host.cwd.startswith("~") else host.cwd,
        env={**spec.env, **host.env},
        python="" if host.python.startswith("~") else host.python,
        liveness=spec.liveness,
        on_disconnect_s=spec.on_disconnect_s,
        stop_timeout_s=spec.stop_timeout_s,
        tls=spec.tls,
        tunnelled=host.tunnel,
    )


def guest_bootstrap(spec: RunSpec, host: str) -> Bootstrap:
    """What a machine that joins by itself is told: ``cwd`` is relative to its copy of the project, and a script in the
    project is named from there. Secret, addresses and devices are its own to fill in. One that the roster knows gets
    what the roster says of it.
    """
    project = spec.project or spec.cwd
    below = _below(spec.cwd, project)
    known = next((plan.env for plan in spec.hosts if plan.name == host), {})
    return Bootstrap(
        run_id=spec.run_id,
        secret="",
        controllers=(),
        host=host,
        devices=(),
        script=_translated(spec.script, project, "~", below),
        cwd=below,
        env={**spec.env, **known},
        python="",
        liveness=spec.liveness,
        on_disconnect_s=spec.on_disconnect_s,
        stop_timeout_s=spec.stop_timeout_s,
    )


def walk_in_bootstrap(spec: RunSpec, host: str) -> Bootstrap:
    """As ``guest_bootstrap``, for a machine that has proven its join secret; a managed one of the roster is told what
    the cluster file says of it, too: devices, interpreter and the project's folder.
    """
    given = replace(guest_bootstrap(spec, host), is_walk_in=True)
    known = next((plan for plan in spec.hosts if plan.name == host and plan.kind is HostKind.MANAGED), None)
    if known is None:
        return given
    folder = known.cwd if given.cwd == "." else known.cwd.removesuffix(f"/{given.cwd}")
    return replace(given, devices=known.devices, python=known.python, project=folder)


def describe(spec: RunSpec, run_dir: str) -> list[str]:
    """Every command, folder and environment key of the run, as lines for ``--dry-run``; values of variables are left
    out, for they may be secrets.
    """
    lines = [
        f"run         {spec.run_id} ({spec.name})",
        f"listens on  {format_address(spec.bind_host, spec.port) if spec.port else spec.bind_host + ', any free port'}"
        + (f", workers dial {format_address(spec.advertise, spec.port)}" if spec.advertise else ""),
        f"tls         {_TLS_WORDS[spec.tls]}",
        f"directory   {run_dir}",
        f"controller  {shlex.join(commands.controller_argv(spec.python, run_dir))}",
        *_describe_head(spec),
    ]
    if spec.join.token_file:
        lines.insert(3, f"walk-ins    prove the join token in {spec.join.token_file}")
    for host in spec.hosts:
        way = f"{host.kind}, tunnel" if host.tunnel else host.kind
        is_copied = spec.sync.mode is not SyncMode.OFF and host.kind is HostKind.SSH
        lines += [
            f"host        {host.name} ({way}), devices: {' '.join(host.devices)}",
            *([f"  copied    by {spec.sync.mode} to {host.project}"] if is_copied else []),
            *_start_lines(host),
            f"  ranks     {shlex.join([host.python or 'python3', *host.script])}",
            f"  in        {host.cwd}",
            f"  env       {_keys({**spec.env, **host.env})}",
        ]
    return lines


def _describe_head(spec: RunSpec) -> list[str]:
    if spec.plain is not None:
        return [f"plain       no head, no engine; max_restarts: {spec.plain.max_restarts}"]
    return [
        f"head        {shlex.join([spec.python, *spec.script])}",
        f"  in        {spec.cwd}",
        f"  env       {_keys(spec.env)}",
    ]


def _start_lines(host: HostPlan) -> list[str]:
    if host.kind is HostKind.MANAGED:
        return ["  daemon    dials in by itself"]
    start = commands.openssh_command(host) or commands.daemon_argv(host.python)
    return [f"  daemon    {shlex.join(start)}", "  stdin     bootstrap with the host's secret: <redacted>"]


def _join_token_file(spec: "ClusterSpec", request: LaunchRequest) -> str:
    """The file of the join token in use: the environment's, the cluster file's, the user's own; empty without one. The
    user's own, which nobody has asked for, stops a run only that needs it.
    """
    configured = _expanded(spec.controller.join.token_file, "")
    path = request.join_token_file or configured
    managed = [worker.host for worker in spec.workers if worker.daemon == "managed"]
    if not path and request.own_join_token_fault:
        if managed:
            raise ConfigError(request.own_join_token_fault)
        return ""
    path = path or request.own_join_token_file
    if managed and not path:
        raise ConfigError(
            f"worker {managed[0]} has a managed daemon, and there is no join token that it could prove\n"
            f"  fdl join-config {managed[0]} makes one; `controller.join.token_file` and FDL_JOIN_TOKEN_FILE name any"
        )
    return path


def _project(spec: "ClusterSpec", request: LaunchRequest) -> str:
    """The project's folder here: what the cluster file says; else the folder of an ``fdl.cluster.yml`` where the launch
    is in it or below, for the nearest one is found from there; else where the launch is. One in the home folder is for
    every project in it. A file of another name, which has to be named, says nothing about the project.
    """
    from flodl.config.cluster import FILE_NAME  # pydantic is there: it has made ``spec``

    if spec.controller.path:
        return os.path.normpath(os.path.expanduser(spec.controller.path))
    folder, name = os.path.split(os.path.normpath(os.path.join(request.cwd, spec.source.file)))
    folder = spec.source.folder or folder
    is_project = name == FILE_NAME and folder != request.home and _below(request.cwd, folder) != "."
    return folder if is_project else os.path.normpath(request.cwd)


def _host(worker: "WorkerSpec", spec: "ClusterSpec", request: LaunchRequest, project: str, below: str) -> HostPlan:
    is_managed = worker.daemon == "managed"
    is_local = (
        not is_managed
        and worker.ssh is None
        and (worker.host in request.local_names or worker.host == spec.controller.host)
    )
    folder = worker.path or project
    if is_local:
        folder = os.path.normpath(_expanded(worker.path, project))
    if is_local and worker.tunnel:
        raise ConfigError(
            f"worker {worker.host} is this machine: there is no ssh session for its `tunnel`; leave it out"
        )
    ssh = None if is_local or is_managed else _ssh(worker, spec.liveness.dead_s)
    if ssh is not None:
        parse_options(ssh.options, worker.host)
    devices = ("all",) if worker.local_devices == "all" else tuple(str(device) for device in worker.local_devices)
    return HostPlan(
        name=worker.host,
        kind=HostKind.MANAGED if is_managed else HostKind.LOCAL if is_local else HostKind.SSH,
        devices=devices,
        python=worker.python or (request.python if is_local else ""),
        cwd=folder if below == "." else os.path.join(folder, below),
        script=_translated(request.script, project, folder, below),
        ranks=worker.ranks or (),
        env=_host_env(worker),
        ssh=ssh,
        tunnel=worker.tunnel,
        project=folder,
    )


def _ssh(worker: "WorkerSpec", dead_s: float) -> SshSpec:
    ssh, target = worker.ssh, worker.ssh_target
    spec = SshSpec(target)
    if ssh is not None:
        spec = SshSpec(target, ssh.port, ssh.user, ssh.identity_file, ssh.proxy_jump, tuple(ssh.options))
    return replace(spec, patience_s=dead_s, reopens=True) if worker.tunnel else spec


def _host_env(worker: "WorkerSpec") -> dict[str, str]:
    env: dict[str, str] = {}
    if worker.nccl_socket_ifname:
        env["NCCL_SOCKET_IFNAME"] = env["GLOO_SOCKET_IFNAME"] = worker.nccl_socket_ifname
    if worker.data_path:
        env["FDL_DATA_PATH"] = worker.data_path
    return {**env, **worker.env}


def _translated(script: tuple[str, ...], project: str, folder: str, cwd_below: str) -> tuple[str, ...]:
    """An absolute path into the project here becomes one into the project there; ``~`` is the other side's to expand,
    and nobody expands it in an argument.
    """
    if script[0] == "-m" or not os.path.isabs(script[0]):
        return script
    below = _below(script[0], project)
    if below == ".":
        return script
    path = os.path.relpath(below, cwd_below) if folder.startswith("~") else os.path.join(folder, below)
    return (path, *script[1:])


def _below(path: str, folder: str) -> str:
    relative = os.path.relpath(os.path.normpath(path), folder)
    return "." if relative == ".." or relative.startswith("../") else relative


def _expanded(path: str | None, default: str) -> str:
    return os.path.expanduser(path) if path else default


def _keys(env: Mapping[str, str]) -> str:
    return " ".join(sorted(env)) or "-"
