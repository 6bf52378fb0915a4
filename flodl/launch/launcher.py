"""``launch``: run directory, port, controller process, then the viewer. The run lives in the controller.

``start_controller`` is everything up to a listening controller; auto-promotion uses it too.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flodl.core.actions import Outcome
from flodl.core.ending import EXIT_INTERRUPTED
from flodl.core.window import StartRule
from flodl.errors import ConfigError, DeadlineExceeded, FlodlError
from flodl.launch import interruption, join_token, listening, preflight, rundir
from flodl.launch.commands import controller_argv
from flodl.launch.document import dump
from flodl.launch.headline import last_lines
from flodl.launch.interruption import Interrupted
from flodl.launch.plan import LaunchRequest, PlainPlan, RunSpec, SyncMode, describe, plan
from flodl.launch.rundir import CONTROLLER_START_S, ControllerInfo, RunDir, outcome_exit_code, port_remedy
from flodl.launch.terminal import Terminal
from flodl.launch.viewer import Detached, Viewer
from flodl.runtime.ports import listen

if TYPE_CHECKING:
    from flodl.config.model import ClusterSpec
    from flodl.launch.tree import Tree

POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a person wants the run launched; ``script`` is verbatim what follows the interpreter."""

    script: tuple[str, ...]
    name: str = ""
    detach: bool = False
    dry_run: bool = False
    preflight: bool = True
    stop_timeout_s: float = 30.0
    spawns_head: bool = True
    plain: PlainPlan | None = None


@dataclass(slots=True)
class StartedRun:
    """A run whose controller listens."""

    run: RunDir
    info: ControllerInfo
    process: "subprocess.Popen[bytes]"


def launch(cluster: "ClusterSpec", options: LaunchOptions) -> int:
    """Run ``options.script`` on ``cluster`` and watch it to its end.

    Returns:
        The run's exit code; 0 after a dry run or a detachment, 129 where SIGHUP made us leave it.

    Raises:
        ConfigError: the plan is impossible, or the script is not there.
        PreflightError: the port is taken, or the state folder cannot be written or is full.
        HostUnreachable: names of hosts do not resolve.
        FlodlError: the controller did not start; its own words are in the message.
    """
    return start(plan(cluster, local_request(options)), options)


def start(spec: RunSpec, options: LaunchOptions) -> int:
    """``launch`` behind its plan.

    Raises:
        Interrupted: a signal came before the run's controller listened; nothing of the run goes on.
    """
    run = rundir.place(spec.run_id)
    with interruption.raised(f"run {spec.run_id}", run.controller_json.exists) as signals:
        return _start(spec, options, signals)


def _start(spec: RunSpec, options: LaunchOptions, signals: deque[int]) -> int:
    terminal = Terminal()
    if not spec.join.token_file and (fault := join_token.own_fault()):
        terminal.say(f"fdl: warning: this run takes no walk-ins: {fault}")
    for folder in rundir.open_folders():
        terminal.say(f"fdl: warning: {folder}: others may write to it, and so change runs; run: chmod go-w {folder}")
    if options.dry_run:
        preflight.check_script(spec)
        for line in describe(spec, str(rundir.place(spec.run_id).path)):
            terminal.result(line)
        if spec.sync.mode is not SyncMode.OFF:
            from flodl.launch.sync import step

            step.take_stock(spec, terminal)
        return 0
    preflight.check_script(spec)
    preflight.check_interpreter(spec)
    preflight.check_join_token(spec)
    if options.preflight:
        preflight.report(preflight.check_hosts(spec))
        for warning in preflight.check_here(spec):
            terminal.say(f"fdl: warning: {warning}")
    started = start_controller(spec, lambda: spread(spec, terminal))
    if options.detach:
        terminal.say(f"fdl: run {spec.run_id} ({spec.name}) goes on; fdl attach, fdl status, fdl stop")
        if spec.join.start is not StartRule.AUTO:
            terminal.say(f"fdl: its start is held for: fdl start {spec.run_id}")
        terminal.result(spec.run_id)
        return 0
    with interruption.caught([signal.SIGINT], lambda number, _: signals.append(number)):  # until the viewer cares
        terminal.say(f"fdl: run {spec.run_id} ({spec.name}) on {started.info.address}:{started.info.port}")
        end = Viewer(started.run, started.info, terminal, started.process.poll, signals=signals).watch()
    if isinstance(end, Detached):
        return end.exit_code
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.process.wait(1.0)
    return end


def spread(spec: RunSpec, terminal: Terminal) -> "Tree | None":
    """Where the cluster file wants it, bring the project to the hosts.

    Returns:
        What they have then; None where nothing is copied.

    Raises:
        ConfigError: the project is not as it has to be, or too large.
        HostUnreachable: hosts cannot be reached or not be brought it, and the run needs them.
    """
    if spec.sync.mode is SyncMode.OFF:
        return None
    from flodl.launch.sync import step

    project = step.take_stock(spec, terminal)
    if project is None:
        return None
    step.bring_to_all(spec, project, terminal)
    return project.tree


