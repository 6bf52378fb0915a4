"""The evaluation: its mean, and that it leaves no trace."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flodl.rank.evaluation import evaluate

CPU = torch.device("cpu")


def size_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return float(len(x))


def test_batches_are_weighed_by_their_samples_in_the_datasets_order(make_job: Any) -> None:
    job = make_job(eval_dataset=make_job().config.dataset, eval_fn=size_of, batch_size=8)

    result = evaluate(nn.Linear(1, 1), CPU, job.config, epoch=7)

    assert (result.epoch, result.value, result.error) == (7, (8 * 8 + 8 * 8 + 4 * 4) / 20, "")
    assert job.config.eval_dataset.reads == list(range(20))


def test_a_batch_that_is_no_tuple_is_one_argument(make_job: Any) -> None:
    def collate(samples: list[Any]) -> dict[str, int]:
        return {"count": len(samples)}

    job = make_job(
        eval_dataset=make_job().config.dataset, eval_fn=lambda model, batch: batch["count"], collate_fn=collate
    )

    assert evaluate(nn.Linear(1, 1), CPU, job.config, 0).value == 4.0


def test_modes_and_random_generators_are_as_before(make_job: Any) -> None:
    seen: list[tuple[bool, bool]] = []

    def noisy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        seen.append((model.training, torch.is_grad_enabled()))
        return torch.rand(1).item() + random.random() + float(np.random.rand())

    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1)).train()
    model[1].eval()  # frozen by the user
    job = make_job(eval_dataset=make_job().config.dataset, eval_fn=noisy)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    evaluate(model, CPU, job.config, 0)

    assert seen == [(False, False)] * 5
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_an_exception_is_told_and_printed_and_leaves_no_trace_either(
    make_job: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        raise ValueError("planted")

    model = nn.Linear(1, 1).train()
    job = make_job(eval_dataset=make_job().config.dataset, eval_fn=fail)

    assert evaluate(model, CPU, job.config, 1).error == "ValueError: planted"
    assert "ValueError: planted" in capsys.readouterr().err
    assert model.training
