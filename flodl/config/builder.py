"""``ClusterBuilder``: the cluster file written in Python, with the same model and the same validation."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from flodl.config.gpus import probe_gpus
from flodl.config.model import ClusterSpec, ControllerSpec
from flodl.config.problems import ClusterError, Finding, KeyPath, Problem, format_path, shorten
from flodl.config.relations import Resolve, resolve_host
from flodl.config.validation import Invalid, validate
from flodl.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOCAL_HOST = "localhost"


def local_cluster(devices: int | Sequence[int | str], loopback: str = LOOPBACK, port: int = 0) -> ClusterSpec:
    """A cluster of this machine alone, as ``fdl launch --local N`` takes it: one worker, ``localhost``.

    Args:
        devices: how many CPU ranks, or one entry per rank: GPU indices, GPU UUIDs or ``cpu``.
        loopback: address to bind and dial; ``::1`` where there is no IPv4.
        port: the controller's port; 0 takes any free one when it binds.

    Raises:
        ConfigError: fewer than one rank, or a device that is none.
    """
    if isinstance(devices, int) and devices < 1:
        raise ConfigError(f"--local {devices}: expected at least 1 rank")
    wanted = ["cpu"] * devices if isinstance(devices, int) else list(devices)
    builder = ClusterBuilder().controller(loopback).done().host(LOCAL_HOST).devices(wanted).done()
    spec = builder.build()
    controller = ControllerSpec.model_validate({**spec.controller.model_dump(exclude_defaults=True), "port": port})
    return spec.model_copy(update={"controller": controller})


class ClusterBuilder:
    """Builds a ``ClusterSpec`` key by key; ``build`` validates and reports everything that is wrong at once.

    Example::

        spec = (
            ClusterBuilder()
            .controller("192.168.122.1").port(1337).path("/opt/project").done()
            .host("node-a").devices([0]).path("/opt/project").done()
            .host("node-b").devices("all").ssh("node-b.lab").ssh_port(2222).done()
            .build()
        )
    """

    def __init__(self) -> None:
        """Start empty."""
        self._cluster: dict[str, Any] = {}
        self._workers: list[dict[str, Any]] = []

    @classmethod
    def all_local_gpus(cls) -> Self:
        """One worker, this machine, with every GPU that ``CUDA_VISIBLE_DEVICES`` leaves, by UUID where it is known.

        Raises:
            ConfigError: there is no GPU; the message says why.
        """
        probe = probe_gpus()
        if not probe.gpus:
            raise ConfigError(f"no GPU on this machine: {probe.reason}; CPU ranks need no GPU: fdl launch --local N")
        has_ids = all(gpu.uuid for gpu in probe.gpus)
        devices = [gpu.uuid if has_ids and gpu.uuid else gpu.index for gpu in probe.gpus]
        builder = cls()
        builder.controller(LOOPBACK)
        builder.host(LOCAL_HOST).devices(devices)
        return builder

    def controller(self, host: str) -> "ControllerBuilder":
        """Describe the controller: the address to bind, and what workers dial."""
        self._cluster["controller"] = {"host": host}
        return ControllerBuilder(self, self._cluster["controller"])

    def host(self, name: str) -> "WorkerBuilder":
        """Add a worker; workers keep the order in which they are added."""
        self._workers.append({"host": name})
        return WorkerBuilder(self, self._workers[-1])

    def env(self, variables: Mapping[str, str]) -> Self:
        """Environment variables of every rank."""
        self._cluster["env"] = dict(variables)
        return self

    def sync(self, mode: str, exclude: Sequence[str] = (), limit_gb: float = 1.0) -> Self:
        """How the project gets to the hosts: ``off``, ``rsync`` or ``sftp``, patterns of what stays behind, and the GB
        above which it is not copied.
        """
        self._cluster["sync"] = {"mode": mode, "exclude": tuple(exclude), "limit_gb": limit_gb}
        return self

    def liveness(self, **seconds: float) -> Self:
        """``heartbeat_s``, ``suspect_s``, ``dead_s``, ``startup_s``; what is left out keeps its default."""
        self._cluster["liveness"] = dict(seconds)
        return self

    def on_disconnect_s(self, seconds: float) -> Self:
        """Seconds for which a daemon keeps its ranks while its controller is silent."""
        self._cluster["on_disconnect_s"] = seconds
        return self

    def tls(self, mode: str) -> Self:
        """``auto``, ``on`` or ``off``."""
        self._cluster["security"] = {"tls": mode}
        return self

    def build(self, resolve: Resolve = resolve_host) -> ClusterSpec:
        """Validate.

        Raises:
            ClusterError: the description is not valid; ``problems`` lists everything, by the file's key paths.
        """
        data = {"cluster": {**self._cluster, "workers": tuple(self._workers)}}
        try:
            return validate(data, resolve)
        except Invalid as wrong:
            raise ClusterError([_problem(finding, data) for finding in wrong.findings]) from None


class ControllerBuilder:
    """The controller's keys; ``done`` returns to the cluster."""

    def __init__(self, parent: ClusterBuilder, keys: dict[str, Any]) -> None:
        """``keys`` is the mapping that the methods fill."""
        self._parent, self._keys = parent, keys

    def advertise(self, host: str) -> Self:
        """What workers dial, when that is not the address to bind."""
        return self._set("advertise", host)

    def port(self, port: int) -> Self:
        """The one port, 1 to 65535."""
        return self._set("port", port)

    def path(self, folder: str) -> Self:
        """Project directory on the controller's machine."""
        return self._set("path", folder)

    def join(self, **keys: int | float | str | bool) -> Self:
        """The join window: any of the keys of ``join`` in the file."""
        return self._set("join", dict(keys))

    def done(self) -> ClusterBuilder:
        """Back to the cluster."""
        return self._parent

    def _set(self, key: str, value: object) -> Self:
        self._keys[key] = value
        return self


