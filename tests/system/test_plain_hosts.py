"""A script for torchrun on two hosts over ssh, with one rank on the first and two on the second."""

import json
import re
from pathlib import Path

import pytest

from tests.runs import DDP, END_S, START_S, Fdl, Launched
from tests.system.lab import Lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

LONG = ("--steps", 100_000, "--step-ms", 20)
BACK_S = 60.0


@pytest.fixture
def cluster(hosts: Lab, tmp_path: Path) -> Path:
    workers = [hosts.worker(hosts.hosts[0], 1), hosts.worker(hosts.hosts[1], 2)]
    return hosts.cluster(tmp_path / "two-hosts.yml", workers)


def plain(fdl: Fdl, cluster: Path, *arguments: object, options: tuple[object, ...] = ()) -> Launched:
    return fdl.launch("--stop-timeout", 5, "-c", cluster, "--plain", *options, DDP, *arguments)


def found(run: Launched, rank: int) -> list[dict[str, str]]:
    return [json.loads(text) for text in re.findall(r"environment (\{.*\})", run.log(f"rank{rank}.stdout.log"))]


@pytest.mark.long
def test_unequal_hosts_train_together(fdl: Fdl, hosts: Lab, cluster: Path) -> None:
    run = plain(fdl, cluster)

    assert run.wait() == 0, run.story()
    assert len(re.findall("of 3 is done: all alike True", run.stdout)) == 3
    envs = [found(run, rank)[0] for rank in range(3)]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "0", "1"]
    assert [env["LOCAL_WORLD_SIZE"] for env in envs] == ["1", "2", "2"]
    assert [env["GROUP_RANK"] for env in envs] == ["0", "1", "1"]
    assert {env["GROUP_WORLD_SIZE"] for env in envs} == {"2"}
    assert {env["MASTER_ADDR"] for env in envs} == {hosts.hosts[0].address}
    run.wait_until_clean()


@pytest.mark.long
def test_rank_that_fails_on_one_host_ends_those_of_the_other(fdl: Fdl, cluster: Path, hosts: Lab) -> None:
    run = plain(fdl, cluster, *LONG, "--fail-rank", 2)

    assert run.wait() == 7, run.story()
    assert f"first failure: rank 2 on {hosts.hosts[1].name} (cpu:1): exited with code 7" in run.stderr
    run.wait_until_clean()


@pytest.mark.long
def test_host_that_is_lost_comes_back_for_the_restart(fdl: Fdl, hosts: Lab, cluster: Path, tmp_path: Path) -> None:
    arguments = ("--steps", 400, "--step-ms", 20, "--checkpoint", tmp_path / "model.pt")
    run = plain(fdl, cluster, *arguments, options=("--max-restarts", 1))
    for rank in range(3):
        run.wait_for_log(f"rank{rank}.stdout.log", "takes its first step")

    run.kill("daemon", hosts.hosts[1].namespace)

    fdl.wait_until(lambda: run.events("restarting"), START_S, run.story)
    assert run.wait(BACK_S + END_S) == 0, run.story()
    assert re.search(r"goes on from step \d+\nrank 2 of 3 is done", run.log("rank2.stdout.log")), run.story()
    assert [env["TORCHELASTIC_RESTART_COUNT"] for env in found(run, 2)] == ["0", "1"]
    run.wait_until_clean()


@pytest.mark.long
def test_host_whose_cable_is_pulled_starts_again_once_it_is_back(fdl: Fdl, hosts: Lab, tmp_path: Path) -> None:
    workers = [hosts.worker(hosts.hosts[0], 1), hosts.worker(hosts.hosts[1], 2)]
    liveness = {"heartbeat_s": 1, "suspect_s": 4, "dead_s": 8}
    cluster = hosts.cluster(tmp_path / "c.yml", workers, liveness=liveness, on_disconnect_s=10)
    arguments = ("--steps", 200, "--step-ms", 20, "--checkpoint", tmp_path / "model.pt")
    run = plain(fdl, cluster, *arguments, options=("--max-restarts", 1))
    for rank in range(3):
        run.wait_for_log(f"rank{rank}.stdout.log", "takes its first step")

    hosts.cut(hosts.hosts[1])
    try:
        run.wait_for_event("restarting")
        state = json.loads(fdl.call("status", "--json").stdout)
        assert (state["phase"], state["waits_for"]) == ("gathering", [f"host {hosts.hosts[1].name}"])
    finally:
        hosts.heal(hosts.hosts[1])

    assert run.wait(BACK_S + END_S) == 0, run.story()
    for rank in range(3):
        assert [env["TORCHELASTIC_RESTART_COUNT"] for env in found(run, rank)] == ["0", "1"], run.story()
    run.wait_until_clean()
