"""The registry of runs: what is created, with which modes, and which run a word means."""

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flodl.errors import ConfigError, PreflightError
from flodl.launch import rundir
from flodl.launch.rundir import ControllerInfo, RunDir


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def make(run_id: str, name: str = "train", live: bool = False) -> RunDir:
    run = rundir.create(run_id)
    run.write("run.json", f'{{"name": "{name}"}}')
    if live:
        run.announce(rundir.own_info("127.0.0.1", 1))
    return run


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o022])
def test_directory_is_private_and_token_is_random_under_any_umask(umask: int) -> None:
    before = os.umask(umask)
    try:
        run = make(f"20260101-000000-00{umask:02x}"[:20])
    finally:
        os.umask(before)
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.logs.stat().st_mode & 0o777 == 0o700
    assert run.token_path.stat().st_mode & 0o777 == 0o600
    assert (run.path / "run.json").stat().st_mode & 0o777 == 0o600
    assert len(run.read_token()) == 32


def test_planted_token_link_is_not_followed(state_home: Path, tmp_path: Path) -> None:
    folder = state_home / "runs" / "x"
    folder.mkdir(parents=True)
    with pytest.raises(PreflightError):
        rundir.create("x")
    (folder / "token").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("00" * 32)
    with pytest.raises(ConfigError):
        RunDir(folder).read_token()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_token_that_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "token")
    with pytest.raises(ConfigError, match=r"token: no regular file; the token cannot be read"):
        rundir.read_token_file(tmp_path / "token")


@pytest.mark.parametrize(("text", "mode"), [("00" * 32, 0o644), ("zz" * 32, 0o600), ("00", 0o600), ("é", 0o600)])
def test_token_that_others_read_or_that_is_none_is_refused(text: str, mode: int) -> None:
    run = make("20260101-000000-0000")
    run.token_path.write_text(text)
    run.token_path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        run.read_token()
    assert "00" * 32 not in str(caught.value)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_token_may_end_with_one_line_end(end: str) -> None:
    run = make("20260101-000000-0000")
    run.token_path.write_text("0A" * 32 + end, newline="")
    assert run.read_token() == b"\x0a" * 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00 " * 32,
        " " + "00" * 32,
        "00" * 32 + " ",
        "00" * 32 + "\n\n",
        "00" * 32 + "\n00",
        "00" * 33,
        "00" * 32 + " " * 64 + "more",
        "00" * 16 + "\n" + "00" * 16,
        "\0" * 64,
    ],
)
def test_token_is_its_digits_and_nothing_else(text: str) -> None:
    run = make("20260101-000000-0000")
    run.token_path.write_text(text)
    with pytest.raises(ConfigError, match=r"token: not a token \(expected 64 hex digits and nothing else\)"):
        run.read_token()


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_folders_above_the_run_are_private_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "a" / "b"))
    before = os.umask(umask)
    try:
        run = make("20260101-000000-0000")
    finally:
        os.umask(before)
    assert {folder.stat().st_mode & 0o777 for folder in list(run.path.parents)[:3]} == {0o700}
    assert rundir.open_folders() == []


def test_state_folder_that_others_may_write_to_is_found(state_home: Path) -> None:
    make("20260101-000000-0000")
    state_home.chmod(0o770)
    assert rundir.open_folders() == [state_home]
    state_home.chmod(0o1777)
    assert rundir.open_folders() == []


def test_file_is_made_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    rundir.write_token_file(tmp_path / "t", bytes(32))
    with pytest.raises(FileExistsError):
        rundir.write_token_file(tmp_path / "t", bytes(range(32)))
    assert rundir.read_token_file(tmp_path / "t") == bytes(32)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_ids_sort_by_time_and_differ() -> None:
    first, second = rundir.new_run_id(1.0), rundir.new_run_id(2.0)
    assert first < second
    assert first.startswith("19700101-000001-")
    assert rundir.new_run_id() != rundir.new_run_id()


def test_run_is_found_by_id_beginning_and_name() -> None:
    old, new = make("20260101-000000-aaaa", "a"), make("20260102-000000-bbbb", "b")
    assert rundir.find(old.run_id) == old
    assert rundir.find("20260102") == new
    assert rundir.find("a") == old
    assert rundir.find() == new


def test_latest_run_of_a_name_wins_unless_an_older_one_lives() -> None:
    old, new = make("20260101-000000-aaaa", live=True), make("20260102-000000-bbbb")
    assert rundir.find("train") == old
    old.controller_json.unlink()
    assert rundir.find("train") == new


def test_default_is_the_live_run() -> None:
    live = make("20260101-000000-aaaa", live=True)
    make("20260102-000000-bbbb")
    assert rundir.find() == live
    assert rundir.find(must_be_live=True) == live


def test_whoever_changes_a_run_is_asked_which_of_several_live_ones() -> None:
    older, newer = (make(f"2026010{day}-000000-aaaa", live=True) for day in (1, 2))
    other = make("20260103-000000-bbbb", "other", live=True)
    assert rundir.find() == other
    assert rundir.find("train") == newer
    with pytest.raises(ConfigError) as refused:
        rundir.find(must_be_live=True)
    assert str(refused.value).splitlines() == [
        "3 runs are live; which one? give its id, or its beginning:",
        f"  {other.run_id} (other)",
        f"  {newer.run_id} (train)",
        f"  {older.run_id} (train)",
    ]
    with pytest.raises(ConfigError, match="2 runs are live"):
        rundir.find("train", must_be_live=True)
    assert rundir.find("other", must_be_live=True) == other
    assert rundir.find(older.run_id, must_be_live=True) == older
    assert rundir.find("20260101", must_be_live=True) == older
    for ended in (other, newer):
        ended.write("outcome.json", "{}")
    assert rundir.find(must_be_live=True) == older


