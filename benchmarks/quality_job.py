"""One training of benchmarks/quality.py: an example's model, data and measure, on ranks of unequal speed.

    python benchmarks/quality_job.py TASK --seed N --log DIR ...                            alone
    fdl launch --local 3 benchmarks/quality_job.py TASK --seed N --log DIR --mode MODE ...

TASK is the name of a script in examples/. The seed decides the initial weights and the order of the samples. Each step
of rank R takes the R-th of --step-ms, as if that were its device's speed; sync modes deal their shares by these speeds.
Leaves in --log what tests/witness.py reads, and in ``joined-PID.json`` the example's measure on the held-out samples as
``held_out``.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flodl  # noqa: E402  # the examples and the tests' scripts are found from the root
from tests.scripts.job import at_any_end, digest, write_json  # noqa: E402

RANK = os.environ.get("RANK", "solo")
DATA = {"digits": "digits", "transformer": "characters"}
MEASURE = {"digits": "accuracy", "transformer": "bits_per_character"}


class Noted:
    """A dataset that writes down every index that is read."""

    def __init__(self, samples: Any, log: Path) -> None:
        self._samples = samples
        self._fd = os.open(log / f"reads-{RANK}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        os.write(self._fd, f"{index}\n".encode())
        return self._samples[index]


class Pace:
    """One step per ``step_s``, whatever a step costs here: the speed of a device, on cores that several share."""

    def __init__(self, step_s: float) -> None:
        self._step_s, self._next_s = step_s, 0.0

    def keep(self) -> None:
        """Sleep until the next step may begin."""
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self._step_s


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=DATA)
    parser.add_argument("--mode", default="nccl_cadence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--step-ms", default="0", help="how long a step of each rank takes, as A,B,C")
    parser.add_argument("--max-anchor", type=int, default=1000)
    parser.add_argument("--log", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    example = importlib.import_module(f"examples.{args.task}")
    train, held_out = getattr(example, DATA[args.task])()
    steps_ms = [float(text) for text in args.step_ms.split(",")]
    step_s = steps_ms[int(RANK) % len(steps_ms)] / 1e3 if RANK.isdigit() else 0.0

    def build_model(device: torch.device) -> Any:
        model = example.build_model(device)
        path = args.log / f"final-{RANK}.json"
        at_any_end(lambda: write_json(path, {"sha256": digest([*model.parameters(), *model.buffers()])}))
        return model

    pace = Pace(step_s)

    def train_step(model: nn.Module, batch: Any) -> Any:
        pace.keep()
        return example.train_step(model, batch)

    cadence = flodl.ElCheConfig(mode=args.mode, max_anchor=args.max_anchor)
    if flodl.ElCheMode(args.mode).is_sync and len(steps_ms) > 1:
        speeds = [1 / each for each in steps_ms]
        cadence = cadence.partition_ratios([speed / sum(speeds) for speed in speeds])
    handle = (
        flodl.Trainer.builder(build_model, example.make_optimizer, train_step)
        .dataset(Noted(train, args.log))
        .batch_size(args.batch_size)
        .num_epochs(args.epochs)
        .seed(args.seed)
        .elche(cadence)
        .run()
    )
    state = handle.join()
    model = example.build_model(torch.device("cpu"))
    model.load_state_dict(state.state_dict())
    model.eval()
    with torch.no_grad():
        measured = getattr(example, MEASURE[args.task])(model, *held_out.tensors)
    told = {
        "role": "head" if flodl.is_head() else RANK,
        "outcome": state.outcome,
        "sha256": digest([*state.params, *state.buffers]),
        "held_out": measured,
        "samples": len(train),
    }
    write_json(args.log / f"joined-{os.getpid()}.json", told)


if __name__ == "__main__":
    main()
