"""What a rank's environment says of its device, and of its part of the cores."""

import os
from collections.abc import Mapping

from flodl.messages import Device


def rank_environment(device: Device, local_world_size: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank's environment says of its device, on top of ``environ``.

    The device is pinned whatever ``environ`` says, a GPU by UUID, so that no numbering can mix devices up. CPU ranks
    share the host's cores, unless ``environ`` says how many threads a rank takes.
    """
    if device.kind == "cuda":
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": device.id}
    pinned = {"CUDA_VISIBLE_DEVICES": ""}
    if "OMP_NUM_THREADS" not in environ:
        pinned["OMP_NUM_THREADS"] = str(thread_count(local_world_size))
    return pinned


def thread_count(local_world_size: int) -> int:
    """A rank's part of the host's cores, one at least."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, local_world_size))
