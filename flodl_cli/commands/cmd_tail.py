"""``fdl tail``: logs of all ranks from the controller, or from the run's directory once it is gone."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from flodl.errors import ConfigError, PeerLost
from flodl.launch import rundir
from flodl.launch.control import ControllerClient
from flodl.launch.progress import log_line
from flodl.launch.rundir import RunDir
from flodl.launch.snapshot import snapshot
from flodl_cli.ended_logs import Wants, ended_lines
from flodl_cli.runs import complete_any, complete_host

DEFAULT_LINES: Final = 20
MAX_RANK: Final = 100_000
STREAMS: Final = ("stdout", "stderr")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command("tail", short_help="show logs")
@click.argument("run", required=False, shell_complete=complete_any)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("-n", "--lines", type=click.IntRange(0), default=None, metavar="N", help="Start N lines before the end.")
@click.option("--since", metavar="AGE", help="Start with what is younger: 90, 90s, 5m, 2h, 1d.")
@click.option("--rank", "ranks", multiple=True, metavar="LIST", help="Only these: 0,2-5. May be repeated.")
@click.option("--host", "hosts", multiple=True, shell_complete=complete_host, help="Only this host. May be repeated.")
@click.option("--stream", type=click.Choice(STREAMS), help="Only stdout or only stderr.")
@click.option("--grep", metavar="REGEX", help="Only lines in which it is found.")
@click.option("--prefix/--no-prefix", default=True, help="host:rank: or head: in front of each line.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(
    run: str | None,
    follow: bool,
    lines: int | None,
    since: str | None,
    ranks: tuple[str, ...],
    hosts: tuple[str, ...],
    stream: str | None,
    grep: str | None,
    prefix: bool,
    as_json: bool,
) -> int:
    """Show what the ranks print, wherever they run.

    RUN is a run's id, its beginning, or its name; default: the latest live run, else the latest.
    """
    chosen = rundir.find(run)
    wanted = parse_ranks(ranks)
    pattern = _pattern(grep)
    since_s = None if since is None else time.time() - parse_age(since)
    if wanted is not None or hosts:
        _check_choice(snapshot(chosen), wanted, hosts)
    query = _query(follow, lines, since_s, wanted, hosts, stream)

    def wants(rank: int, host: str, stream_of: str) -> bool:
        is_chosen = (wanted is None or rank in wanted) and (not hosts or host in hosts)
        return is_chosen and (stream is None or stream_of == stream)

    for line in _lines(chosen, query, wants, follow):
        text = str(line.get("text", ""))
        if not _fits(line, wanted, hosts, stream, since_s) or (pattern and not pattern.search(text)):
            continue
        click.echo(json.dumps(line) if as_json else log_line(line, prefix=prefix, names_head=True))
    return 0


def parse_ranks(lists: tuple[str, ...]) -> frozenset[int] | None:
    """``("0,2-5", "7")`` as a set; None for no choice.

    Raises:
        ConfigError: not numbers and ranges.
    """
    if not lists:
        return None
    chosen: set[int] = set()
    for part in ",".join(lists).split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > MAX_RANK:
            raise ConfigError(f"--rank {part!r}: expected ranks and ranges such as 0,2-5")
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def parse_age(text: str) -> float:
    """``5m`` in seconds.

    Raises:
        ConfigError: not an age.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--since {text!r}: expected an age such as 90s, 5m, 2h or 1d")
    return float(match[1]) * _SECONDS[match[2]]


def _check_choice(state: Mapping[str, Any], wanted: frozenset[int] | None, hosts: tuple[str, ...]) -> None:
    """Refuse a choice that no rank of the run fits. Before there are ranks any may come.

    Raises:
        ConfigError: names the ranks that there are, by host.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in state.get("ranks") or []:
        if isinstance(rank.get("rank"), int):
            ranks_of.setdefault(str(rank.get("host", "")), []).append(rank["rank"])
    fitting = [
        rank
        for host, ranks in ranks_of.items()
        for rank in ranks
        if (wanted is None or rank in wanted) and (not hosts or host in hosts)
    ]
    if ranks_of and not fitting:
        known = "; ".join(f"{host}: rank {', '.join(map(str, ranks))}" for host, ranks in ranks_of.items())
        raise ConfigError(f"the run has no rank that --rank and --host choose; there are {known}")


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return None if grep is None else re.compile(grep)
    except re.error as error:
        raise ConfigError(f"--grep {grep!r}: not a regular expression: {error}") from None


def _query(
    follow: bool,
    lines: int | None,
    since_s: float | None,
    ranks: frozenset[int] | None,
    hosts: tuple[str, ...],
    stream: str | None,
) -> dict[str, str | int]:
    query: dict[str, str | int] = {"follow": int(follow)}
    if lines is not None or since_s is None:
        query["tail"] = DEFAULT_LINES if lines is None else lines
    if since_s is not None:
        query["since"] = int(since_s)
    if ranks is not None:
        query["ranks"] = ",".join(map(str, sorted(ranks)))
    if hosts:
        query["host"] = ",".join(hosts)
    if stream is not None:
        query["stream"] = stream
    return query


def _lines(run: RunDir, query: dict[str, str | int], wants: Wants, follow: bool) -> Iterator[Mapping[str, Any]]:
    info = run.controller()
    if info is None or not run.is_live():
        yield from ended_lines(run, query, wants)
        return
    try:
        yield from ControllerClient.of(run, info).follow("/logs", query)
    except PeerLost:
        if run.is_live() or not follow:
            raise


def _fits(
    line: Mapping[str, Any],
    ranks: frozenset[int] | None,
    hosts: tuple[str, ...],
    stream: str | None,
    since_s: float | None,
) -> bool:
    ts_ms = line.get("ts")
    return (
        (ranks is None or line.get("rank") in ranks)
        and (not hosts or line.get("host") in hosts)
        and (stream is None or line.get("stream") == stream)
        and (since_s is None or not isinstance(ts_ms, (int, float)) or ts_ms >= since_s * 1e3)
    )