class WorkerBuilder:
    """One worker's keys; ``done`` returns to the cluster."""

    def __init__(self, parent: ClusterBuilder, keys: dict[str, Any]) -> None:
        """``keys`` is the mapping that the methods fill."""
        self._parent, self._keys = parent, keys

    def devices(self, devices: Sequence[int | str] | str) -> Self:
        """``all``, or one entry per rank: GPU indices, GPU UUIDs or ``cpu``."""
        return self._set("local_devices", devices if isinstance(devices, str) else tuple(devices))

    def ranks(self, ranks: Sequence[int]) -> Self:
        """Global ranks of the devices, in order; over all workers exactly 0 … n-1."""
        return self._set("ranks", tuple(ranks))

    def nccl_socket_ifname(self, interface: str) -> Self:
        """Network interface of the collective plane."""
        return self._set("nccl_socket_ifname", interface)

    def path(self, folder: str) -> Self:
        """Project directory on this host."""
        return self._set("path", folder)

    def python(self, interpreter: str) -> Self:
        """Interpreter on this host: an absolute path or a bare name."""
        return self._set("python", interpreter)

    def data_path(self, folder: str) -> Self:
        """Data directory on this host."""
        return self._set("data_path", folder)

    def env(self, variables: Mapping[str, str]) -> Self:
        """Environment variables of this host's ranks."""
        return self._set("env", dict(variables))

    def ssh(self, target: str) -> Self:
        """What ssh connects to: a name, an address or an alias of the ssh config."""
        return self._set_ssh("target", target)

    def ssh_port(self, port: int) -> Self:
        """Port of the ssh server, 1 to 65535."""
        return self._set_ssh("port", port)

    def ssh_user(self, user: str) -> Self:
        """Login name."""
        return self._set_ssh("user", user)

    def ssh_identity_file(self, path: str) -> Self:
        """Private key on this machine."""
        return self._set_ssh("identity_file", path)

    def ssh_proxy_jump(self, jump: str) -> Self:
        """Jump hosts: ``[user@]host[:port]``, separated by commas."""
        return self._set_ssh("proxy_jump", jump)

    def ssh_options(self, options: Sequence[str]) -> Self:
        """More OpenSSH options as ``Key=value``."""
        return self._set_ssh("options", tuple(options))

    def tunnel(self, is_on: bool = True) -> Self:
        """Training traffic through the ssh session."""
        return self._set("tunnel", is_on)

    def daemon(self, kind: str) -> Self:
        """``launched`` or ``managed``."""
        return self._set("daemon", kind)

    def done(self) -> ClusterBuilder:
        """Back to the cluster."""
        return self._parent

    def _set(self, key: str, value: object) -> Self:
        self._keys[key] = value
        return self

    def _set_ssh(self, key: str, value: object) -> Self:
        self._keys.setdefault("ssh", {})[key] = value
        return self


def _problem(finding: Finding, data: object) -> Problem:
    read = finding.read if finding.read is not None else _read_at(finding.path, data, finding.at_key)
    return Problem("ClusterBuilder", None, None, format_path(finding.path), read, finding.expected, finding.fix)


def _read_at(path: KeyPath, data: Any, at_key: bool) -> str:
    if at_key:
        return str(path[-1])
    for step in path:
        data = data[step] if isinstance(step, int) else data.get(step)
    return shorten(repr(data))
