"""The trained state: what a model holds comes back bit for bit, under its names and in its orders, without pickle."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from flodl.errors import CheckpointError
from flodl.spec.state import StateInfo, TrainedState, dump_state, load_state, write_state

INFO = StateInfo(epochs=3, version=17)


class Odd(nn.Module):
    """Tied weights, a frozen parameter, many dtypes, a 0-d and an empty tensor, a buffer outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = nn.Buffer(torch.tensor([True, False, True]))
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.half_wide = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.twice_wide = nn.Parameter(torch.randn(2, 2, dtype=torch.float64).t())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.scratch = nn.Buffer(torch.arange(7, dtype=torch.uint8), persistent=False)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.equal(right)


def loaded(model: nn.Module) -> TrainedState:
    return load_state(dump_state(model, INFO), "complete")


def rewritten(data: bytes, change: Any) -> bytes:
    """The file with its header's flodl note changed."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    note = json.loads(header["__metadata__"]["flodl"])
    header["__metadata__"]["flodl"] = json.dumps(change(note))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def test_params_and_buffers_are_in_the_models_order() -> None:
    model = Odd()
    state = loaded(model)
    assert all(map(same, state.params, model.parameters()))
    assert all(map(same, state.buffers, model.buffers()))
    assert len(state.params) == len(list(model.parameters()))
    assert len(state.buffers) == len(list(model.buffers()))


def test_the_state_dict_is_the_models() -> None:
    model, twin = Odd(), Odd()
    state = loaded(model).state_dict()
    assert list(state) == list(model.state_dict())
    twin.load_state_dict(state)
    assert all(map(same, twin.state_dict().values(), model.state_dict().values()))


def test_a_tied_tensor_is_stored_once_and_shared_when_loaded() -> None:
    stored = safetensors.torch.load(dump_state(Odd(), INFO))
    assert "embed.weight" in stored
    assert "head.weight" not in stored
    state = loaded(Odd()).state_dict()
    assert state["head.weight"] is state["embed.weight"]


def test_a_buffer_outside_the_state_dict_has_a_place_of_its_own() -> None:
    assert "nonpersistent/scratch" in safetensors.torch.load(dump_state(Odd(), INFO))
    assert "scratch" not in loaded(Odd()).state_dict()


def test_what_travels_beside_the_tensors_comes_back() -> None:
    state = TrainedState.from_model(nn.Linear(1, 1), INFO, "stopped")
    assert (state.epochs, state.version, state.outcome) == (3, 17, "stopped")


def test_the_state_is_a_copy() -> None:
    model = nn.Linear(2, 2)
    state = loaded(model)
    before = state.params[0].clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert state.params[0].equal(before)


def test_the_prefix_of_torch_compile_is_stripped() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    assert list(loaded(model).state_dict()) == ["0.weight", "0.bias"]


def test_a_model_without_tensors_has_an_empty_state() -> None:
    state = loaded(nn.ReLU())
    assert (state.params, state.buffers, state.state_dict()) == ([], [], {})


def test_state_that_is_no_tensor_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    assert list(loaded(Extra(1, 1)).state_dict()) == ["weight", "bias"]
    assert "_extra_state" in caplog.text


def test_writing_to_a_descriptor_gives_the_same_bytes_and_their_number(tmp_path: Path) -> None:
    model, path = Odd(), tmp_path / "state"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    size = write_state(model, INFO, fd)
    os.close(fd)
    assert path.read_bytes() == dump_state(model, INFO)
    assert path.stat().st_size == size
    assert all(map(same, load_state(path, "complete").params, model.parameters()))


def test_a_dtype_without_a_place_is_refused_by_name() -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"phase has dtype torch.complex128"):
        dump_state(model, INFO)


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_cut_file_is_refused(cut: int) -> None:
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_state(dump_state(Odd(), INFO)[:cut], "complete")


def test_another_programs_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"other\.safetensors is .* but not one that flodl wrote"):
        load_state(path, "complete")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda note: note | {"format": 2}, "has format 2, this flodl reads 1; upgrade flodl"),
        (lambda note: note | {"parameters": ["nowhere"]}, "header that does not fit its tensors"),
        (lambda note: note | {"state_dict": ["a"]}, "header that does not fit its tensors"),
        (lambda note: [], "not one that flodl wrote"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_state(rewritten(dump_state(nn.Linear(1, 1), INFO), change), "complete")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone cannot be read: No such file"):
        load_state(tmp_path / "gone", "complete")
