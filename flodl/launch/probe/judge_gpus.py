"""From what nvidia-smi and torch say on a host to findings about its GPUs. Pure.

CUDA is never asked: whether this torch runs on that GPU follows from what it was built for and what the driver can do.
"""

import re
from collections.abc import Sequence
from typing import Final

from flodl.config.gpus import GpuInfo, GpuProbe, explanation, parse_query, select_visible, with_mig_ids
from flodl.errors import ConfigError
from flodl.launch.devices import asks_for_gpus, chosen
from flodl.launch.plan import HostPlan
from flodl.launch.probe.facts import Facts
from flodl.launch.probe.finding import Finding, Level, ok
from flodl.messages import Device

OLDEST_DRIVERS: Final = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest Linux driver for each major version of CUDA (NVIDIA's "CUDA Compatibility", minor versions)."""

BUSY_MIB: Final = 500
"""An idle GPU shows some hundred MiB of the driver's own."""

BUSY_APP_MIB: Final = 64
"""With a process on it that nvidia-smi shows; a display server without a screen takes a few MiB."""

_MIB: Final = 1 << 20


def judge_gpus(host: HostPlan, facts: Facts) -> list[Finding]:
    """Which devices its ranks get, and whether they can be trained on."""
    if not asks_for_gpus(host.devices):
        return [ok("devices", host.name, f"{len(host.devices)} × cpu")]
    reason = ""
    try:
        probe = _probe(host.name, facts)
        reason = probe.reason
        devices = chosen(host.devices, host.name, probe)
    except ConfigError as error:
        remedy = "correct `local_devices`, or CUDA_VISIBLE_DEVICES there"
        explained = _explained(facts, reason) if reason else ""
        words = str(error).removeprefix(f"host {host.name}: ")
        return [Finding("devices", host.name, Level.ERROR, words, "", explained or remedy)]
    if not probe.gpus:
        return [_without_gpu(host.name, facts, probe.reason)]
    wanted = [gpu for gpu in probe.gpus if any(_is(device, gpu) for device in devices)]
    found = [_sliced(host.name, wanted) or ok("devices", host.name, _named(devices))]
    found += _build(host.name, facts)
    if facts.torch is not None and facts.torch.cuda:
        found += [_driver(host.name, facts), *_arch(host.name, facts, wanted)]
    return [*found, _busy(host.name, facts, wanted)]


def _probe(host: str, facts: Facts) -> GpuProbe:
    if facts.smi is None or facts.smi.reason:
        return GpuProbe((), facts.smi.reason if facts.smi else "nobody asked")
    gpus = with_mig_ids(parse_query(facts.smi.query), facts.smi.listing)
    visible = tuple(select_visible(gpus, facts.visible, host))
    if not gpus:
        return GpuProbe((), "nvidia-smi lists no GPU")
    return GpuProbe(visible, "" if visible else f"CUDA_VISIBLE_DEVICES={facts.visible!r} hides every GPU")


def _explained(facts: Facts, reason: str) -> str:
    is_hidden = "hides every GPU" in reason
    return "" if is_hidden or facts.smi is None else explanation(reason, bool(facts.driver), facts.amd)


def _without_gpu(host: str, facts: Facts, reason: str) -> Finding:
    """``all`` on a machine that offers no GPU: one CPU rank, which may not be what was meant."""
    remedy = _explained(facts, reason)
    if not remedy and facts.torch is not None and facts.torch.cuda:
        remedy = "its torch is built for CUDA: install the NVIDIA driver there, or say `local_devices: [cpu]`"
    if remedy:
        return Finding("devices", host, Level.WARN, f"no GPU, so one CPU rank: {reason}", "a GPU", remedy)
    return ok("devices", host, "1 × cpu: no GPU")


def _sliced(host: str, gpus: Sequence[GpuInfo]) -> Finding | None:
    """A GPU in MIG mode that shall be used as a whole: CUDA gives a process one slice of it at most."""
    cut = [f"GPU {gpu.index} ({len(gpu.mig_ids)} slices)" for gpu in gpus if gpu.mig_ids]
    if not cut:
        return None
    remedy = "name one slice for each rank in CUDA_VISIBLE_DEVICES there (MIG-…, see nvidia-smi -L), or switch MIG off"
    return Finding("devices", host, Level.WARN, f"cut into MIG slices: {', '.join(cut)}", "whole GPUs", remedy)


def _named(devices: Sequence[Device]) -> str:
    names: dict[str, int] = {}
    for device in devices:
        name = device.name.removeprefix("NVIDIA ") if device.kind == "cuda" else "cpu"
        names[name or "GPU"] = names.get(name or "GPU", 0) + 1
    return ", ".join(f"{count} × {name}" for name, count in names.items())


def _build(host: str, facts: Facts) -> list[Finding]:
    torch = facts.torch
    if torch is None or torch.cuda:
        return []
    kind = f"built for AMD's GPUs (ROCm {torch.hip})" if torch.hip else "built for CPUs only"
    remedy = (
        f"install torch for CUDA there (pytorch.org/get-started, for {facts.executable}), or `local_devices: [cpu]`"
    )
    return [Finding("torch", host, Level.ERROR, f"{torch.version} is {kind}, and its ranks get GPUs", "", remedy)]


def _driver(host: str, facts: Facts) -> Finding:
    """A driver that is too old is no error: datacenter GPUs have a package that lets it run a newer CUDA, and only
    CUDA itself, which nobody touches here, could tell whether it does.
    """
    assert facts.torch is not None
    assert facts.smi is not None
    driver = next((cells[2] for cells in _rows(facts.smi.use) if len(cells) > 2), "")
    major = re.match(r"(\d{1,3})\.", facts.torch.cuda)
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", driver)
    oldest = OLDEST_DRIVERS.get(int(major.group(1))) if major else None
    nccl = f", NCCL {facts.torch_import.nccl}" if facts.torch_import and facts.torch_import.nccl else ""
    if oldest and numbers and (int(numbers.group(1)), int(numbers.group(2))) < oldest:
        wanted = f"{oldest[0]}.{oldest[1]:02} or newer for CUDA {facts.torch.cuda}, which this torch is built for"
        remedy = (
            "a newer NVIDIA driver there, or a torch that is built for an older CUDA; nothing, where NVIDIA's "
            "cuda-compat makes up for it: torch.cuda.is_available() says so"
        )
        return Finding("driver", host, Level.WARN, f"driver {driver}", wanted, remedy)
    return ok("driver", host, f"{driver or 'unknown'}, CUDA {facts.torch.cuda}{nccl}")


def _arch(host: str, facts: Facts, gpus: Sequence[GpuInfo]) -> list[Finding]:
    imported = facts.torch_import
    if imported is None:
        return []
    if imported.error:
        is_slow = imported.error.startswith("no answer")
        remedy = "a slow disk? The ranks need as long" if is_slow else f"try: {facts.executable} -c 'import torch'"
        words = f"torch does not import: {imported.error}"
        return [Finding("torch", host, Level.WARN if is_slow else Level.ERROR, words, "", remedy)]
    if not imported.arches:
        return []
    bare = [gpu for gpu in gpus if gpu.sm_version is not None and not covers(imported.arches, gpu.sm_version)]
    if not bare:
        known = sorted({f"sm_{gpu.sm_version[0]}{gpu.sm_version[1]}" for gpu in gpus if gpu.sm_version})
        return [ok("arch", host, ", ".join(known) or "unknown")]
    named = ", ".join(
        f"GPU {gpu.index} ({gpu.name}, sm_{gpu.sm_version[0]}{gpu.sm_version[1]})" for gpu in bare if gpu.sm_version
    )
    remedy = "install a torch that is built for it, or leave it out of `local_devices`"
    return [
        Finding("arch", host, Level.ERROR, f"this torch has no code for {named}", " ".join(imported.arches), remedy)
    ]


def covers(arches: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code built for ``arches`` runs on a GPU of this compute capability: binary code (``sm_``) on the same
    major version and no older minor one, intermediate code (``compute_``) on anything newer; with a letter behind
    (``sm_90a``) on exactly that (CUDA C++ Programming Guide, "Compute Capabilities").
    """
    for arch in arches:
        match = re.fullmatch(r"(sm|compute)_(\d{1,3})(\d)([af]?)", arch)
        if match is None:
            continue
        built = (int(match.group(2)), int(match.group(3)))
        if match.group(4) == "a":
            is_covered = built == capability
        elif match.group(1) == "sm" or match.group(4):
            is_covered = built[0] == capability[0] and built[1] <= capability[1]
        else:
            is_covered = built <= capability
        if is_covered:
            return True
    return False


def _busy(host: str, facts: Facts, gpus: Sequence[GpuInfo]) -> Finding:
    assert facts.smi is not None
    used = {cells[0]: _whole(cells[1]) for cells in _rows(facts.smi.use) if len(cells) > 1}
    busy = []
    for gpu in gpus:
        apps = [cells for cells in _rows(facts.smi.apps) if len(cells) > 2 and gpu.uuid and cells[0] == gpu.uuid]
        taken = used.get(gpu.uuid or "", 0)
        if taken < (BUSY_APP_MIB if apps else BUSY_MIB):
            continue
        pids = " ".join(cells[1] for cells in apps[:8] if cells[1].isdigit())
        who = f" by pid {pids}" if pids else ""
        total = f" of {gpu.vram_bytes // _MIB}" if gpu.vram_bytes else ""
        busy.append(f"GPU {gpu.index}: {taken}{total} MiB in use{who}")
    if busy:
        remedy = "end what runs there, or leave the GPU out of `local_devices`"
        return Finding("busy", host, Level.WARN, "; ".join(busy), "an idle GPU", remedy)
    return ok("busy", host, "idle")


def _is(device: Device, gpu: GpuInfo) -> bool:
    return device.kind == "cuda" and device.id == (gpu.uuid or str(gpu.index))


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]


def _whole(cell: str) -> int:
    return int(cell) if re.fullmatch(r"[0-9]{1,9}", cell) else 0
