"""From the cluster file's words for devices to what this host offers, and to a rank's environment."""

import os
from collections.abc import Mapping, Sequence

from flodl.config.gpus import GpuInfo, detect_gpus
from flodl.errors import ConfigError
from flodl.messages import Device


def offered(configured: Sequence[str], host: str) -> tuple[Device, ...]:
    """The devices behind ``cpu``, GPU indices, GPU UUIDs or ``all`` (every GPU, else one CPU rank).

    Raises:
        ConfigError: a GPU that is not there; the message names the host and what is.
    """
    if all(word == "cpu" for word in configured):
        return tuple(Device("cpu", index) for index in range(len(configured)))
    gpus = detect_gpus()
    if list(configured) == ["all"]:
        return tuple(_cuda(gpu) for gpu in gpus) or (Device("cpu", 0),)
    return tuple(_find(word, gpus, host, index) for index, word in enumerate(configured))


def _find(word: str, gpus: Sequence[GpuInfo], host: str, index: int) -> Device:
    if word == "cpu":
        return Device("cpu", index)
    for gpu in gpus:
        if word in (str(gpu.index), gpu.uuid) or (len(word) > 4 and (gpu.uuid or "").startswith(word)):
            return _cuda(gpu)
    there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise ConfigError(f"host {host}: no GPU {word}; nvidia-smi shows: {there}. Use [cpu] for CPU ranks")


def _cuda(gpu: GpuInfo) -> Device:
    return Device("cuda", gpu.index, gpu.uuid or str(gpu.index), gpu.name or "")


def rank_environment(device: Device, local_world_size: int, configured: Mapping[str, str]) -> dict[str, str]:
    """What a rank's environment says of its device, unless the user's own says it.

    A GPU is pinned by UUID, so that no numbering can mix devices up; CPU ranks share the host's cores.
    """
    if device.kind == "cuda":
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": device.id}
    env = {"CUDA_VISIBLE_DEVICES": ""}
    if "OMP_NUM_THREADS" not in configured and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        env["OMP_NUM_THREADS"] = str(max(1, cores // max(1, local_world_size)))
    return env
