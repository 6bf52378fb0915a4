"""``fdl probe`` and preflight over real sshd: hosts with one fault each, planted for real, are found out by name."""

import json
import os
import shlex
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.runs import Fdl
from tests.system.lab import Host, Lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

GREEN_S = 3.0
SCRIPT = "import json\nimport numpy\nimport flodl\nimport torch\n"
OLD_TORCH = {
    "torch/__init__.py": "from torch.version import __version__\n",
    "torch/version.py": "__version__ = '2.0.1'\ncuda = None\nhip = None\n",
    "torch-2.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n",
}
CUDA_TORCH = {
    "torch/__init__.py": "class _C:\n    _cuda_getArchFlags = staticmethod(lambda: 'sm_80 sm_90 compute_90')\n",
    "torch/version.py": "from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = '12.4'\n",
    "torch-{version}.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
}
VOLTA = "0, GPU-aaaa1111, Tesla V100, 7.0, 16384"
VOLTA_USE = "GPU-aaaa1111, 9000, 550.54.15"
VOLTA_APPS = "GPU-aaaa1111, 4711, 8900"
HOPPER = "0, GPU-bbbb2222, NVIDIA H200, 9.0, 143771"
HOPPER_USE = "GPU-bbbb2222, 0, 550.54.15"


@dataclass
class Bench:
    """Interpreters with a fault, and cluster files that give them to hosts."""

    lab: Lab
    fdl: Fdl
    project: Path
    made: int = field(default=0)

    def interpreter(self, exports: str = "", code: str = "", files: dict[str, str] | None = None) -> str:
        """This Python, with ``exports`` in its environment, ``files`` first on its path, ``code`` run at its start."""
        self.made += 1
        folder = self.project / f"site{self.made}"
        for name, text in {**(files or {}), **({"sitecustomize.py": code} if code else {})}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        folder.mkdir(exist_ok=True)
        return self.program("python", f'{exports}\nexport PYTHONPATH={folder}\nexec {sys.executable} "$@"')

    def program(self, name: str, body: str) -> str:
        folder = self.project / f"bin{self.made}"
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    def with_gpus(self, query: str, use: str, apps: str = "") -> str:
        """An interpreter on whose PATH there is an nvidia-smi that prints this, and a torch for CUDA."""
        version = "2.13.0"
        cases = f"--query-gpu=index*) echo '{query}';; --query-gpu=uuid*) echo '{use}';; --query-comp*) echo '{apps}';;"
        files = {name.format(version=version): text.replace("{version}", version) for name, text in CUDA_TORCH.items()}
        python = self.interpreter(f"export PATH={self.project}/bin{self.made + 1}:$PATH", files=files)
        self.program("nvidia-smi", f'case "$1" in {cases} esac')
        return python

    def cluster(self, changes: dict[int, dict[str, object]] | None = None) -> Path:
        """All three hosts, one CPU rank each, but for ``changes`` by place."""
        workers = [
            self.lab.worker(host, 1, **{"path": str(self.project), **(changes or {}).get(place, {})})
            for place, host in enumerate(self.lab.hosts)
        ]
        return self.lab.cluster(self.project / "c.yml", workers)

    def probe(self, cluster: Path, *words: str) -> dict[str, Any]:
        done = self.fdl.call("probe", "-c", str(cluster), "--json", *words, timeout_s=60)
        assert done.returncode in (0, 3, 4), done.stdout + done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["exit_code"] == done.returncode
        return report


@pytest.fixture
def bench(three: Lab, fdl: Fdl) -> Bench:
    (fdl.folder / "train.py").write_text(SCRIPT)
    return Bench(three, fdl, fdl.folder)


def wrong(report: dict[str, Any], host: Host | None = None) -> dict[str, str]:
    """What is not green: check → level; the box's own business, which other tests on it may be, left out."""
    return {
        finding["check"]: finding["level"]
        for finding in report["findings"]
        if finding["level"] != "ok"
        and (host is None or finding["host"] == host.name)
        and finding["check"] not in ("stale runs", "memory")
    }


def finding(report: dict[str, Any], check: str, host: Host) -> dict[str, str]:
    found = [each for each in report["findings"] if (each["check"], each["host"]) == (check, host.name)]
    (worst,) = [each for each in found if each["level"] != "ok"] or found
    return dict(worst)


