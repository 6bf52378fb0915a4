"""From what one host says of itself to what is wrong with it, and what to do."""

import dataclasses
from typing import Any

import pytest

from flodl.errors import HostUnreachable
from flodl.launch.plan import HostKind
from flodl.launch.probe.facts import RunSeen
from flodl.launch.probe.finding import CHECKS, Finding, Level, exit_code, ok, sentence
from flodl.launch.probe.judge import (
    CPU_INDEX,
    FULL_BYTES,
    PACKAGES,
    RANK_BYTES,
    TIGHT_BYTES,
    judge_host,
    judge_old_python,
    judge_together,
    judge_unreachable,
)
from tests.unit.launch.probe.describing import HERE, VITAL, facts, host, judged, of, place, smi, wrong

WARN, ERROR = Level.WARN, Level.ERROR


def packages(**changes: str) -> dict[str, str]:
    return {**facts().packages, **changes}


def test_good_host_is_green_in_every_check_that_concerns_it() -> None:
    found = judged()
    assert wrong(found) == {}
    assert {each.check for each in found} <= set(CHECKS)
    assert len({each.check for each in found}) == len(found)
    assert of(found, "python").read == "3.11.2"
    assert of(found, "script").read == "train.py"


@pytest.mark.parametrize(
    ("changes", "check", "level", "read", "remedy"),
    [
        ({"python": "3.12.1"}, "python", WARN, "Python 3.12.1", "set `python`"),
        ({"packages": packages(flodl="")}, "flodl", ERROR, "/opt/python has no flodl", "README, 'Install on a host'"),
        (
            {"packages": packages(flodl="0.2")},
            "flodl",
            ERROR,
            "0.2",
            "/opt/python -m pip install ./flodl-0.1.0",
        ),
        ({"packages": packages(torch="")}, "torch", ERROR, "no torch", f"torch==2.13.0 --index-url {CPU_INDEX}"),
        ({"packages": packages(torch="2.4.0")}, "torch", WARN, "2.4.0", "nccl_* modes want the same version"),
        ({"packages": packages(msgpack="", pyyaml="")}, "packages", ERROR, "has no msgpack, pyyaml", "msgpack pyyaml"),
        ({"packages": {}}, "packages", ERROR, "has no numpy", "pip install numpy"),
        ({"missing_modules": ("sklearn",)}, "modules", WARN, "the script imports sklearn", "the package's own name"),
        ({"script": "/opt/project/train.py not found"}, "script", ERROR, "train.py not found", "up to date"),
        ({"memory_bytes": RANK_BYTES - 1}, "memory", WARN, "1 rank needs 0.1 GB", "fewer ranks"),
        ({"limits": {"nofile": 256}}, "limits", WARN, "256 open files are allowed", "ulimit -n 8192"),
        ({"limits": {"nproc": 100}}, "limits", WARN, "100 processes", "ulimit -u"),
        ({"limits": {"memlock": 65536}, "has_rdma": True}, "limits", WARN, "64 KiB of locked memory", "ulimit -l"),
    ],
)
def test_fault_is_named_with_its_remedy(
    changes: dict[str, Any], check: str, level: Level, read: str, remedy: str
) -> None:
    found = judged(**changes)
    finding = of(found, check)
    assert finding.level is level
    assert read in finding.read
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"packages": packages(torch="2.13.0+cpu")},
        {"limits": {"nproc": 100}, "is_root": True},
        {"limits": {"memlock": 65536}},
        {"memory_bytes": 0},
    ],
)
def test_what_does_no_harm_is_green(changes: dict[str, Any]) -> None:
    assert wrong(judged(**changes)) == {}


def test_versions_that_differ_say_what_is_expected() -> None:
    finding = of(judged(packages=packages(flodl="0.2")), "flodl")
    assert sentence(finding) == "flodl: 0.2 (expected 0.1.0 as here)"


def test_host_with_gpus_gets_torch_for_them() -> None:
    found = judged(host(devices=("all",)), packages=packages(torch=""))
    assert of(found, "torch").remedy == "there: /opt/python -m pip install torch==2.13.0"