def local_request(options: LaunchOptions) -> LaunchRequest:
    """The request with the facts about this machine and this moment."""
    created_s = time.time()
    return LaunchRequest(
        run_id=rundir.new_run_id(created_s),
        created_s=created_s,
        script=options.script,
        cwd=_working_directory(),
        python=sys.executable,
        local_names=local_names(),
        name=options.name,
        stop_timeout_s=options.stop_timeout_s,
        spawns_head=options.spawns_head,
        preflight=options.preflight,
        plain=options.plain,
        join_token_file=join_token.named(os.environ),
        own_join_token_file=join_token.own_if_there(),
        own_join_token_fault=join_token.own_fault(),
        home=os.path.realpath(os.path.expanduser("~")),
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory has been deleted; change to one that exists") from None


def local_names() -> frozenset[str]:
    """Names and addresses that mean this machine: loopback, its host name, and its interfaces' addresses."""
    import psutil  # nobody else in a launch needs it

    addresses = {
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    return frozenset({"localhost", "127.0.0.1", "::1", socket.gethostname(), *addresses})


def start_controller(spec: RunSpec, bring: "Callable[[], Tree | None]" = lambda: None) -> StartedRun:
    """Bind the run's port, create its directory, and start its controller in a session of its own.

    ``bring`` copies the project to the hosts and says what they have then. It is called once the port is ours and the
    state folder is known to take runs: a launch that cannot start changes no host, least of all under a run that goes
    on. Who dials meanwhile waits for the controller in the kernel's queue.

    Returns:
        Once the controller has announced where it listens.

    Raises:
        PreflightError: the port is taken or the state folder cannot be written; nothing is left then.
        FlodlError: the controller ended or was not ready in time; or what ``bring`` raises, and nothing is left then.
    """
    sockets = listen(spec.bind_host, spec.port, port_remedy(spec.port))
    run: RunDir | None = None
    process: subprocess.Popen[bytes] | None = None
    try:
        _, port = listening.dial_address(sockets[0])
        spec = dataclasses.replace(spec, port=port)
        with interruption.held():
            rundir.try_to_create(spec.run_id)
        tree = bring()
        with interruption.held():
            run = rundir.create(spec.run_id)
        run.write("run.json", dump(spec, indent=1))
        if tree is not None:
            run.write("tree.json", dump(tree))
        with interruption.held():
            process = _spawn(run, spec, sockets)
        for sock in sockets:
            sock.close()
        return StartedRun(run, _wait_for_controller(run, process), process)
    except BaseException as error:
        if process is not None:
            _end(process)
        if run is not None:
            _tell_failed_start(run, error)
        raise
    finally:
        for sock in sockets:
            sock.close()


def _tell_failed_start(run: RunDir, error: BaseException) -> None:
    """A run whose controller does not come to listen has ended: its directory says why, for whoever looks later. One
    that does not even say what was launched goes.
    """
    if not run.run_json.exists():
        shutil.rmtree(run.path, ignore_errors=True)
    elif not run.outcome_json.exists():
        _write_failed_start(run, error)


def _write_failed_start(run: RunDir, error: BaseException) -> None:
    outcome = Outcome("failed", 1, f"the run did not start: {error}", None, (), 0)
    if isinstance(error, FlodlError):
        outcome = dataclasses.replace(outcome, exit_code=error.exit_code)
    elif isinstance(error, Interrupted):
        outcome = dataclasses.replace(outcome, status="stopped", exit_code=error.exit_code, message=str(error))
    elif isinstance(error, KeyboardInterrupt):
        words = "interrupted before its controller listened"
        outcome = dataclasses.replace(outcome, status="stopped", exit_code=EXIT_INTERRUPTED, message=words)
    run.release_reserve()
    with contextlib.suppress(OSError):  # the disk may be what fails
        run.write("outcome.json", json.dumps(dataclasses.asdict(outcome), indent=1))


def _spawn(run: RunDir, spec: RunSpec, sockets: list[socket.socket]) -> "subprocess.Popen[bytes]":
    environ = dict(os.environ)
    environ.pop("FLODL_ROLE", None)
    descriptors = listening.hand_down(sockets, environ)
    log = os.open(run.logs / "controller.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            controller_argv(spec.python, str(run.path)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            pass_fds=descriptors,
            start_new_session=True,
        )
    finally:
        os.close(log)


def _wait_for_controller(run: RunDir, process: "subprocess.Popen[bytes]") -> ControllerInfo:
    deadline_s = time.monotonic() + CONTROLLER_START_S
    while time.monotonic() < deadline_s:
        info = run.controller()
        if info is not None:
            return info
        if process.poll() is not None:
            raise _failed_start(run, process.returncode)
        time.sleep(POLL_S)
    raise DeadlineExceeded(f"the controller was not ready within {CONTROLLER_START_S:g} s{_words(run)}")


def _failed_start(run: RunDir, code: int) -> FlodlError:
    return FlodlError(f"the controller ended with code {code} before it listened{_words(run)}")


def _words(run: RunDir) -> str:
    path: Path = run.logs / "controller.log"
    said = "".join(f"\n  | {line}" for line in last_lines(path, 12))
    return f"; its log is {path}{said}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)


def finished_exit_code(run: RunDir) -> int | None:
    """The exit code of a run that has ended, None while it has none."""
    outcome = run.read_json("outcome.json")
    return None if outcome is None else outcome_exit_code(outcome)
