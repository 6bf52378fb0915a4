"""The GPUs of this machine, by ``nvidia-smi`` alone: no CUDA, no torch.

Asking is bounded in time and survives whatever the tool does; what it does not say is None. A GPU is named by its
UUID wherever that is known, for CUDA's own numbering differs from nvidia-smi's on machines with mixed GPUs.
Indices, in ``CUDA_VISIBLE_DEVICES`` too, are nvidia-smi's (``CUDA_DEVICE_ORDER=PCI_BUS_ID``).
"""

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from flodl.errors import ConfigError

QUERY_TIMEOUT_S = 10.0
"""A cold driver without persistence mode takes several seconds to answer; one that needs longer is broken."""

TERM_GRACE_S = 0.5
"""From SIGTERM to SIGKILL for an nvidia-smi that did not answer."""

MAX_OUTPUT_BYTES = 1 << 20
"""What is read of one answer: some 4,000 GPUs."""

DRIVER_FILE = "/proc/driver/nvidia/version"
AMD_FILE = "/dev/kfd"

_FIELDS = ("index", "uuid", "name", "compute_cap", "memory.total")
_OLD_FIELDS = ("index", "uuid", "name", "pstate", "memory.total")
"""For drivers that do not know ``compute_cap`` and then say nothing at all; what stands in its place is not read."""

_MIB = 1 << 20
_UNKNOWN = re.compile(r"\[.*\]|N/A|ERR!|Unknown.*|", re.IGNORECASE)
_END = re.compile(r"|-[0-9]+|NoDevFiles|none|void", re.IGNORECASE)
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
_CAPABILITY = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
_LISTED_GPU = re.compile(r"GPU [0-9]+:.*\(UUID: (GPU-[^)]+)\)")
_LISTED_MIG = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_LEGACY_MIG = re.compile(r"MIG-(GPU-[^/]+)/[0-9]+/[0-9]+")

