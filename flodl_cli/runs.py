"""What commands share that take a RUN: the run that a word means, and the words that a shell may complete."""

import click
from click.shell_completion import CompletionItem

from flodl.errors import ConfigError
from flodl.launch import rundir
from flodl.launch.rundir import ControllerInfo, RunDir


def live_run(wanted: str | None) -> tuple[RunDir, ControllerInfo, str]:
    """The live run that ``wanted`` means, where its controller listens, and its id and name for a person.

    Raises:
        ConfigError: there is none, or it is one of several.
    """
    chosen = rundir.find(wanted, must_be_live=True)
    label = f"{chosen.run_id} ({rundir.run_name(chosen)})"
    info = chosen.controller()
    if info is None:
        raise ConfigError(f"run {label} has not started yet")
    return chosen, info, label


def complete_live(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids and names of live runs that begin so."""
    return _items(rundir.live_runs(), incomplete)


def complete_any(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same, and the latest of those that have ended."""
    return _items([*rundir.live_runs(), *rundir.all_runs()[:ENDED_SHOWN]], incomplete)


def complete_ended(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The latest runs that have ended."""
    live = {run.run_id for run in rundir.live_runs()}
    return _items([run for run in rundir.all_runs()[:ENDED_SHOWN] if run.run_id not in live], incomplete)


def complete_file(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shell's own files."""
    return [CompletionItem(incomplete, type="file")]


def complete_host(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Hosts of live runs, from what their directories say."""
    states = [run.read_json("state.json") or {} for run in rundir.live_runs()]
    hosts = [each.get("host") for state in states for each in state.get("hosts") or [] if isinstance(each, dict)]
    return [CompletionItem(host) for host in dict.fromkeys(map(str, hosts)) if host.startswith(incomplete)]


ENDED_SHOWN = 10
"""A shell's menu of all runs of a year helps nobody."""


def _items(runs: list[RunDir], incomplete: str) -> list[CompletionItem]:
    words: dict[str, str] = {}
    for run in runs:
        name = rundir.run_name(run)
        words.setdefault(run.run_id, name)
        if name:
            words.setdefault(name, run.run_id)
    return [CompletionItem(word, help=told) for word, told in words.items() if word.startswith(incomplete)]
