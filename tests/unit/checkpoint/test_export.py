"""The tensor file without torch: what its header says, what of it is refused, and the plain weights taken out of it."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from flodl.checkpoint.bundle import Stem
from flodl.checkpoint.export import export
from flodl.checkpoint.reader import find, look, opened
from flodl.checkpoint.show import describe
from flodl.checkpoint.tensor_file import read_tensor_file
from flodl.checkpoint.writer import BundleWriter
from flodl.core.elche import ElCheState, Phase
from flodl.core.position import CadenceState, Covered, Position, ResumePoint, SaveReason
from flodl.errors import CheckpointError, ConfigError
from flodl.ids import Span
from flodl.messages import CadenceSettings, Settings
from flodl.spec.state import StateInfo, dump_state

POINT = ResumePoint(
    Position(version=9, epoch=3, covered=(Covered(3, (Span(0, 10),)),), global_step=70, world_size=2),
    CadenceState(ElCheState(Phase.WARMUP, 1, 12, (0, 1), 0, {0: 1.0}, {0: 12, 1: 12}, {0: 0.5, 1: 0.5}), ()),
    Settings(dataset_size=40, batch_size=5, num_epochs=2, seed=0, cadence=CadenceSettings(), epoch_splits=2),
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.tail = nn.Linear(3, 5, bias=False)
        self.tail.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(7), persistent=False)


def whole_state(model: nn.Module) -> bytes:
    """A model's state with the tensors of optimizers beside it, as a rank streams it for a checkpoint."""
    plain = dump_state(model, StateInfo(1, 9))
    metadata = json.loads(plain[8 : 8 + int.from_bytes(plain[:8], "little")])["__metadata__"]
    whole = {"optimizer": {"class": "Adam"}, "outer": {"class": "SlowMomentum", "slots": {}}}
    extra = {"optim/0/exp_avg": torch.ones(5, 3), "outer/0/f32": torch.ones(9, dtype=torch.float64)}
    note = json.loads(metadata["flodl"]) | {"whole": whole}
    return safetensors.torch.save(safetensors.torch.load(plain) | extra, {"format": "pt", "flodl": json.dumps(note)})


def save(path: Path, content: bytes) -> None:
    with BundleWriter(Stem.of(path)) as bundle:
        with bundle.part(".fdl") as part:
            part.write(content)
        bundle.commit(SaveReason.GRACEFUL_SHUTDOWN, POINT, {"torch": "2.13.0"})


# ----------------------------------------------------------------------------------------------------------- export
def test_export_is_what_load_state_dict_takes(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    save(tmp_path / "run", whole_state(model))

    done = export(tmp_path / "run.fdl")

    loaded = safetensors.torch.load_file(tmp_path / "run.safetensors")
    other.load_state_dict(loaded, strict=True)
    assert (done.path, done.tensor_count) == (tmp_path / "run.safetensors", len(model.state_dict()))
    assert done.size_bytes == os.path.getsize(done.path)
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safetensors.safe_open(done.path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(os.listdir(tmp_path)) == ["run.fdl", "run.meta.json", "run.safetensors"]


def test_export_of_a_model_without_tensors_is_a_file_too(tmp_path: Path) -> None:
    save(tmp_path / "run", dump_state(nn.Identity(), StateInfo(1, 1)))
    assert safetensors.torch.load_file(export(tmp_path / "run").path) == {}


def test_export_replaces_nothing_unless_told_to(tmp_path: Path) -> None:
    save(tmp_path / "run", whole_state(Tied()))
    target = tmp_path / "mine.safetensors"
    target.write_text("precious")

    with pytest.raises(ConfigError, match=r"mine\.safetensors is there already; name another file, or .* --force"):
        export(tmp_path / "run", target)
    assert target.read_text() == "precious"

    export(tmp_path / "run", target, replace=True)
    assert "embed.weight" in safetensors.torch.load_file(target)


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.fdl", r"run\.fdl does not end in \.safetensors"),
        ("weights", r"weights does not end in \.safetensors"),
        ("folder.safetensors", "is a folder; name a file"),
        ("link.safetensors", "is a symbolic link; name a file"),
        ("pipe.safetensors", "is a pipe or a device; name a file"),
        ("x" * 256 + ".safetensors", "cannot be written: File name too long: take a shorter one"),
    ],
)
def test_target_that_cannot_be_meant_is_refused(tmp_path: Path, name: str, message: str, is_forced: bool) -> None:
    save(tmp_path / "run", whole_state(Tied()))
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "run.fdl")

    with pytest.raises(ConfigError, match=message):
        export(tmp_path / "run", tmp_path / name, replace=is_forced)

    find(tmp_path / "run")


