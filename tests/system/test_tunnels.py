"""A host whose traffic goes through the ssh session: a firewall lets nothing else from it to the controller."""

from pathlib import Path

import pytest

from tests.runs import Fdl
from tests.system.lab import Lab
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def test_host_behind_a_firewall_trains_through_its_ssh_session(fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path) -> None:
    near, far = hosts.hosts
    port = hosts.free_port()
    workers = [hosts.worker(near, 1), hosts.worker(far, 2, tunnel=True)]
    cluster = hosts.cluster(tmp_path / "c.yml", workers, port)
    with hosts.fence(far, port):
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
