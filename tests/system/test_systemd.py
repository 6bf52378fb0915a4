"""The shipped unit under a real systemd: it starts, serves runs, comes back, leaves in order, and gives up where it
should. Only its times are shortened, by a drop-in.
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flodl.checkpoint.reader import find
from flodl.core.position import SaveReason
from flodl.launch import rundir, units
from flodl.launch.units import Scope
from flodl.wire.handshake import derive_join_secret
from tests.runs import BIN, END_S, ROOT, START_S, Fdl, Launched
from tests.system.lab import Lab
from tests.system.systemd import Systemd

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

UNIT = units.UNIT_NAME
JOIN_TOKEN = secrets.token_bytes(32)
FDL = BIN / "fdl"
SHORT = "[Service]\nWatchdogSec=8\nRestartSec=0.5\n"
CLUSTER = """\
cluster:
  controller: {{host: 127.0.0.1, port: {port}}}
  workers: [{workers}]
  liveness: {{heartbeat_s: 0.5}}
"""
MANAGED = f"{{host: node-m, daemon: managed, local_devices: [cpu], path: {ROOT}}}"
LOCAL = "{host: localhost, local_devices: [cpu]}"
PLAIN = "[Service]\nUser=fdl\nExecStart=/usr/bin/python3 -P -m flodl_cli daemon run\n"


@pytest.fixture(scope="module")
def machine(wait_until: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systemd]:
    """One machine for all tests, with the unit installed as a person would."""
    if obstacle := Systemd.obstacle():
        pytest.skip(obstacle)
    with Systemd(tmp_path_factory.mktemp("machine"), wait_until) as booted:
        done = booted.call(FDL, "daemon", "install", "--system", "--run-as", "root")
        assert done.returncode == 0, done.stderr
        drop_in = booted.root / "run/systemd/system" / f"{UNIT}.d"
        drop_in.mkdir()
        (drop_in / "short.conf").write_text(SHORT)
        booted.systemctl("daemon-reload")
        yield booted


class Site:
    """The machine for one test: the daemon's settings and token, and runs of this machine that it may serve."""

    def __init__(self, machine: Systemd, fdl: Fdl) -> None:
        self.machine, self.fdl, self.port = machine, fdl, free_port()
        rundir.write_token_file(fdl.folder / "join.token", JOIN_TOKEN)
        fdl.env["FDL_JOIN_TOKEN_FILE"] = str(fdl.folder / "join.token")
        settings = {units.CONTROLLER: f"127.0.0.1:{self.port}", units.HOST: "node-m"}
        (self._folder / units.CONFIG_NAME).write_text(units.config(settings))
        self.give_token(derive_join_secret(JOIN_TOKEN, "node-m"))

    @property
    def _folder(self) -> Path:
        return self.machine.root / "etc/fdl"

    def give_token(self, secret: bytes | None) -> None:
        """Replace this host's token; None takes it away."""
        path = self._folder / units.TOKEN_NAME
        path.unlink(missing_ok=True)
        if secret is not None:
            rundir.write_token_file(path, secret)

    @contextlib.contextmanager
    def holding(self, *files: tuple[str, bytes]) -> Iterator[None]:
        """The machine with these files, root's and private, until the end."""
        paths = [self.machine.root / name for name, _ in files]
        for path, (_, content) in zip(paths, files, strict=True):
            path.unlink(missing_ok=True)
            path.touch(0o600)
            path.write_bytes(content)
        yield
        for path in paths:
            path.unlink()

    def launch(self, *workers: str, **flags: object) -> Launched:
        path = self.fdl.folder / "fdl.cluster.yml"
        path.write_text(CLUSTER.format(port=self.port, workers=", ".join(workers)))
        given: dict[str, object] = {"mode": "cpu_cadence", "size": 403, "batch_size": 4, "epochs": 10_000}
        return self.fdl.job(options=("-c", path), **{**given, "step_ms": 10, **flags})

    def restarts(self) -> int:
        return int(self.machine.show(UNIT, "NRestarts"))

    def journal(self) -> str:
        return self.machine.call("journalctl", "-u", UNIT, "--no-pager", "-o", "cat").stdout

    def wait_for_restart(self, count: int) -> None:
        self.fdl.wait_until(
            lambda: self.restarts() >= count and self.machine.show(UNIT, "ActiveState") == "active",
            START_S,
            self.journal,
        )

    def wait_for_rank(self, run: Launched, rank: int) -> None:
        """It has trained, and what it has trained is merged."""

        def has_share() -> bool:
            found = [each for each in (run.read("state.json") or {}).get("ranks", []) if each["rank"] == rank]
            return bool(found and found[0]["share"])

        self.fdl.wait_until(has_share, START_S, lambda: run.story() + self.journal())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def site(machine: Systemd, fdl: Fdl) -> Iterator[Site]:
    yield Site(machine, fdl)
    machine.call("systemctl", "kill", "-s", "KILL", UNIT)
    machine.call("systemctl", "stop", UNIT)
    machine.call("systemctl", "reset-failed", UNIT)


