"""What a launch says of the project before it copies it, what it refuses to copy, and hosts that cannot be reached."""

import io
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flodl.config import model
from flodl.errors import ConfigError, HostUnreachable
from flodl.launch import document, rundir
from flodl.launch.plan import LaunchRequest, RunSpec, describe, plan
from flodl.launch.sync.project import Project, project_of
from flodl.launch.sync.step import bring_to_all, take_stock
from flodl.launch.terminal import Terminal
from flodl.launch.tree import Tree


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text("x = 1\n")
    monkeypatch.setenv("FDL_STATE_HOME", str(made / "state"))
    return made


def spec(
    folder: Path, mode: str = "sftp", quorum: int | None = None, ports: tuple[int, ...] = (1,), **sync: object
) -> RunSpec:
    workers = [
        model.WorkerSpec(host=f"node-{port}", ssh=model.SshSpec(target="127.0.0.1", port=port)) for port in ports
    ]
    join = model.JoinSpec(min_rank_start=quorum)
    cluster = model.ClusterSpec(
        controller=model.ControllerSpec(host="127.0.0.1", join=join),
        workers=(model.WorkerSpec(host="localhost"), *workers),
        sync=model.SyncSpec(mode=mode, **sync),  # type: ignore[arg-type]
    )
    request = LaunchRequest("20261129-213045-ab12", 1.5, ("train.py",), str(folder), "/py", frozenset({"localhost"}))
    return plan(cluster, request)


def stock(given: RunSpec) -> tuple[Project | None, str]:
    said = io.StringIO()
    project = take_stock(given, Terminal(io.StringIO(), said))
    return project, said.getvalue()


def closed_ports(count: int) -> tuple[int, ...]:
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    ports = tuple(sock.getsockname()[1] for sock in socks)
    for sock in socks:
        sock.close()
    return ports


def test_files_and_bytes_are_said_and_runs_and_their_tokens_left_out(folder: Path) -> None:
    run = rundir.create("20261129-213045-ab12")
    os.mkfifo(folder / "pipe")
    project, said = stock(spec(folder))
    assert project is not None
    assert [entry.path for entry in project.tree.entries] == ["train.py"]
    assert said == (
        f"fdl: sync: {folder}: 1 file, 6 bytes, tree {project.tree.hash[:12]}\n"
        "fdl: sync: left out, for they are neither files nor links: pipe\n"
    )
    run.write("tree.json", document.dump(project.tree))
    assert project_of(run, spec(folder)) == project


def test_nothing_is_read_where_nothing_is_copied(folder: Path) -> None:
    (folder / "out").symlink_to("/")
    assert stock(spec(folder, "off")) == (None, "")
    assert stock(spec(folder, ports=())) == (None, "")


