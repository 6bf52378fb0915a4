"""A sync mode over equal ranks is ordinary synchronous training: torch's DistributedDataParallel does the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Figures
from tests.runs import ROOT, Fdl

pytestmark = pytest.mark.timeout(240)

SCRIPT = ROOT / "tests" / "scripts" / "synchronous.py"
STEPS = 50
RANKS = 3
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
"""float32: the mean of three parameters is rounded elsewhere than the mean of three gradients. One wrong batch of the
150 moves a parameter by 5e-3."""


def steps_of(log: Path, rank: int) -> list[list[int]]:
    return [[int(index) for index in line.split()] for line in (log / f"steps-{rank}.log").read_text().splitlines()]


def replay_with_ddp(fdl: Fdl, log: Path) -> dict[str, torch.Tensor]:
    """Let DistributedDataParallel train on the batches that flodl has noted."""
    command = [sys.executable, str(SCRIPT), "--ddp", "--log", str(log)]
    envs = [
        {**fdl.env, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"} for rank in range(RANKS)
    ]
    peers = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for env in envs]
    try:
        for peer in peers:
            _, said = peer.communicate(timeout=60 * fdl.deadline_factor)
            assert peer.returncode == 0, said
    finally:
        for peer in peers:
            peer.kill()
            peer.wait(10)
    return torch.load(log / "ddp.pt", weights_only=True)


@pytest.mark.parametrize("mode", [pytest.param("nccl_sync", marks=pytest.mark.long), "cpu_sync"])
def test_equal_ranks_in_lockstep_train_as_distributed_data_parallel(
    fdl: Fdl, tmp_path: Path, figures: Figures, mode: str
) -> None:
    run = fdl.launch("--local", RANKS, SCRIPT, "--mode", mode, "--steps", STEPS, "--log", tmp_path)
    assert run.wait() == 0, run.story()

    ours = torch.load(tmp_path / "flodl.pt", weights_only=True)
    theirs = replay_with_ddp(fdl, tmp_path)

    steps = [steps_of(tmp_path, rank) for rank in range(RANKS)]
    assert [len(each) for each in steps] == [STEPS] * RANKS
    assert {len(batch) for each in steps for batch in each} == {4}
    assert sum(fields["version"] > 0 for fields in run.commits()) == STEPS, "a round for each step"
    assert ours.keys() == theirs.keys()
    figures["largest_difference"] = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