# --------------------------------------------------------------------------------------------------------- one machine
@pytest.mark.long
def test_unit_serves_runs_outlives_a_controller_and_leaves_in_order_with_a_checkpoint(
    site: Site, tmp_path: Path
) -> None:
    machine = site.machine
    machine.systemctl("start", UNIT)  # returns at READY
    assert machine.show(UNIT, "ActiveState") == "active"
    shown = machine.call(FDL, "daemon", "status")
    assert (shown.returncode, "waiting for a controller" in shown.stdout) == (0, True), shown

    lost = site.launch(MANAGED)
    lost.wait_for_training()
    assert_nothing_leaks(site)
    lost.kill("controller")
    lost.wait()
    site.fdl.wait_until(lambda: len(machine.processes_of(UNIT)) == 1, END_S, site.journal)

    run = site.launch(MANAGED, save=tmp_path / "run")
    run.wait_for_training(2)
    assert f"serving run {run.run_id}: 1 rank" in machine.show(UNIT, "StatusText")
    machine.systemctl("stop", UNIT)  # returns when it has stopped

    assert run.wait(END_S) == 143, run.story()
    meta = find(tmp_path / "run").meta
    assert (meta.reason, meta.point.position.version) == (SaveReason.GRACEFUL_SHUTDOWN, run.commits()[-1]["version"])
    assert (machine.show(UNIT, "ActiveState"), machine.show(UNIT, "Result")) == ("inactive", "success")
    assert site.restarts() == 0
    run.wait_until_clean()


def assert_nothing_leaks(site: Site) -> None:
    """What systemd gives the service stays with it, and its token is in no command line, environment or journal."""
    service = ("NOTIFY_SOCKET=", "WATCHDOG_", "LISTEN_", "CREDENTIALS_DIRECTORY=", "FDL_TOKEN_FILE=", "FDL_CONTROLLER=")
    secret = derive_join_secret(JOIN_TOKEN, "node-m").hex()
    main, *below = sorted(site.machine.processes_of(UNIT), key=lambda each: each.create_time())
    assert len(below) >= 3, "warden, daemon, rank"
    for process in below:
        assert [each for each in service if any(name.startswith(each) for name in process.environ())] == []
    for process in (main, *below):
        assert secret not in " ".join((*process.cmdline(), *process.environ().values()))
    assert secret not in site.journal()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["main", "daemon"])
def test_unit_comes_back_after_a_kill_and_after_a_loop_that_stands_still(site: Site, victim: str) -> None:
    machine = site.machine
    machine.systemctl("start", UNIT)
    run = site.launch(LOCAL, MANAGED)
    run.wait_for_training()
    site.wait_for_rank(run, 1)

    machine.main_process(UNIT).kill()
    site.wait_for_restart(1)
    site.wait_for_rank(run, 2)

    before = {process.pid for process in machine.processes_of(UNIT)}
    frozen = machine.main_process(UNIT).pid if victim == "main" else daemon_pid(machine)
    os.kill(frozen, signal.SIGSTOP)
    site.wait_for_restart(2)
    assert not before & {process.pid for process in machine.processes_of(UNIT)}
    assert "Watchdog timeout" in site.journal()
    assert "Fatal Python error: Aborted" in site.journal()  # and where it stood
    site.wait_for_rank(run, 3)

    assert site.fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)


def daemon_pid(machine: Systemd) -> int:
    """Of the daemon that serves the run."""
    (found,) = (each.pid for each in machine.processes_of(UNIT) if each.cmdline()[2:4] == ["-m", "flodl_daemon"])
    return int(found)


