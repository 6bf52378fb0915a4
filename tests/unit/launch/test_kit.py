"""What a walk-in is given: made once, kept, made anew, and never over what is somebody else's."""

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from flodl.config.address import split_address
from flodl.errors import ConfigError, PreflightError
from flodl.launch import kit, kit_files, private_files, units
from flodl.launch.kit import KitRequest
from flodl.launch.rundir import read_token_file
from flodl.wire.handshake import derive_join_secret

REQUEST = KitRequest("box", "boss.lab:1337", "10.0.0.1:1337", "me@boss.lab")
ONLY_SSH = KitRequest("box", "127.0.0.1:1337", "127.0.0.1:1337", "me@b")
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
        "fdl join boss.lab:1337 --persist --token-file daemon.token --host box --path PROJECT\n",
        "--ssh me@boss.lab -i id_ed25519 --token-file daemon.token --host box --path PROJECT\n",
        "  FDL_CONTROLLER=10.0.0.1:1337\n  FDL_SSH=me@boss.lab\n",
        kit.authorized_line(REQUEST, KEY),
        "- {host: box, daemon: managed}",
    ):
        assert words in said


def test_controller_on_loopback_is_reached_through_ssh_only() -> None:
    said = "\n".join(kit.instructions(ONLY_SSH, "/k", KEY))
    assert "Directly: not from another machine" in said
    assert said.index("Through ssh") < said.index("fdl daemon install")
    assert "daemon.token daemon.env id_ed25519  → /etc/fdl/" in said
    assert "--ssh me@b" in said


def test_settings_for_a_controller_on_loopback_lead_through_ssh() -> None:
    settings = kit.texts(ONLY_SSH, KEY)[units.CONFIG_NAME].splitlines()
    assert "FDL_CONTROLLER=127.0.0.1:1337" in settings
    assert "FDL_SSH=me@b" in settings
    assert not any(line.startswith("FDL_SSH=") for line in kit.texts(REQUEST, KEY)[units.CONFIG_NAME].splitlines())


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


@pytest.mark.parametrize(("before", "after"), [(REQUEST, ONLY_SSH), (ONLY_SSH, REQUEST)])
def test_what_names_another_address_is_made_anew_and_told(state: Path, before: KitRequest, after: KitRequest) -> None:
    make(state, before)
    report = kit_files.make(after, state / "join.token", regenerate=False, dry_run=False)
    anew = {path.name for what, path in report.done if what != "kept"}
    assert anew == {"authorized_keys.line", "daemon.env"}
    words = {REQUEST: ("10.0.0.1:1337", "boss.lab:1337"), ONLY_SSH: ("127.0.0.1:1337", "127.0.0.1:1337 through me@b")}
    names = ("authorized_keys.line", "daemon.env")
    assert report.moved == list(zip(names, words[before], words[after], strict=True))
    assert set(make(state, after).values()) == {"kept"}


def test_other_login_is_made_anew(state: Path) -> None:
    make(state, ONLY_SSH)
    moved = make(state, KitRequest("box", "127.0.0.1:1337", "127.0.0.1:1337", "me@other"))
    assert {name for name, what in moved.items() if what != "kept"} == {"daemon.env"}


def test_what_a_person_has_edited_is_refused_in_one_message_until_it_is_asked_for(state: Path) -> None:
    make(state)
    for name in ("daemon.env", "worker.yml"):
        with (kit_files.folder_of("box") / name).open("a") as file:
            file.write("FDL_PATH=/srv/mine\n")
    before = contents(state)
    with pytest.raises(ConfigError, match=r"worker\.yml: holds something else(.|\n)*daemon\.env: holds .*--regen"):
        make(state, ONLY_SSH)
    assert contents(state) == before
    assert make(state, ONLY_SSH, regenerate=True)["daemon.env"] == "made anew"


