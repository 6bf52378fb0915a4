"""``ClusterBuilder`` mirrors the file; ``local_cluster`` is what ``--local`` takes."""

from pathlib import Path

import pytest

from flodl.config.builder import ClusterBuilder, local_cluster
from flodl.config.cluster import parse_cluster
from flodl.config.model import ClusterSpec
from flodl.config.problems import ClusterError
from flodl.config.relations import resolve_nothing
from flodl.errors import ConfigError

TEXT = """\
cluster:
  controller:
    host: 10.0.0.1
    advertise: head.lab
    port: 1400
    path: /opt/project
    join: {min_rank_start: 1, target_ranks: 3, start: manual, elastic: false}
  workers:
    - host: node-a
      local_devices: [0, 1]
      ranks: [0, 1]
      nccl_socket_ifname: enp1s0
      path: /opt/project
      python: /opt/venv/bin/python
      data_path: /data
      env: {A: b}
    - host: node-b
      ssh: {target: b.lab, port: 2222, user: u, identity_file: ~/k, proxy_jump: j, options: [A=b]}
      tunnel: true
      ranks: [2]
  env: {C: d}
  sync: {mode: rsync, exclude: [x]}
  liveness: {dead_s: 40}
  on_disconnect_s: 60
  security: {tls: off}
"""


def full_builder() -> ClusterBuilder:
    controller = ClusterBuilder().controller("10.0.0.1").advertise("head.lab").port(1400).path("/opt/project")
    cluster = controller.join(min_rank_start=1, target_ranks=3, start="manual", elastic=False).done()
    first = cluster.host("node-a").devices([0, 1]).ranks([0, 1]).nccl_socket_ifname("enp1s0").path("/opt/project")
    first.python("/opt/venv/bin/python").data_path("/data").env({"A": "b"}).done()
    second = cluster.host("node-b").ssh("b.lab").ssh_port(2222).ssh_user("u").ssh_identity_file("~/k")
    second.ssh_proxy_jump("j").ssh_options(["A=b"]).tunnel().ranks([2]).devices("all").done()
    return cluster.env({"C": "d"}).sync("rsync", ["x"]).liveness(dead_s=40).on_disconnect_s(60).tls("off")


def test_builder_says_what_the_file_says() -> None:
    assert full_builder().build(resolve_nothing) == parse_cluster(TEXT.encode(), "f.yml", resolve_nothing)


def test_managed_daemon_is_built() -> None:
    spec = ClusterBuilder().controller("h").done().host("a").daemon("managed").done().build(resolve_nothing)

    assert spec.workers[0].daemon == "managed"


def test_builder_reports_everything_by_key_path() -> None:
    builder = ClusterBuilder().controller("10.0").port(0).join(elastc=True).done()
    builder.host("a").env({"RANK": "1"}).ranks([1]).done().host("A").ranks([0])

    with pytest.raises(ClusterError) as caught:
        builder.build(resolve_nothing)

    assert {(one.key, one.read) for one in caught.value.problems} == {
        ("cluster.controller.host", "'10.0'"),
        ("cluster.controller.port", "0"),
        ("cluster.controller.join.elastc", "elastc"),
        ("cluster.workers[0].env.RANK", "RANK"),
        ("cluster.workers[1].host", "'A'"),
    }
    assert "ClusterBuilder: cluster.controller.port\n  read:     0" in str(caught.value)


def test_builder_without_controller_and_workers_is_refused() -> None:
    with pytest.raises(ClusterError, match="the key `controller`"):
        ClusterBuilder().build(resolve_nothing)


def test_local_cluster_of_cpu_ranks() -> None:
    spec = local_cluster(3)

    assert (spec.controller.host, spec.controller.port) == ("127.0.0.1", 0)
    assert [(worker.host, worker.local_devices) for worker in spec.workers] == [("localhost", ("cpu", "cpu", "cpu"))]
    assert ClusterSpec.model_validate_json(spec.model_dump_json()) == spec


def test_local_cluster_of_named_devices_on_ipv6() -> None:
    spec = local_cluster(["GPU-1", "GPU-2"], loopback="::1", port=1400)

    assert (spec.controller.host, spec.controller.port) == ("::1", 1400)
    assert spec.workers[0].local_devices == ("GPU-1", "GPU-2")


def test_local_cluster_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 rank"):
        local_cluster(0)
    with pytest.raises(ConfigError, match="local_devices"):
        local_cluster([])


def fake_nvidia_smi(folder: Path, lines: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    program.chmod(0o755)


def test_all_local_gpus_are_taken_by_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "0, GPU-aa, X, 9.0, 100\n1, GPU-bb, X, 9.0, 100")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")

    assert ClusterBuilder.all_local_gpus().build().workers[0].local_devices == ("GPU-bb", "GPU-aa")


def test_gpus_without_uuid_are_taken_by_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "0, GPU-aa, X, 9.0, 100\n1, [N/A], X, 9.0, 100")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert ClusterBuilder.all_local_gpus().build().workers[0].local_devices == (0, 1)


def test_machine_without_gpu_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")

    with pytest.raises(ConfigError, match="hides every GPU"):
        ClusterBuilder.all_local_gpus()
