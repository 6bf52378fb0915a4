"""What is promised for a ``kill -9`` of anything, a log-out and a closed laptop, on two hosts: all of them are clean in
time, or the run goes on. test_two_hosts has the rank, the daemon, the controller, the launcher and a pulled cable.
"""

import shlex
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from tests.runs import CLEAN_S, END_S, Fdl, Launched
from tests.system.lab import Lab
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

GRACE_S = 5.0
SIZE = 1603


@pytest.fixture
def workers(hosts: Lab) -> list[dict[str, object]]:
    return [hosts.worker(hosts.hosts[0], 1), hosts.worker(hosts.hosts[1], 2)]


def endless(fdl: Fdl, cluster: Path, under: tuple[str, ...] = ()) -> Launched:
    run = fdl.job(options=("-c", cluster), under=under, step_ms=20, epochs=10_000, grandchild=True)
    run.wait_for_training()
    return run


@pytest.mark.long
def test_killed_head_stops_the_run_on_all_hosts(fdl: Fdl, hosts: Lab, workers: list[dict[str, object]]) -> None:
    run = endless(fdl, hosts.cluster(fdl.folder / "c.yml", workers))

    run.kill("head")

    assert run.wait(END_S) == 137, run.story()
    for host in hosts.hosts:
        assert run.leftovers_on(host.namespace) == []
    run.wait_until_clean()


@pytest.mark.long
@pytest.mark.parametrize("role", ["warden", "daemon"])
def test_killed_daemon_or_warden_leaves_its_host_clean(
    fdl: Fdl, hosts: Lab, workers: list[dict[str, object]], role: str
) -> None:
    run = endless(fdl, hosts.cluster(fdl.folder / "c.yml", workers))

    run.kill(role, hosts.hosts[1].namespace)

    fdl.wait_until(lambda: not run.leftovers_on(hosts.hosts[1].namespace), CLEAN_S, run.story)
    assert run.is_live
    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    run.wait_until_clean()


@pytest.mark.long
def test_user_who_logs_out_leaves_a_run_that_goes_on_and_is_found(fdl: Fdl, hosts: Lab, tmp_path: Path) -> None:
    """The launch is typed in an ssh session with a terminal on the first host; then the session's other end is gone."""
    desk, other = hosts.hosts
    log = tmp_path / "log"
    log.mkdir()
    run = fdl.job(
        options=("-c", cluster_of(hosts, tmp_path / "c.yml")),
        under=session(fdl, hosts, tmp_path / "launch-0.err"),
        step_ms=40, size=SIZE, batch_size=8, log=log,
    )  # fmt: skip
    run.wait_for_training(version=2)
    (launcher,) = [int(line.split()[0]) for line in run.leftovers_on(desk.namespace) if " launch " in line]
    assert run.process is not None

    run.process.kill()

    fdl.wait_until(lambda: not psutil.pid_exists(launcher), CLEAN_S, run.story)
    status = fdl.call_on(desk.name, "status")
    assert run.run_id in status.stdout, status.stderr
    assert run.wait_for_end()["exit_code"] == 0
    assert witness_run(run.folder, log, size=SIZE, epochs=2).faults == []
    for host in (desk, other):
        fdl.wait_until(lambda host=host: not run.leftovers_on(host.namespace), CLEAN_S, run.story)


@pytest.mark.long
def test_laptop_that_is_closed_leaves_no_host_training_and_says_so_when_it_wakes(
    fdl: Fdl, hosts: Lab, workers: list[dict[str, object]]
) -> None:
    """The controller's machine falls silent towards all hosts: its processes stand still, its cables are out."""
    cluster = hosts.cluster(fdl.folder / "c.yml", workers, on_disconnect_s=8)
    run = endless(fdl, cluster)
    frozen = [psutil.Process(int(line.split()[0])) for line in run.leftovers() if on_laptop(line, run, hosts)]
    assert len(frozen) >= 2
    for host in hosts.hosts:
        hosts.cut(host)
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    try:
        for host in hosts.hosts:
            fdl.wait_until(lambda host=host: not run.leftovers_on(host.namespace), 8 + GRACE_S + 2 * CLEAN_S, run.story)
    finally:
        for host in hosts.hosts:
            hosts.heal(host)
            hosts.hang_up(host)
        for process in frozen:
            process.send_signal(signal.SIGCONT)
    assert run.wait(END_S) == 5, run.story()
    run.wait_until_clean()


def on_laptop(line: str, run: Launched, lab: Lab) -> bool:
    """Whether this of the run's processes is on the launching machine."""
    elsewhere = [each for host in lab.hosts for each in run.leftovers_on(host.namespace)]
    return line not in elsewhere


def cluster_of(lab: Lab, path: Path) -> Path:
    """Both hosts, for a launch on the first one."""
    desk, other = lab.hosts
    here = {name: value for name, value in lab.worker(desk, 1).items() if name != "ssh"}
    controller = {"host": desk.address, "join": {"elastic": False}}
    workers = [{**here, "host": desk.address}, lab.worker(other, 1)]
    path.write_text(yaml.safe_dump({"cluster": {"controller": controller, "workers": workers}}))
    return path


def session(fdl: Fdl, lab: Lab, stderr: Path) -> tuple[str, ...]:
    """A login with a terminal on the first host, behind which a command follows; it keeps the test's environment."""
    options = ["-tt", "-i", str(lab.key), "-o", f"UserKnownHostsFile={fdl.home / '.ssh' / 'known_hosts'}"]
    keep = [f"{name}={value}" for name, value in fdl.env.items() if name.startswith(("FDL_", "HOME", "PATH", "OMP_"))]
    login = ("ssh", *options, f"root@{lab.hosts[0].address}")
    return (*login, "cd", str(fdl.folder), "&&", "exec", f"2>>{stderr}", "env", *(shlex.quote(each) for each in keep))