def test_wrong_words_are_answered_with_what_there_is() -> None:
    make("20260101-000000-aaaa", "a")
    make("20260101-000000-bbbb", "b")
    with pytest.raises(ConfigError, match="not unique"):
        rundir.find("20260101")
    with pytest.raises(ConfigError, match=r"no run 'zzz'.*20260101-000000-bbbb \(b\)"):
        rundir.find("zzz")
    with pytest.raises(ConfigError, match="no run is live"):
        rundir.find(must_be_live=True)
    with pytest.raises(ConfigError, match="not live"):
        rundir.find("a", must_be_live=True)


def test_no_runs_at_all_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(ConfigError, match="fdl launch"):
        rundir.find()


def test_process_with_the_same_number_but_another_start_is_dead() -> None:
    run = make("20260101-000000-aaaa", live=True)
    info = run.controller()
    assert info is not None
    assert run.is_live()
    run.announce(ControllerInfo(info.pid, info.started + 1, info.address, info.port))
    assert not run.is_live()


def test_zombie_is_dead() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert rundir.process_started(process.pid) is None


def test_torn_or_foreign_documents_are_no_documents() -> None:
    run = make("20260101-000000-aaaa")
    (run.path / "controller.json").write_text('{"pid": 1')
    (run.path / "outcome.json").write_text("[]")
    assert run.controller() is None
    assert run.read_json("outcome.json") is None


def test_unwritable_state_folder_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(PreflightError, match="FDL_STATE_HOME"):
        rundir.create("x")


def test_full_disk_is_said_before_the_start_and_leaves_no_half_run(
    state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PreflightError, match="No space left on device; runs are kept there, FDL_STATE_HOME names"):
        rundir.create("20260101-000000-0000")
    assert rundir.all_runs() == []


def test_interrupted_making_leaves_no_half_run(state_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rundir.create("20260101-000000-0000")
    assert rundir.all_runs() == []


def test_room_for_the_last_words_is_kept_until_they_are_written() -> None:
    run = rundir.create("20260101-000000-0000")
    reserve = run.path / rundir.RESERVE_NAME
    assert reserve.stat().st_blocks * 512 >= rundir.RESERVE_BYTES
    run.release_reserve()
    run.release_reserve()
    assert not reserve.exists()


def test_document_that_cannot_be_written_leaves_nothing_beside_the_old_one() -> None:
    run = make("20260101-000000-0000")
    (run.path / "state.json").mkdir()  # a file cannot take its place
    with pytest.raises(OSError, match="directory"):
        run.write("state.json", "{}")
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".state")] == []


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"FDL_STATE_HOME": "/a"}, "/a"),
        ({"FDL_STATE_HOME": "", "XDG_STATE_HOME": "/x"}, "/x/fdl"),
        ({"FDL_STATE_HOME": "", "XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/fdl"),
    ],
)
def test_state_home_follows_the_conventions(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert str(rundir.state_home()) == expected


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (255, 255), (256, 1), (-9, 1), (None, 1), ("0", 1)])
def test_exit_code_of_an_outcome_is_one_that_a_process_can_have(code: object, expected: int) -> None:
    assert rundir.outcome_exit_code({"exit_code": code}) == expected


@pytest.mark.parametrize("place", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_no_document_and_nobody_waits_for_it(place: Callable[[Path], None]) -> None:
    run = rundir.create("20260101-000000-aaaa")
    place(run.run_json)
    place(run.controller_json)
    assert (run.read_json("run.json"), run.controller(), rundir.run_name(run)) == (None, None, "")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000])
def test_document_of_endless_depth_is_none(text: str) -> None:
    run = rundir.create("20260101-000000-aaaa")
    run.write("run.json", text)
    run.write("controller.json", text)
    assert (run.read_json("run.json"), run.controller()) == (None, None)


def test_document_without_an_end_is_none() -> None:
    run = rundir.create("20260101-000000-aaaa")
    run.write("run.json", "{}")
    os.truncate(run.run_json, rundir.MAX_DOCUMENT_BYTES + 1)
    assert run.read_json("run.json") is None
    with pytest.raises(OSError, match="too large"):
        rundir.read_document(run.run_json)


@pytest.mark.parametrize("word", ["", "  "])
def test_empty_word_names_no_run(word: str) -> None:
    make("20260101-000000-aaaa", live=True)
    for must_be_live in (False, True):
        with pytest.raises(ConfigError, match="names no run"):
            rundir.find(word, must_be_live=must_be_live)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 10**20}, {"port": 0}, {"port": -1}, {"port": 65536}, {"certificate": "zz"},
        {"address": ""}, {"address": "x" * 300}, {"address": "a..b"}, {"address": "a\0b"}, {"address": "\u00e9" * 70},
    ],
)  # fmt: skip
def test_announcement_of_what_is_no_place_is_none(change: dict[str, object]) -> None:
    run = make("20260101-000000-aaaa", live=True)
    assert run.is_live()
    run.write("controller.json", json.dumps({**json.loads(run.controller_json.read_text()), **change}))
    assert (run.controller(), run.is_live()) == (None, False)


def test_what_a_run_reports_of_itself_comes_as_it_can_be_shown_and_what_was_asked_as_it_is() -> None:
    run = make("20260101-000000-aaaa")
    for name in ("run.json", "state.json", "outcome.json"):
        run.write(name, r'{"name": "a\ud800"}')
    assert run.read_json("run.json") == {"name": "a\ud800"}
    assert run.read_json("state.json") == run.read_json("outcome.json") == {"name": "a\\ud800"}
    assert rundir.run_name(run) == "a\\ud800"