def test_module_of_the_project_is_copied_and_not_installed() -> None:
    vital = dataclasses.replace(VITAL, own=frozenset({"helper"}))
    found = judge_host(host(), facts(missing_modules=("helper", "sklearn")), HERE, vital)
    own, other = (each for each in found if each.check == "modules")
    assert (own.level, own.read) == (
        WARN,
        "the script imports helper, of the project, and the project there is without",
    )
    assert own.remedy.startswith("bring the copy there up to date")
    assert "pip install sklearn (or" in other.remedy


def test_more_cpu_ranks_than_cores_are_warned_about() -> None:
    assert wrong(judged(host(devices=("cpu",) * 8))) == {}
    finding = of(judged(host(devices=("cpu",) * 9)), "cores")
    assert finding.read == "9 CPU ranks share 8 cores: more ranks than cores train no faster"


# --------------------------------------------------------------------------------------------------------------- disks
@pytest.mark.parametrize(
    ("role", "free_bytes", "level"),
    [
        ("temporary", FULL_BYTES - 1, ERROR),
        ("temporary", FULL_BYTES, WARN),
        ("temporary", TIGHT_BYTES, None),
        ("project", FULL_BYTES - 1, WARN),
        ("project", TIGHT_BYTES - 1, WARN),
    ],
)
def test_disk_that_is_full_is_an_error_where_flodl_itself_writes(
    role: str, free_bytes: int, level: Level | None
) -> None:
    places = (*facts().places[:0], place(role, "/there", free_bytes))
    found = [each for each in judged(places=places) if each.check == "disk"]
    assert [each.level for each in found] == [level or Level.OK]
    assert ("/there" in found[0].read) == (level is not None)


def test_disk_that_nobody_writes_to_may_be_full() -> None:
    assert wrong(judged(places=(place("project", "/cd", 0, is_read_only=True), place("temporary", "/tmp")))) == {}


def test_disk_that_does_not_answer_is_an_error() -> None:
    stale = place("project", "/nfs", 0, error="Stale file handle")
    assert of(judged(places=(stale,)), "disk").read == "/nfs: Stale file handle"


def test_small_shared_memory_is_a_warning() -> None:
    small = place("shared memory", "/dev/shm", 0, total_bytes=64 << 20)
    finding = of(judged(places=(small,)), "shm")
    assert (finding.level, finding.read, finding.expected) == (WARN, "/dev/shm has 64 MiB", "256 MiB or more")
    absent = dataclasses.replace(small, is_folder=False)
    assert of(judged(places=(absent,)), "shm").read == "no /dev/shm"


def test_folders_that_are_not_there_are_named() -> None:
    places = (place("project", "/gone", is_folder=False), place("data", "/data", is_folder=False))
    found = judged(places=places)
    assert (of(found, "project").level, of(found, "project").read) == (ERROR, "folder /gone not found")
    assert (of(found, "data").level, of(found, "data").read) == (WARN, "folder /data not found")
    assert of(judged(places=(place("data", "/data"),)), "data").read == "/data"


def test_code_that_is_not_the_same_is_named() -> None:
    found = judged(code={"train.py": "5e", "lib/a.py": "", **{f"x{n}.py": "0" for n in range(9)}})
    error, warning = of(found, "code", ERROR), of(found, "code", WARN)
    assert error.read == "not the project as it is here: train.py differs, lib/a.py is missing"
    assert warning.read.startswith("not the project as it is here: x0.py differs, x1.py differs")
    assert warning.read.endswith(" more")
    assert "sync.mode" in error.remedy
    assert "sync.mode" in warning.remedy


@pytest.mark.parametrize(
    ("path", "content", "level"),
    [
        ("train.py", "5e", ERROR),
        ("lib/a.py", "", ERROR),
        ("lib/a.py", "5e", WARN),
        ("local_settings.py", "", WARN),
        ("lib/_version.py", "5e", WARN),
    ],
)
def test_only_what_the_script_cannot_start_without_holds_a_run_up(path: str, content: str, level: Level) -> None:
    assert wrong(judged(code={path: content})) == {"code": level}


