"""``fdl``: a click group that imports a command's module only when that command runs.

Errors of flodl end with one message on stderr and the exit code of their class; ``FDL_TRACEBACK=1`` shows where they
came from.
"""

import importlib
import io
import os
import sys
from typing import Final

import click

COMMANDS: Final = {
    "attach": "watch a live run as fdl launch does, to its end",
    "checkpoint": "show, verify and export checkpoints",
    "config": "validate, show and describe the cluster file",
    "daemon": "serve one run after another on this machine, by itself or under systemd",
    "debug": "gather what a bug report needs",
    "drain": "let a host leave a run at the next commit, without loss",
    "join": "offer this machine's devices to a run, until it ends",
    "join-config": "make what a machine needs to walk in: token, key, settings",
    "launch": "train a script on this machine or on a cluster",
    "probe": "check whether this machine and the hosts are ready for a run",
    "ps": "list runs, live and past",
    "start": "start a run whose join window is held",
    "status": "show a run's phase, hosts, ranks, rates and shares",
    "stop": "end a run in order, or at once",
    "tail": "show the logs of a run's ranks, wherever they run",
}
"""Every command with its line in ``fdl --help``, which must not import them."""


class LazyGroup(click.Group):
    """Finds commands by name in ``flodl_cli.commands``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"flodl_cli.commands.cmd_{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them from ``COMMANDS``, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name near commands for one that does not exist."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib  # only for this message

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


def _show_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from flodl import __version__

        click.echo(f"fdl {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show it and exit."
)
def cli() -> None:
    """Data-parallel training on the machines you have."""


def main(argv: list[str] | None = None) -> None:
    """The console script's entry point; always ends by SystemExit."""
    from flodl.launch import standard_streams

    standard_streams.open_closed()
    standard_streams.guard()
    from flodl.errors import FlodlError
    from flodl.spec.words import printable

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python's stderr: what it cannot hold fails no command
    try:
        code = cli.main(args=argv, prog_name="fdl", standalone_mode=False)
    except standard_streams.OutputLost as error:
        standard_streams.give_up_output()
        if not isinstance(error, standard_streams.ReaderGone):
            click.echo(f"fdl: {error}", err=True)
        code = error.exit_code
    except FlodlError as error:
        if os.environ.get("FDL_TRACEBACK"):
            raise
        click.echo(f"fdl: {printable(str(error))}", err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        code = _interrupted(error)
    sys.exit(code if isinstance(code, int) else 0)


def _interrupted(error: BaseException) -> int:
    """The exit code; click has put an exception of its own in front of ours."""
    from flodl.launch.interruption import Interrupted

    cause = error.__cause__ if isinstance(error, click.Abort) else error
    if not isinstance(cause, Interrupted):
        return 130
    click.echo(f"fdl: {cause}", err=True)
    return cause.exit_code


if __name__ == "__main__":
    main()