def test_three_good_hosts_are_green_within_three_seconds(bench: Bench, deadline_factor: float) -> None:
    cluster = bench.cluster()
    started_s = time.monotonic()
    report = bench.probe(cluster, "train.py")
    whole_s = time.monotonic() - started_s

    assert wrong(report) == {}
    assert report["exit_code"] == 0
    checks = {each["check"] for each in report["findings"] if each["host"] == bench.lab.hosts[1].name}
    assert checks >= {"ssh", "clock", "python", "flodl", "torch", "disk", "shm", "limits", "controller", "peers", "mtu"}
    assert whole_s < GREEN_S * deadline_factor
    print(f"asked in {report['seconds']:.2f} s, the command took {whole_s:.2f} s")


def test_wrong_python_is_found(bench: Bench) -> None:
    shim = "import sys; sys.version_info = (3, 9, 2, 'final', 0); code = sys.argv[2]; sys.argv[1:3] = []; exec(code)"
    old = bench.program("python", f'exec {sys.executable} -c {shlex.quote(shim)} "$@"')
    report = bench.probe(bench.cluster({0: {"python": old}, 1: {"python": "/opt/no/python"}}))

    aged, missing = (finding(report, "python", host) for host in bench.lab.hosts[:2])
    assert (aged["level"], aged["read"], aged["expected"]) == ("error", "Python 3.9.2", "3.11 or newer")
    assert "set `python` of worker" in aged["remedy"]
    assert missing["read"] == "interpreter /opt/no/python not found"
    assert wrong(report, bench.lab.hosts[2]) == {}
    assert report["exit_code"] == 3


def test_missing_module_is_found(bench: Bench) -> None:
    folder = bench.project / "packages"
    folder.mkdir()
    for path in map(Path, dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path))):
        for entry in path.iterdir() if path.is_dir() and "site-packages" in path.name else ():
            if not entry.name.startswith("msgpack") and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    own = os.pathsep.join([str(folder), str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "daemon")])
    python = bench.program(
        "python",
        f'export PYTHONPATH={own}\nexec {Path(sys._base_executable).resolve()} -S "$@"',  # type: ignore[attr-defined]
    )
    report = bench.probe(bench.cluster({1: {"python": python}}))

    missing = finding(report, "packages", bench.lab.hosts[1])
    assert "has no msgpack" in missing["read"]
    assert "-m pip install msgpack" in missing["remedy"]
    assert wrong(report) == {"packages": "error"}


def test_what_only_the_script_imports_is_found(bench: Bench) -> None:
    (bench.project / "train.py").write_text(SCRIPT + "import zebra_crossing\n")
    report = bench.probe(bench.cluster(), "train.py")

    assert "zebra_crossing" in finding(report, "modules", bench.lab.hosts[2])["read"]
    assert wrong(report) == {"modules": "warn"}
    assert report["exit_code"] == 0


def test_another_copy_of_the_code_is_found(bench: Bench) -> None:
    stale = bench.project / "stale"
    stale.mkdir()
    (stale / "train.py").write_text(SCRIPT + "from model import size\n")
    (stale / "model.py").write_text("size = 1\n")
    (bench.project / "train.py").write_text(SCRIPT + "from model import size\n")
    (bench.project / "model.py").write_text("size = 2\n")
    report = bench.probe(bench.cluster({1: {"path": str(stale)}}), "train.py")

    code = finding(report, "code", bench.lab.hosts[1])
    assert code["read"] == "not the project as it is here: model.py differs"
    assert "up to date" in code["remedy"]
    assert wrong(report) == {"code": "warn"}


def test_another_torch_is_found(bench: Bench) -> None:
    report = bench.probe(bench.cluster({1: {"python": bench.interpreter(files=OLD_TORCH)}}))

    other = finding(report, "torch", bench.lab.hosts[1])
    assert (other["level"], other["read"]) == ("warn", "2.0.1")
    assert "pip install torch==" in other["remedy"]
    assert wrong(report) == {"torch": "warn"}


def test_full_disk_is_found(bench: Bench) -> None:
    full = bench.project / "full"
    full.mkdir()
    first, second, _ = bench.lab.hosts
    bench.lab.run_on(second, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(full))
    try:
        bench.lab.run_on(second, "fallocate", "-l", "1m", str(full / "fill"))
        python = bench.interpreter(f"export TMPDIR={full}")
        report = bench.probe(bench.cluster({0: {"python": python}, 1: {"python": python}}))
    finally:
        bench.lab.run_on(second, "umount", str(full))

    disk = finding(report, "disk", second)
    assert (disk["level"], disk["read"]) == ("error", f"{full}: 0 KiB of 1 MiB are free: it is full")
    assert "set TMPDIR" in disk["remedy"]
    assert wrong(report, second) == {"disk": "error"}
    assert wrong(report, first) == {}


