"""What follows from a cluster and a request: folders, scripts, addresses, environment, and the words for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from flodl.config import model
from flodl.config.builder import local_cluster
from flodl.config.cluster import load_cluster
from flodl.config.tls import TlsMode
from flodl.core.window import StartRule
from flodl.errors import ConfigError
from flodl.launch import document
from flodl.launch.commands import openssh_command, remote_command
from flodl.launch.plan import (
    HostKind,
    JoinPlan,
    LaunchRequest,
    RunSpec,
    bootstrap_for,
    describe,
    guest_bootstrap,
    plan,
    walk_in_bootstrap,
)


def request(*script: str, cwd: str = "/home/me/proj", name: str = "") -> LaunchRequest:
    return LaunchRequest(
        run_id="20261129-213045-ab12",
        created_s=1.5,
        script=script or ("train.py",),
        cwd=cwd,
        python="/venv/bin/python",
        local_names=frozenset({"localhost", "10.0.0.1"}),
        name=name,
    )


def cluster(*workers: model.WorkerSpec, path: str | None = None) -> model.ClusterSpec:
    return model.ClusterSpec(controller=model.ControllerSpec(host="10.0.0.1", path=path), workers=workers)


REMOTE = model.WorkerSpec(host="node-b", path="/srv/proj", local_devices=("cpu", "cpu"), python="/opt/py")


def test_local_cluster_becomes_one_local_host_with_this_interpreter() -> None:
    spec = plan(local_cluster(3), request("train.py", "--x"))
    (host,) = spec.hosts
    assert (host.kind, host.devices, host.python) == (HostKind.LOCAL, ("cpu",) * 3, "/venv/bin/python")
    assert (host.cwd, host.script) == ("/home/me/proj", ("train.py", "--x"))
    assert host.ssh is None
    assert (spec.name, spec.port, spec.bind_host) == ("train", 0, "127.0.0.1")


@pytest.mark.parametrize("name", ["10.0.0.1", "localhost"])
def test_worker_that_is_this_machine_needs_no_ssh(name: str) -> None:
    spec = plan(cluster(model.WorkerSpec(host=name)), request())
    assert spec.hosts[0].kind is HostKind.LOCAL


def test_ssh_settings_make_even_this_machine_an_ssh_host() -> None:
    worker = model.WorkerSpec(host="localhost", ssh=model.SshSpec(port=2222))
    assert plan(cluster(worker), request()).hosts[0].kind is HostKind.SSH


def test_terms_of_the_join_window_are_planned() -> None:
    join = model.JoinSpec(min_rank_start=2, target_ranks=3, join_timeout=4, max_join_timeout=5, start="hybrid")
    controller = model.ControllerSpec(host="10.0.0.1", join=join)
    spec = plan(model.ClusterSpec(controller=controller, workers=()), request())
    assert (spec.join, spec.hosts) == (JoinPlan(2, 3, 4.0, 5.0, True, start=StartRule.HYBRID), ())
    assert document.load(RunSpec, document.dump(spec)) == spec


def test_other_hosts_get_their_own_folder_and_the_login_shells_interpreter() -> None:
    spec = plan(cluster(model.WorkerSpec(host="node-b", path="/srv/proj")), request())
    host = spec.hosts[0]
    assert host.kind is HostKind.SSH
    assert (host.cwd, host.python) == ("/srv/proj", "")
    assert host.ssh is not None
    assert host.ssh.target == "node-b"


def test_tunnel_is_planned_told_to_the_daemon_and_shown() -> None:
    worker = REMOTE.model_copy(update={"tunnel": True})
    spec = plan(cluster(worker, model.WorkerSpec(host="node-c")), request())
    through, direct = spec.hosts
    assert (through.tunnel, direct.tunnel) == (True, False)
    assert [bootstrap_for(spec, host, "", ()).tunnelled for host in spec.hosts] == [True, False]
    assert through.ssh is not None
    assert direct.ssh is not None
    assert (through.ssh.patience_s, through.ssh.reopens) == (30.0, True)
    assert (direct.ssh.patience_s, direct.ssh.reopens) == (0.0, False)
    assert "host        node-b (ssh, tunnel), devices: cpu cpu" in describe(spec, "/runs/x")


def test_session_of_a_tunnel_bears_silence_as_long_as_its_host_may_be_silent() -> None:
    worker = REMOTE.model_copy(update={"tunnel": True, "ssh": model.SshSpec(user="u")})
    spec = cluster(worker).model_copy(update={"liveness": model.LivenessSpec(dead_s=77.0)})
    (host,) = plan(spec, request()).hosts
    assert host.ssh is not None
    assert (host.ssh.user, host.ssh.patience_s) == ("u", 77.0)


def test_tunnel_to_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker localhost is this machine: there is no ssh session for its `tunnel`"):
        plan(cluster(model.WorkerSpec(host="localhost", tunnel=True)), request())


def test_launch_below_the_project_runs_below_it_everywhere() -> None:
    spec = plan(cluster(REMOTE, path="/home/me/proj"), request(cwd="/home/me/proj/sub"))
    assert spec.cwd == "/home/me/proj/sub"
    assert spec.hosts[0].cwd == "/srv/proj/sub"


@pytest.mark.parametrize("file", ["/home/me/proj/fdl.cluster.yml", "../fdl.cluster.yml"])
def test_launch_below_the_cluster_file_has_its_folder_as_the_project(file: str) -> None:
    found = cluster(REMOTE, model.WorkerSpec(host="node-c")).with_source(model.Source(file))
    spec = plan(found, request(cwd="/home/me/proj/sub"))
    assert (spec.project, spec.cwd) == ("/home/me/proj", "/home/me/proj/sub")
    assert [(host.project, host.cwd) for host in spec.hosts] == [
        ("/srv/proj", "/srv/proj/sub"),
        ("/home/me/proj", "/home/me/proj/sub"),
    ]


def test_cluster_file_named_through_a_link_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "proj" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "proj")
    file = tmp_path / "link" / "fdl.cluster.yml"
    file.write_text("cluster:\n  controller: {host: 127.0.0.1}\n  workers: [{host: node-a}]\n")
    spec = plan(load_cluster(file), request(cwd=str(tmp_path / "proj" / "sub")))
    assert (spec.project, spec.cwd) == (str(tmp_path / "proj"), str(tmp_path / "proj" / "sub"))


@pytest.mark.parametrize(
    "file",
    [
        "",
        "/home/me/proj/lab.yml",
        "/home/me/proj/sub/fdl.cluster.yml",
        "/opt/fdl.cluster.yml",
        "/home/me/fdl.cluster.yml",
    ],
)
def test_no_other_cluster_file_says_which_folder_the_project_is(file: str) -> None:
    named = cluster(REMOTE).with_source(model.Source(file))
    spec = plan(named, replace(request(cwd="/home/me/proj/sub"), home="/home/me"))
    assert (spec.project, spec.cwd, spec.hosts[0].cwd) == ("/home/me/proj/sub", "/home/me/proj/sub", "/srv/proj")


def test_path_of_the_cluster_file_wins_over_where_it_lies() -> None:
    found = cluster(REMOTE, path="/home/me").with_source(model.Source("/home/me/proj/fdl.cluster.yml"))
    assert plan(found, request(cwd="/home/me/proj/sub")).hosts[0].cwd == "/srv/proj/proj/sub"


def test_launch_outside_the_project_runs_in_the_project_folder() -> None:
    spec = plan(cluster(REMOTE, path="/home/me/proj"), request(cwd="/home/me/project2"))
    assert spec.cwd == "/home/me/proj"
    assert spec.hosts[0].cwd == "/srv/proj"


def test_absolute_script_inside_the_project_is_found_in_the_hosts_folder() -> None:
    spec = plan(cluster(REMOTE), request("/home/me/proj/sub/t.py", "/home/me/proj/data"))
    assert spec.script == ("/home/me/proj/sub/t.py", "/home/me/proj/data")
    assert spec.hosts[0].script == ("/srv/proj/sub/t.py", "/home/me/proj/data")


def test_absolute_script_elsewhere_stays_as_it_is() -> None:
    assert plan(cluster(REMOTE), request("/opt/t.py")).hosts[0].script == ("/opt/t.py",)


def test_home_relative_folder_is_left_to_the_other_side() -> None:
    worker = model.WorkerSpec(host="node-b", path="~/proj", python="~/venv/bin/python")
    spec = plan(cluster(worker), request("/home/me/proj/sub/t.py"))
    host = spec.hosts[0]
    assert (host.cwd, host.script) == ("~/proj", ("sub/t.py",))
    given = bootstrap_for(spec, host, "00", ("a:1",))
    assert (given.cwd, given.python) == (".", "")


@pytest.mark.parametrize(
    ("cwd", "script", "below", "named"),
    [
        ("/home/me/proj", "train.py", ".", "train.py"),
        ("/home/me/proj/sub", "train.py", "sub", "train.py"),
        ("/home/me/proj/sub", "/home/me/proj/sub/t.py", "sub", "t.py"),
        ("/home/me/proj/sub", "/home/me/proj/t.py", "sub", "../t.py"),
        ("/home/me/elsewhere", "/opt/t.py", ".", "/opt/t.py"),
        ("/home/me/proj", "-m", ".", "-m"),
    ],
)
def test_guest_finds_the_script_in_its_own_copy_of_the_project(cwd: str, script: str, below: str, named: str) -> None:
    spec = plan(cluster(REMOTE, path="/home/me/proj"), request(script, "pkg", cwd=cwd))
    given = guest_bootstrap(spec, "c")
    assert (spec.project, given.cwd, given.script) == ("/home/me/proj", below, (named, "pkg"))
    assert (given.secret, given.controllers, given.devices, given.python) == ("", (), (), "")


def test_guest_that_the_roster_knows_gets_its_environment() -> None:
    worker = model.WorkerSpec(host="node-b", env={"A": "host"}, path="/srv")
    spec = plan(cluster(worker).model_copy(update={"env": {"A": "cluster"}}), request())
    assert guest_bootstrap(spec, "node-b").env["A"] == "host"
    assert guest_bootstrap(spec, "node-c").env["A"] == "cluster"


MANAGED = model.WorkerSpec(host="10.0.0.1", daemon="managed", local_devices=(0, 1), path="~/p", python="~/py")


def managed(cwd: str = "/home/me/proj") -> RunSpec:
    spec = cluster(MANAGED, path="/home/me/proj")
    return plan(spec, replace(request("/home/me/proj/sub/t.py", cwd=cwd), join_token_file="/etc/join.token"))


def test_managed_host_is_started_by_nobody_even_on_this_machine() -> None:
    (host,) = managed().hosts
    assert (host.kind, host.ssh) == (HostKind.MANAGED, None)
    lines = describe(managed(), "/runs/x")
    assert "  daemon    dials in by itself" in lines
    assert "walk-ins    prove the join token in /etc/join.token" in lines
    assert not any("flodl_daemon" in line or "bootstrap" in line for line in lines)


@pytest.mark.parametrize(
    ("cwd", "below", "named"), [("/home/me/proj", ".", "sub/t.py"), ("/home/me/proj/sub", "sub", "t.py")]
)
def test_managed_host_is_told_what_the_cluster_file_says_of_it(cwd: str, below: str, named: str) -> None:
    given = walk_in_bootstrap(managed(cwd), "10.0.0.1")
    assert (given.project, given.cwd, given.script) == ("~/p", below, (named,))
    assert (given.devices, given.python, given.is_walk_in) == (("0", "1"), "~/py", True)
    assert (given.secret, given.controllers) == ("", ())


def test_walk_in_that_the_roster_does_not_know_has_its_own_word() -> None:
    given = walk_in_bootstrap(managed(), "node-x")
    assert given == replace(guest_bootstrap(managed(), "node-x"), is_walk_in=True)
    assert (given.project, given.devices, given.python) == ("", (), "")


def test_arguments_survive_unchanged_into_the_bootstrap() -> None:
    words = (
        "t.py",
        "a b",
        '--x="q"',
        "$HOME",
        "64(x2)",
        ";reboot",
        "`id`",
        "*",
        "-n",
        "",
        "new\nline",
        "é漢",
        "\udcff",
    )
    spec = plan(cluster(REMOTE), request(*words))
    assert spec.script == words
    assert bootstrap_for(spec, spec.hosts[0], "00", ()).script == words


def test_environment_of_host_wins_over_the_clusters() -> None:
    worker = model.WorkerSpec(
        host="node-b", env={"A": "host", "C": "1"}, nccl_socket_ifname="enp1s0", data_path="/data", path="/srv"
    )
    spec = cluster(worker).model_copy(update={"env": {"A": "cluster", "B": "2"}})
    run = plan(spec, request())
    env = bootstrap_for(run, run.hosts[0], "00", ()).env
    assert env == {
        "A": "host",
        "B": "2",
        "C": "1",
        "FDL_DATA_PATH": "/data",
        "FDL_RUN_ID": run.run_id,
        "GLOO_SOCKET_IFNAME": "enp1s0",
        "NCCL_SOCKET_IFNAME": "enp1s0",
    }


def test_run_is_named_after_script_or_module_unless_named() -> None:
    assert plan(local_cluster(1), request("sub/train_it.py")).name == "train_it"
    assert plan(local_cluster(1), request("-m", "pkg.mod", "-x")).name == "pkg.mod"
    assert plan(local_cluster(1), request(name="mine")).name == "mine"


@pytest.mark.parametrize("script", [(), ("-m",)])
def test_nothing_to_launch_is_refused(script: tuple[str, ...]) -> None:
    asked = LaunchRequest("id", 0.0, script, "/", "py", frozenset())
    with pytest.raises(ConfigError, match="no script"):
        plan(local_cluster(1), asked)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("ControlMaster=auto", "ControlMaster cannot be honoured"),
        ("Port=x", "whole number"),
        ("StrictHostKeyChecking=x", "one of"),
    ],
)
def test_ssh_option_that_cannot_be_honoured_is_refused_at_planning(option: str, words: str) -> None:
    worker = model.WorkerSpec(host="node-b", ssh=model.SshSpec(options=(option,)))
    with pytest.raises(ConfigError, match=words):
        plan(cluster(worker), request())


@pytest.mark.parametrize(("mode", "words"), [("auto", "not loopback"), ("on", "every address"), ("off", "off: ")])
def test_tls_is_planned_told_to_the_daemons_and_shown(mode: str, words: str) -> None:
    spec = plan(cluster(REMOTE).model_copy(update={"security": model.SecuritySpec(tls=mode)}), request())
    assert spec.tls is bootstrap_for(spec, spec.hosts[0], "", ()).tls is TlsMode(mode)
    assert any(line.startswith("tls ") and words in line for line in describe(spec, "/runs/x"))


def test_run_json_holds_everything_and_reads_back() -> None:
    worker = model.WorkerSpec(
        host="c", ssh=model.SshSpec(port=22, user="u", proxy_jump="j", options=("Port=1",)), ranks=(0,)
    )
    spec = plan(cluster(worker.model_copy(update={"local_devices": ("cpu",)})), request("t.py", "\udcff"))
    assert document.load(RunSpec, document.dump(spec)) == spec


@pytest.mark.parametrize(
    "change", [{"port": "1"}, {"port": True}, {"extra": 1}, {"hosts": {}}, {"liveness": {"dead_s": "x"}}]
)
def test_run_json_of_another_shape_is_refused(change: dict[str, object]) -> None:
    text = document.dump(plan(cluster(REMOTE), request()))
    with pytest.raises(document.DocumentFault):
        document.load(RunSpec, document.json.dumps({**document.json.loads(text), **change}))


def test_description_shows_commands_and_keys_but_no_values() -> None:
    worker = model.WorkerSpec(
        host="node-b",
        path="/srv",
        env={"SECRET": "hunter2"},
        ssh=model.SshSpec(port=2222, user="u", options=("Port=1",)),
    )
    spec = plan(cluster(worker, model.WorkerSpec(host="localhost", local_devices=("cpu",))), request("t.py", "a b"))
    text = "\n".join(describe(spec, "/runs/x"))
    assert "hunter2" not in text
    assert "SECRET" in text
    assert "ssh -p 2222 -l u -o Port=1 -- node-b" in text
    assert "/venv/bin/python -P -m flodl_daemon.warden -- " in text
    assert "t.py 'a b'" in text


def test_openssh_command_is_empty_for_this_machine() -> None:
    assert openssh_command(plan(local_cluster(1), request()).hosts[0]) == []


def test_remote_command_is_one_line_without_secrets_or_environment() -> None:
    host = plan(cluster(REMOTE.model_copy(update={"env": {"K": "v4lue"}})), request("t.py", "arg")).hosts[0]
    command = remote_command(host)
    assert "\n" not in command
    assert "v4lue" not in command
    assert "arg" not in command
