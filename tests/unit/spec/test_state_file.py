"""One safetensors file: any reader opens it, ours reads tensor by tensor, and damage is told in words."""

import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch

from flodl.errors import CheckpointError
from flodl.spec.state_file import DTYPE_NAMES, FORMAT_VERSION, StateFile, compose, describe_tensor

NOTE = {"format": FORMAT_VERSION, "text": "ü"}
Open = Callable[[bytes], StateFile]


@pytest.fixture
def opened() -> Iterator[Open]:
    fds: list[int] = []

    def make(data: bytes) -> StateFile:
        fds.append(os.memfd_create("state"))
        os.write(fds[-1], data)
        return StateFile(fds[-1], "the file")

    yield make
    for fd in fds:
        os.close(fd)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {name: (100 * torch.randn(3, 2)).to(dtype) for dtype, name in DTYPE_NAMES.items()}
    return found | {
        "scalar": torch.tensor(0.5),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(3, 2).t(),
        "slice": torch.arange(10, dtype=torch.int64)[1::3],
        "weight": torch.nn.Parameter(torch.randn(2)),
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    plain = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and plain[0].equal(plain[1])


def data_of(named: dict[str, torch.Tensor]) -> bytes:
    return b"".join(compose(named, NOTE).chunks())


def with_header(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def test_tensors_and_note_come_back_bit_for_bit(opened: Open) -> None:
    named = tensors()

    file = opened(data_of(named))

    assert file.note == NOTE
    assert file.places.keys() == named.keys()
    for name, tensor in named.items():
        assert same(file.read(name), tensor), name
        assert str(file.places[name]) == describe_tensor(tensor)


def test_any_safetensors_reader_opens_it() -> None:
    named = tensors()
    found = safetensors.torch.load(data_of(named))
    assert all(same(found[name], tensor) for name, tensor in named.items())


def test_image_is_filled_with_the_very_bytes() -> None:
    file = compose(tensors(), NOTE)
    image = torch.full((file.size_bytes + 7,), 0xFF, dtype=torch.uint8)

    file.fill(image)

    assert image.numpy().tobytes() == b"".join(file.chunks()) + b"\xff" * 7


def test_every_tensor_begins_at_a_multiple_of_its_elements(opened: Open) -> None:
    places = opened(data_of(tensors())).places.values()
    assert all(place.start % place.dtype.itemsize == 0 for place in places)


def test_old_bytes_behind_the_state_are_not_looked_at(opened: Open) -> None:
    assert opened(data_of({"a": torch.ones(3)}) + b"old bytes").read("a").tolist() == [1.0, 1.0, 1.0]


def test_file_without_tensors_has_a_note(opened: Open) -> None:
    assert opened(data_of({})).note == NOTE


@pytest.mark.parametrize("cut", [0, 3, 8, 60, -1])
def test_cut_file_is_refused(opened: Open, cut: int) -> None:
    with pytest.raises(CheckpointError, match=r"the file (is not a whole safetensors file|is cut off)"):
        opened(data_of({"a": torch.ones(3)})[:cut])


def test_file_that_is_cut_while_it_is_read_is_refused(opened: Open) -> None:
    file = opened(data_of({"a": torch.ones(3)}))
    os.truncate(file._fd, 100)
    with pytest.raises(CheckpointError, match="has become shorter while it was read"):
        file.read("a")


def test_descriptor_that_cannot_be_read_is_refused(tmp_path: Any) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(CheckpointError, match="the file cannot be read: Is a directory"):
            StateFile(fd, "the file")
    finally:
        os.close(fd)
    with pytest.raises(CheckpointError, match="the file cannot be read: Bad file descriptor"):
        StateFile(fd, "the file")


def entry(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header | {"a": header["a"] | fields}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: [], "not one that flodl wrote"),
        (lambda header: header | {"__metadata__": {}}, "not one that flodl wrote"),
        (lambda header: header | {"__metadata__": {"flodl": "[1]"}}, "not one that flodl wrote"),
        (lambda header: header | {"__metadata__": {"flodl": "[" * 100_000}}, "not one that flodl wrote"),
        (lambda header: header | {"__metadata__": {"flodl": '{"format": 2}'}}, "has format 2, this flodl reads 1"),
        (lambda header: header | {"b": 3}, "tensor 'b' is described by 3"),
        (entry(dtype="F4"), "tensor 'a' is described by"),
        (entry(dtype=[]), "tensor 'a' is described by"),
        (entry(shape=[-3]), "tensor 'a' is described by"),
        (entry(shape=[3.0]), "tensor 'a' is described by"),
        (entry(shape=[True, 3]), "tensor 'a' is described by"),
        (entry(shape=3), "tensor 'a' is described by"),
        (entry(data_offsets=[0]), "tensor 'a' is described by"),
        (entry(data_offsets=[12, 0]), "tensor 'a' of -12 bytes has shape"),
        (entry(shape=[4]), "tensor 'a' of 12 bytes has shape"),
        (entry(shape=[2**62, 2**62]), "tensor 'a' of 12 bytes has shape"),
        (entry(data_offsets=[4, 16]), "tensors do not lie side by side"),
        (entry(data_offsets=[10**20, 10**20 + 12]), "is cut off"),
        (lambda header: header | {"b": header["a"]}, "tensors do not lie side by side"),
    ],
)
def test_header_that_does_not_fit_is_refused(opened: Open, change: Any, message: str) -> None:
    data = with_header(data_of({"a": torch.ones(3)}) + bytes(8), change)
    with pytest.raises(CheckpointError, match=message):
        opened(data)


def test_noise_is_refused_or_read(opened: Open) -> None:
    whole, rng = data_of({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8)}), random.Random(0)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            file = opened(bytes(data))
            for name in file.places:
                file.read(name)
        except CheckpointError:
            pass


def test_dtype_without_a_place_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"phase has dtype torch.complex128, which safetensors cannot hold"):
        compose({"phase": torch.zeros(2, dtype=torch.complex128)}, NOTE)


def test_header_beyond_the_formats_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flodl.spec.state_file.MAX_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"the names of 1 tensors and what goes with them take \d+ bytes"):
        compose({"a" * 2000: torch.zeros(2)}, NOTE)
