"""What a person types and sets: commands, the cluster file, knobs; and the import layers."""

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel

import flodl_cli.main
from flodl.config.model import ClusterSpec
from flodl.messages import CadenceSettings
from tables.markdown import ROOT, documented, table


def commands() -> str:
    """Every command with its options, as click knows them."""
    parts = []
    context = click.Context(flodl_cli.main.cli)
    for name in flodl_cli.main.COMMANDS:
        command = flodl_cli.main.cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            parts += [describe_command(f"{name} {sub}", each) for sub, each in sorted(command.commands.items())]
        else:
            parts.append(describe_command(name, command))
    return "\n\n".join(parts)


def describe_command(name: str, command: click.Command) -> str:
    """One command: usage, help, options."""
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    text = re.sub(r"\b(RUN|FILE|SCRIPT|PATH)\b", r"`\1`", " ".join((command.help or "").split()))
    rows = [
        (
            ", ".join(f"`{one}`" for one in (*option.opts, *option.secondary_opts)),
            option.metavar or "",
            option.help or "",
        )
        for option in command.params
        if isinstance(option, click.Option)
    ]
    listed = "\n\n" + table(("option", "value", "does"), rows) if rows else ""
    return f"**`fdl {name} {usage}`**\n\n{text}{listed}"


def cluster_file() -> str:
    """Every key of the cluster file with its type, default and meaning."""
    return table(("key", "type", "default", "meaning"), list(keys_of(ClusterSpec, "cluster")))


def keys_of(model: type[BaseModel], path: str) -> Iterable[tuple[str, ...]]:
    """The rows of ``model``, nested models in their place."""
    shapes = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        nested = next((arg for arg in _arguments(field.annotation) if is_model(arg)), None)
        is_list = "tuple" in str(field.annotation)
        key = f"{path}.{name}" + ("[]" if nested and is_list else "")
        if nested is not None:
            yield from keys_of(nested, key)
            continue
        default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
        yield f"`{key}`", _shape(shapes[name]), default, " ".join((field.description or "").split())


def is_model(annotation: Any) -> bool:
    """Whether ``annotation`` is one of the file's sections."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _arguments(annotation: Any) -> list[Any]:
    inner = [leaf for each in get_args(annotation) for leaf in _arguments(each)]
    return [annotation, *inner]


def _default(value: Any) -> str:
    if value is None:
        return "–"
    if value == () or isinstance(value, Mapping):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _shape(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    options = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    if "const" in schema:
        return f"`{schema['const']}`"
    if options:
        return " or ".join(_shape(each) for each in options)
    words = {"array": "list", "object": "mapping", "string": "text", "integer": "whole number", "boolean": "yes/no"}
    kind = str(schema.get("type", "text"))
    return words.get(kind, kind)


def knobs() -> str:
    """Every knob of ``TrainerConfig`` and the builder."""
    return _knobs(ROOT / "flodl/spec/knobs.py", "Knobs")


def cadence_knobs() -> str:
    """Every knob of ``ElCheConfig``."""
    return _knobs(ROOT / "flodl/spec/cadence.py", "CadenceKnobs")


def _knobs(path: Path, name: str) -> str:
    tree = ast.parse(path.read_text())
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    said = documented(cls.body)
    rows = []
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            default = next((word.value for word in node.value.keywords if word.arg == "default"), None)
            rows.append((f"`{node.target.id}`", _knob_default(default), said.get(node.target.id, "")))
    return table(("knob", "default", "meaning"), rows)


def _knob_default(node: ast.expr | None) -> str:
    if node is None:
        return "required"
    text = ast.unparse(node)
    if text.startswith("CadenceSettings()."):
        return f"`{getattr(CadenceSettings(), text.removeprefix('CadenceSettings().'))}`"
    return f"`{text}`"


def layers() -> str:
    """The import layers as pyproject.toml states them, highest first."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = next(rule["layers"] for rule in rules if rule["id"] == "layers")
    return "\n".join(["```", "flodl_cli | flodl_daemon", *listed, "```"])
