"""The part of a launch in which the project travels: what is here is read and said, then every host is brought it.

``take_stock`` comes first and touches this machine only. ``bring_to_all`` ends with every host holding the same tree,
by its hash, or named with what is in the way. Hosts that start later, or again, are brought it by the controller.
"""

import asyncio
import os
from collections.abc import Sequence
from functools import partial

from flodl.errors import ConfigError, HostUnreachable
from flodl.launch import join_token, kit_files, preflight, rundir
from flodl.launch.ignore import GIT_FILE, OWN_FILE
from flodl.launch.plan import HostKind, HostPlan, RunSpec, SyncMode
from flodl.launch.sync.project import Brought, Project, Telling
from flodl.launch.terminal import Terminal
from flodl.launch.tree import first_few, over_limit, size_words
from flodl.launch.tree_scan import Listing, read, scan
from flodl.spec.words import printable


def take_stock(spec: RunSpec, terminal: Terminal) -> Project | None:
    """Read what a launch of ``spec`` copies, and say it; None where it copies nothing.

    Raises:
        ConfigError: it is more than ``sync.limit_gb`` allows, a link in it leads out of the project, something in it
            cannot be read, a pattern is none, or the script is not copied.
    """
    if spec.sync.mode is SyncMode.OFF or not _remote(spec):
        return None
    folder = spec.project or spec.cwd
    listing = scan(folder, spec.sync.exclude, [*_secrets(spec), *_own_output()])
    _check(folder, listing, spec.sync.limit_gb)
    _check_script(folder, listing, spec)
    project = Project(folder, read(folder, listing.tree), spec.sync.mode)
    terminal.say(f"fdl: sync: {folder}: {project.tree}")
    if listing.skipped:
        named = first_few([printable(path) for path in listing.skipped])
        terminal.say(f"fdl: sync: left out, for they are neither files nor links: {named}")
    return project


def bring_to_all(spec: RunSpec, project: Project, terminal: Terminal) -> None:
    """Bring ``project`` to every host that is reached by ssh, several at a time, and say what becomes of it.

    A host that cannot be brought it ends the launch, unless ``min_rank_start`` lets the run start without: then the
    controller tries again.

    Raises:
        ConfigError: an ssh option that cannot be honoured.
        HostUnreachable: hosts cannot be reached, or not be brought the project; all are named.
    """
    try:
        failed = asyncio.run(_bring_to_all(_remote(spec), project, terminal))
    finally:
        terminal.close()
    if not spec.join.min_rank_start:
        preflight.report(failed)
    for error in failed:
        terminal.say(f"fdl: warning: {error}")


def _check(folder: str, listing: Listing, limit_gb: float) -> None:
    if too_much := over_limit(listing.tree, limit_gb):
        raise ConfigError(
            f"{folder} is not copied, it holds {too_much}; name what ranks do not need in {OWN_FILE} or sync.exclude, "
            "such as /data/, or raise sync.limit_gb"
        )
    if listing.strays:
        raise ConfigError(
            f"links in {folder} lead out of it: {first_few(listing.strays)}; hosts would not have what they point to: "
            f"make each a relative link to something inside, or name it in {OWN_FILE}"
        )


def _check_script(folder: str, listing: Listing, spec: RunSpec) -> None:
    """A script that lies in the project has to travel with it."""
    script = os.path.join(spec.cwd, spec.script[0])
    path = os.path.relpath(script, folder)
    if spec.script[0] == "-m" or not os.path.isfile(script) or path.startswith(os.pardir):
        return
    beyond_links = os.path.relpath(os.path.realpath(script), os.path.realpath(folder))
    if all(entry.path not in (path, beyond_links) for entry in listing.tree.entries):
        raise ConfigError(
            f"script {path} stays behind: a {GIT_FILE}, {OWN_FILE} or sync.exclude names it or its folder; take it out "
            f"there, or put !/{path} into {OWN_FILE}"
        )


async def _bring_to_all(hosts: Sequence[HostPlan], project: Project, terminal: Terminal) -> list[HostUnreachable]:
    from flodl.launch.ssh_login import MAX_PARALLEL_LOGINS

    logins, moving = asyncio.Semaphore(MAX_PARALLEL_LOGINS), dict[str, str]()
    ends = await asyncio.gather(*(_bring(host, project, logins, moving, terminal) for host in hosts))
    return [error for error in ends if error is not None]


async def _bring(
    host: HostPlan, project: Project, logins: asyncio.Semaphore, moving: dict[str, str], terminal: Terminal
) -> HostUnreachable | None:
    """What stands against it, if anything. At most ``logins`` hosts are served at a time."""
    from flodl.launch.ssh_login import log_in
    from flodl.launch.sync.host import bring

    def moved(done: int, whole: int) -> None:
        moving[host.name] = f"{host.name} {size_words(done)} of {size_words(whole)}"
        terminal.show("sync: " + ", ".join(moving.values()))

    assert host.ssh is not None
    say = partial(_say, terminal, host.name)
    try:
        async with logins:
            login = await log_in(host.ssh, host.name)
            try:
                brought = await bring(login, host, project, Telling(say, moved))
            finally:
                await login.close()
    except HostUnreachable as error:
        return error
    finally:
        moving.pop(host.name, None)
    say(_end(brought))
    return None


def _say(terminal: Terminal, host: str, text: str) -> None:
    terminal.say(f"fdl: sync: {host}: {text}")


def _end(brought: Brought) -> str:
    if brought.plan.is_empty:
        return f"up to date, seen in {brought.seconds:.1f} s"
    by = f" by {brought.by}" if brought.plan.send else ""
    return f"done in {brought.seconds:.1f} s{by}"


def _secrets(spec: RunSpec) -> list[str]:
    """Where tokens and keys are kept that this launch knows of. The state folder's parts by themselves, too: the folder
    may be the project, and is then not left out.
    """
    state = rundir.state_home()
    parts = (state / name for name in (rundir.RUNS_NAME, kit_files.FOLDER, join_token.OWN_NAME))
    keys = (host.ssh.identity_file for host in spec.hosts if host.ssh is not None and host.ssh.identity_file)
    named = (spec.join.token_file, *keys)
    return [*map(str, (state, *parts)), *(os.path.expanduser(path) for path in named if path)]


def _own_output() -> list[str]:
    """The files that this launch itself writes to: they would change while they are copied."""
    return [f"/proc/self/fd/{stream}" for stream in (1, 2)]


def _remote(spec: RunSpec) -> list[HostPlan]:
    return [host for host in spec.hosts if host.kind is HostKind.SSH]