@pytest.mark.long
def test_stop_that_takes_longer_than_its_time_leaves_the_checkpoint_before(site: Site, tmp_path: Path) -> None:
    machine = site.machine
    machine.systemctl("start", UNIT)
    run = site.launch(MANAGED, save=tmp_path / "run", every=1, size=8, step_ms=3000)
    run.wait_for_event("checkpoint")
    hurry = machine.root / "run/systemd/system" / f"{UNIT}.d/zz-hurry.conf"
    hurry.write_text("[Service]\nTimeoutStopSec=0.5\n")  # less than a step
    machine.systemctl("daemon-reload")

    machine.call("systemctl", "stop", UNIT)

    hurry.unlink()
    machine.systemctl("daemon-reload")
    assert machine.show(UNIT, "Result") == "timeout"
    assert machine.processes_of(UNIT) == []
    assert run.wait(END_S) != 0, run.story()
    verified = site.fdl.call("checkpoint", "verify", str(tmp_path / "run"))
    assert verified.returncode == 0, verified.stderr
    run.wait_until_clean()


def test_unit_gives_up_on_what_a_restart_does_not_cure(site: Site) -> None:
    machine = site.machine
    run = site.launch(MANAGED)  # it waits for its host
    run.wait_for_event("host_awaited")

    for secret, status in [(derive_join_secret(JOIN_TOKEN, "node-x"), "2"), (None, "243")]:
        site.give_token(secret)
        machine.call("systemctl", "start", UNIT)
        site.fdl.wait_until(lambda: machine.show(UNIT, "ActiveState") == "failed", START_S, site.journal)
        assert (machine.show(UNIT, "ExecMainStatus"), site.restarts()) == (status, 0)
        machine.systemctl("reset-failed", UNIT)

    assert "it holds another token" in site.journal()
    os.kill(run.pid_of("controller"), signal.SIGTERM)
    run.wait(END_S)


@pytest.mark.long
def test_unit_comes_through_ssh_with_the_files_of_its_kit(site: Site, hosts: Lab) -> None:
    machine, fdl = site.machine, site.fdl
    run = site.launch(MANAGED, epochs=3)
    run.wait_for_event("host_awaited")
    kit = Path(fdl.env["FDL_STATE_HOME"]) / "walk-ins" / "node-m"
    authorized = fdl.folder / "authorized"
    authorized.touch()
    with hosts.one_more_sshd(None, authorized=authorized) as (port, known):
        login = f"root@{hosts.address}:{port}"
        made = fdl.call("join-config", "node-m", "-c", str(fdl.folder / "fdl.cluster.yml"), "--login", login)
        assert made.returncode == 0, made.stderr
        authorized.write_bytes((kit / "authorized_keys.line").read_bytes())
        names = ("daemon.env", "daemon.token", "id_ed25519")
        files = [(f"etc/fdl/{name}", (kit / name).read_bytes()) for name in names]
        with site.holding(*files, ("etc/ssh/ssh_known_hosts", known.encode())):
            machine.systemctl("start", UNIT)
            run.wait_for_training()
            state = run.read("state.json")
            assert state is not None
            assert [host["host"] for host in state["hosts"] if host["tunnelled"]] == ["node-m"]
            assert run.wait() == 0, run.story() + site.journal()
            machine.systemctl("stop", UNIT)
    run.wait_until_clean()


# ---------------------------------------------------------------------------------------------------------- the units
@pytest.fixture
def analyze() -> Callable[..., str]:
    """``systemd-analyze``, without asking a running systemd; fails on anything but 0."""

    def call(*words: object) -> str:
        done = subprocess.run(
            ["systemd-analyze", *map(str, words)], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done
        return done.stdout + done.stderr

    try:
        call("--version")
    except OSError:
        pytest.skip("not installed: systemd-analyze")
    return call


def exposure(analyze: Callable[..., str], path: Path) -> float:
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", analyze("security", "--offline=true", path))
    assert found is not None
    return float(found[1])


def test_units_are_clean_and_the_system_one_is_less_exposed(
    analyze: Callable[..., str], tmp_path: Path, figures: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for scope in Scope:
        path = tmp_path / scope / UNIT
        path.parent.mkdir()
        path.write_text(units.unit(scope, sys.executable, "root"))
        assert analyze(f"--{scope}", "verify", path) == ""
    plain = tmp_path / "plain.service"
    plain.write_text(PLAIN)
    figures["plain"], figures["shipped"] = exposure(analyze, plain), exposure(analyze, ROOT / "systemd" / UNIT)

    assert figures["plain"] > 9
    assert figures["shipped"] < 3
