"""Checkpoints that no run has made, for tests."""

import json
from pathlib import Path

from flodl.checkpoint.bundle import BundleMeta, Stem
from flodl.checkpoint.writer import BundleWriter
from flodl.core.position import Position, ResumePoint, SaveReason
from flodl.messages import CadenceSettings, Settings


def weights(content: bytes = b"weights") -> bytes:
    """A file as ranks write it, with one tensor."""
    note = {"format": 1, "state_dict": {"weight": "weight"}, "parameters": ["weight"]}
    entry = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    head = json.dumps({"__metadata__": {"format": "pt", "flodl": json.dumps(note)}, "weight": entry}).encode()
    return len(head).to_bytes(8, "little") + head + content


def write_bundle(stem: Path, dataset_size: int, data: bytes) -> BundleMeta:
    """A whole checkpoint at ``stem`` of a run over ``dataset_size`` samples, with ``data`` for its tensors."""
    settings = Settings(dataset_size, batch_size=8, num_epochs=3, seed=0, cadence=CadenceSettings())
    with BundleWriter(Stem.of(stem)) as writer:
        with writer.part(".fdl") as part:
            part.write(data)
        return writer.commit(SaveReason.CHECKPOINT, ResumePoint(Position(7, epoch=1), None, settings))
