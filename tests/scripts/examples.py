"""The models and data of the examples with checkpoints, and a note of every step, for tests of resuming.

In the folder of --log: ``steps-R.log``, the loss and the learning rate of each step of rank R.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flodl

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
RANK = os.environ.get("RANK", "solo")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["digits", "transformer"], default="digits")
    parser.add_argument("--mode", default="nccl_cadence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--anchor", type=int, default=4, help="of every window, for every rank")
    parser.add_argument("--step-ms", type=float, default=0)
    parser.add_argument("--save", default=None)
    parser.add_argument("--at-epoch", type=int, default=None)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--log", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    example: Any = __import__(args.task)
    train, _ = example.digits() if args.task == "digits" else example.characters()
    note = (args.log / f"steps-{RANK}.log").open("a", buffering=1)
    optimizers: list[torch.optim.Optimizer] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(example.make_optimizer(parameters))
        return optimizers[0]

    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = example.train_step(model, batch)
        print(loss.item(), optimizers[0].param_groups[0]["lr"], file=note)
        time.sleep(args.step_ms / 1e3)
        return loss

    (
        flodl.Trainer.builder(example.build_model, make_optimizer, train_step)
        .dataset(train)
        .batch_size(32 if args.task == "digits" else 16)
        .num_epochs(args.epochs)
        .epoch_splits(args.splits)
        .seed(args.seed)
        .scheduler_fn(torch.optim.lr_scheduler.CosineAnnealingLR)
        .elche(
            flodl.ElCheConfig(
                mode=args.mode,
                anchor=args.anchor,
                min_anchor=args.anchor,
                max_anchor=args.anchor,
                max_batch_diff=0,
                guard=flodl.NoGuard(),
            )
        )
        .save_path(args.save)
        .checkpoint_at_epoch(args.at_epoch)
        .resume_from(args.resume)
        .run()
        .join()
    )


if __name__ == "__main__":
    main()
