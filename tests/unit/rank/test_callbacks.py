"""The script's functions behind an epoch: what they see, and that they leave no trace."""

from typing import Any

import pytest
import torch
from torch import nn

import flodl
from flodl.core.actions import CallBack, Evaluate
from flodl.core.events import CalledBack, Evaluated
from flodl.messages import CallbackKind
from flodl.rank.callbacks import ScriptCallbacks
from flodl.rank.stepper import build_stepper

CPU = torch.device("cpu")
EPOCH, CHECKPOINT = CallbackKind.EPOCH, CallbackKind.CHECKPOINT


@pytest.fixture
def call(make_job: Any, in_run: None) -> Any:
    """What comes of an action, with the given functions, and the model afterwards."""
    made: list[Any] = []

    def call(action: Evaluate | CallBack, **knobs: Any) -> tuple[Any, nn.Module]:
        build = knobs.pop("build_model", lambda device: nn.Sequential(nn.Linear(1, 1), nn.Dropout()))
        job = make_job(build_model=build, **knobs)
        made.append(build_stepper(job, CPU, 0))
        return ScriptCallbacks(made[-1], job.config)(action), made[-1].model

    yield call
    for stepper in made:
        stepper.close()


def test_epoch_fn_gets_its_epoch_and_the_rank(call: Any) -> None:
    seen: list[tuple[int, flodl.Worker, bool, bool]] = []

    def look(epoch: int, worker: flodl.Worker) -> None:
        before.append(torch.get_rng_state())
        seen.append((epoch, worker, worker.model.training, torch.is_grad_enabled()))
        torch.rand(3)

    before: list[torch.Tensor] = []
    told, model = call(CallBack(EPOCH, 4), epoch_fn=look)

    assert told == CalledBack(EPOCH, 4, "")
    assert seen == [(4, flodl.Worker(0, 1, CPU, model, 0.1), False, False)]
    assert model.training
    assert torch.equal(before[0], torch.get_rng_state())


def test_checkpoint_fn_gets_its_epoch_and_the_model(call: Any) -> None:
    seen: list[tuple[int, Any]] = []
    told, model = call(CallBack(CHECKPOINT, 2), checkpoint_fn=lambda *given: seen.append(given), checkpoint_every=1)
    assert (told, seen) == (CalledBack(CHECKPOINT, 2, ""), [(2, model)])


@pytest.mark.parametrize("kind", CallbackKind)
def test_exception_is_printed_and_told(call: Any, kind: CallbackKind, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("planted")

    told, model = call(CallBack(kind, 0), epoch_fn=fail, checkpoint_fn=fail, checkpoint_every=1)

    assert told == CalledBack(kind, 0, "KeyError: 'planted'")
    assert "Traceback" in capsys.readouterr().err
    assert model.training


def test_optimizer_without_a_rate_has_none(call: Any) -> None:
    class Still(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

    rates: list[float | None] = []
    call(CallBack(EPOCH, 0), epoch_fn=lambda _, worker: rates.append(worker.lr), make_optimizer=Still)
    assert rates == [None]


def test_evaluation_goes_the_same_way(call: Any, make_job: Any) -> None:
    told, _ = call(Evaluate(3), eval_dataset=make_job().config.dataset, eval_fn=lambda *_: 2.0)
    assert told == Evaluated(3, 2.0, "")
