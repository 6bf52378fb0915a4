"""``fdl launch``: everything after the script's name belongs to the script, byte for byte."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from flodl.launch.launcher import LaunchOptions, launch, start
from flodl.launch.plan import PlainPlan
from flodl_cli.runs import complete_ended

if TYPE_CHECKING:
    from flodl.config.model import ClusterSpec


class _LaunchCommand(click.Command):
    """Splits the command line at the script before click can touch what follows it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, script = split_script(self, args)
        ctx.meta["flodl.script"] = script
        return super().parse_args(ctx, own)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The script is cut off before click could complete it: a run after ``--resume``, else a file."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        script = ctx.meta.get("flodl.script")
        if ctx.params.get("resume") and not script:
            return complete_ended(ctx, self.params[0], incomplete)
        return [CompletionItem(incomplete, type="file")]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "SCRIPT [ARGS]...", "|", "--resume [RUN]"]


def split_script(command: click.Command, args: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Cut ``args`` into launch's own options and the script with its arguments.

    The script is the first word that is neither an option nor an option's value, the word behind ``--``, or ``-m`` and
    the module's name. Option names are never completed from abbreviations.
    """
    options = {name: option for option in command.params if isinstance(option, click.Option) for name in option.opts}
    index = 0
    while index < len(args):
        word = args[index]
        if word == "--":
            return args[:index], tuple(args[index + 1 :])
        if word == "-m":
            return args[:index], tuple(args[index:])
        if not word.startswith("-") or word == "-":
            return args[:index], tuple(args[index:])
        index += 2 if _takes_next(word, options) else 1
    return args, ()


def _takes_next(word: str, options: dict[str, click.Option]) -> bool:
    if word.startswith("--"):
        option = options.get(word)
        return option is not None and not option.is_flag
    for position, letter in enumerate(word[1:], 2):
        option = options.get(f"-{letter}")
        if option is None:
            return False
        if not option.is_flag:
            return position == len(word)
    return False


@click.command("launch", cls=_LaunchCommand, short_help="train a script")
@click.option("--local", type=click.IntRange(1), metavar="N", help="N CPU ranks on this machine; no cluster file.")
@click.option("-c", "--cluster", "cluster_file", type=click.Path(path_type=Path), help="The cluster file.")
@click.option("-n", "--name", default="", help="The run's name; default: the script's.")
@click.option("-d", "--detach", is_flag=True, help="Print the run's id and return once the controller listens.")
@click.option("--dry-run", is_flag=True, help="Print every command, folder and environment key; start nothing.")
@click.option("--no-preflight", is_flag=True, help="Start without a look at the hosts; fdl probe is that look alone.")
@click.option(
    "--stop-timeout",
    type=click.FloatRange(0, 86400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Between SIGTERM and SIGKILL of a rank.",
)
@click.option("--plain", is_flag=True, help="SCRIPT trains by itself, as under torchrun; without flodl's engine.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    metavar="N",
    help="With --plain: so often all ranks start again after one has failed. Default: 0.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Instead of a script: a run that has ended; launch it again, from its last checkpoint. Default: the latest.",
)
@click.option("-m", "module", metavar="MODULE", expose_value=False, help="Run a module, as python -m does.")
@click.pass_context
def command(
    ctx: click.Context,
    local: int | None,
    cluster_file: Path | None,
    name: str,
    detach: bool,
    dry_run: bool,
    no_preflight: bool,
    stop_timeout: float,
    plain: bool,
    max_restarts: int | None,
    resume: bool,
) -> int:
    """Train SCRIPT with one rank per device, here or on a cluster.

    Without --local and -c, FDL_CLUSTER or the nearest fdl.cluster.yml decides; without those, every GPU of this
    machine, else one CPU rank. Everything after SCRIPT belongs to it.
    """
    script: tuple[str, ...] = ctx.meta["flodl.script"]
    if resume:
        if local is not None or cluster_file is not None or plain or len(script) > 1:
            raise click.UsageError("--resume takes a run: script, its arguments and the cluster are that run's.", ctx)
        options = LaunchOptions((), name, detach, dry_run, not no_preflight, stop_timeout)
        return _again(script[0] if script else None, options)
    if not script:
        raise click.UsageError("Missing the script to launch; try: fdl launch train.py", ctx)
    if script[0] == "-m" and len(script) == 1:
        raise click.UsageError("Option -m needs a module's name.", ctx)
    if local is not None and cluster_file is not None:
        raise click.UsageError("--local and -c exclude each other.", ctx)
    if max_restarts is not None and not plain:
        raise click.UsageError("--max-restarts needs --plain: a run with the engine survives losses without.", ctx)
    plan = PlainPlan(max_restarts or 0) if plain else None
    options = LaunchOptions(script, name, detach, dry_run, not no_preflight, stop_timeout, plain=plan)
    return launch(cluster_of(local, cluster_file), options)


def _again(run: str | None, options: LaunchOptions) -> int:
    from flodl.launch import rundir
    from flodl.launch.resumption import plan_resumption

    spec, stem = plan_resumption(rundir.find(run), options)
    click.echo(f"fdl: going on from {stem}", err=True)
    return start(spec, options)


def cluster_of(local: int | None, cluster_file: Path | None) -> "ClusterSpec":
    """The machines that the command line, the environment or the nearest cluster file name; else this one, with a
    word where it seems to have a GPU and offers none.
    """
    from flodl.config.builder import ClusterBuilder, local_cluster
    from flodl.config.cluster import find_cluster_file, load_cluster
    from flodl.config.gpus import probe_gpus

    if local is not None:
        return local_cluster(local)
    path = cluster_file or find_cluster_file(Path.cwd(), os.environ)
    if path is not None:
        return load_cluster(path)
    probe = probe_gpus()
    if probe.gpus:
        return ClusterBuilder.all_local_gpus().build()
    if probe.is_surprising:
        click.echo(f"fdl: warning: no GPU here, so one CPU rank: {probe.reason}\n  if it is meant: --local 1", err=True)
    return local_cluster(1)
