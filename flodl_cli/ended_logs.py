"""What a run that has ended has printed: from its directory, in the order in which it came."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from flodl.launch.headline import last_lines
from flodl.launch.rundir import RunDir
from flodl.monitor.log_lines import LineReader, cursor_at, tail_reader
from flodl.monitor.log_store import HEAD
from flodl.monitor.stored_logs import StoredLogs

Wants = Callable[[int, str, str], bool]
"""Chooses by rank, host and stream."""


def ended_lines(run: RunDir, query: Mapping[str, str | int], wants: Wants) -> Iterator[Mapping[str, Any]]:
    """The lines that ``query`` (``tail``, ``since``) and ``wants`` choose, as the controller gave them; where the index
    does not tell the order, those of one file after the other, after a word about it.
    """
    host_of = _hosts(run)
    try:
        logs = StoredLogs(run.logs)
    except (OSError, ValueError) as error:
        yield from _from_files(run, query, host_of, wants, error)
        return

    def chosen(rank: int, stream: str) -> bool:
        return wants(rank, host_of.get(rank, ""), stream)

    first = logs.first_since(int(query["since"]) * 1000) if "since" in query else 0
    reader = LineReader(logs, cursor_at(first), chosen)
    if "tail" in query:
        reader = asyncio.run(tail_reader(logs, chosen, int(query["tail"]), first, with_rest=True))
    while True:
        lines = reader.lines() if reader.next_arrival < logs.count else reader.rest()
        for line in lines:
            yield {
                "cursor": line.cursor,
                "ts": line.ts_ms,
                "rank": line.rank,
                "host": host_of.get(line.rank, ""),
                "stream": line.stream,
                "text": line.text,
            }
        if not lines and reader.next_arrival >= logs.count:
            return


def _from_files(
    run: RunDir, query: Mapping[str, str | int], host_of: Mapping[int, str], wants: Wants, error: Exception
) -> Iterator[Mapping[str, Any]]:
    paths = sorted(run.logs.glob("*.std???.log"), key=_natural)
    if paths:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged: {error}"
        dropped = "; --since is left out" if "since" in query else ""
        click.echo(
            f"fdl: {run.logs / 'index'} {why}; without it one log follows the other, and -n counts in each{dropped}",
            err=True,
        )
    for path in paths:
        name, stream, _ = path.name.rsplit(".", 2)
        rank = int(name[4:]) if name.startswith("rank") and name[4:].isdigit() else HEAD
        host = host_of.get(rank, "")
        if (rank == HEAD and name != "head") or not wants(rank, host, stream) or not query.get("tail", 1):
            continue
        for text in last_lines(path, int(query.get("tail", 1 << 30))):
            yield {"rank": rank, "host": host, "stream": stream, "text": text}


def _hosts(run: RunDir) -> dict[int, str]:
    return {
        rank["rank"]: str(rank.get("host", ""))
        for rank in (run.read_json("state.json") or {}).get("ranks") or []
        if isinstance(rank, dict) and isinstance(rank.get("rank"), int)
    }


def _natural(path: Path) -> tuple[int, str]:
    digits = "".join(char for char in path.name if char.isdigit())
    return (int(digits) if digits else -1, path.name)