def test_project_that_is_too_large_is_refused_before_it_is_read(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data/huge").touch()
    os.truncate(folder / "data/huge", 3 * 10**12)
    with pytest.raises(ConfigError) as caught:
        stock(spec(folder))
    assert f"{folder} is not copied, it holds 2 files, 3000.0 GB, more than the 1 GB or 20,000 files" in str(
        caught.value
    )
    assert "most is in data (1 file, 3000.0 GB); the project's own folder (1 file, 6 bytes)" in str(caught.value)
    assert "in .fdlignore or sync.exclude, such as /data/, or raise sync.limit_gb" in str(caught.value)
    project, _ = stock(spec(folder, exclude=("/data/",)))
    assert project is not None


def test_limit_is_the_cluster_files(folder: Path) -> None:
    with pytest.raises(ConfigError, match="more than the 1e-09 GB"):
        stock(spec(folder, limit_gb=1e-9))


def test_links_that_lead_out_are_refused_by_name(folder: Path) -> None:
    (folder / "out").symlink_to("/etc")
    with pytest.raises(ConfigError, match=r"lead out of it: out -> /etc; hosts would not have"):
        stock(spec(folder))


@pytest.mark.parametrize("name", [".gitignore", ".fdlignore"])
def test_script_that_would_stay_behind_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("*.py\n")
    if name == ".gitignore":
        (folder / ".git").mkdir()
    with pytest.raises(ConfigError, match=r"script train\.py stays behind"):
        stock(spec(folder))
    (folder / ".fdlignore").write_text("*.py\n!/train.py\n")
    project, _ = stock(spec(folder))
    assert project is not None
    assert "train.py" in [entry.path for entry in project.tree.entries]


def test_script_behind_a_link_within_the_project_travels(folder: Path) -> None:
    (folder / "lib").mkdir()
    (folder / "train.py").rename(folder / "lib" / "train.py")
    (folder / "src").symlink_to("lib")
    project, _ = stock(replace(spec(folder), script=("src/train.py",)))
    assert project is not None


def test_no_secret_travels_however_project_and_state_folder_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, token = folder.parent / "link", folder / "kept" / "join.token"
    link.symlink_to(folder)
    token.parent.mkdir()
    for each in (token, folder / "id_ed25519"):
        each.write_text("secret")
    for here, state in ((folder, link / "state"), (link, folder / "state"), (folder, folder), (link, folder)):
        monkeypatch.setenv("FDL_STATE_HOME", str(state))
        run = rundir.create(rundir.new_run_id())
        given = spec(here)
        assert given.hosts[1].ssh is not None
        ssh = replace(given.hosts[1].ssh, identity_file=str(folder / "id_ed25519"))
        hosts = (given.hosts[0], replace(given.hosts[1], ssh=ssh))
        project, _ = stock(replace(given, hosts=hosts, join=replace(given.join, token_file=str(token))))
        assert project is not None
        assert run.token_path.exists()
        assert [entry.path for entry in project.tree.entries] == ["train.py"], state


def test_state_folder_of_other_days_stays_at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir.create(rundir.new_run_id())
    monkeypatch.setenv("FDL_STATE_HOME", str(folder.parent / "elsewhere"))
    project, _ = stock(spec(folder))
    assert project is not None
    assert [entry.path for entry in project.tree.entries] == ["train.py"]


def test_hosts_that_cannot_be_reached_end_the_launch_and_all_are_named(folder: Path) -> None:
    given = spec(folder, ports=closed_ports(2))
    said = io.StringIO()
    with pytest.raises(HostUnreachable) as caught:
        bring_to_all(given, Project(str(folder), Tree(()), given.sync.mode), Terminal(io.StringIO(), said))
    assert all(f"host {host.name}: connect: " in str(caught.value) for host in given.hosts[1:])


def test_hosts_that_the_run_can_start_without_are_only_warned_about(folder: Path) -> None:
    given = spec(folder, quorum=1, ports=closed_ports(1))
    said = io.StringIO()
    bring_to_all(given, Project(str(folder), Tree(()), given.sync.mode), Terminal(io.StringIO(), said))
    assert said.getvalue().startswith(f"fdl: warning: host {given.hosts[1].name}: connect: ")


def test_dry_run_shows_where_the_project_is_copied_to(folder: Path) -> None:
    lines = describe(spec(folder, "rsync"), "/runs/x")
    assert lines.count(f"  copied    by rsync to {folder}") == 1
    assert not any("copied" in line for line in describe(spec(folder, "off"), "/runs/x"))


def test_run_whose_tree_is_not_there_any_more_is_told(folder: Path) -> None:
    run = rundir.create("20261129-213045-ab12")
    with pytest.raises(ConfigError, match=r"tree\.json: .*launch again"):
        project_of(run, spec(folder))
    run.write("tree.json", "{}")
    with pytest.raises(ConfigError, match=r"tree\.json: Tree\.entries: expected to be present"):
        project_of(run, spec(folder))


def test_what_the_launch_prints_into_the_project_is_not_copied(folder: Path) -> None:
    program = (
        "import sys; from flodl.launch.sync.step import _own_output; from flodl.launch.tree_scan import scan; "
        "found = scan(sys.argv[1], private=_own_output()).tree.entries; "
        "print([entry.path for entry in found], file=open(sys.argv[2], 'w'))"
    )
    told = folder.parent / "told"
    with (folder / "out.log").open("w") as out, (folder / "err.log").open("w") as err:
        subprocess.run([sys.executable, "-c", program, folder, told], stdout=out, stderr=err, check=True, timeout=30)
    assert told.read_text() == "['train.py']\n"
