"""``fdl checkpoint``: look at one, verify it, take the weights out. Nothing in it is ever run, and no torch loaded."""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from flodl.checkpoint.export import export
from flodl.checkpoint.reader import find, look, opened
from flodl.checkpoint.show import describe
from flodl_cli.runs import complete_file

AGES: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
SIZES: Final = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@click.group("checkpoint", short_help="show, verify and export checkpoints")
def command() -> None:
    """Show, verify or export a checkpoint."""


@command.command("show")
@click.argument("path", shell_complete=complete_file)
@click.option("--json", "as_json", is_flag=True, help="One document.")
def show_command(path: str, as_json: bool) -> int:
    """Print what is in the checkpoint PATH, such as ckpts/run43; reads no tensor."""
    found = describe(look(path))
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return 0
    rows = list(_rows(found, time.time()))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name.ljust(width)}  {_printable(text)}")
    return 0


@command.command("verify")
@click.argument("path", shell_complete=complete_file)
def verify_command(path: str) -> int:
    """Read every byte of the checkpoint PATH; exit 0 when all are as they were written, 6 when not."""
    bundle = find(path)
    with opened(bundle) as (_, tensors):
        count = len(tensors.tensors)
    size = size_text(sum(part.size_bytes for part in bundle.meta.parts))
    click.echo(f"{bundle.stem}: OK, {count} tensors in {size}, every byte as it was written")
    return 0


@command.command("export")
@click.argument("path", shell_complete=complete_file)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("-f", "--force", is_flag=True, help="Replace FILE.")
def export_command(path: str, file: Path | None, force: bool) -> int:
    """Write the weights in the checkpoint PATH, under their state-dict names, to FILE.

    FILE is a .safetensors file, by default beside the checkpoint.
    """
    done = export(path, file, replace=force)
    click.echo(f"{done.path}: {done.tensor_count} tensors, {size_text(done.size_bytes)}")
    return 0


def size_text(size_bytes: int) -> str:
    """``size_bytes`` with one decimal and a unit."""
    for unit_bytes, unit in SIZES:
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} bytes"


def _rows(found: Mapping[str, Any], now_s: float) -> Iterator[tuple[str, str]]:
    yield "checkpoint", found["checkpoint"]
    yield "saved", f"{_when(found['saved_at_s'], now_s)}, reason {found['reason']}"
    yield "progress", _progress(found)
    yield "consensus", f"version {found['version']:,}, {found['global_step']:,} steps of all ranks"
    yield "ranks", f"{found['world_size']} in {found['mode']}"
    cadence = found["cadence"]
    yield "cadence", "starts afresh" if cadence is None else f"{cadence['phase']}, anchor {cadence['anchor']}"
    yield "model", f"{found['parameters']:,} parameters, {found['tensors']:,} tensors"
    kept = [name.replace("_", " ") for name in ("optimizer", "outer_optimizer") if found[f"has_{name}"]]
    yield "holds", ", ".join(["model", *kept])
    for part in found["parts"]:
        yield "file", f"{part['file']}, {size_text(part['size_bytes'])}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())


def _progress(found: Mapping[str, Any]) -> str:
    epoch, epochs, merged = found["epoch"], found["epochs"], found["epoch_merged"]
    if epoch == epochs:
        return f"all {epochs} epochs complete"
    return f"epoch {epoch + 1}/{epochs}, {merged:,} samples of it merged, {found['progress']:.0%} of the run"


def _when(saved_at_s: float, now_s: float) -> str:
    moment = datetime.fromtimestamp(int(saved_at_s), UTC).astimezone()
    age_s = int(now_s - saved_at_s)
    age = next((f", {age_s // unit_s} {unit} ago" for unit_s, unit in AGES if age_s >= unit_s), "")
    return f"{moment:%Y-%m-%d %H:%M:%S %z}{age}"


def _printable(text: str) -> str:
    """What came from a file must not steer the terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
