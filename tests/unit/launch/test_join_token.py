"""Which file holds the join token of a run."""

from pathlib import Path

import pytest

from flodl.config import model
from flodl.errors import ConfigError
from flodl.launch import join_token, preflight, rundir
from flodl.launch.plan import LaunchRequest, RunSpec, plan

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


def test_token_that_cannot_be_read_is_found_before_anything_starts(tmp_path: Path) -> None:
    preflight.check_join_token(spec())
    with pytest.raises(ConfigError, match="the token cannot be read"):
        preflight.check_join_token(spec(str(tmp_path / "gone")))


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
