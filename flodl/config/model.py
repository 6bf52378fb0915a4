"""The cluster file's model: what may stand in ``fdl.cluster.yml``, its types, units, defaults and relations.

Strict: unknown keys are refused and nothing is coerced. Frozen: a spec never changes after it was validated. The same
model serves the file (``load_cluster``), ``ClusterBuilder`` and the JSON Schema.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from flodl.config.address import is_unspecified, parse_host
from flodl.config.problems import Finding, KeyPath
from flodl.config.relations import Machine, machine_findings, rank_findings, resolve_nothing
from flodl.errors import ConfigError

DEFAULT_PORT = 1337
SSH_PORT = 22

RESERVED_ENV = {
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FDL_RUN_ID", "FLODL_ROLE"),
        "flodl sets it for every rank; leave it out",
    ),
    "CUDA_VISIBLE_DEVICES": "name the worker's GPUs in `local_devices`",
}
"""Variables that flodl sets itself, with what to do instead of setting them."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SSH_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*=\S.*")
_GPU_ID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_DEVICE_WORDS = "a GPU index, a GPU UUID (GPU-…) or `cpu`"
_DEVICES_WORDS = "`all`, or a list of GPU indices, GPU UUIDs (GPU-…) or `cpu`, one entry per rank"


_AnySpec = TypeVar("_AnySpec", bound=BaseModel)


class Found(PydanticCustomError):
    """A validator's findings, their paths relative to the value that it checks."""

    def __new__(cls, findings: list[Finding]) -> Self:
        """``findings`` holds at least one."""
        return super().__new__(cls, "findings", "{text}", {"text": findings[0].expected, "findings": findings})


def _found(expected: str, fix: str = "") -> Found:
    return Found([Finding((), expected, fix)])


def _checked(spec: _AnySpec, findings: list[Finding]) -> _AnySpec:
    if findings:
        raise Found(findings)
    return spec


# ------------------------------------------------------------------------------------------------------ field types
def _host(value: object) -> object:
    if not isinstance(value, str):
        fix = 'put an address in brackets into quotes: "[::1]"' if isinstance(value, tuple) else ""
        raise _found("a host name or an IP address in full", fix)
    try:
        return parse_host(value)
    except ConfigError as wrong:
        raise _found(str(wrong)) from None


def _text(value: str) -> str:
    if not value or value != value.strip() or not value.isprintable():
        raise _found("printable text, not empty, without spaces around it")
    return value


def _word(value: str) -> str:
    if not value or re.search(r"\s", value) or not value.isprintable() or value.startswith("-"):
        raise _found("one word that does not start with `-`")
    return value


def _folder(value: str) -> str:
    if not value.startswith(("/", "~/")) and value != "~":
        raise _found("an absolute path, or one that starts with `~/`")
    return value


def _interpreter(value: str) -> str:
    if "/" in value and not value.startswith(("/", "~/")):
        raise _found("an absolute path, or the bare name of a program on the login shell's PATH")
    return value


def _ssh_target(value: str) -> str:
    if "@" in value:
        raise _found("a host name, an address or an alias of your ssh config", "put the user into `ssh.user`")
    return value.removeprefix("[").removesuffix("]")


def _ssh_option(value: str) -> str:
    if not _SSH_OPTION.fullmatch(value):
        raise _found("an OpenSSH option as Key=value", "for example StrictHostKeyChecking=accept-new")
    return value


def _env(value: object) -> object:
    if not isinstance(value, Mapping):
        raise _found("a mapping of variables to text")
    findings = []
    for name, text in value.items():
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            findings.append(Finding((name,), "a variable's name: letters, digits and `_`", at_key=True))
        elif name in RESERVED_ENV:
            findings.append(Finding((name,), f"another variable: {RESERVED_ENV[name]}", at_key=True))
        elif not isinstance(text, str):
            findings.append(Finding((name,), "text"))
        elif not _is_passable(text):
            findings.append(Finding((name,), "text that an environment can hold: valid Unicode without NUL"))
    if findings:
        raise Found(findings)
    return dict(value)


def _is_passable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _port(value: int) -> int:
    if not 1 <= value <= 65535:
        raise _found("a port from 1 to 65535")
    return value


def _port_or_any(value: int) -> int:
    return value if value == 0 else _port(value)


