"""Finding the file, the origins of values, the settings of later versions, the schema, the shipped example."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from flodl.config.cluster import Override, find_cluster_file, load_cluster, parse_cluster, schema, show
from flodl.config.model import ClusterSpec, ControllerSpec, SshSpec, WorkerSpec
from flodl.config.problems import ClusterFileError, Problem
from flodl.config.relations import resolve_nothing

EXAMPLE = Path(__file__).parents[3] / "fdl.cluster.yml.example"


def small() -> ClusterSpec:
    return ClusterSpec(controller=ControllerSpec(host="10.0.0.1"), workers=(WorkerSpec(host="a"),))


def test_file_is_found_in_the_folder_and_above(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "fdl.cluster.yml").touch()

    assert find_cluster_file(deep, {}) == tmp_path / "fdl.cluster.yml"
    (deep / "fdl.cluster.yml").touch()
    assert find_cluster_file(deep, {"FDL_CLUSTER": ""}) == deep / "fdl.cluster.yml"


def test_folder_of_that_name_is_no_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "fdl.cluster.yml").mkdir()

    assert find_cluster_file(tmp_path, {}) is None


def test_variable_names_another_file(tmp_path: Path) -> None:
    (tmp_path / "fdl.cluster.yml").touch()
    (tmp_path / "x.yml").touch()

    assert find_cluster_file(tmp_path, {"FDL_CLUSTER": "x.yml"}) == tmp_path / "x.yml"
    assert find_cluster_file(tmp_path, {"FDL_CLUSTER": str(tmp_path / "x.yml")}) == tmp_path / "x.yml"


def test_variable_that_names_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match=r"FDL_CLUSTER=absent\.yml"):
        find_cluster_file(tmp_path, {"FDL_CLUSTER": "absent.yml"})


def test_every_value_is_shown_with_its_origin() -> None:
    worker = "{host: a, local_devices: [0], ssh: {port: 22}}"
    text = f"cluster:\n  controller: {{host: h}}\n  workers:\n    - {worker}\n  env: {{A: b}}\n"
    spec = parse_cluster(text.encode(), "f.yml", resolve_nothing)
    overrides = [
        Override("env", "FDL_PORT", "controller.port", 1),
        Override("flag", "--port", "controller.port", 2),
        Override("env", "FDL_DISCONNECT", "on_disconnect_s", 5.0),
    ]

    rows = {row.key: (row.value, row.origin) for row in show(spec, overrides)}

    assert rows["controller.host"] == ("h", "f.yml:2")
    assert rows["controller.port"] == (2, "flag --port")
    assert rows["on_disconnect_s"] == (5.0, "env FDL_DISCONNECT")
    assert rows["workers[0].local_devices"] == ([0], "f.yml:4")
    assert rows["workers[0].ssh.port"] == (22, "f.yml:4")
    assert rows["workers[0].ssh.options"] == ([], "default")
    assert rows["workers[0].env"] == ({}, "default")
    assert rows["env.A"] == ("b", "f.yml:5")
    assert rows["liveness.dead_s"] == (30.0, "default")
    json.dumps([row.value for row in show(spec)])


def test_schema_is_plain_json_and_closed() -> None:
    text = json.dumps(schema())

    controller = json.loads(text)["$defs"]["ControllerSpec"]
    assert controller["additionalProperties"] is False
    assert (controller["properties"]["port"]["minimum"], controller["properties"]["port"]["maximum"]) == (1, 65535)
    assert controller["properties"]["host"]["description"].startswith("Address to bind")


def test_shipped_example_is_valid() -> None:
    spec = load_cluster(EXAMPLE, resolve_nothing)

    assert [worker.host for worker in spec.workers] == ["node-a", "node-b"]


def test_example_of_the_operations_guide_parses() -> None:
    text = (
        EXAMPLE.read_text().replace("mode: off ", "mode: rsync ").replace("    # - host: node-c", "    - host: node-c")
    )
    text = text.replace("    #   daemon: managed", "      daemon: managed").replace("      # tunnel:", "      tunnel:")

    spec = parse_cluster(text.encode(), "f.yml", resolve_nothing)

    assert spec.sync.mode == "rsync"


def test_specs_are_frozen_and_compare_without_their_source() -> None:
    text = "cluster:\n  controller: {host: 10.0.0.1}\n  workers: [{host: a}]\n"
    spec = parse_cluster(text.encode(), "f.yml", resolve_nothing)

    assert spec == small()
    assert spec.source.file == "f.yml"
    assert small().source.file == ""
    with pytest.raises(ValidationError):
        spec.controller.port = 1  # type: ignore[misc]


def test_spec_goes_through_json_unchanged() -> None:
    spec = load_cluster(EXAMPLE, resolve_nothing)

    assert ClusterSpec.model_validate_json(spec.model_dump_json()) == spec


def test_spec_built_directly_is_held_to_the_rules_across_workers() -> None:
    with pytest.raises(ValidationError, match="another machine"):
        ClusterSpec(controller=ControllerSpec(host="h"), workers=(WorkerSpec(host="a"), WorkerSpec(host="A")))


def test_ssh_target_is_the_host_unless_named() -> None:
    assert WorkerSpec(host="a").ssh_target == "a"
    assert WorkerSpec(host="a", ssh=SshSpec(port=2222)).ssh_target == "a"
    assert WorkerSpec(host="a", ssh=SshSpec(target="[::1]")).ssh_target == "::1"


def test_problem_without_value_and_remedy_is_short() -> None:
    assert str(Problem("f.yml", None, None, "", "", "a file")) == "f.yml\n  expected: a file"
