"""One training of plain SGD in two engines: flodl's, which notes the batches of every step, and torch's own
DistributedDataParallel, which is fed those very batches.

    fdl launch --local 3 tests/scripts/synchronous.py --log DIR --mode nccl_sync
    RANK=R WORLD_SIZE=3 python tests/scripts/synchronous.py --log DIR --ddp

In the folder of --log: ``steps-R.log``, one line of sample indices for each step of rank R; ``flodl.pt``, the state
dict that ``join()`` returned; ``ddp.pt``, that of DistributedDataParallel's rank 0 at its end.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flodl

BATCH_SIZE = 4
LEARNING_RATE = 0.1
PEERS_TIMEOUT_S = 60.0


class Numbered:
    """Sample i is i itself, with a vector that i seeds and a class."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, torch.sin(torch.arange(1, 9) * (index + 1.0)), index % 3


def network() -> nn.Module:
    """Other weights on every rank, so that it shows whose are taken: rank 0's, by both engines."""
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    _, x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train_with_flodl(log: Path, mode: str, steps: int) -> None:
    world_size = 3
    note = log / f"steps-{os.environ.get('RANK', 'head')}.log"

    def train_step(model: nn.Module, batch) -> torch.Tensor:
        with note.open("a") as file:
            file.write(" ".join(map(str, batch[0].tolist())) + "\n")
        return loss_of(model, batch)

    handle = (
        flodl.Trainer.builder(lambda device: network().to(device), optimizer, train_step)
        .dataset(Numbered(steps * world_size * BATCH_SIZE))
        .batch_size(BATCH_SIZE)
        .num_epochs(1)
        .elche(flodl.ElCheConfig(mode=mode, max_batch_diff=0))
        .run()
    )
    torch.save(handle.join().state_dict(), log / "flodl.pt")


def train_with_ddp(log: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(log / "rendezvous"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = DistributedDataParallel(network())
    sgd, data = optimizer(model.parameters()), Numbered(10**6)
    for line in (log / f"steps-{rank}.log").read_text().splitlines():
        batch = torch.utils.data.default_collate([data[int(index)] for index in line.split()])
        sgd.zero_grad()
        loss_of(model, batch).backward()
        sgd.step()
    if rank == 0:
        torch.save(model.module.state_dict(), log / "ddp.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--mode", default="nccl_sync")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ddp", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.ddp:
        train_with_ddp(args.log)
        sys.stdout.flush()
        os._exit(0)  # under load the interpreter's end meets threads of torch's that nobody has joined, and aborts
    else:
        train_with_flodl(args.log, args.mode, args.steps)


if __name__ == "__main__":
    main()
