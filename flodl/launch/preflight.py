"""Checks before anything starts: what would fail later fails now, with the remedy, all findings together."""

import importlib.machinery
import importlib.util
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Final

from flodl.errors import ConfigError, HostUnreachable, PreflightError
from flodl.launch import join_token
from flodl.launch.plan import HostKind, RunSpec
from flodl.launch.probe.finding import Level, sentence
from flodl.launch.probe.here import look_here
from flodl.runtime.reason import reason_of

RESOLVE_TIMEOUT_S: Final = 5.0
MAX_RESOLVERS: Final = 16


def check_script(spec: RunSpec) -> None:
    """The script is there and can be read, or the module can be found, and its name can be said to others.

    Raises:
        ConfigError: it is not.
    """
    script = spec.script
    if script[0] == "-m":
        _check_module(script[1], spec.cwd)
        _check_name(script[1], f"module {script[1]}")
        return
    path = os.path.join(spec.cwd, script[0])
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise ConfigError(f"{path} is a folder without __main__.py; name the script in it")
    elif not os.path.exists(path):
        raise ConfigError(f"script {path} not found{_near(path)}")
    elif not os.access(path, os.R_OK):
        raise ConfigError(f"script {path} cannot be read; see its permissions")
    else:
        _check_name(os.path.basename(path), f"script {path}")


def _check_name(name: str, what: str) -> None:
    """Ranks and head name the script to each other, and messages are UTF-8; folders above it are not named."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what}: its name is no UTF-8 text; rename it") from None


def check_hosts(spec: RunSpec) -> list[HostUnreachable]:
    """The names of hosts that no resolver knows. Names that only ssh's configuration knows (an alias, a jump host) are
    left to ssh.
    """
    targets = {
        host.name: host.ssh.target
        for host in spec.hosts
        if host.kind is HostKind.SSH and host.ssh is not None and not _may_be_alias(host.ssh.proxy_jump)
    }
    if not targets:
        return []
    pool = ThreadPoolExecutor(max_workers=MAX_RESOLVERS, thread_name_prefix="resolve")
    try:
        lookups = {name: pool.submit(_resolves, target) for name, target in targets.items()}
        failed = []
        for name, lookup in lookups.items():
            try:
                reason = lookup.result(RESOLVE_TIMEOUT_S)
            except FutureTimeoutError:
                continue
            if reason:
                remedy = "check the name, or give `ssh.target` (a name, an address, or an alias of your ssh config)"
                failed.append(HostUnreachable(name, "resolve", f"{targets[name]}: {reason}", remedy))
        return failed
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def report(failed: list[HostUnreachable]) -> None:
    """Raise one error that lists them all.

    Raises:
        HostUnreachable: there are any.
    """
    if len(failed) == 1:
        raise failed[0]
    if failed:
        first, others = failed[0], "".join(f"\nfdl: {error}" for error in failed[1:])
        raise HostUnreachable(first.host, first.stage, f"{first.reason}\n  {first.remedy}{others}")


def check_here(spec: RunSpec) -> list[str]:
    """What this machine, as the run's head and controller, may suffer from.

    Raises:
        PreflightError: there is no room for the run's directory, or no torch.
    """
    found = look_here(spec)
    errors = [finding for finding in found if finding.level is Level.ERROR]
    if errors:
        raise PreflightError("\n".join(f"{sentence(error)}\n  {error.remedy}" for error in errors))
    return [f"{sentence(finding)}; {finding.remedy}" for finding in found if finding.level is Level.WARN]


def check_interpreter(spec: RunSpec) -> None:
    """The interpreter of this machine's part exists.

    Raises:
        PreflightError: it does not.
    """
    if not os.access(spec.python, os.X_OK):
        raise PreflightError(f"interpreter {spec.python} cannot be executed")


def check_join_token(spec: RunSpec) -> None:
    """The join token of walk-ins, where there is one, can be read.

    Raises:
        ConfigError: it cannot; with the remedy.
    """
    if spec.join.token_file:
        join_token.read(Path(spec.join.token_file))


def _check_module(name: str, cwd: str) -> None:
    path = [cwd, *sys.path]
    parts = name.split(".")
    for index, part in enumerate(parts):
        found = importlib.machinery.PathFinder.find_spec(".".join(parts[: index + 1]) if index == 0 else part, path)
        if found is None:
            builtin = importlib.util.find_spec(name) if index == 0 and part in sys.builtin_module_names else None
            if builtin is None:
                raise ConfigError(f"module {name} not found from {cwd}; -m takes a module's dotted name")
            return
        path = list(found.submodule_search_locations or [])


def _may_be_alias(proxy_jump: str | None) -> bool:
    return proxy_jump is not None or os.path.exists(os.path.expanduser("~/.ssh/config"))


def _resolves(target: str) -> str:
    try:
        socket.getaddrinfo(target, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return reason_of(error)
    return ""


def _near(path: str) -> str:
    import difflib  # only for this message

    folder, name = os.path.split(path)
    try:
        near = difflib.get_close_matches(name, [each for each in os.listdir(folder or ".") if each.endswith(".py")], 1)
    except OSError:
        return f" (there is no folder {folder})"
    return f"; did you mean {near[0]}?" if near else ""
