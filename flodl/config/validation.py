"""From plain data to a validated ``ClusterSpec``, or to every reason against it at once."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flodl.config.address import parse_host
from flodl.config.model import SSH_PORT, ClusterDocument, ClusterSpec
from flodl.config.problems import Finding, KeyPath
from flodl.config.relations import Machine, Resolve, machine_findings, rank_findings
from flodl.config.yaml_source import Trap
from flodl.errors import ConfigError

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "`true` or `false`",
    "tuple_type": "a list",
    "dict_type": "a mapping of names to text",
    "mapping_type": "a mapping of names to text",
    "string_unicode": "text of valid Unicode",
    "finite_number": "a finite number",
}

_REMEDIES: dict[KeyPath, str] = {
    ("cluster", "controller", "join", "token"): "a token never stands in this file: use a token file or the environment"
}


class Invalid(Exception):
    """The data is no cluster; ``findings`` has every reason. Never leaves the config room."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        super().__init__(f"{len(findings)} findings")


def validate(data: object, resolve: Resolve) -> ClusterSpec:
    """Check the content of a whole file (``{"cluster": …}``; lists as tuples).

    Raises:
        Invalid: with findings of every rule that is broken, as far as each can be judged beside the others.
    """
    findings = list(_across_workers(data, resolve))
    spec: ClusterSpec | None = None
    try:
        spec = ClusterDocument.model_validate(data).cluster
    except ValidationError as wrong:
        for error in wrong.errors(include_url=False):
            findings += _findings_of(error)
    if spec is None or findings:
        raise Invalid(findings)
    return spec


def words_at(path: KeyPath) -> tuple[str, ...]:
    """The words allowed at ``path``, empty where the value is not one of a few words."""
    kind = _kind_at(path)
    return tuple(get_args(kind)) if get_origin(kind) is Literal else ()


