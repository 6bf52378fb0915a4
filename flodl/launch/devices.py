"""From the cluster file's words for devices to what this host offers."""

import logging
from collections.abc import Sequence

from flodl.config.gpus import GpuInfo, GpuProbe, probe_gpus
from flodl.errors import ConfigError
from flodl.messages import Device

_log = logging.getLogger(__name__)


def offered(configured: Sequence[str], host: str) -> tuple[Device, ...]:
    """The devices behind ``cpu``, GPU indices, GPU UUIDs (or a beginning of one) or ``all`` alone: every GPU, else one
    CPU rank.

    Raises:
        ConfigError: a GPU that is not there, or one that is named twice or ambiguously; the message names the host, the
            word and what is there.
    """
    if not asks_for_gpus(configured):
        return chosen(configured, host, GpuProbe(()))
    probe = probe_gpus()
    if list(configured) == ["all"] and not probe.gpus:
        _log.warning("host %s: no GPU, one CPU rank instead: %s", host, probe.reason)
    return chosen(configured, host, probe)


def asks_for_gpus(configured: Sequence[str]) -> bool:
    """Whether what is configured depends on the host's GPUs."""
    return any(word != "cpu" for word in configured)


def chosen(configured: Sequence[str], host: str, probe: GpuProbe) -> tuple[Device, ...]:
    """As ``offered``, where ``probe`` is what the host has. Pure.

    Raises:
        ConfigError: as there.
    """
    if list(configured) == ["all"]:
        return tuple(map(_cuda, probe.gpus)) or (Device("cpu", 0),)
    there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in probe.gpus) or f"none ({probe.reason})"
    devices: list[Device] = []
    for word in configured:
        if word == "cpu":
            devices.append(Device("cpu", sum(device.kind == "cpu" for device in devices)))
            continue
        found = _find(word, probe.gpus)
        if len(found) != 1:
            what = "several GPUs begin with" if found else "no GPU"
            raise ConfigError(f"host {host}: {what} {word}; nvidia-smi shows: {there}. Use [cpu] for CPU ranks")
        device = _cuda(found[0])
        if device in devices:
            raise ConfigError(f"host {host}: GPU {word} is in the list twice; one rank trains on a GPU")
        devices.append(device)
    return tuple(devices)


def _find(word: str, gpus: Sequence[GpuInfo]) -> list[GpuInfo]:
    exact = [gpu for gpu in gpus if word in (str(gpu.index), gpu.uuid)]
    return exact or [gpu for gpu in gpus if len(word) > len("GPU-") and (gpu.uuid or "").startswith(word)]


def _cuda(gpu: GpuInfo) -> Device:
    return Device("cuda", gpu.index, gpu.uuid or str(gpu.index), gpu.name or "")
