"""What a checkpoint is, for people and for programs: read off its meta file and the header of its tensor file."""

from datetime import UTC, datetime
from typing import Any

from flodl.checkpoint.reader import Bundle, opened


def describe(bundle: Bundle) -> dict[str, Any]:
    """Plain values, as ``fdl checkpoint show --json`` prints them; ``epoch`` counts from 0.

    ``epoch`` is the first that is not complete, ``epoch_merged`` its samples that are in the weights already,
    ``progress`` what part of the whole run is. ``cadence`` is None where a resume starts afresh.

    Raises:
        CheckpointError: the tensor file cannot be read, or is none of flodl's.
    """
    meta = bundle.meta
    position, settings, cadence = meta.point.position, meta.point.settings, meta.point.cadence
    epochs = settings.num_epochs * settings.epoch_splits
    merged = {each.epoch: sum(span.count for span in each.spans) for each in position.covered}
    done = position.epoch / settings.epoch_splits + sum(merged.values()) / settings.dataset_size
    with opened(bundle) as (_, tensors):
        held = {
            "tensors": len(set(tensors.state_dict.values())),
            "parameters": tensors.parameter_count,
            "has_optimizer": tensors.has_optimizer,
            "has_outer_optimizer": tensors.has_outer_optimizer,
        }
    return {
        "checkpoint": str(bundle.stem),
        "save_id": meta.save_id,
        "reason": meta.reason.value,
        "saved_at": datetime.fromtimestamp(int(meta.saved_at_s), UTC).isoformat(),
        "saved_at_s": meta.saved_at_s,
        "epoch": position.epoch,
        "epochs": epochs,
        "epoch_merged": merged.get(position.epoch, 0),
        "progress": min(done / settings.num_epochs, 1.0),
        "version": position.version,
        "global_step": position.global_step,
        "world_size": position.world_size,
        "mode": settings.cadence.mode.value,
        "cadence": None
        if cadence is None
        else {"phase": cadence.elche.phase.name.lower(), "anchor": cadence.elche.anchor},
        **held,
        "parts": [
            {"file": str(bundle.paths[part.suffix]), "size_bytes": part.size_bytes, "sha256": part.sha256}
            for part in meta.parts
        ],
        "versions": dict(meta.versions),
    }
