"""What a rank's environment says of its device."""

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
        cores = len(os.sched_getaffinity(0))
        pinned["OMP_NUM_THREADS"] = str(max(1, cores // max(1, local_world_size)))
    return pinned
