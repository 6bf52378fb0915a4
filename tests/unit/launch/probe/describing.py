"""A host that is fine in every way, and changes to it."""

import dataclasses
from typing import Any

from flodl.launch.plan import HostKind, HostPlan
from flodl.launch.probe.facts import Facts, Interface, Place, Reach, Reached, SmiAnswer, TorchBuild, TorchImport
from flodl.launch.probe.finding import Finding, Level
from flodl.launch.probe.imports import Vital
from flodl.launch.probe.judge import PACKAGES, Reference, judge_host

GIB = 1 << 30
VITAL = Vital(frozenset({"train.py"}), frozenset({"lib/a.py"}))
HERE = Reference("0.1.0", "3.11.7", "2.13.0+cu124")
TWO_GPUS = "0, GPU-aaaa1111, NVIDIA H200, 9.0, 143771\n1, GPU-bbbb2222, NVIDIA A100, 8.0, 81920\n"
IDLE = "GPU-aaaa1111, 0, 550.54.15\nGPU-bbbb2222, 3, 550.54.15\n"
LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111)\nGPU 1: NVIDIA A100 (UUID: GPU-bbbb2222)\n"
SLICES = "GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111)\n  MIG 1g.18gb     Device  0: (UUID: MIG-cccc3333)\n"


def host(name: str = "node-a", devices: tuple[str, ...] = ("cpu",), **changes: Any) -> HostPlan:
    plan = HostPlan(name, HostKind.SSH, devices, "/opt/python", "/opt/project", ("train.py",))
    return dataclasses.replace(plan, **changes)


def place(role: str, path: str, free_bytes: int = 50 * GIB, **changes: Any) -> Place:
    return dataclasses.replace(Place(role, path, True, False, 100 * GIB, free_bytes, ""), **changes)


def smi(**changes: Any) -> SmiAnswer:
    return dataclasses.replace(SmiAnswer("/usr/bin/nvidia-smi", TWO_GPUS, IDLE, "", LISTING, ""), **changes)


def facts(**changes: Any) -> Facts:
    good = Facts(
        hostname="node-a",
        user="ana",
        is_root=False,
        python="3.11.2",
        executable="/opt/python",
        cores=8,
        memory_bytes=32 * GIB,
        packages={**dict.fromkeys(PACKAGES, "1.0"), "flodl": "0.1.0", "torch": "2.13.0+cu124"},
        torch=TorchBuild("2.13.0+cu124", "12.4", ""),
        limits={"nofile": 4096, "nproc": -1, "memlock": -1},
        has_rdma=False,
        interfaces=(Interface("eth0", 1500, ("10.0.0.11", "fd00::11")),),
        script="",
        code={},
        missing_modules=(),
        runs=(),
        driver="NVRM version: NVIDIA UNIX",
        amd="",
        visible=None,
        places=(
            place("project", "/opt/project"),
            place("temporary", "/tmp"),
            place("shared memory", "/dev/shm", 16 * GIB),
        ),
        smi=smi(),
        torch_import=TorchImport("", ("sm_80", "sm_90", "compute_90"), "2.21.5"),
        port=4711,
    )
    return dataclasses.replace(good, **changes)


def reach(source: str = "10.0.0.11", error: str = "", peers: dict[str, str] | None = None) -> Reach:
    """``peers``: name → why it cannot be dialled, empty where it can."""
    controller = Reached("" if error else "10.0.0.1", "" if error else source, error)
    return Reach(0.0, 0.0, controller, {name: Reached("", "", why) for name, why in (peers or {}).items()})


def judged(plan: HostPlan | None = None, **changes: Any) -> list[Finding]:
    return judge_host(plan or host(), facts(**changes), HERE, VITAL)


def wrong(found: list[Finding]) -> dict[str, Level]:
    return {finding.check: finding.level for finding in found if finding.level is not Level.OK}


def of(found: list[Finding], check: str, level: Level | None = None) -> Finding:
    (only,) = [each for each in found if each.check == check and level in (None, each.level)]
    return only
