"""What a walk-in is given: made once, kept, made anew, and never over what is somebody else's."""

import os
import stat
from pathlib import Path

import asyncssh
import pytest

from flodl.config.address import split_address
from flodl.errors import ConfigError, PreflightError
from flodl.launch import kit, kit_files, units
from flodl.launch.kit import KitRequest
from flodl.launch.rundir import read_token_file
from flodl.wire.handshake import derive_join_secret

REQUEST = KitRequest("box", "boss.lab:1337", "10.0.0.1:1337", "me@boss.lab")
KEY = "ssh-ed25519 AAAA"
ALL = {"daemon.token", "id_ed25519", *kit.texts(REQUEST, KEY)}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def make(state: Path, request: KitRequest = REQUEST, regenerate: bool = False, dry_run: bool = False) -> dict[str, str]:
    """What has become of each file, by its name."""
    report = kit_files.make(request, state / "join.token", regenerate=regenerate, dry_run=dry_run)
    return {path.name: what for what, path in report.done}


def contents(state: Path) -> dict[str, bytes]:
    return {str(path.relative_to(state)): path.read_bytes() for path in sorted(state.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------------------------------------------------------- words
def test_guarded_key_may_do_nothing_but_reach_the_controller() -> None:
    assert kit.authorized_line(REQUEST, KEY) == (
        'restrict,port-forwarding,permitopen="10.0.0.1:1337",permitlisten="localhost:1",command="exit 1" '
        "ssh-ed25519 AAAA fdl walk-in box"
    )


def test_what_goes_where_is_said_with_this_hosts_words() -> None:
    said = "\n".join(kit.instructions(REQUEST, "/kits/box", KEY))
    for words in (
        "copy from /kits/box",
        "fdl join boss.lab:1337 --persist --token-file daemon.token --host box",
        "fdl join 10.0.0.1:1337 --persist --ssh me@boss.lab -i id_ed25519 --token-file daemon.token --host box",
        kit.authorized_line(REQUEST, KEY),
        "- {host: box, daemon: managed}",
    ):
        assert words in said


def test_controller_on_loopback_is_reached_through_ssh_only() -> None:
    said = "\n".join(kit.instructions(KitRequest("box", "127.0.0.1:1337", "127.0.0.1:1337", "me@b"), "/k", KEY))
    assert "Directly: not from another machine" in said
    assert "fdl daemon install" not in said
    assert "--ssh me@b" in said


def test_settings_name_the_controller_and_the_host() -> None:
    settings = kit.texts(REQUEST, KEY)[units.CONFIG_NAME].splitlines()
    assert "FDL_CONTROLLER=boss.lab:1337" in settings
    assert "FDL_HOST=box" in settings
    assert split_address("boss.lab:1337", 0) == ("boss.lab", 1337)


# ------------------------------------------------------------------------------------------------------------- the disk
def test_kit_is_made_once_and_kept(state: Path) -> None:
    assert make(state) == {"join.token": "made", **dict.fromkeys(ALL, "made")}
    before = contents(state)
    assert make(state) == {"join.token": "kept", **dict.fromkeys(ALL, "kept")}
    assert contents(state) == before


def test_token_is_the_hosts_own_and_the_key_pair_fits(state: Path) -> None:
    make(state)
    folder = kit_files.folder_of("box")
    join_token = read_token_file(state / "join.token")
    assert read_token_file(folder / "daemon.token") == derive_join_secret(join_token, "box")
    public = asyncssh.read_private_key(folder / "id_ed25519").export_public_key().decode().split()[:2]
    assert (folder / "id_ed25519.pub").read_text().split()[:2] == public
    assert " ".join(public) in (folder / "authorized_keys.line").read_text()


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_secrets_are_private_whatever_the_umask(state: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make(state)
    finally:
        os.umask(before)
    folder = kit_files.folder_of("box")
    secret = [state / "join.token", folder / "daemon.token", folder / "id_ed25519"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in secret] == [0o600] * 3
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_dry_run_writes_nothing_and_says_the_same(state: Path) -> None:
    planned = make(state, dry_run=True)
    assert not state.exists()
    assert planned == make(state)
    before = contents(state)
    assert set(make(state, regenerate=True, dry_run=True).values()) == {"made anew", "kept"}
    assert contents(state) == before


def test_regenerating_changes_every_secret_and_the_other_hosts_tokens(state: Path) -> None:
    make(state)
    make(state, KitRequest("other", "b:1", "b:1", "me@b"))
    before = contents(state)

    report = kit_files.make(REQUEST, state / "join.token", regenerate=True, dry_run=False)

    after = contents(state)
    changed = {name for name in after if after[name] != before[name]}
    own = {"daemon.token", "id_ed25519", "id_ed25519.pub", "authorized_keys.line"}
    assert changed == {"join.token", "walk-ins/other/daemon.token", *(f"walk-ins/box/{name}" for name in own)}
    assert report.stale == ["other"]
    token = read_token_file(state / "join.token")
    assert read_token_file(kit_files.folder_of("other") / "daemon.token") == derive_join_secret(token, "other")


def test_token_of_an_earlier_join_token_is_made_anew(state: Path) -> None:
    make(state)
    (state / "join.token").unlink()
    assert {name for name, what in make(state).items() if what != "kept"} == {"join.token", "daemon.token"}


def test_other_address_is_refused_until_it_is_asked_for(state: Path) -> None:
    make(state)
    moved = KitRequest("box", "elsewhere:1", "10.0.0.1:1337", "me@boss.lab")
    with pytest.raises(ConfigError, match=r"daemon\.env: holds something else.*--regen"):
        make(state, moved)
    assert make(state, moved, regenerate=True)["daemon.env"] == "made anew"


@pytest.mark.parametrize("name", ["join.token", "walk-ins/box/daemon.token", "walk-ins/box/id_ed25519"])
@pytest.mark.parametrize("regenerate", [False, True])
@pytest.mark.parametrize("content", [b"my own notes", b""])
def test_foreign_file_in_a_secrets_place_is_left_alone(
    state: Path, name: str, regenerate: bool, content: bytes
) -> None:
    path = state / name
    path.parent.mkdir(parents=True)
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=path.name):
        make(state, regenerate=regenerate)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["join.token", "walk-ins/box/daemon.token", "walk-ins/box/daemon.env", "walk-ins/box"])
@pytest.mark.parametrize("regenerate", [False, True])
def test_link_is_not_followed(state: Path, tmp_path: Path, name: str, regenerate: bool) -> None:
    target = tmp_path / "target"
    (state / name).parent.mkdir(parents=True)
    (state / name).symlink_to(target)
    with pytest.raises(ConfigError, match="move it away"):
        make(state, regenerate=regenerate)
    assert not target.exists()


def test_key_that_others_may_read_is_refused(state: Path) -> None:
    make(state)
    (kit_files.folder_of("box") / "id_ed25519").chmod(0o644)
    with pytest.raises(ConfigError, match="id_ed25519: readable by others"):
        make(state)


def test_folder_that_cannot_be_made_is_told(state: Path) -> None:
    state.write_text("a file")
    with pytest.raises(PreflightError, match="state"):
        make(state)