def test_workers_that_do_not_reach_each_other_are_found(bench: Bench) -> None:
    first, second, third = bench.lab.hosts
    bench.lab.isolate(first, second)
    try:
        report = bench.probe(bench.cluster())
    finally:
        bench.lab.isolate(first, second, is_isolated=False)

    peers = finding(report, "peers", first)
    assert (peers["level"], f"{second.name} cannot be dialled" in peers["read"]) == ("warn", True)
    assert third.name not in peers["read"]
    assert "nccl_socket_ifname" in peers["remedy"]
    assert finding(report, "peers", third)["read"] == "2 reached"
    assert finding(report, "controller", first)["level"] == "ok"


def test_clock_that_is_ten_minutes_off_is_found(bench: Bench) -> None:
    shift = "import time\n_time = time.time\ntime.time = lambda: _time() + 600\n"
    report = bench.probe(bench.cluster({2: {"python": bench.interpreter(code=shift)}}))

    clock = finding(report, "clock", bench.lab.hosts[2])
    assert clock["level"] == "warn"
    assert 599.0 < float(clock["read"].split()[3]) < 601.0
    assert "ahead of" in clock["read"]
    assert "set-ntp" in clock["remedy"]
    assert wrong(report) == {"clock": "warn"}


def test_gpus_that_cannot_train_or_do_not_mix_are_found(bench: Bench) -> None:
    volta = bench.with_gpus(VOLTA, VOLTA_USE, VOLTA_APPS)
    hopper = bench.with_gpus(HOPPER, HOPPER_USE)
    amd = bench.interpreter(f"export PATH={bench.project}/bin{bench.made + 1}:$PATH")
    bench.program("rocm-smi", "echo GPU")
    devices: dict[str, object] = {"local_devices": "all"}
    changes = {place: {**devices, "python": python} for place, python in enumerate((volta, hopper, amd))}
    report = bench.probe(bench.cluster(changes))

    first, second, third = bench.lab.hosts
    arch = finding(report, "arch", first)
    assert (arch["level"], arch["expected"]) == ("error", "sm_80 sm_90 compute_90")
    assert "GPU 0 (Tesla V100, sm_70)" in arch["read"]
    assert "leave it out" in arch["remedy"]
    assert finding(report, "busy", first)["read"] == "GPU 0: 9000 of 16384 MiB in use by pid 4711"
    assert wrong(report, second) == {}
    assert finding(report, "devices", second)["read"] == "1 × H200"
    assert finding(report, "driver", second)["read"] == "550.54.15, CUDA 12.4"
    mixed = [each for each in report["findings"] if (each["check"], each["host"]) == ("devices", third.name)]
    assert [each["level"] for each in mixed] == ["warn", "warn"]
    assert "its GPU is AMD's" in mixed[0]["remedy"] + mixed[1]["remedy"]
    assert f"AMD GPU, so CPU ranks, and GPUs on {first.name}, {second.name}" in mixed[0]["read"] + mixed[1]["read"]


def test_launch_stops_with_all_findings_in_one_report_and_one_login_each(bench: Bench) -> None:
    before = [bench.lab.logins(host) for host in bench.lab.hosts]
    cluster = bench.cluster({0: {"python": "/opt/no/python"}, 1: {"path": "/no/such/folder"}})
    (bench.project / "train.py").write_text("open('started', 'w')\n")
    run = bench.fdl.launch("-c", cluster, "train.py")
    assert run.wait(60) == 3, run.story()

    first, second, _ = bench.lab.hosts
    assert f"host {first.name}: preflight: interpreter /opt/no/python not found" in run.stderr
    assert f"host {second.name}: preflight: project: folder /no/such/folder not found" in run.stderr
    assert [bench.lab.logins(host) for host in bench.lab.hosts] == [count + 1 for count in before]
    assert not (bench.project / "started").exists()
    run.wait_until_clean()


def test_dead_host_is_named_among_the_others_and_gives_its_own_exit_code(bench: Bench) -> None:
    dead = {"target": bench.lab.nobody, "user": "root", "options": ["ConnectTimeout=2"]}
    report = bench.probe(bench.cluster({0: {"ssh": dead}, 1: {"python": "/opt/no/python"}}))

    first, second, third = bench.lab.hosts
    assert report["exit_code"] == 4
    assert finding(report, "ssh", first)["read"].startswith("connect: port 22")
    assert wrong(report, second) == {"python": "error"}
    assert wrong(report, third) == {}
