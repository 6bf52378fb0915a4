"""``fdl.cluster.yml``: find it, load it, show where each value comes from, and its JSON Schema."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, JsonValue

from flodl.config.model import ClusterDocument, ClusterSpec, Source
from flodl.config.problems import ClusterFileError, Finding, KeyPath, Problem, format_path, shorten
from flodl.config.relations import Resolve, resolve_host
from flodl.config.validation import Invalid, validate, words_at
from flodl.config.yaml_source import MAX_FILE_BYTES, Document, read_yaml

FILE_NAME = "fdl.cluster.yml"
FILE_VARIABLE = "FDL_CLUSTER"

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

LeafPath: TypeAlias = tuple[KeyPath, object]


@dataclass(frozen=True, slots=True)
class Override:
    """A value that the command line or the environment puts in place of the file's.

    ``key`` is the key path without ``cluster.`` (``controller.port``), ``name`` the flag or variable as typed.
    """

    kind: Literal["flag", "env"]
    name: str
    key: str
    value: JsonValue


@dataclass(frozen=True, slots=True)
class Row:
    """One value with its origin: ``flag --port``, ``env FDL_PORT``, ``file:line`` or ``default``."""

    key: str
    value: JsonValue
    origin: str


def find_cluster_file(cwd: Path, env: Mapping[str, str]) -> Path | None:
    """Find the cluster file: what ``FDL_CLUSTER`` names, else ``fdl.cluster.yml`` in ``cwd`` or the nearest one above.

    Returns:
        Its path, None when there is none.

    Raises:
        ClusterFileError: ``FDL_CLUSTER`` names a file that is not there.
    """
    named = env.get(FILE_VARIABLE)
    if named:
        path = cwd / Path(named).expanduser()
        if not os.path.isfile(path):
            fix = f"correct {FILE_VARIABLE}, or unset it"
            raise ClusterFileError([Problem(str(path), None, None, "", f"{FILE_VARIABLE}={named}", "a file", fix)])
        return path
    start = Path(os.path.abspath(cwd))
    for folder in (start, *start.parents):
        if os.path.isfile(folder / FILE_NAME):
            return folder / FILE_NAME
    return None


def load_cluster(path: Path, resolve: Resolve = resolve_host) -> ClusterSpec:
    """Load and validate a cluster file.

    Args:
        path: the file.
        resolve: how names become addresses when looking for one machine listed twice; waits 5 s at most.

    Raises:
        ClusterFileError: it cannot be read or is not valid; ``problems`` lists everything that is wrong with it.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise ClusterFileError([Problem(str(path), None, None, "", reason, "a readable cluster file")]) from None
    spec = parse_cluster(content, str(path), resolve)
    return spec.with_source(replace(spec.source, folder=os.path.realpath(path.parent)))


def parse_cluster(content: bytes, file: str, resolve: Resolve = resolve_host) -> ClusterSpec:
    """As ``load_cluster``, from the bytes of a file called ``file``."""
    document = read_yaml(content, file, lambda place, text: text in words_at(place))
    problems = document.problems
    spec: ClusterSpec | None = None
    try:
        spec = validate(document.data, resolve)
    except Invalid as wrong:
        problems = problems + [_problem(finding, document, file) for finding in wrong.findings]
    if spec is None or problems:
        raise ClusterFileError(sorted(set(problems), key=lambda each: (each.line or 0, each.column or 0, str(each))))
    return spec.with_source(Source(file, document.values))


def show(spec: ClusterSpec, overrides: Sequence[Override] = ()) -> list[Row]:
    """List every value with its origin, in the order of the model: flag > env > file:line > default.

    ``overrides`` are those that apply; of several for one key a flag wins over a variable, then the first.
    """
    ranked = sorted(overrides, key=lambda one: one.kind != "flag")
    rows = []
    for path, value in _leaves(spec, ()):
        key = format_path(path)
        override = next((one for one in ranked if one.key == key), None)
        place = spec.source.places.get(("cluster", *path))
        if override:
            rows.append(Row(key, override.value, f"{override.kind} {override.name}"))
        elif place:
            rows.append(Row(key, _plain(value), f"{spec.source.file}:{place.line}"))
        else:
            rows.append(Row(key, _plain(value), "default"))
    return rows


def schema() -> dict[str, Any]:
    """The JSON Schema of the file, for editors."""
    return {"$schema": SCHEMA_DIALECT, "title": FILE_NAME, **ClusterDocument.model_json_schema()}


def _problem(finding: Finding, document: Document, file: str) -> Problem:
    places = document.keys if finding.at_key else document.values
    path = finding.path
    while path not in places and path:
        path = path[:-1]
    place = places.get(path) or document.values[()]
    read = shorten(place.raw) if finding.read is None else finding.read
    return Problem(file, place.line, place.column, format_path(finding.path), read, finding.expected, finding.fix)


def _leaves(value: object, path: KeyPath) -> Iterator[LeafPath]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _leaves(getattr(value, name), (*path, name))
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif isinstance(value, Mapping) and value:
        for name, text in value.items():
            yield (*path, name), text
    else:
        yield path, value


def _plain(value: Any) -> JsonValue:
    if isinstance(value, tuple):
        return list(value)
    return {} if isinstance(value, Mapping) else value
