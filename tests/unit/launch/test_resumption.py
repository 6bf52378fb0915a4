import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from flodl.config.builder import local_cluster
from flodl.errors import CheckpointError, ConfigError
from flodl.launch import rundir
from flodl.launch.document import dump
from flodl.launch.launcher import LaunchOptions, local_request
from flodl.launch.plan import PlainPlan, RunSpec, plan
from flodl.launch.resumption import plan_resumption
from flodl.launch.rundir import RunDir, own_info
from tests.bundles import weights, write_bundle

OPTIONS = LaunchOptions(())


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    request = local_request(LaunchOptions(("train.py", "--epochs", "5"), name="mine"))
    return replace(plan(local_cluster(2), replace(request, created_s=1.0)), port=4711)


def save(stem: Path) -> None:
    write_bundle(stem, 100, weights())


def old_run(spec: RunSpec, save_path: str = "", resume_from: str = "", begun: bool = True) -> RunDir:
    run = rundir.create(spec.run_id)
    run.write("run.json", dump(spec))
    lines = [json.dumps({"event": "spawning", "fields": {}})]
    if begun:
        lines.append(json.dumps({"event": "admitted", "fields": {"save_path": save_path, "resume_from": resume_from}}))
    (run.path / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "che')
    return run


def test_same_is_launched_from_the_last_checkpoint(spec: RunSpec, tmp_path: Path) -> None:
    save(tmp_path / "ckpts" / "run")

    again, stem = plan_resumption(old_run(spec, "ckpts/run", "older"), OPTIONS)

    assert stem == tmp_path / "ckpts" / "run"
    assert again.run_id != spec.run_id
    assert again.env == {"FDL_RUN_ID": again.run_id, "FDL_RESUME": str(stem)}
    assert (again.script, again.cwd, again.hosts, again.name) == (spec.script, spec.cwd, spec.hosts, "mine")
    assert again.port == 0, "the port was the system's choice"


def test_port_of_a_cluster_file_stays(spec: RunSpec, tmp_path: Path) -> None:
    save(tmp_path / "run")
    again, _ = plan_resumption(old_run(replace(spec, cluster_file="fdl.cluster.yml"), "run"), OPTIONS)
    assert again.port == 4711


def test_run_that_ended_before_its_first_checkpoint_goes_on_from_where_it_began(spec: RunSpec, tmp_path: Path) -> None:
    save(tmp_path / "older")
    _, stem = plan_resumption(old_run(spec, "never", "older"), OPTIONS)
    assert stem == tmp_path / "older"


@pytest.mark.parametrize(
    ("save_path", "resume_from", "begun", "words"),
    [
        ("", "", False, "has not begun to train"),
        ("", "", True, "has no save_path"),
        ("missing", "", True, "missing"),
        ("missing", "missing too", True, "missing too"),
    ],
)
def test_run_without_a_checkpoint_is_refused(
    spec: RunSpec, save_path: str, resume_from: str, begun: bool, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        plan_resumption(old_run(spec, save_path, resume_from, begun), OPTIONS)


def test_checkpoint_of_an_earlier_run_is_not_taken_for_this_one_s(spec: RunSpec, tmp_path: Path) -> None:
    save(tmp_path / "run")
    with pytest.raises(CheckpointError, match="older than it"):
        plan_resumption(old_run(replace(spec, created_s=9e9), "run"), OPTIONS)


def test_checkpoint_that_the_run_began_with_and_has_not_replaced_is_its_own(spec: RunSpec, tmp_path: Path) -> None:
    save(tmp_path / "run")
    _, stem = plan_resumption(old_run(replace(spec, created_s=9e9), "run", "run"), OPTIONS)
    assert stem == tmp_path / "run"


def test_plain_run_is_refused(spec: RunSpec) -> None:
    with pytest.raises(ConfigError, match="was a plain run"):
        plan_resumption(old_run(replace(spec, plain=PlainPlan(2))), OPTIONS)


def test_live_run_is_refused(spec: RunSpec) -> None:
    run = old_run(spec)
    run.announce(own_info("127.0.0.1", 1))
    with pytest.raises(ConfigError, match=f"fdl stop {run.run_id}"):
        plan_resumption(run, OPTIONS)


def test_run_without_its_document_is_refused(spec: RunSpec) -> None:
    run = old_run(spec)
    os.unlink(run.run_json)
    with pytest.raises(ConfigError, match=r"run\.json"):
        plan_resumption(run, OPTIONS)
