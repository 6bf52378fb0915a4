"""Tables and lines for ``fdl status``: from a snapshot (state.json) to text. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

DASH = "–"


def status_lines(state: Mapping[str, Any], name: str) -> list[str]:
    """The whole of ``fdl status``."""
    lines = [f"run {state.get('run_id', '')} ({name})  {_phase(state)}"]
    facts = [("mode", state.get("mode")), ("backend", state.get("backend")), ("version", state.get("version"))]
    shown = [f"{key} {value}" for key, value in facts if value not in (None, "")]
    if shown:
        lines.append("  ".join(shown))
    if progress := _progress(state):
        lines.append(progress)
    hosts, ranks = _records(state, "hosts"), _records(state, "ranks")
    if hosts:
        lines += ["", *table(("HOST", "STATE", "RANKS", "HEARD", "ADDRESS"), [_host_row(host) for host in hosts])]
    if ranks:
        header = ("RANK", "HOST", "DEVICE", "STATE", "STEPS", "RATE", "SHARE", "COUNT", "LOSS", "WHY")
        lines += ["", *table(header, [_rank_row(rank) for rank in ranks])]
    losses = state.get("losses")
    if isinstance(losses, list) and losses:
        lines += ["", f"tolerated losses: {len(losses)}"]
        lines += [f"  {loss.get('host', '')}: {loss.get('error', '')}" for loss in losses if isinstance(loss, dict)]
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; a column without any value is left out."""
    columns = [index for index in range(len(header)) if any(row[index] not in ("", DASH) for row in rows)]
    chosen = [[line[index] for index in columns] for line in (header, *rows)]
    widths = [max(len(line[index]) for line in chosen) for index in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in chosen]


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
    return str(state.get("phase", "unknown"))


def _progress(state: Mapping[str, Any]) -> str:
    epochs, epoch = state.get("num_epochs"), state.get("epoch")
    if not isinstance(epochs, int) or not isinstance(epoch, int) or not epochs:
        return ""
    merged, per_epoch = state.get("samples_merged"), state.get("epoch_samples")
    text = f"epoch {min(epoch + 1, epochs)}/{epochs}"
    if isinstance(merged, int) and isinstance(per_epoch, int) and per_epoch:
        text += f"  {merged}/{per_epoch} samples merged"
    cadence = state.get("cadence")
    if isinstance(cadence, dict):
        text += f"  cadence {cadence.get('phase', '')}, anchor {cadence.get('anchor', DASH)}"
    return text


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
        str(host.get("address") or DASH),
    )


def _rank_row(rank: Mapping[str, Any]) -> tuple[str, ...]:
    rate = rank.get("rate")
    return (
        str(rank.get("rank", "")),
        str(rank.get("host", "")),
        str(rank.get("device") or DASH),
        str(rank.get("state", "")),
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
