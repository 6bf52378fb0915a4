"""Which file holds the join token of a run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flodl.config import model
from flodl.config.builder import ClusterBuilder, local_cluster
from flodl.errors import ConfigError
from flodl.launch import join_token, preflight, rundir
from flodl.launch.launcher import LaunchOptions, launch
from flodl.launch.plan import LaunchRequest, RunSpec, plan
from flodl.launch.promote import promote

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path))
    return tmp_path


def spec(configured: str | None = None, named: str = "", own: str = "", daemon: str = "launched") -> RunSpec:
    cluster = model.ClusterSpec(
        controller=model.ControllerSpec(host="10.0.0.1", join=model.JoinSpec(token_file=configured)),
        workers=(model.WorkerSpec(host="node-c", daemon=daemon),),  # type: ignore[arg-type]
    )
    request = LaunchRequest(
        "run-1", 0.0, ("t.py",), "/p", "python", frozenset(), join_token_file=named, own_join_token_file=own
    )
    return plan(cluster, request)


@pytest.mark.parametrize(
    ("configured", "named", "own", "used"),
    [
        ("/c", "/n", "/o", "/n"),
        ("/c", "", "/o", "/c"),
        (None, "", "/o", "/o"),
        (None, "", "", ""),
    ],
)
def test_environment_wins_over_the_cluster_file_and_that_over_the_users_own(
    configured: str | None, named: str, own: str, used: str
) -> None:
    assert spec(configured, named, own).join.token_file == used


def test_home_relative_file_is_found_in_this_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert spec("~/t").join.token_file == "/home/me/t"
    assert join_token.named({"FDL_JOIN_TOKEN_FILE": "~/t"}) == "/home/me/t"
    assert join_token.named({}) == ""


def test_users_own_file_counts_once_it_is_there(state_home: Path) -> None:
    assert join_token.own_if_there() == ""
    rundir.write_token_file(join_token.own_path(), SECRET)
    assert join_token.own_if_there() == str(state_home / "join.token")
    assert rundir.read_token_file(join_token.own_path()) == SECRET


def test_managed_worker_without_a_join_token_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"worker node-c has a managed daemon.*\n.*fdl join-config node-c"):
        spec(daemon="managed")


def damaged_request(state_home: Path) -> LaunchRequest:
    own = state_home / "join.token"
    own.touch(0o600)
    fault = join_token.own_fault()
    assert fault.startswith(f"{own}: not a token")
    return LaunchRequest(
        "r", 0.0, ("t.py",), "/p", "python", frozenset(), own_join_token_file=str(own), own_join_token_fault=fault
    )


def cluster(token_file: str | None = None, daemon: str = "launched") -> model.ClusterSpec:
    worker = model.WorkerSpec(host="node-c", daemon=daemon)  # type: ignore[arg-type]
    controller = model.ControllerSpec(host="10.0.0.1", join=model.JoinSpec(token_file=token_file))
    return model.ClusterSpec(controller=controller, workers=(worker,))


def test_damaged_own_file_stops_no_run_that_does_not_need_it(state_home: Path) -> None:
    request = damaged_request(state_home)
    assert plan(cluster(), request).join.token_file == ""
    assert plan(cluster("/named"), request).join.token_file == "/named"


def test_managed_worker_with_a_damaged_join_token_is_refused_with_the_remedy(state_home: Path) -> None:
    with pytest.raises(ConfigError, match=r"join\.token: not a token.*\n.*fdl join-config NAME --regen"):
        plan(cluster(daemon="managed"), damaged_request(state_home))


def test_launch_says_that_a_damaged_join_token_takes_no_walk_ins(
    state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FDL_JOIN_TOKEN_FILE", raising=False)
    (state_home / "join.token").touch(0o600)
    state_home.chmod(0o777)
    assert launch(local_cluster(1), LaunchOptions(("train.py",), dry_run=True)) == 0
    said = capfd.readouterr().err
    assert f"this run takes no walk-ins: {state_home / 'join.token'}: not a token" in said
    assert "fdl join-config NAME --regen" in said
    assert f"chmod go-w {state_home}" in said


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    path.write_bytes(content)
    path.chmod(mode)


REGEN = "--regen makes a new join token"
AWAY = "move it away, then fdl join-config NAME makes a join token"


@pytest.mark.parametrize(
    ("place", "remedy", "never"),
    [
        (lambda path: write(path, b"zz"), AWAY, "--regen"),
        (lambda path: write(path, b"ab" * 33), AWAY, "--regen"),
        (os.mkfifo, AWAY, "--regen"),
        (os.mkdir, AWAY, "--regen"),
        (lambda path: path.symlink_to(path.with_name("elsewhere")), AWAY, "--regen"),
        (lambda path: write(path, b""), REGEN, "move it away"),
        (lambda path: write(path, b"abc"), REGEN, "move it away"),
        (lambda path: write(path, bytes(64)), REGEN, "move it away"),
        (lambda path: write(path, b"ab" * 32, 0o644), "run: chmod 600", "join-config"),
        (lambda path: None, "fdl join-config NAME makes one", "--regen"),
    ],
)
def test_remedy_for_a_join_token_is_one_that_helps(
    tmp_path: Path, place: Callable[[Path], None], remedy: str, never: str
) -> None:
    path = tmp_path / "t"
    place(path)
    with pytest.raises(ConfigError) as caught:
        join_token.read(path)
    assert remedy in str(caught.value)
    assert never not in str(caught.value)


def test_own_file_that_is_whole_has_no_fault() -> None:
    assert join_token.own_fault() == ""
    rundir.write_token_file(join_token.own_path(), SECRET)
    assert join_token.own_fault() == ""


def test_token_that_cannot_be_read_is_found_before_anything_starts(tmp_path: Path) -> None:
    preflight.check_join_token(spec())
    with pytest.raises(ConfigError, match="the token cannot be read"):
        preflight.check_join_token(spec(str(tmp_path / "gone")))


def test_token_of_a_script_that_becomes_a_head_is_found_damaged_before_anything_starts(
    state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDL_JOIN_TOKEN_FILE", str(state_home / "gone"))
    with pytest.raises(ConfigError, match="the token cannot be read"):
        promote(ClusterBuilder().controller("127.0.0.1").done().host("localhost").devices(["cpu"]).done())
    assert rundir.all_runs() == []


def test_token_file_is_private_from_its_first_moment_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t"
    rundir.write_token_file(path, SECRET)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        rundir.write_token_file(path, SECRET)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        rundir.write_token_file(tmp_path / "link", SECRET)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("mode", "is_credential", "is_read"), [
    (0o400, True, True), (0o440, True, True), (0o440, False, False), (0o460, True, False), (0o444, True, False),
])  # fmt: skip
def test_systemd_may_show_the_services_user_as_a_group(
    tmp_path: Path, mode: int, is_credential: bool, is_read: bool
) -> None:
    path = tmp_path / "t"
    rundir.write_token_file(path, SECRET)
    path.chmod(mode)
    if is_read:
        assert rundir.read_token_file(path, is_credential=is_credential) == SECRET
    else:
        with pytest.raises(ConfigError, match=rf"readable by others \(mode {mode:o}\); run: chmod 600 {path}$"):
            rundir.read_token_file(path, is_credential=is_credential)
