"""From the facts of hosts to findings: what is wrong, what was expected, and what to do about it. Pure.

``judge_host`` looks at one host beside this machine, ``judge_gpus`` at its devices, ``judge_network`` at how hosts
reach each other, ``judge_together`` at what only shows between hosts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flodl.config.gpus import parse_query
from flodl.core.counted import counted
from flodl.errors import HostUnreachable
from flodl.launch.commands import install_command
from flodl.launch.devices import asks_for_gpus
from flodl.launch.plan import HostKind, HostPlan
from flodl.launch.probe.facts import OLDEST_PYTHON, Facts, Place
from flodl.launch.probe.finding import Finding, Level, ok
from flodl.launch.probe.imports import Vital
from flodl.launch.probe.judge_gpus import judge_gpus
from flodl.launch.tree import first_few

PACKAGES: Final = ("flodl", "torch", "numpy", "msgpack", "safetensors", "psutil", "pydantic", "pyyaml", "cryptography")
"""What a daemon and its ranks import; ``flodl`` and ``torch`` have checks of their own."""

CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own; what the default index has is for CUDA, and gigabytes large."""

RANK_BYTES: Final = 150_000_000
"""Of a process that has imported torch, what it shares with no other; measured with torch 2.13 for CPUs."""

MIB: Final = 1 << 20
FULL_BYTES: Final = MIB
"""Less than this on a disk is as good as nothing: logs are spooled there before they are shipped."""

TIGHT_BYTES: Final = 1024 * MIB
SMALL_SHM_BYTES: Final = 256 * MIB
"""Docker's default is 64 MiB, and one batch of images in flight for each loader worker is more."""

FEW_FILES: Final = 1024
FEW_PROCESSES: Final = 1024
LOCKED_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class Reference:
    """This machine's versions, which the others are held against; ``torch`` is empty where there is none here."""

    flodl: str
    python: str
    torch: str


def judge_unreachable(error: HostUnreachable, is_probed: bool) -> Finding:
    """A host that could not be asked: ``ssh`` with the stage; once logged in (``is_probed``) it is its Python."""
    check = {"join": "controller"}.get(error.stage, "python" if is_probed else "ssh")
    read = f"{error.stage}: {error.reason}" if check == "ssh" else error.reason
    return Finding(check, error.host, Level.ERROR, read, remedy=error.remedy)


def judge_old_python(host: HostPlan, version: str) -> Finding:
    """Its interpreter is older than anything of flodl's."""
    wanted = ".".join(map(str, OLDEST_PYTHON))
    remedy = f"set `python` of worker {host.name} to an interpreter with flodl, by its absolute path"
    return Finding("python", host.name, Level.ERROR, f"Python {version}", f"{wanted} or newer", remedy)


def judge_host(host: HostPlan, facts: Facts, here: Reference, vital: Vital, is_copied: bool = False) -> list[Finding]:
    """Everything about one host that needs no other. ``vital``: files that must be there; ``is_copied``: a launch
    brings the project to hosts elsewhere.
    """
    return [
        *_python(host, facts, here),
        *_modules(host, facts, vital),
        *judge_gpus(host, facts),
        *_load(host, facts),
        *_disks(host, facts.places),
        _limits(host, facts),
        *_project(host, facts, vital, is_copied and host.kind is not HostKind.LOCAL),
        _stale_runs(host.name, facts),
    ]


def judge_together(facts: Mapping[str, tuple[HostPlan, Facts]], findings: Sequence[Finding]) -> list[Finding]:
    """What only shows between hosts: ranks on GPUs here and on CPUs there."""
    kinds = {name: device_kind(host, known) for name, (host, known) in facts.items()}
    if "GPU" not in kinds.values():
        return []
    failed = {(finding.check, finding.host) for finding in findings if finding.level is Level.ERROR}
    with_gpus = ", ".join(name for name, kind in kinds.items() if kind == "GPU")
    remedy = "a cpu_* mode; or the same vendor's GPUs on every host, and no `cpu` in `local_devices`"
    return [
        Finding("devices", name, Level.WARN, f"{kind}, and GPUs on {with_gpus}: no nccl_* mode mixes them", "", remedy)
        for name, kind in kinds.items()
        if kind != "GPU" and ("devices", name) not in failed
    ]


