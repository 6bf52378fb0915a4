"""A loop of one's own under Hugging Face Accelerate, as people start it with torchrun."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    accelerator = Accelerator(cpu=True, project_dir=parser.parse_args().folder)
    torch.manual_seed(0)
    x = torch.rand(64, 1)  # (N, 1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(x, 2 * x - 1), batch_size=4, shuffle=True)
    )
    steps = 0
    for _ in range(10):
        for point, target in loader:
            loss = nn.functional.mse_loss(model(point), target)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
    accelerator.save_state(accelerator.project_dir / "last")
    print(f"rank {accelerator.process_index} of {accelerator.num_processes}: step {steps}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
