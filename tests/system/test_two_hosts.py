"""The same script, unchanged, on two hosts over ssh."""

from pathlib import Path

import pytest

from tests.runs import Fdl
from tests.system.lab import Lab
from tests.witness import witness_run

pytestmark = pytest.mark.system


@pytest.fixture
def cluster(hosts: Lab, tmp_path: Path) -> Path:
    """One rank on the first host, two on the second."""
    workers = [hosts.worker(hosts.hosts[0], 1), hosts.worker(hosts.hosts[1], 2)]
    return hosts.cluster(tmp_path / "two-hosts.yml", workers)


@pytest.mark.parametrize("mode", ["nccl_cadence", "cpu_cadence", "nccl_sync", "cpu_sync"])
def test_every_sample_is_merged_once_and_all_ranks_end_alike(
    fdl: Fdl, cluster: Path, tmp_path: Path, mode: str
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    run = fdl.job(options=("-c", cluster), mode=mode, size=101, batch_size=4, epochs=2, log=log)

    assert run.wait() == 0, run.story()
    seen = witness_run(run.folder, log, size=101, epochs=2)
    assert (seen.faults, seen.samples, seen.ranks) == ([], 202, [0, 1, 2])
    run.wait_until_clean()
