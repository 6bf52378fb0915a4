"""A training whose divergence can be switched on: as soon as the file --trigger exists, one rank's learning rate is
20 times as large, and two windows later all steps are much faster, so that the overhead asks for a longer window.

    fdl launch --local 3 tests/scripts/diverging.py --trigger FILE --log DIR --mode nccl_cadence
    RANK=R WORLD_SIZE=3 python tests/scripts/diverging.py --trigger FILE --log DIR --ddp

The loss has the curvature 1 in every direction, so what a step does is known: it multiplies the distance from the
optimum by 1 - lr. That is 0.896 before the injection, and -1.08 in the rank after it. A window of k steps therefore
grows the average of three ranks by 1.08**k / 3: not at all for k = 10, fivefold for k = 36. A synchronous step of three
ranks, of which one is 20 times as fast, stays stable: 1 - lr * 22 / 3 = 0.24. Nothing is clipped.

In the folder of --log: ``injected.json``, the steps that the rank had done when its rate was changed;
``ended-PID.json``, whether the trained parameters are finite, and the largest of them.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flodl

RANK = int(os.environ.get("RANK", "0"))
SICK_RANK = 1
DIMENSIONS = 256
NOISE = 0.02
BATCH_SIZE = 4
LEARNING_RATE = 0.104
TIMES = 20
GUARDS = {
    "none": flodl.NoGuard(),
    "trend": None,  # flodl.TrendGuard, with the threshold that suits the mode
    "msf": flodl.MsfGuard().with_nudge(n=1),
}


class Vectors:
    """Sample i is a vector of ones with noise that i seeds."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        return 1.0 + NOISE * torch.randn(DIMENSIONS, generator=torch.Generator().manual_seed(index))


class Mean(nn.Module):
    """Learns the mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(DIMENSIONS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean).square().sum(dim=1).mean() / 2


class Step:
    """A training step that looks for the trigger, and sleeps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._trigger: Path = args.trigger
        self._note: Path = args.log / "injected.json"
        self._step_s: float = args.step_ms / 1e3
        self._steps = self._hurry_at = 0
        self._optimizer: torch.optim.Optimizer | None = None

    def make_optimizer(self, parameters) -> torch.optim.Optimizer:
        self._optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
        return self._optimizer

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if not self._hurry_at and self._trigger.exists():
            self._inject()
        self._steps += 1
        if not self._hurry_at or self._steps < self._hurry_at:
            time.sleep(self._step_s)
        return model(batch)

    def _inject(self) -> None:
        self._hurry_at = self._steps + 2 * int(self._trigger.read_text())
        if RANK == SICK_RANK:
            assert self._optimizer is not None
            for group in self._optimizer.param_groups:
                group["lr"] *= TIMES
            self._note.write_text(json.dumps({"steps": self._steps}))


def train_with_flodl(args: argparse.Namespace, step: Step) -> list[torch.Tensor]:
    cadence = flodl.ElCheConfig(mode=args.mode, guard=GUARDS[args.guard], meta_controller=not args.no_meta)
    if not flodl.ElCheMode(args.mode).is_sync:
        cadence = cadence.anchor(args.anchor).max_anchor(args.max_anchor).overhead_target(args.overhead_target)
    handle = (
        flodl.Trainer.builder(lambda device: Mean().to(device), step.make_optimizer, step)
        .dataset(Vectors(args.steps * args.world_size * BATCH_SIZE))
        .batch_size(BATCH_SIZE)
        .num_epochs(1)
        .elche(cadence)
        .run()
    )
    return list(handle.join().params)


def train_with_ddp(args: argparse.Namespace, step: Step) -> list[torch.Tensor]:
    """The same injection at the step --inject-at."""
    store = dist.FileStore(str(args.log / "rendezvous"), args.world_size)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=args.world_size)
    model = DistributedDataParallel(Mean())
    optimizer, data = step.make_optimizer(model.parameters()), Vectors(10**6)
    for number in range(args.steps):
        if number == args.inject_at and RANK == SICK_RANK:
            args.trigger.write_text("0")
        first = (number * args.world_size + RANK) * BATCH_SIZE
        optimizer.zero_grad()
        step(model, torch.stack([data[first + i] for i in range(BATCH_SIZE)])).backward()
        optimizer.step()
    dist.destroy_process_group()
    return list(model.module.parameters())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trigger", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--mode", default="nccl_cadence")
    parser.add_argument("--guard", choices=GUARDS, default="trend")
    parser.add_argument("--no-meta", action="store_true")
    parser.add_argument("--anchor", type=int, default=4)
    parser.add_argument("--max-anchor", type=int, default=40)
    parser.add_argument("--overhead-target", type=float, default=0.05)
    parser.add_argument("--step-ms", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=2000, help="of each rank, on average")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--inject-at", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    step = Step(args)
    params = (train_with_ddp if args.ddp else train_with_flodl)(args, step)
    is_finite = all(bool(tensor.isfinite().all()) for tensor in params)
    told = {"is_finite": is_finite, "largest": max(float(tensor.detach().abs().max()) for tensor in params)}
    (args.log / f"ended-{os.getpid()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