def test_export_into_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    save(tmp_path / "run", whole_state(Tied()))
    with pytest.raises(CheckpointError, match=r"nowhere/w\.safetensors cannot be written: No such file or directory"):
        export(tmp_path / "run", tmp_path / "nowhere" / "w.safetensors")


def test_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    save(tmp_path / "run", whole_state(Tied()))
    content = bytearray((tmp_path / "run.fdl").read_bytes())
    content[-1] ^= 1
    (tmp_path / "run.fdl").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"run\.fdl is damaged: its SHA-256"):
        export(tmp_path / "run")

    assert sorted(os.listdir(tmp_path)) == ["run.fdl", "run.meta.json"]


def test_checkpoint_that_is_replaced_between_look_and_open_is_not_mixed(tmp_path: Path) -> None:
    save(tmp_path / "run", whole_state(Tied()))
    bundle = look(tmp_path / "run")
    save(tmp_path / "run", whole_state(Tied()))

    with pytest.raises(CheckpointError, match="is replaced while it is read; try again"), opened(bundle):
        pass


# ------------------------------------------------------------------------------------------------------- description
def test_description_says_what_is_in_it(tmp_path: Path) -> None:
    save(tmp_path / "run", whole_state(Tied()))

    found = describe(look(tmp_path / "run"))

    assert (found["reason"], found["version"], found["global_step"]) == ("GracefulShutdown", 9, 70)
    assert (found["epoch"], found["epochs"], found["epoch_merged"], found["progress"]) == (3, 4, 10, 0.875)
    assert (found["mode"], found["world_size"]) == ("nccl_cadence", 2)
    assert found["cadence"] == {"phase": "warmup", "anchor": 12}
    assert found["parameters"] == sum(parameter.numel() for parameter in Tied().parameters())
    assert found["tensors"] == len(Tied().state_dict()) - 1
    assert (found["has_optimizer"], found["has_outer_optimizer"]) == (True, True)
    assert [part["file"] for part in found["parts"]] == [str(tmp_path / "run.fdl")]
    assert json.loads(json.dumps(found)) == found


def test_description_of_bare_weights_has_no_optimizer(tmp_path: Path) -> None:
    save(tmp_path / "run", dump_state(Tied(), StateInfo(1, 9)))
    found = describe(look(tmp_path / "run"))
    assert (found["has_optimizer"], found["has_outer_optimizer"]) == (False, False)


# ------------------------------------------------------------------------------------------------------------ header
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
NOTE = {"format": 1, "state_dict": {"w": "w"}, "parameters": ["w"]}


