"""Brings the project to one host, over an ssh session that is open: look, decide, send, install.

What is there already is read and left alone. Files arrive beside the project and are put into place when all are there
and every byte is right; so a copy that is cut off, at any moment, leaves each file whole, and the next one goes on.
"""

import getpass
import os
import socket
import time
from collections.abc import Callable

from flodl.launch.plan import HostPlan, SyncMode
from flodl.launch.ssh_login import Login
from flodl.launch.sync.carriers import rsync_here, send_by_rsync, send_by_sftp
from flodl.launch.sync.plan import SyncPlan, There, altered_words, plan_sync
from flodl.launch.sync.project import Brought, Project, Telling
from flodl.launch.sync.session import SyncSession
from flodl.launch.tree import size_words
from flodl.launch.tree_scan import is_file_here


async def bring(login: Login, host: HostPlan, project: Project, tell: Telling) -> Brought:
    """Make the host's folder hold the project's tree; returns when each of its files is what it is here.

    Raises:
        HostUnreachable: stage sync: something is in the way there, the disk is full, the host falls silent, another
            launch holds the folder, or a file here is not any more what the tree says.
    """
    began_s = time.monotonic()
    async with SyncSession(login, host) as session:
        there = await session.look(project.tree)
        plan = _plan(project, there, session)
        by = project.mode if session.rsync and rsync_here() else SyncMode.SFTP
        wire_bytes, altered = 0, plan.altered
        if not plan.is_empty:
            mark, free_bytes = await session.begin(_me(), lambda who: tell.say(f"waits for {who}"))
            if mark != there.mark:  # somebody else was here in between
                plan = _plan(project, await session.look(project.tree), session)
            tell.say(f"{plan}")
            if plan.send_bytes > free_bytes:
                room = f"{size_words(free_bytes)} are free at {session.root}, too few for this copy"
                raise session.failure(room, "free space there, or exclude what ranks do not need")
            if by is not project.mode and plan.send:
                tell.say(f"by sftp, for there is no rsync {'there' if rsync_here() else 'here'}")
            wire_bytes, complaint = await _send(session, project, plan, by, tell)
            kept = await session.install(project.tree, plan, _name_of(plan, by), complaint)
            altered = (*plan.altered, *kept)
        if words := altered_words(altered):
            tell.say(words)
        return Brought(plan, by, wire_bytes, time.monotonic() - began_s)


def _plan(project: Project, there: There, session: SyncSession) -> SyncPlan:
    here = {path for path in (*there.stale, *there.altered) if is_file_here(project.folder, path)}
    plan = plan_sync(project.tree, there, here)
    if plan.obstacles:
        raise session.failure("; ".join(plan.obstacles), f"move it out of {session.root} there, or exclude it here")
    return plan


async def _send(session: SyncSession, project: Project, plan: SyncPlan, by: SyncMode, tell: Telling) -> tuple[int, str]:
    """How many bytes that took, and what was said of it."""
    if not plan.send:
        return 0, ""
    wire_bytes = 0

    def moved(count: int) -> None:
        nonlocal wire_bytes
        wire_bytes += count
        tell.moved(wire_bytes, plan.send_bytes)

    send = send_by_rsync if by is SyncMode.RSYNC else send_by_sftp
    sending = send(session, project.folder, plan.send, moved)
    complaint = await session.unless_stalled(sending, lambda: wire_bytes)
    return wire_bytes, complaint


def _name_of(plan: SyncPlan, by: SyncMode) -> Callable[[int], str]:
    return (lambda number: plan.send[number].path) if by is SyncMode.RSYNC else str


def _me() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()} (pid {os.getpid()})"