def test_project_that_is_copied_need_not_be_there_yet() -> None:
    places = (place("project", "/gone", is_folder=False),)
    found = judge_host(host(), facts(places=places, script="/gone/train.py not found"), HERE, VITAL, is_copied=True)
    assert wrong(found) == {}
    assert of(found, "project").read == "copied to /gone"
    here = host(kind=HostKind.LOCAL, ssh=None)
    assert of(judge_host(here, facts(places=places), HERE, VITAL, is_copied=True), "project").level is ERROR


def test_module_as_script_and_no_script_are_not_looked_for() -> None:
    assert of(judged(host(script=("-m", "pkg.main"))), "script").read == "-m"
    assert "script" not in {each.check for each in judged(host(script=("-",)))}


# ----------------------------------------------------------------------------------------------------------- stale runs
def test_processes_without_their_daemon_are_stale_and_a_live_run_is_not() -> None:
    live, left = RunSeen("20260101-a", (10, 11), True), RunSeen("20260101-b", (12, 13), False)
    assert of(judged(runs=(live,)), "stale runs").read == "none; 1 live"
    finding = of(judged(runs=(live, left)), "stale runs")
    assert finding.level is WARN
    assert "20260101-b (pid 12 13)" in finding.read
    assert "20260101-a" not in finding.read
    assert finding.remedy.endswith("kill 12 13")


# ----------------------------------------------------------------------------------------------------- hosts that fail
def test_host_that_is_not_reached_is_an_ssh_finding_with_its_stage() -> None:
    error = HostUnreachable("a", "auth", "ana is refused", "ssh-copy-id")
    finding = judge_unreachable(error, is_probed=False)
    assert finding == Finding("ssh", "a", ERROR, "auth: ana is refused", "", "ssh-copy-id")


def test_host_whose_python_does_not_answer_is_a_python_finding() -> None:
    error = HostUnreachable("a", "start", "interpreter /x not found", "set it")
    assert judge_unreachable(error, is_probed=True).check == "python"


def test_host_that_has_no_address_to_dial_is_a_controller_finding() -> None:
    error = HostUnreachable("a", "join", "only this machine can dial it")
    assert judge_unreachable(error, is_probed=False).check == "controller"


def test_old_python_is_told_what_is_needed() -> None:
    finding = judge_old_python(host(), "2.7.18")
    assert (finding.level, finding.read, finding.expected) == (ERROR, "Python 2.7.18", "3.11 or newer")


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([], 0),
        ([ok("ssh", "a", "")], 0),
        ([Finding("disk", "a", WARN, "")], 0),
        ([Finding("disk", "a", ERROR, ""), Finding("clock", "a", WARN, "")], 3),
        ([Finding("disk", "a", ERROR, ""), Finding("ssh", "b", ERROR, "")], 4),
    ],
)
def test_exit_code_is_that_of_the_worst(found: list[Finding], code: int) -> None:
    assert exit_code(found) == code


# ------------------------------------------------------------------------------------------------------------- together
def test_gpus_here_and_cpus_there_are_warned_about_where_the_cpus_are() -> None:
    hosts = {
        "a": (host("a", ("all",)), facts()),
        "b": (host("b", ("cpu",)), facts()),
        "c": (host("c", ("all",)), facts(smi=smi(query="", reason="not on PATH"), amd="/dev/kfd")),
    }
    found = judge_together(hosts, [])
    assert [(each.host, each.check, each.level) for each in found] == [("b", "devices", WARN), ("c", "devices", WARN)]
    assert found[0].read == "CPU ranks, and GPUs on a: no nccl_* mode mixes them"
    assert found[1].read.startswith("AMD GPU, so CPU ranks, and GPUs on a")
    assert judge_together(hosts, [Finding("devices", "b", ERROR, "")])[0].host == "c"


def test_one_kind_of_device_everywhere_is_fine() -> None:
    assert judge_together({"a": (host("a"), facts()), "b": (host("b"), facts())}, []) == []
    assert judge_together({"a": (host("a", ("all",)), facts()), "b": (host("b", ("0",)), facts())}, []) == []


def test_every_package_of_the_daemon_is_asked_for() -> None:
    assert {"flodl", "torch", "numpy", "msgpack"} <= set(PACKAGES)