@pytest.mark.parametrize("name", ["join.token", "walk-ins/box/daemon.token", "walk-ins/box/id_ed25519"])
@pytest.mark.parametrize("regenerate", [False, True])
def test_foreign_file_in_a_secrets_place_is_left_alone(state: Path, name: str, regenerate: bool) -> None:
    path = state / name
    path.parent.mkdir(parents=True)
    path.touch(0o600)
    path.write_bytes(b"my own notes")
    with pytest.raises(ConfigError, match=path.name):
        make(state, regenerate=regenerate)
    assert path.read_bytes() == b"my own notes"


def damage(path: Path, kept_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:kept_bytes])


@pytest.mark.parametrize("kept_bytes", [0, 20])
@pytest.mark.parametrize("name", ["join.token", "walk-ins/box/id_ed25519"])
def test_damaged_secret_is_named_with_the_remedy_and_regenerated(state: Path, name: str, kept_bytes: int) -> None:
    make(state)
    damage(state / name, kept_bytes)
    with pytest.raises(ConfigError, match=rf"{name}: not a (.|\n)*--regen makes a new"):
        make(state)
    assert make(state, regenerate=True)[Path(name).name] == "made anew"
    assert set(make(state).values()) == {"kept"}


@pytest.mark.parametrize("content", [b"", b"12ab", b"\0" * 64])
def test_damaged_token_of_the_host_is_made_anew(state: Path, content: bytes) -> None:
    make(state)
    (kit_files.folder_of("box") / "daemon.token").write_bytes(content)
    assert {name for name, what in make(state).items() if what != "kept"} == {"daemon.token"}
    secret = derive_join_secret(read_token_file(state / "join.token"), "box")
    assert read_token_file(kit_files.folder_of("box") / "daemon.token") == secret


@pytest.mark.parametrize(
    "obstacle", ["walk-ins/box/worker.yml", "walk-ins/box/id_ed25519.pub", "walk-ins/box/daemon.token"]
)
def test_regenerating_looks_at_everything_before_it_changes_anything(state: Path, obstacle: str) -> None:
    make(state)
    make(state, KitRequest("other", "b:1", "b:1", "me@b"))
    (state / obstacle).unlink()
    (state / obstacle).mkdir()
    before = contents(state)
    with pytest.raises(ConfigError, match=rf"{obstacle}: no regular file; move it away"):
        make(state, regenerate=True)
    assert contents(state) == before


@pytest.mark.parametrize(("content", "mode"), [(b"", 0o600), (b"12ab", 0o600), (b"ab" * 32, 0o644)])
def test_other_hosts_damaged_token_is_made_anew_and_named(state: Path, content: bytes, mode: int) -> None:
    make(state)
    make(state, KitRequest("other", "b:1", "b:1", "me@b"))
    token = kit_files.folder_of("other") / "daemon.token"
    token.write_bytes(content)
    token.chmod(mode)
    report = kit_files.make(REQUEST, state / "join.token", regenerate=True, dry_run=False)
    assert (report.stale, report.left) == (["other"], [])
    assert read_token_file(token) == derive_join_secret(read_token_file(state / "join.token"), "other")


