"""Handwritten digits, in one file: a small network, scikit-learn's 1,797 real 8×8 images, a fifth of them held out.

python examples/digits.py                          # one process
fdl launch --local 3 examples/digits.py            # three ranks on this machine
fdl launch -c fdl.cluster.yml examples/digits.py   # as many hosts as the file names
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import flodl


# ------------------------------------------------------------------------------------------------------------- data
def digits() -> tuple[TensorDataset, TensorDataset]:
    """The images split 80/20, the same way in every process: (train, held out)."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32)  # (1797, 64), from 0 to 1
    y = torch.tensor(labels)  # (1797,)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held_out, train = order[: len(x) // 5], order[len(x) // 5 :]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


# ------------------------------------------------------------------------------------------------------------ model
def build_model(device: torch.device) -> nn.Module:
    """A network of two hidden layers with batch norm: (B, 64) to (B, 10)."""
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).to(device)


def make_optimizer(parameters) -> torch.optim.Optimizer:
    """Adam, as everywhere."""
    return torch.optim.Adam(parameters, lr=5e-3)


def train_step(model: nn.Module, batch) -> torch.Tensor:
    """The loss of one batch; flodl does the rest."""
    x, y = batch  # (B, 64), (B,)
    return cross_entropy(model(x), y)


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The fraction of right answers."""
    return (model(x).argmax(dim=1) == y).float().mean().item()


# ------------------------------------------------------------------------------------------------------------- run
GUARDS = {  # who may object when the window between two averagings grows
    "trend": None,  # flodl.TrendGuard, with the threshold that suits the mode
    "msf": flodl.MsfGuard().with_nudge(n=1),
    "none": flodl.NoGuard(),
}
OUTER = {  # what becomes of the ranks' average before they adopt it
    "avg": flodl.OuterAvg(),
    "slowmo": flodl.SlowMomentum(lr=1.0, mu=0.5),
    "diloco": flodl.NesterovMomentum(lr=0.7, mu=0.9),
}


def main() -> None:
    """Train, then measure once on what no rank has seen."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--mode", default="nccl_cadence", choices=[mode.value for mode in flodl.ElCheMode])
    parser.add_argument("--guard", default="trend", choices=list(GUARDS))
    parser.add_argument("--outer", default="avg", choices=list(OUTER))
    args = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = digits()
    handle = (
        flodl.Trainer.builder(build_model, make_optimizer, train_step)
        .dataset(train)
        .batch_size(args.batch_size)
        .num_epochs(args.epochs)
        .elche(flodl.ElCheConfig(mode=args.mode, guard=GUARDS[args.guard]))
        .outer_optimizer(OUTER[args.outer])
        .eval_dataset(held_out)
        .eval_fn(accuracy)
        .metrics_fn(lambda m: print(f"epoch {m.epoch + 1}: loss {m.avg_loss:.4f}, {m.epoch_ms:.0f} ms"))
        .eval_result_fn(lambda epoch, value: print(f"epoch {epoch + 1}: held-out accuracy so far {value:.4f}"))
        .run()
    )
    state = handle.join()  # the ranks end here; what follows runs once

    model = build_model(torch.device("cpu"))
    model.load_state_dict(state.state_dict())
    model.eval()
    print(f"held-out accuracy {accuracy(model, *held_out.tensors):.4f}")


if __name__ == "__main__":
    main()
