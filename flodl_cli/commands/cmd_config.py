"""``fdl config``: what stands in the cluster file, where each value comes from, and its schema."""

import json
import os
from pathlib import Path

import click

from flodl.config.cluster import find_cluster_file, load_cluster, schema, show
from flodl.core.counted import counted
from flodl.errors import ConfigError


@click.group("config", short_help="validate and show the cluster file")
def command() -> None:
    """Validate and show the cluster file, or print its JSON Schema."""


@command.command("validate")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def validate_command(file: Path | None) -> int:
    """Check FILE (default: what fdl launch would take); exit 0 when it can be launched."""
    path = _path(file)
    spec = load_cluster(path)
    click.echo(f"{path}: valid, {counted(len(spec.workers), 'worker')}")
    return 0


@command.command("show")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One document.")
def show_command(file: Path | None, as_json: bool) -> int:
    """Print every value with its origin: file and line, or default."""
    rows = show(load_cluster(_path(file)))
    if as_json:
        click.echo(json.dumps([{"key": row.key, "value": row.value, "origin": row.origin} for row in rows], indent=1))
        return 0
    width = max(len(row.key) for row in rows)
    for row in rows:
        click.echo(f"{row.key.ljust(width)}  {json.dumps(row.value, ensure_ascii=False)}  ({row.origin})")
    return 0


@command.command("schema")
def schema_command() -> int:
    """Print the JSON Schema of the cluster file, for editors."""
    click.echo(json.dumps(schema(), indent=2))
    return 0


def _path(file: Path | None) -> Path:
    path = file or find_cluster_file(Path.cwd(), os.environ)
    if path is None:
        raise ConfigError("no fdl.cluster.yml here or above; name one, or set FDL_CLUSTER")
    return path