def test_what_lies_in_place_of_another_hosts_token_is_named_and_stops_nothing(state: Path) -> None:
    make(state)
    token = kit_files.folder_of("other") / "daemon.token"
    token.mkdir(parents=True)
    report = kit_files.make(REQUEST, state / "join.token", regenerate=True, dry_run=False)
    assert report.left == [f"other: {token}: no regular file; move it away"]
    assert token.is_dir()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many more files the disk can take; the next one is cut short."""
    left, fsync = [0], os.fsync

    def sync(descriptor: int) -> None:
        if left[0] == 0:
            os.ftruncate(descriptor, 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return left


@pytest.mark.parametrize("room", range(8))
def test_full_disk_leaves_whole_files_only_and_says_what_is_done(state: Path, full_disk: list[int], room: int) -> None:
    full_disk[0] = room
    with pytest.raises(PreflightError, match="No space left on device") as caught:
        make(state)
    assert len(contents(state)) == room
    assert str(caught.value).count("\n  made: ") == room
    full_disk[0] = -1
    assert list(make(state).values()).count("kept") == room


@pytest.mark.parametrize("room", range(5))
def test_regenerating_on_a_full_disk_keeps_the_join_token(state: Path, full_disk: list[int], room: int) -> None:
    full_disk[0] = -1
    make(state)
    before = (state / "join.token").read_bytes()
    full_disk[0] = room
    with pytest.raises(PreflightError, match="No space left on device"):
        make(state, regenerate=True)
    assert (state / "join.token").read_bytes() == before
    hidden = [name for name in contents(state) if "/." in name or name.startswith(".")]
    assert hidden == ["walk-ins/.gitignore"]


def test_many_first_times_at_once_agree(state: Path) -> None:
    barrier = threading.Barrier(8)

    def first(_: int) -> str:
        barrier.wait(30)
        return kit_files.make(REQUEST, state / "join.token", regenerate=False, dry_run=False).public_key

    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(first, range(8)))
    assert len(keys) == 1
    assert set(make(state).values()) == {"kept"}


def test_new_join_tokens_at_once_leave_every_host_with_a_token_of_the_one_that_stays(state: Path) -> None:
    requests = [replace(REQUEST, host=f"box-{number}") for number in range(4)]
    for request in requests:
        kit_files.make(request, state / "join.token", regenerate=False, dry_run=False)
    barrier = threading.Barrier(4)

    def anew(request: KitRequest) -> None:
        barrier.wait(30)
        kit_files.make(request, state / "join.token", regenerate=True, dry_run=False)

    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(anew, requests))
        join_token = read_token_file(state / "join.token")
        for request in requests:
            token = read_token_file(kit_files.folder_of(request.host) / "daemon.token")
            assert token == derive_join_secret(join_token, request.host)


def test_kit_that_another_process_holds_is_not_waited_for_without_end(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "ALONE_S", 0.05)
    make(state)
    with private_files.alone_in(state), pytest.raises(PreflightError, match="another process changes it"):
        make(state)


def test_file_that_another_process_makes_meanwhile_is_read(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, theirs = os.link, bytes(range(32))

    def late(source: Path, target: Path, **options: bool) -> None:
        if target.name == "join.token" and not target.exists():
            target.write_text(theirs.hex())
            target.chmod(0o600)
        link(source, target, **options)

    monkeypatch.setattr(os, "link", late)
    assert make(state)["join.token"] == "kept"
    assert read_token_file(kit_files.folder_of("box") / "daemon.token") == derive_join_secret(theirs, "box")


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_state_folders_are_private_up_to_the_first_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    state = tmp_path / "home" / ".local" / "state" / "fdl"
    monkeypatch.setenv("FDL_STATE_HOME", str(state))
    before = os.umask(umask)
    try:
        make(state)
    finally:
        os.umask(before)
    made = [state / "walk-ins" / "box", *list((state / "walk-ins" / "box").parents)[:5]]
    assert made[-1] == tmp_path / "home"
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in made} == {0o700}


@pytest.mark.parametrize("name", [".", "walk-ins", "walk-ins/box"])
def test_folder_that_others_may_write_to_takes_no_tokens(state: Path, name: str) -> None:
    (state / name).mkdir(parents=True)
    (state / name).chmod(0o775)
    with pytest.raises(ConfigError, match=r"others may write to it.*chmod go-w"):
        make(state)
    assert not contents(state)


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


def test_folder_that_cannot_be_made_is_told(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.write_text("a file")
    with pytest.raises(ConfigError, match="state: not a folder; move it away"):
        make(state)
    monkeypatch.setenv("FDL_STATE_HOME", str(state / "below"))
    with pytest.raises(PreflightError, match=r"state: Not a directory"):
        make(state / "below")
