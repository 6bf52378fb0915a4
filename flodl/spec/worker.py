"""What ``epoch_fn`` gets to see of the rank that runs it."""

from dataclasses import dataclass

import torch

from flodl.ids import RankId


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank behind an epoch. ``model`` holds the consensus, in eval mode: look at it, and do not change it.

    ``world_size`` counts the ranks that there were when this one started; ``device`` is the model's. ``lr`` is the
    learning rate of the optimizer's first parameter group at this moment, None where it has none.
    """

    rank: RankId
    world_size: int
    device: torch.device
    model: torch.nn.Module
    lr: float | None
