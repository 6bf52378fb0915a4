"""What a host reads of itself: nvidia-smi that misbehaves, torch's own words, processes of other runs."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flodl.launch.probe import collect
from flodl.launch.probe.survey import reference

TORCH = "class _C:\n    _cuda_getArchFlags = staticmethod(lambda: 'sm_80 compute_90')\n"
VERSION = "__version__ = '9.9.9+cu124'\ncuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def smi(bench: Path, body: str) -> None:
    program = bench / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def request(**changes: Any) -> dict[str, Any]:
    asked = {"folder": "/", "script": ["-m", "x"], "places": [], "packages": [], "modules": [], "gpus": True}
    return {**asked, "smi_timeout_s": 5.0, "torch_timeout_s": 20.0, "own_run": "", "env": {}, "code": {}, **changes}


def test_nvidia_smi_is_asked_in_english_and_its_words_are_kept(bench: Path) -> None:
    smi(bench, 'echo "$LC_ALL $1"')
    answer = collect.facts(request())["smi"]
    assert answer["query"].startswith("C --query-gpu=index,uuid")
    assert answer["apps"].startswith("C --query-compute-apps")
    assert (answer["listing"], answer["reason"]) == ("C -L\n", "")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'Failed to initialize NVML' >&2; exit 18", "nvidia-smi: exit code 18: Failed to initialize NVML"),
        ("exit 3", "nvidia-smi: exit code 3: it printed nothing"),
        ("kill -9 $$", "nvidia-smi: exit code -9: it printed nothing"),
    ],
)
def test_nvidia_smi_that_fails_is_quoted(bench: Path, body: str, reason: str) -> None:
    smi(bench, body)
    assert collect.facts(request())["smi"]["reason"] == reason


def test_nvidia_smi_that_hangs_is_ended_with_its_children(bench: Path, wait_until: Callable[..., object]) -> None:
    smi(bench, f"sleep 60 & echo $! >> {bench}/pids; wait")
    started_s = time.monotonic()
    answer = collect.facts(request(smi_timeout_s=1.0))["smi"]
    assert answer["reason"].startswith("nvidia-smi: no answer within 1 s")
    assert time.monotonic() - started_s < 10
    pids = (bench / "pids").read_text().split()
    assert pids
    wait_until(lambda: not any(_is_running(int(pid)) for pid in pids), 5.0, f"the end of {pids}")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_driver_that_does_not_know_a_field_is_asked_without_it(bench: Path) -> None:
    smi(
        bench, "case $1 in *compute_cap*) echo 'Field \"compute_cap\" is not a valid field'; exit 2;; *) echo $1;; esac"
    )
    answer = collect.facts(request())["smi"]
    assert (answer["query"], answer["reason"]) == ("--query-gpu=index,uuid,name,pstate,memory.total\n", "")


def test_no_nvidia_smi_is_said(bench: Path) -> None:
    assert collect.facts(request())["smi"]["reason"] == "nvidia-smi is not on PATH"


def test_torch_is_read_without_being_imported_and_imported_for_gpus_by_a_child(bench: Path) -> None:
    (bench / "torch").mkdir()
    (bench / "torch" / "__init__.py").write_text(TORCH + f"open({str(bench / 'imported')!r}, 'a').write('x')\n")
    (bench / "torch" / "version.py").write_text(VERSION)
    code = f"import sys; sys.path.insert(0, {str(bench)!r})\nfrom flodl.launch.probe import collect\nimport json\n"
    code += "print(json.dumps(collect.facts({request!r})))"
    for gpus, imports in ((False, ""), (True, "x")):
        words = code.format(request=request(gpus=gpus))
        done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(done.stdout)
        assert found["torch"] == {"version": "9.9.9+cu124", "cuda": "12.4", "hip": ""}
        assert (bench / "imported").exists() == bool(imports)
    assert found["torch_import"] == {"error": "", "arches": ["sm_80", "compute_90"], "nccl": ""}


@pytest.mark.parametrize(
    ("torch", "error"),
    [
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        ("import time\ntime.sleep(60)", "no answer within 1 s"),
        ("import os\nos.abort()", "exit code -6"),
    ],
)
def test_torch_that_cannot_be_imported_says_why(bench: Path, torch: str, error: str) -> None:
    (bench / "torch").mkdir()
    (bench / "torch" / "__init__.py").write_text(torch)
    assert collect._torch_import(1.0, {})["error"].startswith(error)


def test_script_that_is_not_there_is_named(bench: Path) -> None:
    (bench / "t.py").write_text("pass")
    asked = request(gpus=False, folder=str(bench), script=["t.py"])
    assert collect.facts(asked)["script"] == ""
    assert collect.facts({**asked, "script": ["gone.py", "-x"]})["script"] == f"{bench}/gone.py not found"


def test_files_that_are_not_what_they_should_be_are_told_with_what_they_are(bench: Path) -> None:
    (bench / "t.py").write_text("pass")
    sha = hashlib.sha256(b"pass").hexdigest()
    wanted = {"t.py": sha, "./t.py": "0" * 64, "gone.py": sha, "t.py/x": sha}
    asked = request(gpus=False, folder=str(bench), code=wanted)
    assert collect.facts(asked)["code"] == {"./t.py": sha, "gone.py": "", "t.py/x": ""}
    assert collect.facts({**asked, "folder": "/no/folder"})["code"] == {}


def test_ranks_environment_counts_for_what_they_import(bench: Path) -> None:
    (bench / "torch").mkdir()
    (bench / "torch" / "__init__.py").write_text("import os\nraise OSError(os.environ['FOR_RANKS'])")
    assert collect._torch_import(20.0, {"FOR_RANKS": "seen"})["error"] == "OSError: seen"
    (bench / "lib").mkdir()
    (bench / "lib" / "no_such_module.py").write_text("")
    asked = request(gpus=False, modules=["no_such_module"], folder=str(bench), script=["a/t.py"])
    assert collect.facts(asked)["missing_modules"] == ["no_such_module"]
    assert collect.facts({**asked, "env": {"PYTHONPATH": "/x:lib"}})["missing_modules"] == []


def test_place_that_is_not_there_yet_counts_by_the_nearest_above(tmp_path: Path) -> None:
    found, above = collect.place("x", str(tmp_path / "a" / "b")), collect.place("x", str(tmp_path))
    assert (found["is_folder"], above["is_folder"]) == (False, True)
    assert found["total_bytes"] == above["total_bytes"] > 0
    assert collect.place("temporary", "")["path"] in (os.environ.get("TMPDIR"), "/tmp")


def test_torch_without_metadata_is_here_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.version("torch")

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    assert reference().torch.partition("+")[0] == known.partition("+")[0]


def test_version_without_metadata_is_read_from_the_package(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bench / "odd_package").mkdir()
    (bench / "odd_package" / "__init__.py").write_text('__version__ = "3.2.1"\n')
    (bench / "bare_package.py").write_text("")
    monkeypatch.syspath_prepend(str(bench))
    assert [collect.version(name) for name in ("odd_package", "bare_package", "none_such")] == ["3.2.1", "unknown", ""]


def test_processes_of_a_run_are_found_and_those_of_our_own_are_not(bench: Path) -> None:
    env = {**os.environ, "FLODL_RUN_MARK": f"20260101-test{os.getpid()}:3"}
    process = subprocess.Popen(["sleep", "60"], env=env)
    try:
        run_id = env["FLODL_RUN_MARK"].partition(":")[0]
        found = {run["run_id"]: run for run in collect.facts(request(gpus=False))["runs"]}
        assert found[run_id] == {"run_id": run_id, "pids": [process.pid], "is_attended": False}
        assert run_id not in {run["run_id"] for run in collect.facts(request(gpus=False, own_run=run_id))["runs"]}
    finally:
        process.kill()
        process.wait()


def test_process_below_a_daemon_is_attended(bench: Path) -> None:
    env = {**os.environ, "FLODL_RUN_MARK": f"20260101-kept{os.getpid()}:3"}
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    parent = subprocess.Popen([sys.executable, "-c", code, "flodl_daemon.warden"], env=env, start_new_session=True)
    try:
        run_id, deadline_s = env["FLODL_RUN_MARK"].partition(":")[0], time.monotonic() + 20
        found: dict[str, Any] = {}
        while len(found.get("pids", ())) < 2 and time.monotonic() < deadline_s:
            found = next((run for run in collect._runs("") if run["run_id"] == run_id), {})
        assert (len(found["pids"]), found["is_attended"]) == (2, True)
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
