"""A small character-level transformer, in one file, on a real text: what ``help()`` knows of the Python language.

python examples/transformer.py                          # one process
fdl launch --local 3 examples/transformer.py            # three ranks on this machine
fdl launch -c fdl.cluster.yml examples/transformer.py   # as many hosts as the file names

The text is ``pydoc_data.topics``, which every CPython carries in its standard library: nothing to download. Hosts with
other minor versions of Python have other texts; flodl refuses such a cohort when its lengths differ.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import flodl

CHARACTERS = 150_000  # of the text, the last tenth of them held out
T, C, HEADS, LAYERS = 32, 32, 4, 2  # characters of one sample, channels of one character


# ------------------------------------------------------------------------------------------------------------- data
TEXT = "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
ALPHABET = sorted(set(TEXT))  # V characters


def characters() -> tuple[TensorDataset, TensorDataset]:
    """The text cut into samples of T characters, each with its successors as the target: (train, held out)."""
    number = {character: i for i, character in enumerate(ALPHABET)}
    text = torch.tensor([number[character] for character in TEXT])  # (CHARACTERS,)
    count = (len(text) - 1) // T
    x, y = text[: count * T].view(count, T), text[1 : count * T + 1].view(count, T)  # (count, T) each
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    held_out, train = order[: count // 10], order[count // 10 :]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


# ------------------------------------------------------------------------------------------------------------ model
class Block(nn.Module):
    """Attention over what came before, then a small network for each character; both add to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(b, t, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = heads  # (B, HEADS, T, C / HEADS) each
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, HEADS, T, C / HEADS)
        x = x + self.proj(seen.transpose(1, 2).reshape(b, t, C))  # (B, T, C)
        return x + self.mlp(self.norm_2(x))  # (B, T, C)


class Transformer(nn.Module):
    """Characters to the scores of their successors: (B, T) to (B, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(ALPHABET), C), nn.Embedding(T, C)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, len(ALPHABET), bias=False)
        self.head.weight = self.characters.weight  # tied: one tensor, averaged once
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=C**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.characters(x) + self.places.weight[: x.shape[1]]  # (B, T, C)
        return self.head(self.norm(self.blocks(x)))  # (B, T, V)


def build_model(device: torch.device) -> nn.Module:
    """Some 30,000 parameters."""
    return Transformer().to(device)


def make_optimizer(parameters) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(parameters, lr=1.5e-2, weight_decay=0.1)


def train_step(model: nn.Module, batch) -> torch.Tensor:
    """The loss of one batch; flodl does the rest."""
    x, y = batch  # (B, T), (B, T)
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


def bits_per_character(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """How much the next character surprises the model, on average."""
    return train_step(model, (x, y)).item() / math.log(2)


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
    parser = argparse.ArgumentParser(description="Train a small transformer on the documentation of Python.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--mode", default="nccl_cadence", choices=[mode.value for mode in flodl.ElCheMode])
    parser.add_argument("--guard", default="trend", choices=list(GUARDS))
    parser.add_argument("--outer", default="avg", choices=list(OUTER))
    args = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = characters()
    handle = (
        flodl.Trainer.builder(build_model, make_optimizer, train_step)
        .dataset(train)
        .batch_size(args.batch_size)
        .num_epochs(args.epochs)
        .elche(flodl.ElCheConfig(mode=args.mode, guard=GUARDS[args.guard]))
        .outer_optimizer(OUTER[args.outer])
        .eval_dataset(held_out)
        .eval_fn(bits_per_character)
        .metrics_fn(lambda m: print(f"epoch {m.epoch + 1}: loss {m.avg_loss:.4f}, {m.epoch_ms:.0f} ms"))
        .eval_result_fn(lambda epoch, bits: print(f"epoch {epoch + 1}: held-out bits per character so far {bits:.4f}"))
        .run()
    )
    state = handle.join()  # the ranks end here; what follows runs once

    model = build_model(torch.device("cpu"))
    model.load_state_dict(state.state_dict())
    model.eval()
    with torch.no_grad():
        print(f"held-out bits per character {bits_per_character(model, *held_out.tensors):.4f}")


if __name__ == "__main__":
    main()
