"""A script as people have it for torchrun: DistributedDataParallel over Gloo, with a checkpoint; it knows no flodl.

It learns a line, so that the result tells whether all ranks took part. It can be told to fail in one rank.
"""

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CONTRACT = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--fail-rank", type=int, default=-1)
    parser.add_argument("--fail-step", type=int, default=5)
    parser.add_argument("--fail-starts", type=int, default=1 << 30, help="only in so many first starts")
    parser.add_argument("--fail-with", default="exit:7", help="exit:N, signal:N, or raise")
    parser.add_argument("--wait-for", type=Path, help="before the ranks meet; tell the port meanwhile")
    parser.add_argument("--last-words", type=Path, help="on SIGTERM write the step to this file and the rank's number")
    return parser.parse_args()


def fail(how: str) -> None:
    kind, _, number = how.partition(":")
    if kind == "raise":
        raise RuntimeError("told to fail")
    print(f"rank {os.environ['RANK']} is told to fail by {how}", file=sys.stderr, flush=True)
    if kind == "signal":
        os.kill(os.getpid(), int(number))
    os._exit(int(number))


def main() -> None:
    args = parse()
    rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("environment", json.dumps({name: os.environ.get(name) for name in CONTRACT}), flush=True)
    step = 0

    def say_farewell(number: int, _frame: object) -> None:
        args.last_words.with_suffix(f".{rank}").write_text(str(step))
        sys.exit(128 + number)

    if args.last_words:
        signal.signal(signal.SIGTERM, say_farewell)
    if args.wait_for:
        print("port", os.environ["MASTER_PORT"], flush=True)
        while not args.wait_for.exists():
            time.sleep(0.01)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.module.load_state_dict(saved["model"])
        step = saved["step"]
        print(f"goes on from step {step}", flush=True)
    while step < args.steps:
        x = torch.rand(8, 1) + rank  # (B, 1): each rank sees a part of the line
        loss = nn.functional.mse_loss(model(x), 2 * x - 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if args.checkpoint and rank == 0:
            torch.save({"model": model.module.state_dict(), "step": step}, args.checkpoint.with_suffix(".new"))
            args.checkpoint.with_suffix(".new").replace(args.checkpoint)
        if rank == args.fail_rank and step >= args.fail_step and restart < args.fail_starts:
            fail(args.fail_with)
        if step == 1:
            print("takes its first step", flush=True)
        time.sleep(args.step_ms / 1e3)
    weight = model.module.weight.detach().clone()
    dist.all_reduce(weight)
    alike = torch.allclose(weight / dist.get_world_size(), model.module.weight)
    print(f"rank {rank} of {dist.get_world_size()} is done: all alike {alike}", flush=True)
    dist.barrier()  # else a thread of Gloo may still hold a tensor when Python ends, and torch aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