def _not_empty(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise _found("a list with at least one entry")
    return value


def _devices(value: object) -> object:
    if value == "all":
        return value
    if not isinstance(value, (tuple, list)) or not value:
        raise _found(_DEVICES_WORDS)
    findings = [Finding((place,), _DEVICE_WORDS) for place, one in enumerate(value) if not _is_device(one)]
    if findings:
        raise Found(findings)
    gpus = [one for one in value if one != "cpu"]
    repeated = [place for place, one in enumerate(value) if one != "cpu" and one in value[:place]]
    if repeated:
        raise Found([Finding((place,), "each GPU once: one GPU carries one rank") for place in repeated])
    if len({type(one) for one in gpus}) > 1:
        raise _found("GPUs all by index or all by UUID: a mix can name one GPU twice")
    return tuple(value)


def _is_device(one: object) -> bool:
    if isinstance(one, str):
        return one == "cpu" or _GPU_ID.fullmatch(one) is not None
    return isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1024


_PORT_SCHEMA: dict[str, JsonValue] = {"minimum": 1, "maximum": 65535}

Text: TypeAlias = Annotated[str, AfterValidator(_text)]
Word: TypeAlias = Annotated[str, AfterValidator(_word)]
Host: TypeAlias = Annotated[str, BeforeValidator(_host)]
Folder: TypeAlias = Annotated[Text, AfterValidator(_folder)]
Port: TypeAlias = Annotated[int, AfterValidator(_port), Field(json_schema_extra=_PORT_SCHEMA)]
Gigabytes: TypeAlias = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]
NotEmpty = AfterValidator(_not_empty)  # pydantic's own min_length also counts a list of invalid entries as empty
Env: TypeAlias = Annotated[
    Mapping[str, str],
    PlainValidator(_env),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{_ENV_NAME.pattern}$"},
            "additionalProperties": {"type": "string"},
        }
    ),
]
"""Environment variables; those that flodl sets itself are refused."""
Devices: TypeAlias = Annotated[
    tuple[int | str, ...] | Literal["all"],
    PlainValidator(_devices),
    PlainSerializer(lambda devices: devices if devices == "all" else list(devices), when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "all"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "anyOf": [
                            {"type": "integer", "minimum": 0, "maximum": 1023},
                            {"type": "string", "pattern": f"^(cpu|{_GPU_ID.pattern})$"},
                        ]
                    },
                },
            ]
        }
    ),
]
"""``all``, or one entry per rank: nvidia-smi's GPU index, a GPU UUID or MIG id, or ``cpu``."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands in a file: ``line`` and ``column`` from 1, ``raw`` the text as written."""

    line: int
    column: int
    raw: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where a spec came from. ``file`` is empty for one built in code, and ``folder``, free of links, for one that was
    not loaded from a file. Never part of a comparison of specs.
    """

    file: str = field(default="", compare=False)
    places: Mapping[KeyPath, Place] = field(default_factory=dict, compare=False)
    folder: str = field(default="", compare=False)


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


# ----------------------------------------------------------------------------------------------------------- the file
class JoinSpec(_Spec):
    """The join window: who must be there before training starts, and how long it may take."""

    min_rank_start: Count | None = None
    """Ranks without which training does not start; None takes `target_ranks`, else every rank of the roster."""
    target_ranks: Count | None = None
    """Ranks at which the window closes at once; None takes those of the roster, or `min_rank_start` if that is more."""
    join_timeout: Seconds = 300.0
    """Seconds until the window closes with `min_rank_start` ranks or more."""
    max_join_timeout: Seconds = 600.0
    """Seconds until the window fails with fewer than `min_rank_start` ranks."""
    start: Literal["auto", "manual", "hybrid"] = "auto"
    """`auto` starts by the rules above, `manual` waits for `fdl start`, `hybrid` takes whichever comes first."""
    elastic: bool = True
    """Whether hosts may join or leave after the start."""
    token_file: Folder | None = None
    """File of the join token that walk-ins prove; None takes `join.token` in the state folder, if it is there."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        findings = []
        if self.min_rank_start and self.target_ranks and self.min_rank_start > self.target_ranks:
            expected = f"at most target_ranks, which is {self.target_ranks}"
            findings.append(Finding(("min_rank_start",), expected))
        if self.join_timeout > self.max_join_timeout:
            findings.append(self._misordered())
        return _checked(self, findings)

    def _misordered(self) -> Finding:
        """``join_timeout`` above ``max_join_timeout``, of which one may be the default: told at the key that is set."""
        least, most = f"{self.join_timeout:g} seconds", f"{self.max_join_timeout:g} seconds"
        if "join_timeout" in self.model_fields_set:
            default = "" if "max_join_timeout" in self.model_fields_set else " by default"
            expected = f"at most max_join_timeout, which is {most}{default}"
            return Finding(
                ("join_timeout",), expected, f"lower `join_timeout`, or set `max_join_timeout` to {least} or more"
            )
        expected = f"at least join_timeout, which is {least} by default"
        return Finding(("max_join_timeout",), expected, f"add `join_timeout: {self.max_join_timeout:g}`, or less")