def device_kind(host: HostPlan, facts: Facts) -> str:
    """What its ranks train on, in a word: GPU, CPU ranks, or an AMD GPU that nobody uses."""
    has_gpus = facts.smi is not None and bool(parse_query(facts.smi.query))
    if asks_for_gpus(host.devices) and has_gpus:
        return "GPU"
    return "AMD GPU, so CPU ranks" if facts.amd and asks_for_gpus(host.devices) else "CPU ranks"


# ------------------------------------------------------------------------------------------------- python and packages
def _python(host: HostPlan, facts: Facts, here: Reference) -> list[Finding]:
    name, pip = host.name, f"{facts.executable} -m pip install"
    found = [ok("python", name, facts.python)]
    if facts.python.split(".")[:2] != here.python.split(".")[:2]:
        remedy = f"set `python` of worker {name}; another Python is no fault by itself, but other packages often are"
        found = [Finding("python", name, Level.WARN, f"Python {facts.python}", f"{here.python} as here", remedy)]
    flodl, torch = facts.packages.get("flodl", ""), facts.packages.get("torch", "")
    if not flodl:
        remedy = f"there: {install_command(facts.executable)}, or set `python` of worker {name}"
        found.append(Finding("flodl", name, Level.ERROR, f"{facts.executable} has no flodl", here.flodl, remedy))
    elif flodl != here.flodl:
        remedy = f"there: {install_command(facts.executable)}"
        found.append(Finding("flodl", name, Level.ERROR, flodl, f"{here.flodl} as here", remedy))
    else:
        found.append(ok("flodl", name, flodl))
    found.append(_torch(host, facts, torch, here.torch))
    missing = [each for each in PACKAGES[2:] if not facts.packages.get(each)]
    if missing:
        words = f"{facts.executable} has no {', '.join(missing)}"
        found.append(Finding("packages", name, Level.ERROR, words, "", f"there: {pip} {' '.join(missing)}"))
    else:
        found.append(ok("packages", name, f"numpy {facts.packages['numpy']}"))
    return found


def _modules(host: HostPlan, facts: Facts, vital: Vital) -> list[Finding]:
    own = [each for each in facts.missing_modules if each in vital.own]
    others = [each for each in facts.missing_modules if each not in vital.own]
    found = []
    if own:
        words = f"the script imports {', '.join(own)}, of the project, and the project there is without"
        found.append(Finding("modules", host.name, Level.WARN, words, "", _up_to_date(host)))
    if others:
        otherwise = f"or set `python` of worker {host.name}"
        found.append(judge_modules(host.name, facts.executable, others, "there", otherwise))
    return found


def judge_modules(host: str, python: str, missing: Sequence[str], where: str, otherwise: str) -> Finding:
    """Packages that the script imports and ``python`` has not: a warning, for the script may know better."""
    words = f"the script imports {', '.join(missing)}, which {python} has not"
    remedy = f"{where}: {python} -m pip install {' '.join(missing)} (or the package's own name), {otherwise}"
    return Finding("modules", host, Level.WARN, words, "", remedy)


def _torch(host: HostPlan, facts: Facts, torch: str, here: str) -> Finding:
    wanted = f"torch=={_public(here)}" if here else "torch"
    index = "" if device_kind(host, facts) == "GPU" else f" --index-url {CPU_INDEX}"
    remedy = f"there: {facts.executable} -m pip install {wanted}{index}"
    if not torch:
        return Finding("torch", host.name, Level.ERROR, "no torch", here, remedy)
    if here and _public(torch) != _public(here):
        remedy = f"{remedy}; nccl_* modes want the same version everywhere"
        return Finding("torch", host.name, Level.WARN, torch, f"{here} as here", remedy)
    return ok("torch", host.name, torch)