def keys_at(path: KeyPath) -> tuple[str, ...]:
    """The keys that the mapping at ``path`` may have, empty where it has none or takes any."""
    kind = _kind_at(path)
    return tuple(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else ()


# ------------------------------------------------------------------------------------------------ pydantic's errors
def _findings_of(error: ErrorDetails) -> Iterable[Finding]:
    path: KeyPath = error["loc"]
    context = error.get("ctx", {})
    if error["type"] == "findings":
        found: list[Finding] = context["findings"]
        # The rules across workers were judged before, with names resolved.
        for one in found if path != ("cluster",) else [each for each in found if not _is_of_a_worker(each)]:
            fix = "" if one.at_key else _fix_found(_dig(error["input"], one.path), path, one.expected)
            yield Finding((*path, *one.path), one.expected, one.fix or fix, one.read, one.at_key)
    elif error["type"] == "missing":
        keys = ", ".join(f"`{key}`" for key in keys_at(path[:-1]))
        yield Finding(
            path[:-1], f"the key `{path[-1]}`, which must not be left out (keys here: {keys})", read="no such key"
        )
    elif error["type"] == "extra_forbidden":
        yield _unknown_key(path)
    else:
        yield Finding(
            path, _expected(error["type"], path, context, error["msg"]), _fix(error["type"], error["input"], path)
        )


def _is_of_a_worker(finding: Finding) -> bool:
    return finding.path[0] == "workers" and len(finding.path) > 1


def _unknown_key(path: KeyPath) -> Finding:
    known = keys_at(path[:-1])
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    expected = f"one of the keys {', '.join(f'`{key}`' for key in known)}"
    fix = _REMEDIES.get(path, f"did you mean `{near[0]}`?" if near else "")
    return Finding(path, expected, fix, at_key=True)


def _expected(kind: str, path: KeyPath, context: Mapping[str, Any], message: str) -> str:
    match kind:
        case "literal_error":
            return f"one of {', '.join(f'`{word}`' for word in words_at(path))}"
        case "model_type" | "model_attributes_type":
            return f"a mapping with the keys {', '.join(f'`{key}`' for key in keys_at(path))}"
        case "greater_than":
            return f"more than {context['gt']:g}"
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "less_than_equal":
            return f"at most {context['le']:g}"
        case _:
            return _EXPECTED.get(kind, message)


def _fix(kind: str, value: object, path: KeyPath) -> str:
    match kind:
        case "string_type":
            return _fix_text(value)
        case "int_type" | "float_type":
            return _fix_number(value)
        case "bool_type":
            return _fix_bool(value)
        case "literal_error":
            near = difflib.get_close_matches(value, words_at(path), n=1) if isinstance(value, str) else []
            return f"did you mean `{near[0]}`?" if near else _warn(value)
        case "tuple_type":
            return "write it as a list: [ … ]"
        case _:
            return _warn(value)


def _fix_found(value: object, path: KeyPath, expected: str) -> str:
    if expected == "text":
        return _fix_text(value)
    if isinstance(value, Trap) and path[-1] in ("host", "advertise"):
        return _fix_text(value) if _host(value.text) else _warn(value)
    return _fix_number(value) if isinstance(value, (Trap, str)) else ""


def _fix_text(value: object) -> str:
    if isinstance(value, Trap):
        return _warn(value) + (f'; put it in quotes: "{value.text}"' if value.text else "")
    if isinstance(value, (int, float)):
        return "put it in quotes"
    if isinstance(value, tuple):
        return "put text that starts with `[` in quotes"
    return ""


def _fix_number(value: object) -> str:
    if isinstance(value, Trap):
        return _warn(value) + (f"; write {value.decimal}" if value.decimal else "")
    if isinstance(value, str) and value.lstrip("+-").replace(".", "", 1).isdecimal():
        return f"drop the quotes: {value}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)}"
    return ""


def _fix_bool(value: object) -> str:
    if isinstance(value, Trap) and value.reads_as.startswith("the boolean"):
        return f"write {value.reads_as.removeprefix('the boolean ')}: only some YAML readers take `{value.text}` so"
    if isinstance(value, str) and value.casefold() in ("true", "false"):
        return f"drop the quotes: {value.casefold()}"
    return _warn(value)


def _warn(value: object) -> str:
    if not isinstance(value, Trap):
        return ""
    return (
        f"YAML readers take `{value.text}` for {value.reads_as}"
        if value.text
        else "write a value, or leave the key out"
    )


# ------------------------------------------------------------------------------------------- rules over raw workers
def _across_workers(data: object, resolve: Resolve) -> Iterable[Finding]:
    """The rules that span workers, on what is readable, so that they are judged beside errors elsewhere."""
    cluster = _get(data, "cluster")
    port = _get(_get(cluster, "controller"), "port")
    if port == 0 and isinstance(port, int) and not isinstance(port, bool):
        yield Finding(("cluster", "controller", "port"), "a port from 1 to 65535")
    workers = _get(cluster, "workers")
    if not isinstance(workers, tuple):
        return
    machines = [machine for index, worker in enumerate(workers) if (machine := _machine(index, worker))]
    ranks = [_get(worker, "ranks") for worker in workers]
    found = machine_findings(machines, resolve)
    if all(own is None or _is_ranks(own) for own in ranks) and all(isinstance(worker, Mapping) for worker in workers):
        found = rank_findings(ranks) + found
    for one in found:
        yield Finding(("cluster", *one.path), one.expected, one.fix, one.read)


def _machine(index: int, worker: object) -> Machine | None:
    ssh = _get(worker, "ssh")
    host = _host(_get(worker, "host"))
    port, jump = _get(ssh, "port"), _get(ssh, "proxy_jump")
    if host is None:
        return None
    target = _host(_get(ssh, "target")) or host
    return Machine(
        index, host, target, port if isinstance(port, int) else SSH_PORT, jump if isinstance(jump, str) else ""
    )


def _host(value: object) -> str | None:
    try:
        return parse_host(value) if isinstance(value, str) else None
    except ConfigError:
        return None


def _is_ranks(own: object) -> bool:
    return isinstance(own, tuple) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in own)


def _dig(data: Any, path: KeyPath) -> object:
    for step in path:
        data = data.get(step) if isinstance(data, Mapping) else data[int(step)]
    return data


def _get(data: object, key: str) -> Any:
    return data.get(key) if isinstance(data, Mapping) else None


# ------------------------------------------------------------------------------------------------- along the model
def _kind_at(path: Sequence[str | int]) -> Any:
    """The model's type at ``path``, None where the path leaves the model."""
    kind: Any = ClusterDocument
    for step in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            known = kind.model_fields.get(str(step))
            kind = _bare(known.annotation) if known else None
        elif get_origin(kind) is tuple:
            kind = _bare(get_args(kind)[0])
        else:
            return None
    return kind


def _bare(kind: Any) -> Any:
    """Without ``Annotated`` and ``| None``."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    others = [one for one in get_args(kind) if one is not type(None)]
    return _bare(others[0]) if type(None) in get_args(kind) else kind
