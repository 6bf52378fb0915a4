"""A script with a cluster in its code, for tests: it promotes itself to the head of a run of two CPU ranks here.

Arguments: the controller's port, and how long a step takes in milliseconds.
"""

import os
import sys
import time

import torch
from torch import nn

import flodl
from flodl.config.builder import ClusterBuilder


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), index / 64), torch.zeros(1)


def main() -> None:
    port, step_ms = int(sys.argv[1]), float(sys.argv[2])

    def train_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        print(f"rank {os.environ['RANK']} takes a step", flush=True)
        time.sleep(step_ms / 1e3)
        x, target = batch
        return nn.functional.mse_loss(model(x), target)

    worker = ClusterBuilder().controller("127.0.0.1").port(port).done().host("localhost")
    handle = (
        flodl.Trainer.builder(lambda device: nn.Linear(4, 1).to(device), torch.optim.Adam, train_step)
        .dataset(Numbers())
        .batch_size(4)
        .num_epochs(2)
        .cluster(worker.devices(["cpu", "cpu"]).done())
        .run()
    )
    state = handle.join()
    print(f"result: {state.outcome} after {state.epochs} epoch(s), head: {flodl.is_head()}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
