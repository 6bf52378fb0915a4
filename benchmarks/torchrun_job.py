"""What `torchrun` restarts for benchmarks/reliability.py: DistributedDataParallel over Gloo, saving as it goes.

    torchrun ... benchmarks/torchrun_job.py FOLDER STEP_MS SAVE_EVERY

Each worker notes its process id in ``pid-R``, and each step in ``steps-R.log``: number, end in monotonic seconds, and
process id. Rank 0 saves every so many steps, and everybody starts from what is saved.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train for ever."""
    folder, step_s, save_every = Path(sys.argv[1]), float(sys.argv[2]) / 1e3, int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    saved, step = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replica = nn.parallel.DistributedDataParallel(model)
    told = folder / f"pid-{rank}.tmp"
    told.write_text(str(os.getpid()))
    told.rename(folder / f"pid-{rank}")
    with (folder / f"steps-{rank}.log").open("a", buffering=1) as log:
        while True:
            time.sleep(step_s)
            x = torch.sin(torch.arange(32.0).reshape(8, 4) * (step + 1))
            loss: Any = nn.functional.mse_loss(replica(x), x.sum(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(step, time.monotonic(), os.getpid(), file=log)
            if rank == 0 and step % save_every == 0:
                part = folder / "saved.tmp"
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
                part.rename(saved)


if __name__ == "__main__":
    main()
