"""A host whose traffic goes through the ssh session: a firewall lets nothing else from it to the controller."""

import sys
from pathlib import Path

import pytest

from tests.runs import END_S, Fdl
from tests.system.lab import Lab
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def test_host_behind_a_firewall_trains_through_its_ssh_session(fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path) -> None:
    near, far = hosts.hosts
    port = hosts.free_port()
    workers = [hosts.worker(near, 1), hosts.worker(far, 2, tunnel=True)]
    cluster = hosts.cluster(tmp_path / "c.yml", workers, port)
    with hosts.fence(far, port):
        assert not hosts.reaches(far, port)
        run = fdl.job(options=("-c", cluster), mode="cpu_cadence", size=101, batch_size=4, epochs=2, log=log)
        assert run.wait() == 0, run.story()

    state = run.read("state.json")
    assert state is not None
    assert [(host["address"], host["tunnelled"]) for host in state["hosts"]] == [
        (near.address, False),
        ("127.0.0.1", True),
    ]
    assert (witness_run(run.folder, log, size=101, epochs=2).faults) == []
    run.wait_until_clean()


@pytest.mark.long
def test_collective_mode_refuses_a_tunnelled_host_by_name(fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path) -> None:
    near, far = hosts.hosts
    workers = [hosts.worker(near, 1), hosts.worker(far, 1, tunnel=True)]
    run = fdl.job(options=("-c", hosts.cluster(tmp_path / "c.yml", workers)), mode="nccl_cadence", log=log)

    assert run.wait() == 2, run.story()
    assert f"the tunnel of {far.name} leads to the controller only: take a cpu mode" in run.stderr
    assert list(log.glob("reads-*.log")) == [path for path in log.glob("reads-*.log") if not path.read_text()]
    run.wait_until_clean()


@pytest.mark.long
def test_session_that_breaks_costs_the_host_and_is_opened_anew(fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path) -> None:
    near, far = hosts.hosts
    port = hosts.free_port()
    workers = [hosts.worker(near, 1), hosts.worker(far, 1, tunnel=True)]
    cluster = hosts.cluster(tmp_path / "c.yml", workers, port, is_elastic=True)
    with hosts.fence(far, port):
        run = fdl.job(
            options=("-c", cluster), mode="cpu_cadence", size=1603, batch_size=8, step_ms=40, epochs=8, log=log
        )
        run.wait_for_training(version=2)
        hosts.hang_up(far)
        run.wait_for_event("host_lost")
        run.wait_for_event("newcomer_ready")
        assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, 1603, 8, lost=[1])
    assert (seen.faults, seen.samples, seen.ranks) == ([], 8 * 1603, [0, 1, 2])
    run.wait_until_clean()


@pytest.mark.long
def test_sshd_that_forwards_nothing_is_named_with_the_remedy(fdl: Fdl, hosts: Lab, tmp_path: Path) -> None:
    far = hosts.hosts[1]
    with hosts.one_more_sshd(far, ("AllowTcpForwarding no",)) as (port, known):
        with (fdl.home / ".ssh" / "known_hosts").open("a") as file:
            file.write(known)
        ssh = {"target": far.address, "port": port, "user": "root", "identity_file": str(hosts.key)}
        cluster = hosts.cluster(tmp_path / "c.yml", [hosts.worker(far, 1, ssh=ssh, tunnel=True)])
        run = fdl.job(options=("-c", cluster), mode="cpu_cadence")
        assert run.wait() == 4, run.story()
    assert f"host {far.name}: tunnel: its sshd does not forward a port" in run.stderr
    assert "AllowTcpForwarding" in run.stderr
    run.wait_until_clean()


@pytest.mark.long
def test_far_user_reads_nothing_through_the_tunnel(fdl: Fdl, hosts: Lab, tmp_path: Path) -> None:
    """The tunnel's far end is on loopback there, where a run's state would need no token."""
    near, far = hosts.hosts
    workers = [hosts.worker(near, 1), hosts.worker(far, 1, tunnel=True)]
    cluster = hosts.cluster(tmp_path / "c.yml", workers)
    run = fdl.job(options=("-c", cluster), mode="cpu_cadence", step_ms=20, epochs=10_000)
    run.wait_for_training()
    listening = hosts.call(far, "ss", "-Hltn", "src", "127.0.0.1").split()
    port = next(word.rpartition(":")[2] for word in listening if word.startswith("127.0.0.1:"))
    words = "b'GET /state.json HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n'"
    asked = (
        f"import socket; s = socket.create_connection(('127.0.0.1', {port}), 5); s.sendall({words}); print(s.recv(99))"
    )
    assert hosts.call(far, sys.executable, "-c", asked).strip() == "b''"
    fdl.wait_until(lambda: "HTTP through a tunnel is not served" in run.log("controller.log"), 10, run.story)
    assert fdl.call("stop", "-x", timeout_s=END_S).returncode == 0
    run.wait(END_S)
    run.wait_until_clean()
