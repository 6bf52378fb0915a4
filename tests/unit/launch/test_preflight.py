"""What a machine is asked too much of is said before anything starts."""

from pathlib import Path

import pytest

from flodl.config import model
from flodl.config.builder import local_cluster
from flodl.launch.launcher import LaunchOptions, local_request
from flodl.launch.plan import RunSpec, plan
from flodl.launch.preflight import RANK_BYTES, strains, strains_here


def local(ranks: int) -> RunSpec:
    return plan(local_cluster(ranks), local_request(LaunchOptions(("train.py",))))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_fits_is_not_talked_about() -> None:
    assert strains(local(2), cores=2, free_bytes=2 * RANK_BYTES) == []
    assert strains_here(local(1)) == []


def test_more_cpu_ranks_than_cores_are_warned_about() -> None:
    assert strains(local(3), cores=2, free_bytes=3 * RANK_BYTES) == [
        "3 CPU ranks share 2 core(s) here: more ranks than cores train no faster"
    ]


def test_ranks_that_cannot_fit_into_memory_are_warned_about() -> None:
    (_, memory) = strains(local(300), cores=2, free_bytes=4_000_000_000)
    assert memory == "300 ranks need 45.0 GB of memory here, without model and data, and 4.0 GB are free"


def test_gpus_and_other_machines_are_not_counted() -> None:
    workers = (
        model.WorkerSpec(host="localhost", local_devices=(0, 1)),
        model.WorkerSpec(host="far", path="/p", local_devices=("cpu",) * 9),
    )
    cluster = model.ClusterSpec(controller=model.ControllerSpec(host="10.0.0.1"), workers=workers)
    assert strains(plan(cluster, local_request(LaunchOptions(("train.py",)))), cores=1, free_bytes=0) == []
