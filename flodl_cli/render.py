"""What ``fdl status`` shows: from a snapshot (state.json) to text.

On a terminal a table fits its width; elsewhere every cell stands whole, on one line per row.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from flodl.launch.progress import duration, phase_words, plain_line
from flodl.launch.waiting import whom
from flodl.spec.words import printable

DASH = "–"
UNBOUNDED_COLUMNS: Final = 100_000
"""The width where nobody looks: no cell is cut or wrapped."""

HOST_HEADER: Final = ("HOST", "STATE", "RANKS", "HEARD", "ADDRESS")
RANK_HEADER: Final = ("RANK", "HOST", "DEVICE", "PID", "STATE", "UP", "STEPS", "RATE", "SHARE", "COUNT", "LOSS", "WHY")
FREE_TEXT: Final = frozenset({"HOST", "ADDRESS", "WHY"})
"""Columns that wrap on a narrow terminal; the others keep their width."""

STYLES: Final = {
    "suspect": "yellow",
    "frozen": "yellow",
    "dead": "red",
    "gone": "red",
    "failed": "red",
    "vanished": "red",
    "damaged": "red",
}


def status_text(state: Mapping[str, Any], name: str, stream: TextIO) -> str:
    """The whole of ``fdl status``, without a line end, as ``stream`` shows it best."""
    return _text(status_parts(state, name), stream)


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> str:
    """A table alone, likewise; a column without any value is left out."""
    return _text([table(header, rows)], stream)


def _text(parts: Sequence[RenderableType], stream: TextIO) -> str:
    console = screen(stream)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def screen(stream: TextIO) -> Console:
    """A console for ``stream``: with its width and colours where it is a terminal, else plain and as wide as needed."""
    is_screen = stream.isatty()
    return Console(
        file=stream,
        force_terminal=is_screen,
        width=None if is_screen else UNBOUNDED_COLUMNS,
        color_system="auto" if is_screen and not os.environ.get("NO_COLOR") else None,
        highlight=False,
    )


def status_parts(state: Mapping[str, Any], name: str) -> list[RenderableType]:
    """Lines and tables, in order."""
    lines = [f"run {state.get('run_id', '')} ({name})  {_phase(state)}"]
    facts = [("mode", state.get("mode")), ("backend", state.get("backend")), ("version", state.get("version"))]
    shown = [f"{key} {value}" for key, value in facts if value not in (None, "")]
    lines += [message] if (message := _message(state)) else []
    lines += [f"waiting for {awaited}"] if (awaited := _awaited(state)) else []
    lines += ["  ".join(shown)] if shown else []
    lines += [line for line in (plain_line(state), _progress(state), _cadence(state)) if line]
    parts: list[RenderableType] = [Text(printable(line)) for line in lines]
    if hosts := _records(state, "hosts"):
        parts += [Text(), table(HOST_HEADER, [_host_row(host) for host in hosts])]
    if ranks := _records(state, "ranks"):
        parts += [Text(), table(RANK_HEADER, [_rank_row(rank) for rank in ranks])]
    if absent := _records(state, "absent"):
        parts += [Text(), Text(f"missing hosts: {len(absent)}")]
        parts += [Text(f"  {printable(_absence(each))}") for each in absent]
    losses = state.get("losses")
    if isinstance(losses, list) and losses:
        parts += [Text(), Text(f"tolerated losses: {len(losses)}")]
        parts += [
            Text(printable(f"  {loss.get('host', '')}: {loss.get('error', '')}"))
            for loss in losses
            if isinstance(loss, dict)
        ]
    return parts


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without lines; a column without any value is left out."""
    columns = [index for index in range(len(header)) if any(row[index] not in ("", DASH) for row in rows)]
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index in columns:
        made.add_column(header[index], no_wrap=header[index] not in FREE_TEXT, overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(row[index].replace("\n", " ")), STYLES.get(row[index], "")) for index in columns))
    return made


def number(value: object, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, a dash for none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return DASH
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def percent(value: object) -> str:
    """A share of 1 in percent, a dash for none."""
    return f"{value:.1%}" if isinstance(value, (int, float)) else DASH


def _phase(state: Mapping[str, Any]) -> str:
    outcome = state.get("outcome")
    if isinstance(outcome, dict):
        return f"{outcome.get('status', 'ended')}, exit code {outcome.get('exit_code', '?')}"
    return phase_words(state)


def _message(state: Mapping[str, Any]) -> str:
    """Why the run ends or has ended; empty while it goes on."""
    outcome = state.get("outcome")
    words = (outcome if isinstance(outcome, dict) else state).get("message")
    return printable(str(words or ""))


def _awaited(state: Mapping[str, Any]) -> str:
    """Whom a run waits for; hosts that have not come are listed with their reasons instead."""
    is_over = isinstance(state.get("outcome"), dict) or "vanished" in state
    return "" if is_over or state.get("phase") == "waiting" else whom(state)


def _absence(host: Mapping[str, Any]) -> str:
    stage = f"{host['stage']}: " if host.get("stage") not in (None, "join") else ""
    return f"{host.get('host', '')}: {stage}{host.get('reason', '')}"


def _progress(state: Mapping[str, Any]) -> str:
    epochs, epoch = state.get("num_epochs"), state.get("epoch")
    if not isinstance(epochs, int) or not isinstance(epoch, int) or not epochs:
        return ""
    merged, per_epoch = state.get("samples_merged"), state.get("epoch_samples")
    text = f"epoch {min(epoch + 1, epochs)}/{epochs}"
    if isinstance(merged, int) and isinstance(per_epoch, int) and per_epoch:
        text += f"  {merged}/{per_epoch} samples merged"
    return text


def _cadence(state: Mapping[str, Any]) -> str:
    cadence = state.get("cadence")
    if not isinstance(cadence, dict):
        return ""
    anchor, is_settled, verdict = cadence.get("anchor"), cadence.get("settled"), cadence.get("verdict")
    text = f"cadence {cadence.get('phase', '')}" + ("" if anchor is None else f", anchor {anchor}")
    if isinstance(is_settled, bool):
        text += " settled" if is_settled else " not settled"
    return text + (f", verdict {verdict}" if verdict else "")


def _host_row(host: Mapping[str, Any]) -> tuple[str, ...]:
    ranks = host.get("ranks")
    named = ",".join(map(str, ranks)) if isinstance(ranks, (list, tuple)) else number(ranks)
    age = host.get("age_s")
    heard = f"{age:.1f}s ago" if isinstance(age, (int, float)) else DASH
    return (
        str(host.get("host", "")),
        str(host.get("state", "")),
        named or DASH,
        heard,
        str(host.get("address") or DASH) + (" (tunnel)" if host.get("tunnelled") else ""),
    )


def _rank_row(rank: Mapping[str, Any]) -> tuple[str, ...]:
    rate, uptime_s = rank.get("rate"), rank.get("uptime_s")
    return (
        str(rank.get("rank", "")),
        str(rank.get("host", "")),
        str(rank.get("device") or DASH),
        number(rank.get("pid")),
        str(rank.get("state", "")),
        duration(uptime_s) if isinstance(uptime_s, (int, float)) else DASH,
        number(rank.get("steps")),
        f"{rate:.4g}/s" if isinstance(rate, (int, float)) else DASH,
        percent(rank.get("share")),
        number(rank.get("count")),
        number(rank.get("loss")),
        str(rank.get("reason") or DASH),
    )


def _records(state: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    records = state.get(key)
    return [each for each in records if isinstance(each, dict)] if isinstance(records, list) else []
