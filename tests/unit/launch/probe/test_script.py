"""What the script here asks of a host, and of this machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from flodl.config.builder import local_cluster
from flodl.launch.launcher import LaunchOptions, local_request
from flodl.launch.plan import HostKind, PlainPlan, RunSpec, SyncMode, plan
from flodl.launch.probe.here import HERE, look_here
from flodl.launch.probe.script import needed_by
from tests.unit.launch.probe.describing import host, of

SCRIPT = "import os\nimport helper\nimport deep.part\nimport wandb_like\nimport no_such_module\n"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A run of ``train.py`` on a host elsewhere, which has its own copy of the project."""
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "part.py").write_text("")
    return replace(plan(local_cluster(1), local_request(LaunchOptions(("train.py",)))), hosts=(host(),))


def test_module_of_the_project_is_compared_and_not_asked_for(spec: RunSpec) -> None:
    needed = needed_by(spec)
    assert needed.modules == ("os", "wandb_like", "no_such_module")
    assert {"helper.py", "deep/part.py"} <= set(needed.code)
    assert needed.vital.own == {"helper", "deep"}


def test_module_of_the_project_that_is_copied_is_not_asked_for(spec: RunSpec) -> None:
    copied = replace(spec, sync=replace(spec.sync, mode=SyncMode.RSYNC))
    assert needed_by(copied).modules == ("os", "wandb_like", "no_such_module")


def test_module_of_the_project_that_cannot_be_compared_is_asked_for(spec: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb_like.py").write_text("")
    needed = needed_by(replace(spec, env={"PYTHONPATH": "lib"}))
    assert "wandb_like" in needed.modules
    assert "wandb_like" in needed.vital.own


def test_folder_with_the_name_of_a_package_is_no_module_of_the_project(spec: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "train.py").write_text("import numpy\n")
    assert needed_by(spec).modules == ("numpy",)
    assert needed_by(spec).vital.own == set()


def test_what_the_head_cannot_import_is_a_warning_here(spec: RunSpec) -> None:
    finding = of(look_here(spec), "modules")
    assert (finding.host, finding.level) == (HERE, "warn")
    assert finding.read.startswith("the script imports wandb_like, no_such_module, which ")
    assert finding.remedy.endswith("(or the package's own name), for the head runs the script here, too")


def test_what_is_missing_on_this_machine_is_said_once_and_only_where_there_is_a_head(spec: RunSpec) -> None:
    here = host(kind=HostKind.LOCAL, python=spec.python)
    for other in (replace(spec, hosts=(here,)), replace(spec, plain=PlainPlan(0))):
        assert not [each for each in look_here(other) if each.check == "modules"]