def _public(version: str) -> str:
    return version.partition("+")[0]


# ------------------------------------------------------------------------------------------------------------- machine
def _load(host: HostPlan, facts: Facts) -> list[Finding]:
    ranks = sum(device == "cpu" for device in host.devices)
    need = len(host.devices) * RANK_BYTES
    found = [ok("cores", host.name, str(facts.cores)), ok("memory", host.name, size_words(facts.memory_bytes))]
    if ranks > facts.cores:
        words = f"{ranks} CPU ranks share {counted(facts.cores, 'core')}: more ranks than cores train no faster"
        remedy = "fewer ranks, unless it is only to try something out"
        found[0] = Finding("cores", host.name, Level.WARN, words, "", remedy)
    if 0 < facts.memory_bytes < need:
        words = (
            f"{counted(len(host.devices), 'rank')} {'needs' if len(host.devices) == 1 else 'need'} {need / 1e9:.1f} GB "
            "of memory, without model and data, and "
            f"{facts.memory_bytes / 1e9:.1f} GB are free"
        )
        found[1] = Finding(
            "memory", host.name, Level.WARN, words, "", "fewer ranks there, or end what takes the memory"
        )
    return found


def _disks(host: HostPlan, places: Sequence[Place]) -> list[Finding]:
    disks = [place for place in places if place.role != "shared memory"]
    found = [finding for place in disks if (finding := judge_disk(host.name, place))]
    if not found:
        free = min((place.free_bytes for place in disks if not place.is_read_only), default=0)
        found = [ok("disk", host.name, f"{size_words(free)} free")]
    shm = next((place for place in places if place.role == "shared memory"), None)
    if shm is None:
        return found
    if not shm.is_folder or shm.total_bytes < SMALL_SHM_BYTES:
        words = f"/dev/shm has {size_words(shm.total_bytes)}" if shm.is_folder else "no /dev/shm"
        remedy = "loader workers pass batches through it: docker run --shm-size=2g, or num_workers 0"
        found.append(Finding("shm", host.name, Level.WARN, words, f"{size_words(SMALL_SHM_BYTES)} or more", remedy))
    else:
        found.append(ok("shm", host.name, size_words(shm.total_bytes)))
    return found


def judge_disk(host: str, place: Place) -> Finding | None:
    """A disk that is full or nearly so; None where there is room, or where nobody writes."""
    if place.error:
        words = f"{place.path}: {place.error}"
        return Finding("disk", host, Level.ERROR, words, "", f"see the file system of {place.path} there")
    if place.is_read_only:
        return None
    words = f"{place.path}: {size_words(place.free_bytes)} of {size_words(place.total_bytes)} are free"
    is_needed = place.role in ("temporary", "run directory")
    other = {
        "temporary": "or set TMPDIR there to another one",
        "run directory": "or set FDL_STATE_HOME to another one",
    }.get(place.role, "or let the script write elsewhere")
    if place.free_bytes < FULL_BYTES:
        level = Level.ERROR if is_needed else Level.WARN
        return Finding("disk", host, level, f"{words}: it is full", "", f"free space there, {other}")
    if place.free_bytes < TIGHT_BYTES:
        return Finding(
            "disk", host, Level.WARN, words, f"{size_words(TIGHT_BYTES)} or more", f"free space there, {other}"
        )
    return None