class ControllerSpec(_Spec):
    """The controller: where it listens and on what terms a run starts."""

    host: Host
    """Address to bind, and what workers dial unless `advertise` says otherwise."""
    advertise: Host | None = None
    """What workers dial; None takes `host`."""
    port: Annotated[int, AfterValidator(_port_or_any), Field(json_schema_extra=_PORT_SCHEMA)] = DEFAULT_PORT
    """The one port: control, bulk data, HTTP; 1 to 65535 (0, any free port, only in `local_cluster`)."""
    path: Folder | None = None
    """Project directory on this machine; None takes that of `fdl.cluster.yml`, here or above, else the current one."""
    join: JoinSpec = JoinSpec()
    """The join window."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        findings = []
        if self.advertise and is_unspecified(self.advertise):
            findings.append(Finding(("advertise",), "an address that can be dialled"))
        if is_unspecified(self.host) and not self.advertise:
            fix = "add `advertise` with the name or address that workers dial"
            findings.append(Finding(("host",), "an address that can be dialled, unless `advertise` gives one", fix))
        return _checked(self, findings)


class SshSpec(_Spec):
    """How a host is reached; what is left out comes from the user's own OpenSSH config."""

    target: Annotated[Word, AfterValidator(_ssh_target)] | None = None
    """Name, address or ssh-config alias to connect to; None takes the worker's `host`."""
    port: Port | None = None
    """ssh port, 1 to 65535."""
    user: Word | None = None
    """Login name."""
    identity_file: Folder | None = None
    """Private key on this machine."""
    proxy_jump: Word | None = None
    """Jump hosts as in OpenSSH's ProxyJump: `[user@]host[:port]`, separated by commas."""
    options: tuple[Annotated[str, AfterValidator(_ssh_option)], ...] = ()
    """More OpenSSH options as `Key=value`."""


class WorkerSpec(_Spec):
    """One host and its ranks."""

    host: Host
    """Name in the roster; also the ssh target unless `ssh.target` says otherwise."""
    local_devices: Devices = "all"
    """One rank each: GPU indices, GPU UUIDs or `cpu`; `all` is every GPU, else one CPU rank."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0, le=1_000_000)], ...], NotEmpty] | None = None
    """Global ranks of this host's devices, in order; over all workers exactly 0..n-1. None lets admission decide."""
    nccl_socket_ifname: Word | None = None
    """Network interface of the collective plane (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)."""
    path: Folder | None = None
    """Project directory on this host; None takes the controller's."""
    python: Annotated[Text, AfterValidator(_interpreter)] | None = None
    """Interpreter on this host; None takes `python3` of the login shell's PATH."""
    data_path: Folder | None = None
    """Data directory on this host."""
    env: Env = Field(default_factory=dict)
    """Environment variables of this host's ranks; they win over `cluster.env`."""
    ssh: SshSpec | None = None
    """How the host is reached; None connects to `host` by the user's ssh config."""
    tunnel: bool = False
    """Whether training traffic goes through the ssh session (CPU modes only)."""
    daemon: Literal["launched", "managed"] = "launched"
    """`launched` over ssh for the run, or `managed` by systemd on the host, dialling in by itself."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        findings = []
        if self.ranks and self.local_devices != "all" and len(self.ranks) != len(self.local_devices):
            expected = f"one rank per entry of local_devices, which has {len(self.local_devices)}"
            findings.append(Finding(("ranks",), expected))
        if self.daemon == "managed" and self.ssh is not None:
            findings.append(Finding(("ssh",), "no `ssh` beside `daemon: managed`: such a daemon dials in by itself"))
        if self.daemon == "managed" and self.tunnel:
            findings.append(Finding(("tunnel",), "no `tunnel` beside `daemon: managed`: there is no ssh session"))
        return _checked(self, findings)

    @property
    def ssh_target(self) -> str:
        """What ssh connects to: ``ssh.target``, else ``host``."""
        return (self.ssh and self.ssh.target) or self.host


class SyncSpec(_Spec):
    """How the project gets to the hosts that are reached by ssh."""

    mode: Literal["off", "rsync", "sftp"] = "off"
    """`off`: the path is shared or already there; `rsync` (where both sides have it, else sftp) and `sftp` copy it."""
    exclude: tuple[Text, ...] = ()
    """Patterns of what is not copied, as in `.gitignore`; stronger than `.fdlignore` and `.gitignore`."""
    limit_gb: Gigabytes = 1.0
    """GB, and 20,000 files for each of them, above which a project is not copied."""


class LivenessSpec(_Spec):
    """When a silent host or rank is suspected and when it is taken for dead; all in seconds."""

    heartbeat_s: Seconds = 1.0
    """Seconds between two beats."""
    suspect_s: Seconds = 10.0
    """Seconds of silence until a member is suspect."""
    dead_s: Seconds = 30.0
    """Seconds of silence until a member is dead."""
    startup_s: Seconds = 300.0
    """Seconds that a rank may take from its start to its first beat (imports, model building)."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        findings = []
        if self.heartbeat_s >= self.suspect_s:
            findings.append(Finding(("heartbeat_s",), f"less than suspect_s, which is {self.suspect_s:g} seconds"))
        if self.suspect_s >= self.dead_s:
            findings.append(Finding(("suspect_s",), f"less than dead_s, which is {self.dead_s:g} seconds"))
        return _checked(self, findings)