def tensor_file(path: Path, entries: Any, note: Any = NOTE, data: bytes = b"12345678") -> Path:
    header = json.dumps({"__metadata__": {"flodl": json.dumps(note)}} | entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def read(path: Path) -> Any:
    with open(path, "rb") as file:
        return read_tensor_file(file, "it")


def test_header_is_read(tmp_path: Path) -> None:
    found = read(tensor_file(tmp_path / "t", {"w": ENTRY}))
    assert (found.tensors["w"].shape, found.parameter_count, dict(found.state_dict)) == ((2,), 2, {"w": "w"})


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"",
        lambda: b"FDL1 and whatever the Rust one writes",
        lambda: (100_000_001).to_bytes(8, "little") + b"{}",
        lambda: (9).to_bytes(8, "little") + b"{}",
        lambda: (2).to_bytes(8, "little") + b"[]",
        lambda: (6).to_bytes(8, "little") + b"[[[[[[",
        lambda: (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_file_of_another_kind_is_refused_by_name(tmp_path: Path, make: Callable[[], bytes]) -> None:
    (tmp_path / "t").write_bytes(make())
    with pytest.raises(CheckpointError, match="it was not written by this flodl: it is no safetensors file"):
        read(tmp_path / "t")


def test_safetensors_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(safetensors.torch.save({"w": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="it was not written by this flodl: its header has no note"):
        read(tmp_path / "t")


@pytest.mark.parametrize(
    ("entries", "note", "message"),
    [
        ({"w": ENTRY}, {"format": 2}, "has format 2, this flodl reads 1; upgrade"),
        ({"w": 3}, NOTE, "'w' is 3, expected an object"),
        ({"w": {**ENTRY, "dtype": "F4"}}, NOTE, "'w' has dtype 'F4', this flodl knows BOOL"),
        ({"w": {**ENTRY, "dtype": ["F32"]}}, NOTE, r"'w' has dtype \['F32'\]"),
        ({"w": {**ENTRY, "shape": [3]}}, NOTE, "'w' has 8 bytes, which do not fit"),
        ({"w": {**ENTRY, "shape": [-2]}}, NOTE, r"'w': shape\[0\] is -2"),
        ({"w": {**ENTRY, "shape": [1] * 65}}, NOTE, "'w' has 65 dimensions"),
        ({"w": {**ENTRY, "data_offsets": [0]}}, NOTE, "1 offsets"),
        ({"w": {**ENTRY, "data_offsets": [8, 0]}}, NOTE, "'w' has -8 bytes"),
        ({"w": {**ENTRY, "data_offsets": [1, 9]}}, NOTE, "'w' begins at byte .*, expected"),
        ({"w": ENTRY, "v": ENTRY}, NOTE, "begins at byte"),
        ({}, {**NOTE, "state_dict": {}, "parameters": []}, "its tensors end at byte"),
        ({"w": ENTRY}, {**NOTE, "state_dict": {"w": "v"}}, "names 'v', which is not there"),
        ({"w": ENTRY}, {**NOTE, "parameters": ["v"]}, "names 'v', which is not there"),
        ({"w": ENTRY}, {**NOTE, "whole": 3}, "whole is 3, expected an object"),
        ({"w": ENTRY}, {**NOTE, "parameters": None}, "parameters is None, expected an array"),
    ],
)
def test_header_that_does_not_fit_is_named(tmp_path: Path, entries: Any, note: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"it .*{message}"):
        read(tensor_file(tmp_path / "t", entries, note))


# ------------------------------------------------------------------------------------------------- a .fdl by itself
def test_fdl_of_the_rust_flodl_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run.fdl").write_bytes(b"\x00\x01rust")
    with pytest.raises(CheckpointError, match=r"run\.fdl was not written by this flodl: .* Rust flodl cannot be read"):
        find(tmp_path / "run")


def test_weights_alone_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run.fdl").write_bytes(dump_state(Tied(), StateInfo(1, 9)))
    with pytest.raises(CheckpointError, match=r"run\.meta\.json does not exist; run\.fdl alone is a model's weights"):
        find(tmp_path / "run.fdl")


def test_time_of_a_save_beyond_every_calendar_is_refused_before_it_is_shown(tmp_path: Path) -> None:
    save(tmp_path / "run", whole_state(Tied()))
    meta = look(tmp_path / "run").meta
    with pytest.raises(CheckpointError, match="saved_at_s is 1e\\+15"):
        replace(meta, saved_at_s=1e15).to_json()