def _limits(host: HostPlan, facts: Facts) -> Finding:
    files, processes, locked = (facts.limits.get(name, -1) for name in ("nofile", "nproc", "memlock"))
    wrong, remedies = [], []
    if 0 <= files < FEW_FILES:
        wrong.append(f"{files} open files")
        remedies.append(f"ulimit -n {FEW_FILES * 8}")
    if 0 <= processes < FEW_PROCESSES and not facts.is_root:
        wrong.append(f"{processes} processes and threads")
        remedies.append("ulimit -u unlimited")
    if 0 <= locked < LOCKED_BYTES and facts.has_rdma:
        wrong.append(f"{size_words(locked)} of locked memory, and NCCL over InfiniBand needs more")
        remedies.append("ulimit -l unlimited")
    if wrong:
        remedy = f"{'; '.join(remedies)}, for good in /etc/security/limits.conf there, then log in anew"
        return Finding("limits", host.name, Level.WARN, f"{', '.join(wrong)} are allowed", "", remedy)
    return ok("limits", host.name, f"{'unlimited' if files < 0 else files} files")


def _project(host: HostPlan, facts: Facts, vital: Vital, is_copied: bool) -> list[Finding]:
    found = []
    for place in facts.places:
        if place.role == "project" and is_copied:
            found.append(ok("project", host.name, f"copied to {place.path}"))
        elif place.role == "project" and not place.is_folder:
            remedy = f"create it there, set `path` of worker {host.name}, or have it copied: `sync.mode`"
            found.append(Finding("project", host.name, Level.ERROR, f"folder {place.path} not found", "", remedy))
        elif place.role == "project":
            found.append(ok("project", host.name, place.path))
        elif place.role == "data" and not place.is_folder:
            remedy = f"mount or create it there, or set `data_path` of worker {host.name}"
            found.append(Finding("data", host.name, Level.WARN, f"folder {place.path} not found", "", remedy))
        elif place.role == "data":
            found.append(ok("data", host.name, place.path))
    if is_copied:
        return found
    remedy = _up_to_date(host)
    if facts.script:
        found.append(Finding("script", host.name, Level.ERROR, f"script {facts.script}", "", remedy))
    elif host.script[0] != "-":
        found.append(ok("script", host.name, "-m" if host.script[0] == "-m" else host.script[0].rpartition("/")[2]))
    if facts.code and not facts.script:
        found += _code(host.name, facts.code, vital, remedy)
    return found


def _up_to_date(host: HostPlan) -> str:
    return f"bring the copy there up to date (`sync.mode` does), or set `path` of worker {host.name}"


def _code(host: str, code: Mapping[str, str], vital: Vital, remedy: str) -> list[Finding]:
    """Files that are other ones there. A run cannot start without its modules, nor with another script; what else
    differs may be meant to: a file of settings for each host, one that a build has made.
    """
    faults: dict[Level, list[str]] = {Level.ERROR: [], Level.WARN: []}
    for path, content in code.items():
        is_fatal = path in vital.script or (not content and path in vital.imported)
        words = f"{path} {'differs' if content else 'is missing'}"
        faults[Level.ERROR if is_fatal else Level.WARN].append(words)
    said = {Level.ERROR: remedy, Level.WARN: f"{remedy}; nothing, where it is meant to differ from host to host"}
    return [
        Finding("code", host, level, f"not the project as it is here: {first_few(each)}", "", said[level])
        for level, each in faults.items()
        if each
    ]


def _stale_runs(host: str, facts: Facts) -> Finding:
    left = [run for run in facts.runs if not run.is_attended]
    if not left:
        return ok("stale runs", host, f"none; {len(facts.runs)} live" if facts.runs else "none")
    shown = [f"{run.run_id} (pid {' '.join(map(str, run.pids[:8]))})" for run in left[:4]]
    pids = " ".join(str(pid) for run in left[:4] for pid in run.pids[:8])
    words = f"processes of runs whose daemon is gone: {', '.join(shown)}"
    return Finding("stale runs", host, Level.WARN, words, "", f"look at them there, then: kill {pids}")


def size_words(count: int) -> str:
    """A number of bytes as people read it."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count // 1024} KiB"
