"""A model's weights as one file: what is in it, and that it is whole or not there."""

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import flodl
from flodl.errors import CheckpointError
from flodl.spec import context
from flodl.spec.state import load_state
from tests.bundles import weights, write_bundle


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(3))


@pytest.mark.parametrize("name", ["best", "best.fdl", "new/folder/best"])
def test_file_is_read_by_safetensors_and_by_us(tmp_path: Path, name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    flodl.save_checkpoint(model, tmp_path / name)

    path = tmp_path / f"{name.removesuffix('.fdl')}.fdl"
    read = safetensors.torch.load_file(path)
    assert {key: value.tolist() for key, value in read.items()} == {
        key: value.tolist() for key, value in model.state_dict().items()
    }
    assert os.listdir(path.parent) == ["best.fdl"]
    nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)).load_state_dict(load_state(path, "").state_dict())


def test_tied_weights_are_stored_once_and_come_back_under_both_names(tmp_path: Path) -> None:
    flodl.save_checkpoint(Tied(), tmp_path / "tied")
    assert set(safetensors.torch.load_file(tmp_path / "tied.fdl")) == {"first.weight", "count"}
    assert set(load_state(tmp_path / "tied.fdl", "").state_dict()) == {"first.weight", "second.weight", "count"}


def test_names_are_those_of_the_model_that_was_compiled(tmp_path: Path) -> None:
    flodl.save_checkpoint(torch.compile(nn.Linear(2, 1)), tmp_path / "compiled")  # type: ignore[arg-type]
    assert set(safetensors.torch.load_file(tmp_path / "compiled.fdl")) == {"weight", "bias"}


def test_next_one_replaces_it_whole_and_a_failure_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flodl.save_checkpoint(nn.Linear(1, 1), tmp_path / "best")
    flodl.save_checkpoint(nn.Linear(3, 1), tmp_path / "best")
    old = (tmp_path / "best.fdl").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flodl.spec.weights.write_state", fail)
    with pytest.raises(CheckpointError, match=r"best\.fdl cannot be written: No space left on device: free some space"):
        flodl.save_checkpoint(nn.Linear(1, 1), tmp_path / "best")
    assert (tmp_path / "best.fdl").read_bytes() == old
    assert os.listdir(tmp_path) == ["best.fdl"]


def test_tensor_without_a_place_in_the_format_is_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("phase", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"phase has dtype torch\.complex128"):
        flodl.save_checkpoint(model, tmp_path / "best")
    assert os.listdir(tmp_path) == []


def test_checkpoint_of_a_run_is_not_broken_up(tmp_path: Path) -> None:
    write_bundle(tmp_path / "run", 100, weights())
    with pytest.raises(CheckpointError, match=r"run\.fdl is part of a run's checkpoint; choose another name"):
        flodl.save_checkpoint(nn.Linear(1, 1), tmp_path / "run.fdl")


@pytest.mark.parametrize("path", ["", "..", "/"])
def test_path_that_names_no_file_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError):
        flodl.save_checkpoint(nn.Linear(1, 1), path)


@pytest.mark.parametrize("path", ["ckpts/run", "ckpts/run.fdl", "link/run"])
def test_place_where_the_run_of_this_process_will_save_is_refused_while_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "link").symlink_to("ckpts")
    context.enter(context.Role.RANK, 1, 2, save_path="ckpts/run")
    try:
        with pytest.raises(CheckpointError, match=r"is where this run saves its checkpoints \(save_path\); choose"):
            flodl.save_checkpoint(nn.Linear(1, 1), path)
        flodl.save_checkpoint(nn.Linear(1, 1), "ckpts/mine")
    finally:
        context.leave()
    assert os.listdir(tmp_path / "ckpts") == ["mine.fdl"]
    flodl.save_checkpoint(nn.Linear(1, 1), path)