class SecuritySpec(_Spec):
    """What is encrypted."""

    tls: Literal["auto", "on", "off"] = "auto"
    """TLS on the controller's port; `auto`: for any address that is not loopback."""


class ClusterSpec(_Spec):
    """A whole cluster. Compare, copy and dump it as data; ``source`` remembers where each value stood."""

    controller: ControllerSpec
    """The controller."""
    workers: tuple[WorkerSpec, ...]
    """The hosts, in the order in which ranks are given; none: `join.min_rank_start` ranks come by themselves."""
    env: Env = Field(default_factory=dict)
    """Environment variables of every rank."""
    sync: SyncSpec = SyncSpec()
    """How the project gets to the hosts."""
    liveness: LivenessSpec = LivenessSpec()
    """When silence means trouble."""
    on_disconnect_s: Seconds = 120.0
    """Seconds for which a daemon keeps its ranks while its controller is silent."""
    security: SecuritySpec = SecuritySpec()
    """What is encrypted."""

    _source: Source = PrivateAttr(default_factory=Source)

    @model_validator(mode="after")
    def _relations(self) -> Self:
        ranks = rank_findings([worker.ranks for worker in self.workers])
        twins = machine_findings([machine_of(*each) for each in enumerate(self.workers)], resolve_nothing)
        return _checked(self, ranks + twins + self._join_findings())

    def _join_findings(self) -> list[Finding]:
        """Whether enough ranks can come at all."""
        join = self.controller.join
        key = "min_rank_start" if join.min_rank_start else "target_ranks"
        least = join.min_rank_start or join.target_ranks
        if not self.workers and not (least and join.elastic):
            expected = "at least one worker, or hosts that come by themselves: `join.min_rank_start`, and `elastic`"
            return [Finding(("workers",), expected)]
        devices = [worker.local_devices for worker in self.workers]
        known = sum(len(each) for each in devices if each != "all")
        if join.elastic or "all" in devices or not least or least <= known:
            return []
        expected = f"at most {known}, as many ranks as the workers have: with `elastic: false` nobody else may come"
        return [Finding(("controller", "join", key), expected)]

    @property
    def source(self) -> Source:
        """The file and the place of each value; empty for a spec built in code."""
        return self._source

    def with_source(self, source: Source) -> Self:
        """The same spec, read from ``source``."""
        copy = self.model_copy()
        copy._source = source
        return copy


class ClusterDocument(_Spec):
    """The file as a whole."""

    cluster: ClusterSpec
    """The cluster."""


def machine_of(index: int, worker: WorkerSpec) -> Machine:
    """What tells this worker's machine from the others'; ``index`` is its place in the list."""
    ssh = worker.ssh or SshSpec()
    return Machine(index, worker.host, worker.ssh_target, ssh.port or SSH_PORT, ssh.proxy_jump or "")
