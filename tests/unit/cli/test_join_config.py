"""``fdl join-config``: which addresses it takes, what it says, and that no secret is among it."""

import getpass
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from flodl_cli.main import cli


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("FDL_CLUSTER", raising=False)
    monkeypatch.delenv("FDL_JOIN_TOKEN_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state"


def said(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["join-config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def write_cluster(controller: str, folder: Path) -> None:
    text = f"cluster:\n  controller: {{{controller}}}\n  workers: [{{host: a}}]\n"
    (folder / "fdl.cluster.yml").write_text(text)


@pytest.mark.parametrize(
    ("controller", "direct", "gate"),
    [
        ("host: 10.0.0.1, port: 4711", "10.0.0.1:4711", "10.0.0.1:4711"),
        ("host: 10.0.0.1, advertise: boss.lab", "boss.lab:1337", "10.0.0.1:1337"),
        ('host: "0.0.0.0", advertise: boss.lab', "boss.lab:1337", "127.0.0.1:1337"),
        ('host: "::1"', "", "[::1]:1337"),
    ],
)
def test_cluster_file_says_where_the_controller_is(
    state: Path, tmp_path: Path, controller: str, direct: str, gate: str
) -> None:
    write_cluster(controller, tmp_path)
    text = said("box")
    assert f'permitopen="{gate}"' in text
    assert f"fdl join {gate} --persist --ssh {getpass.getuser()}@{socket.gethostname()} " in text
    assert (f"fdl join {direct} --persist --token-file" in text) is bool(direct)


def test_words_of_the_command_line_win(state: Path, tmp_path: Path) -> None:
    write_cluster("host: 10.0.0.1", tmp_path)
    text = said("box", "--address", "nat.example:99", "--login", "u@gate.example")
    assert "fdl join nat.example:99 --persist --token-file" in text
    assert "--ssh u@gate.example " in text


def test_without_a_cluster_file_ssh_is_the_way(state: Path) -> None:
    assert 'permitopen="127.0.0.1:1337"' in said("box")


def test_token_that_the_cluster_file_names_is_made_there(state: Path, tmp_path: Path) -> None:
    write_cluster(f"host: 10.0.0.1, join: {{token_file: {tmp_path / 'lab.token'}}}", tmp_path)
    assert f"made: {tmp_path / 'lab.token'}" in said("box")
    assert f"kept: {tmp_path / 'lab.token'}" in said("box")


def test_no_secret_is_shown(state: Path) -> None:
    text = said("box") + said("box", "--regen")
    folder = state / "walk-ins" / "box"
    for path in (state / "join.token", folder / "daemon.token"):
        assert path.read_text() not in text
    assert "PRIVATE" not in text
    assert not any(line in text for line in (folder / "id_ed25519").read_text().splitlines())


def test_regenerating_says_whose_token_stops_working(state: Path) -> None:
    said("box")
    said("other")
    text = said("box", "--regen")
    assert "the old token of box\n  the old token of other" in text
    assert "the old key of box" in text


def test_dry_run_says_would_and_writes_nothing(state: Path) -> None:
    text = said("box", "--dry-run")
    assert f"would be made: {state / 'walk-ins' / 'box' / 'daemon.token'}" in text
    assert "<public key>" in text
    assert not state.exists()


def test_changed_address_says_what_has_to_be_put_in_place_anew(state: Path, tmp_path: Path) -> None:
    said("box", "--login", "u@gate")
    write_cluster("host: 10.0.0.1", tmp_path)
    text = said("box", "--login", "u@gate")
    assert f"kept: {state / 'join.token'}" in text
    assert (
        "  the line in ~/.ssh/authorized_keys here: made for 127.0.0.1:1337, the controller is now 10.0.0.1:1337\n"
        "  daemon.env there: made for 127.0.0.1:1337 through u@gate, the controller is now 10.0.0.1:1337\n"
    ) in text
