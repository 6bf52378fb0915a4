"""A small job for tests of whole runs. It leaves evidence in --log and can go wrong in every way.

In the folder of --log: ``reads-R.log``, one line for each sample that rank R read; ``steps-R.log``, one line for each
step of rank R, when it began and ended, in monotonic seconds (with --note-steps); ``rates-R.log``, the learning rate of
each step of rank R (with --note-rates); ``final-R.json``, a digest of the rank's weights at its end;
``joined-PID.json``, a digest of what ``join()`` returned, and in which role. A rank is called ``solo`` where there are
none, and tells its pace there, too.
"""

import argparse
import atexit
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import flodl
from flodl.averaging.collective import CollectivePlane
from flodl.averaging.shared import SharedPlane
from flodl.messages import Layout

RANK = os.environ.get("RANK", "solo")
GRANDCHILD_S = 600
GUARD_SLEEPS_S = 1.5


class Numbers:
    """Sample i is a vector that i seeds, with its sum as the target; every read is logged."""

    def __init__(self, size: int, log: Path | None) -> None:
        self._size = size
        self._fd = -1 if log is None else os.open(log / f"reads-{RANK}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fd >= 0:
            os.write(self._fd, f"{index}\n".encode())
        x = torch.sin(torch.arange(1, 5) * (index + 1.0))
        return x, x.sum(dim=0, keepdim=True)


class Step:
    """One training step: counts, sleeps as a slower device would, and goes wrong when its time has come."""

    def __init__(
        self, step_s: float, fault: Callable[[], None] | None, at_step: int, note: Path | None, poisoned: int = 0
    ) -> None:
        self._step_s, self._fault, self._at_step, self._poisoned = step_s, fault, at_step, poisoned
        self._note = None if note is None else note.open("a", buffering=1)
        self._steps, self._first_s, self._last_s = 0, 0.0, 0.0

    @property
    def per_s(self) -> float:
        """Steps per second from the first step to the last one."""
        return (self._steps - 1) / (self._last_s - self._first_s) if self._steps > 1 else 0.0

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self._steps += 1
        self._last_s = time.monotonic()
        self._first_s = self._first_s or self._last_s
        if self._steps == 1:
            print(f"rank {RANK} takes its first step", flush=True)
        if self._steps == self._at_step and self._fault is not None:
            self._fault()
        time.sleep(self._step_s)
        x, target = batch
        loss = nn.functional.mse_loss(model(x), target)
        if self._at_step <= self._steps < self._at_step + self._poisoned:
            loss = loss * float("nan")
        if self._note is not None:
            self._note.write(f"{self._last_s} {time.monotonic()}\n")
        return loss


# ----------------------------------------------------------------------------------------------------------- faults
def raise_value_error() -> None:
    raise ValueError(f"planted on rank {RANK}")


def raise_in_thread() -> None:
    thread = threading.Thread(target=raise_value_error)
    thread.start()
    thread.join()


def flip_bits(sums: int) -> None:
    """Of this rank's next sums: in the side buffer of the collective plane; on the CPU plane, whose result all local
    ranks share, in this rank's own view of it. Byte 256 is the first of ``0.bias``.
    """
    all_reduce, result = CollectivePlane.all_reduce, SharedPlane.result
    left = [sums]

    def flip(image: Any) -> None:
        image[256] ^= 1
        left[0] -= 1
        if not left[0]:
            use(all_reduce, result)

    def all_reduce_and_flip(plane: CollectivePlane, layout: Layout, raw: bool, on_done: Callable[[str], None]) -> None:
        def landed(error: str) -> None:
            assert plane._buffer is not None
            flip(plane._buffer.numpy())
            on_done(error)

        all_reduce(plane, layout, raw, landed)

    def own_view(plane: SharedPlane, layout: Layout) -> memoryview:
        view = memoryview(bytearray(result(plane, layout)))
        flip(view)
        return view

    def use(reduce: Any, view: Any) -> None:
        setattr(CollectivePlane, "all_reduce", reduce)  # noqa: B010  # an assignment could not be typed
        setattr(SharedPlane, "result", view)  # noqa: B010

    use(all_reduce_and_flip, own_view)


FAULTS: dict[str, Callable[[], None]] = {
    "raise": raise_value_error,
    "thread": raise_in_thread,
    "exit-0": lambda: sys.exit(0),
    "exit-1": lambda: sys.exit(1),
    "exit-3": lambda: sys.exit(3),
    "exit-text": lambda: sys.exit("planted text"),
    "_exit-7": lambda: os._exit(7),
    "segv": lambda: print(ctypes.string_at(0)),
    "flip": lambda: flip_bits(1),
    "flip-on": lambda: flip_bits(1000),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class SignOfMean:
    """A user's outer optimizer: steps of one size towards the mean; counts them."""

    slots = 1
    resets_inner = False

    def __repr__(self) -> str:
        return "SignOfMean()"

    def step(self, prev: torch.Tensor, consensus: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        state[0].add_(1)
        prev.add_((consensus - prev).sign().mul_(0.01))


OUTER: dict[str, flodl.OuterOptimizer] = {
    "OuterAvg": flodl.OuterAvg(),
    "SlowMomentum": flodl.SlowMomentum(lr=0.9, mu=0.4),
    "NesterovMomentum": flodl.NesterovMomentum(lr=0.7, mu=0.9),
    "SignOfMean": SignOfMean(),
}


class Guard:
    """A convergence guard of the user's: cuts at version 1, fails at version 2, falls asleep at version 4."""

    def judge(self, figures: flodl.RoundFigures) -> flodl.ConvergenceAction:
        print(f"rank {RANK} judges version {figures.version}", flush=True)
        if figures.version == 2:
            raise ValueError("planted in the guard")
        if figures.version == 4:
            time.sleep(GUARD_SLEEPS_S)
        return flodl.ConvergenceAction.nudge_down(0.5) if figures.version == 1 else flodl.ConvergenceAction.STABLE


class Callbacks:
    """The functions behind an epoch: each call is a line of ``calls-R.log``, with a digest of what it saw."""

    def __init__(self, log: Path, fault: Callable[[], None] | None) -> None:
        self._log, self._fault = log, fault

    def on_epoch(self, epoch: int, worker: flodl.Worker) -> None:
        assert str(worker.rank) == os.environ.get("RANK", "0")
        self._note(f"epoch {epoch} {digest([*worker.model.parameters(), *worker.model.buffers()])}")
        if epoch == 1 and self._fault is not None and not (self._log / "struck").exists():
            (self._log / "struck").write_text(RANK)
            self._fault()

    def on_checkpoint(self, epoch: int, model: nn.Module) -> None:
        flodl.save_checkpoint(model, self._log / f"model-{epoch}")
        self._note(f"checkpoint {epoch} {digest([*model.parameters(), *model.buffers()])}")

    def _note(self, line: str) -> None:
        with (self._log / f"calls-{RANK}.log").open("a") as file:
            file.write(f"{line}\n")


def leave_grandchild(mark: str) -> None:
    """A process in a session of its own, with an empty environment, whose parent is gone; ``mark`` is in its argv."""
    sleeper = [sys.executable, "-S", "-c", f"import time; time.sleep({GRANDCHILD_S})", mark]
    child = f"import subprocess; subprocess.Popen({sleeper!r}, env={{}}, start_new_session=True)"
    subprocess.run([sys.executable, "-S", "-c", child], check=True, env={})


# ------------------------------------------------------------------------------------------------------------- model
def network() -> nn.Module:
    """Parameters, float buffers and an integer buffer."""
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    seen = hashlib.sha256()
    for tensor in tensors:
        seen.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        seen.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return seen.hexdigest()


def write_json(path: Path, data: dict[str, object]) -> None:
    with path.open("x") as file:
        json.dump(data, file)


def at_any_end(write: Callable[[], None]) -> None:
    """Call ``write`` at the interpreter's end, and before an ``os._exit``, which runs no atexit handler."""
    atexit.register(write)
    exit_now = os._exit

    def exit_hard(status: int) -> NoReturn:
        write()
        exit_now(status)

    os._exit = exit_hard


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="cpu_cadence")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--anchor", type=int, default=None)
    parser.add_argument("--min-anchor", type=int, default=1)
    parser.add_argument("--max-anchor", type=int, default=200)
    parser.add_argument("--step-ms", default="0", help="one value, or one for each rank")
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--note-steps", action="store_true")
    parser.add_argument("--bf16-wire", action="store_true")
    parser.add_argument("--outer", choices=OUTER, default="OuterAvg")
    parser.add_argument("--guard", action="store_true", help="judge the rounds with a guard of our own")
    parser.add_argument("--fault", choices=FAULTS, default=None)
    parser.add_argument("--fault-rank", default="1")
    parser.add_argument("--fault-step", type=int, default=3)
    parser.add_argument(
        "--poisoned", type=int, default=0, help="steps of --fault-rank from --fault-step on with NaN loss"
    )
    parser.add_argument("--on-error", default="stop")
    parser.add_argument("--max-failure", type=float, default=None)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--callbacks", action="store_true", help="note what runs behind each epoch, and save models")
    parser.add_argument("--callback-fault", choices=FAULTS, default=None, help="of the first call behind epoch 1")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--save", default=None, help="the stem of checkpoints")
    parser.add_argument("--every", type=int, default=None)
    parser.add_argument("--keep-last", type=int, default=1)
    parser.add_argument("--resume", default=None, help="the stem to go on from")
    parser.add_argument("--reshape", action="store_true")
    parser.add_argument("--evaluate", action="store_true", help="after every epoch")
    parser.add_argument("--ballast-mb", type=int, default=0, help="that the optimizer remembers, and no round carries")
    parser.add_argument("--model-mb", type=int, default=0, help="that a buffer adds to the model")
    parser.add_argument("--note-rates", action="store_true")
    parser.add_argument("--decay", action="store_true", help="the learning rate of global batch n is 0.01 / (1 + n)")
    parser.add_argument("--broken-model", action="store_true")
    parser.add_argument("--exit-after-join", type=int, default=0)
    parser.add_argument("--grandchild", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0 if RANK == "solo" else int(RANK) + 1)  # other initial weights on every rank

    def build_model(device: torch.device) -> nn.Module:
        if args.broken_model:
            raise RuntimeError("planted in build_model")
        if args.grandchild:
            leave_grandchild(f"grandchild-of-{os.environ['FDL_RUN_ID']}")
        model = network()
        if args.model_mb:
            model.register_buffer("ballast", torch.zeros(args.model_mb << 18))
        model.to(device)
        if args.log is not None:
            path = args.log / f"final-{RANK}.json"
            at_any_end(lambda: write_json(path, {"sha256": digest([*model.parameters(), *model.buffers()])}))
        return model

    rates = args.log / f"rates-{RANK}.log" if args.note_rates else None

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        adam = torch.optim.Adam(parameters, 1e-2)
        if rates is not None:
            file = rates.open("a", buffering=1)
            adam.register_step_pre_hook(lambda own, *_: print(own.param_groups[0]["lr"], file=file))
        if args.ballast_mb:
            state: Any = adam.state
            state["ballast"] = torch.zeros(args.ballast_mb << 20, dtype=torch.uint8)
        return adam

    steps_ms = [float(value) for value in args.step_ms.split(",")]
    step_ms = steps_ms[int(RANK) % len(steps_ms)] if RANK.isdigit() else steps_ms[0]
    fault = FAULTS[args.fault] if args.fault and args.fault_rank == RANK else None
    cadence = flodl.ElCheConfig(
        mode=args.mode,
        anchor=args.anchor,
        min_anchor=args.min_anchor,
        max_anchor=args.max_anchor,
        bf16_wire=args.bf16_wire,
    )
    if args.guard:
        cadence.guard(Guard())
    note = args.log / f"steps-{RANK}.log" if args.note_steps and RANK.isdigit() else None
    step = Step(step_ms / 1e3, fault, args.fault_step, note, args.poisoned if args.fault_rank == RANK else 0)
    decay = torch.optim.lr_scheduler.LambdaLR
    builder = flodl.Trainer.builder(build_model, make_optimizer, step)
    if args.evaluate:
        builder.eval_dataset(Numbers(16, None)).eval_fn(lambda model, x, y: float((model(x) - y).square().mean()))
    callbacks = Callbacks(args.log, FAULTS.get(args.callback_fault)) if args.callbacks else None
    handle = (
        builder.dataset(Numbers(args.size, args.log))
        .batch_size(args.batch_size)
        .num_epochs(args.epochs)
        .epoch_splits(args.splits)
        .num_workers(args.num_workers)
        .save_path(args.save)
        .checkpoint_every(args.every)
        .keep_last(args.keep_last)
        .epoch_fn(None if callbacks is None else callbacks.on_epoch)
        .checkpoint_fn(None if callbacks is None else callbacks.on_checkpoint)
        .resume_from(args.resume, reshape=args.reshape)
        .elche(cadence)
        .outer_optimizer(OUTER[args.outer])
        .on_error(args.on_error)
        .max_failure(args.max_failure)
        .precision(args.precision)
        .accumulate(args.accumulate)
        .scheduler_fn((lambda optimizer, total: decay(optimizer, lambda n: 1 / (1 + n))) if args.decay else None)
        .run()
    )
    state = handle.join()
    if args.log is not None:
        role = "head" if flodl.is_head() else RANK
        weights = digest([*state.params, *state.buffers])
        joined = {"role": role, "outcome": state.outcome, "sha256": weights, "steps_per_s": step.per_s}
        write_json(args.log / f"joined-{os.getpid()}.json", joined)
    print(f"joined: {state.outcome} after {state.epochs} epoch(s)", flush=True)
    sys.exit(args.exit_after_join)


if __name__ == "__main__":
    main()