_one_query = threading.Lock()


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU (or one MIG slice of it); None means that nvidia-smi did not say.

    ``index`` is nvidia-smi's, ``uuid`` the opaque id that pins a process to it (a MIG slice: the MIG id),
    ``sm_version`` the compute capability as (major, minor), ``vram_bytes`` the total memory (None for a slice).
    ``mig_ids`` are the slices of this GPU, known only when ``CUDA_VISIBLE_DEVICES`` asks for slices.
    """

    index: int
    uuid: str | None
    name: str | None
    sm_version: tuple[int, int] | None
    vram_bytes: int | None
    mig_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuProbe:
    """The usable GPUs in order; ``reason`` says why there is none and is empty otherwise. ``is_surprising``: there is
    none, and the machine looks as if there should be one.
    """

    gpus: tuple[GpuInfo, ...]
    reason: str = ""
    is_surprising: bool = False


class VisibleDevicesError(ConfigError):
    """``CUDA_VISIBLE_DEVICES`` names devices that this host does not have, or names them in a meaningless way."""

    def __init__(self, host: str, value: str, reason: str) -> None:
        """``value`` is the variable as set, ``reason`` what is wrong with it."""
        self.host, self.value, self.reason = host, value, reason
        super().__init__(f"host {host}: CUDA_VISIBLE_DEVICES={value!r}: {reason}")


class _Form(StrEnum):
    INDEX = "index"
    UUID = "GPU-…"
    MIG = "MIG-…"


def detect_gpus(environ: Mapping[str, str] | None = None, timeout_s: float = QUERY_TIMEOUT_S) -> list[GpuInfo]:
    """List the GPUs that a process of this environment may use, in the order of ``CUDA_VISIBLE_DEVICES``.

    Args:
        environ: the environment to honour (``PATH``, ``CUDA_VISIBLE_DEVICES``); None takes this process's.
        timeout_s: how long nvidia-smi may take, in seconds.

    Returns:
        The GPUs, empty when there is none or nvidia-smi is absent, fails or does not answer (``probe_gpus`` says why).

    Raises:
        VisibleDevicesError: ``CUDA_VISIBLE_DEVICES`` names a GPU that is not there, or one twice, or mixes forms.
    """
    return list(probe_gpus(environ, timeout_s).gpus)


def probe_gpus(environ: Mapping[str, str] | None = None, timeout_s: float = QUERY_TIMEOUT_S) -> GpuProbe:
    """As ``detect_gpus``, with the reason when there is no GPU. Blocks for at most ``timeout_s`` and a second."""
    env = dict(os.environ if environ is None else environ)
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is not None and _hides_all(value):
        return GpuProbe((), f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU")
    deadline_s = time.monotonic() + timeout_s
    if not _one_query.acquire(timeout=timeout_s):
        return GpuProbe((), "an earlier nvidia-smi query is still running", is_surprising=True)
    try:
        query = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
        output, reason = _nvidia_smi(query, env, deadline_s)
        if is_old_driver(reason):
            query[0] = f"--query-gpu={','.join(_OLD_FIELDS)}"
            output, reason = _nvidia_smi(query, env, deadline_s)
        gpus = parse_query(output)
        if not gpus:
            reason = reason or f"nvidia-smi lists no GPU: {_first_line(output)}"
            why = explanation(reason, os.path.exists(DRIVER_FILE), amd_sign(env.get("PATH")))
            return GpuProbe((), f"{reason}; {why}" if why else reason, bool(why))
        if value is not None and "MIG-" in value:
            gpus = with_mig_ids(gpus, _nvidia_smi(["-L"], env, deadline_s)[0])
    finally:
        _one_query.release()
    return GpuProbe(tuple(select_visible(gpus, value, socket.gethostname())))


def is_old_driver(reason: str) -> bool:
    """Whether nvidia-smi failed because it does not know one of the fields."""
    return "not a valid field" in reason


def amd_sign(path: str | None) -> str:
    """What tells of an AMD GPU on this machine, empty where nothing does. ``path`` is the search path."""
    return AMD_FILE if os.path.exists(AMD_FILE) else shutil.which("rocm-smi", path=path or os.defpath) or ""


def explanation(reason: str, has_driver: bool, amd: str) -> str:
    """Why a machine that seems to have a GPU offers none, and what helps; empty where nothing is known.

    Args:
        reason: why nvidia-smi was of no use (``GpuProbe.reason``).
        has_driver: whether NVIDIA's kernel driver is loaded.
        amd: as ``amd_sign``.
    """
    is_absent = "not on PATH" in reason
    if amd and (is_absent or not has_driver):
        return f"its GPU is AMD's ({amd}), and flodl trains on NVIDIA's GPUs and on CPUs: `local_devices: [cpu]`"
    if has_driver and is_absent:
        return (
            "the NVIDIA driver is loaded, its programs are not there: install nvidia-utils, or extend PATH; in a "
            "container: docker run --gpus all"
        )
    if has_driver:
        return "the NVIDIA driver is loaded and shows no GPU: see dmesg; often an update that wants a reboot"
    return "" if is_absent else "nvidia-smi is there and the NVIDIA driver is not loaded: install or load it, or reboot"


def select_visible(gpus: Sequence[GpuInfo], value: str | None, host: str) -> list[GpuInfo]:
    """Pick from ``gpus`` what ``CUDA_VISIBLE_DEVICES`` = ``value`` leaves, in its order.

    None means every GPU. Entries are indices, or GPU UUIDs, or MIG ids (ids may be shortened as long as they are
    unique), never a mix. As for CUDA the list ends at an entry that is empty, negative, or one of the words that hide
    GPUs (``NoDevFiles``, ``none``, ``void``). Where CUDA would end it as silently at a GPU that is not there, this
    raises.

    Raises:
        VisibleDevicesError: an entry is unknown, ambiguous or repeated, or the forms are mixed.
    """
    if value is None:
        return list(gpus)
    if _hides_all(value):
        return []
    entries = _entries(value)
    forms = [_form_of(entry, value, host) for entry in entries]
    if len(set(forms)) > 1:
        raise VisibleDevicesError(host, value, f"mixes forms: {', '.join(dict.fromkeys(forms))}; use one of them")
    chosen: list[GpuInfo] = []
    for entry, form in zip(entries, forms, strict=True):
        gpu = _find(gpus, entry, form, value, host)
        if gpu in chosen:
            raise VisibleDevicesError(host, value, f"{entry!r} names a GPU that is already in the list")
        chosen.append(gpu)
    return chosen


def parse_query(output: str) -> list[GpuInfo]:
    """Read the answer to the query; lines that are no GPU (warnings, in any language) are passed over."""
    gpus: list[GpuInfo] = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < len(_FIELDS):
            continue
        index, uuid, *name, capability, memory = cells
        is_known = _INDEX.fullmatch(index) is not None
        if not is_known and not _UNKNOWN.fullmatch(index):
            continue
        gpus.append(
            GpuInfo(
                index=int(index) if is_known else len(gpus),
                uuid=uuid if uuid.startswith("GPU-") else None,
                name=_known(", ".join(name)),
                sm_version=_capability(capability),
                vram_bytes=int(memory) * _MIB if re.fullmatch(r"[0-9]{1,12}", memory) else None,
            )
        )
    return gpus


def with_mig_ids(gpus: Sequence[GpuInfo], listing: str) -> list[GpuInfo]:
    """Add the MIG slices that ``nvidia-smi -L`` printed to the GPUs that they are cut from."""
    slices: dict[str, list[str]] = {}
    parent = ""
    for line in listing.splitlines():
        if gpu := _LISTED_GPU.match(line):
            parent = gpu.group(1)
        elif mig := _LISTED_MIG.match(line):
            slices.setdefault(parent, []).append(mig.group(1))
    return [replace(gpu, mig_ids=tuple(slices.get(gpu.uuid or "", ()))) for gpu in gpus]


def _hides_all(value: str) -> bool:
    return not _entries(value)


def _entries(value: str) -> list[str]:
    """Up to the first that ends the list."""
    return list(itertools.takewhile(lambda entry: not _END.fullmatch(entry), map(str.strip, value.split(","))))


def _form_of(entry: str, value: str, host: str) -> _Form:
    if re.fullmatch(r"[0-9]{1,6}", entry):
        return _Form.INDEX
    if re.match(r"GPU-[0-9A-Fa-f]", entry):
        return _Form.UUID
    if re.match(r"MIG-[0-9A-Za-z]", entry):
        return _Form.MIG
    raise VisibleDevicesError(host, value, f"{entry!r} is no index, no GPU UUID (GPU-…) and no MIG id (MIG-…)")


def _find(gpus: Sequence[GpuInfo], entry: str, form: _Form, value: str, host: str) -> GpuInfo:
    wanted = entry.casefold()
    found: list[GpuInfo]
    if form is _Form.INDEX:
        found = [gpu for gpu in gpus if gpu.index == int(entry)]
        known = ", ".join(str(gpu.index) for gpu in gpus)
    elif form is _Form.UUID:
        found = [gpu for gpu in gpus if (gpu.uuid or "").casefold().startswith(wanted)]
        known = ", ".join(gpu.uuid for gpu in gpus if gpu.uuid)
    elif legacy := _LEGACY_MIG.fullmatch(entry):
        parent = legacy.group(1).casefold()
        found = [_slice(gpu, entry) for gpu in gpus if (gpu.uuid or "").casefold() == parent]
        known = ", ".join(gpu.uuid for gpu in gpus if gpu.uuid)
    else:
        slices = [_slice(gpu, mig) for gpu in gpus for mig in gpu.mig_ids]
        found = [mig for mig in slices if (mig.uuid or "").casefold().startswith(wanted)]
        known = ", ".join(str(mig.uuid) for mig in slices)
    if not found:
        raise VisibleDevicesError(host, value, f"there is no {entry!r} here; known: {known or 'none'}")
    if len(found) > 1:
        raise VisibleDevicesError(host, value, f"{entry!r} fits more than one of: {known}")
    return found[0]


def _slice(gpu: GpuInfo, mig_id: str) -> GpuInfo:
    return replace(gpu, uuid=mig_id, vram_bytes=None, mig_ids=())


def _known(cell: str) -> str | None:
    return None if _UNKNOWN.fullmatch(cell) else cell


def _capability(cell: str) -> tuple[int, int] | None:
    match = _CAPABILITY.fullmatch(cell)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _first_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return "".join(char if char.isprintable() else "?" for char in lines[0][:200]) if lines else "it printed nothing"


def _nvidia_smi(arguments: list[str], env: Mapping[str, str], deadline_s: float) -> tuple[str, str]:
    """Run it; returns what it printed and, when that is of no use, the reason."""
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    if program is None:
        return "", "nvidia-smi is not on PATH"
    # A file, not a pipe: a grandchild that keeps a pipe open cannot hold us, and nobody has to drain it.
    with tempfile.TemporaryFile() as answer:
        try:
            process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.STDOUT,
                env={**env, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as failure:
            return "", f"nvidia-smi cannot be run: {failure}"
        try:
            code = process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end_group(process)
            return "", "nvidia-smi did not answer in time and was ended"
        answer.seek(0)
        output = answer.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")
    return ("", f"nvidia-smi exited with {code}: {_first_line(output)}") if code else (output, "")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, a short grace, SIGKILL, all to its process group; never waits for one that even SIGKILL cannot end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(TERM_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(TERM_GRACE_S)
