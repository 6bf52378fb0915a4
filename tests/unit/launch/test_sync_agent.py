"""The sync's hand on a host: what it sees, that it changes only what is ours, and that files are whole at any time."""

import fcntl
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from flodl.launch.sync import agent
from flodl.launch.sync.agent import Agent

CHANGING = {"_begin", "_install", "_remove", "_make_way", "_clear_new", "_write_ledger"}
"""What of an agent writes."""

Step = dict[str, Any] | Callable[[], None]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Talk(io.BytesIO):
    """Requests for an agent, with things that happen between them."""

    def __init__(self, *steps: Step) -> None:
        super().__init__()
        self._steps = list(steps)

    def readline(self, _size: int | None = -1) -> bytes:  # type: ignore[override]
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, dict):
                return json.dumps(step).encode() + b"\n"
            step()
        return b""


def talk(root: Path, *steps: Step) -> list[dict[str, Any]]:
    """What the agent answers, but for its beats, from ``open`` on; the answer to ``open`` is left out."""
    replies = io.BytesIO()
    Agent(Talk({"do": "open", "root": str(root)}, *steps), replies).serve()
    lines = [json.loads(line) for line in replies.getvalue().splitlines()[2:]]
    return [line for line in lines if "beat" not in line][1:]


def look(*paths: str) -> Step:
    return {"do": "look", "wanted": [[path, -1] for path in paths]}


def begin() -> Step:
    return {"do": "begin", "who": "me", "wait_s": 0.0}


def install(files: dict[str, str], **others: Any) -> Step:
    """``files`` have arrived under their own names."""
    placed = [[path, path, 0o644, sha(text)] for path, text in files.items()]
    ledger = {path: sha(text) for path, text in files.items()}
    values = {"files": placed, "links": [], "modes": [], "remove": [], "retain": [], "ledger": ledger, **others}
    return {"do": "install", **values}


def arrive(root: Path, files: dict[str, str]) -> Callable[[], None]:
    def put() -> None:
        for name, text in files.items():
            path = root / ".fdl-sync" / "new" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return put


def sync(root: Path, files: dict[str, str], **others: Any) -> list[dict[str, Any]]:
    return talk(root, begin(), arrive(root, files), install(files, **others))


def found(root: Path, *paths: str) -> list[list[Any]]:
    return next((reply["found"] for reply in talk(root, look(*paths)) if "found" in reply), [])


def test_what_is_there_is_seen_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "run").write_text("y")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").write_text("")
    (tmp_path / "l").symlink_to("d")
    os.mkfifo(tmp_path / "p")
    seen = found(tmp_path, "f", "run", "d", "l", "p", "none", "d/none", "none/none", "f/x", "l/x", "l/y/z")
    assert seen == [
        [sha("x"), False],
        [sha("y"), True],
        ["/", False],
        ["->d", False],
        ["?", False],
        ["", False],
        ["", False],
        ["", False],
        ["!f", False],
        ["!l", False],
        ["!l", False],
    ]


def test_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("four")
    assert talk(tmp_path, {"do": "look", "wanted": [["f", 5]]})[0] == {"found": [["4 bytes", False]]}


def test_looking_writes_nothing_not_even_the_folder(tmp_path: Path) -> None:
    assert found(tmp_path / "none", "a/b") == [["", False]]
    assert list(tmp_path.iterdir()) == []


def test_files_arrive_and_are_put_into_place(tmp_path: Path) -> None:
    root = tmp_path / "new" / "project"
    done = sync(root, {"a/b/c": "1", "d": "2"}, links=[["l/up", "../d"]])
    assert done[-1] == {"done": "install", "absent": [], "changed": [], "kept": []}
    assert (root / "a/b/c").read_text() == "1"
    assert os.readlink(root / "l/up") == "../d"
    assert sorted(path.name for path in (root / ".fdl-sync").iterdir()) == ["ledger.json", "lock"]
    assert (root / ".fdl-sync").stat().st_mode & 0o777 == 0o700


def test_modes_follow(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    (tmp_path / "run").chmod(0o640)
    (tmp_path / "text").write_text("")
    (tmp_path / "text").chmod(0o755)
    talk(tmp_path, begin(), install({}, modes=[["run", True], ["text", False]]))
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("run", "text")]
    assert modes == [0o750, 0o644]


@pytest.mark.parametrize("arrived", ["torn", ""])
def test_nothing_is_put_anywhere_unless_every_byte_is_right(tmp_path: Path, arrived: str) -> None:
    sync(tmp_path, {"a": "old", "b": "old"})
    new = {"a": "new", "b": "new"}
    done = talk(tmp_path, begin(), arrive(tmp_path, {"a": "new", "b": arrived}), install(new))
    assert done[-1] == {"done": "install", "absent": [], "changed": ["b"], "kept": []}
    assert [(tmp_path / name).read_text() for name in "ab"] == ["old", "old"]


def test_nothing_is_put_anywhere_unless_every_file_has_arrived(tmp_path: Path) -> None:
    new = {"a": "new", "b": "new"}
    done = talk(tmp_path, begin(), arrive(tmp_path, {"a": "new"}), install(new))
    assert done[-1] == {"done": "install", "absent": ["b"], "changed": [], "kept": []}
    assert not (tmp_path / "a").exists()


def test_file_of_an_earlier_sync_is_stale_until_somebody_changes_it(tmp_path: Path) -> None:
    sync(tmp_path, {"a/x": "1", "b": "2", "c": "3"})
    (tmp_path / "foreign").write_text("")
    (tmp_path / "c").write_text("changed")
    replies = talk(tmp_path, look("b"))
    assert [reply for reply in replies if "stale" in reply or "altered" in reply] == [
        {"stale": ["a/x"]},
        {"altered": ["c"]},
    ]


def test_only_what_a_sync_has_put_there_is_removed_with_the_folders_it_leaves_empty(tmp_path: Path) -> None:
    sync(tmp_path, {"a/b/x": "1", "a/c/y": "2", "z": "3"})
    (tmp_path / "a/c/foreign").write_text("")
    (tmp_path / "z").write_text("changed")
    (tmp_path / "other").write_text("")
    done = talk(tmp_path, begin(), install({}, remove=["a/b/x", "a/c/y", "z", "other", "gone"]))
    assert done[-1]["kept"] == ["z", "other"]
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if ".fdl-sync" not in str(path))
    assert left == ["a", "a/c", "a/c/foreign", "other", "z"]


def test_retained_files_stay_ours_and_others_are_forgotten(tmp_path: Path) -> None:
    sync(tmp_path, {"excluded": "1", "altered": "2"})
    (tmp_path / "altered").write_text("mine now")
    talk(tmp_path, begin(), install({}, retain=["excluded"]))
    assert {"stale": ["excluded"]} in talk(tmp_path, look())
    assert not any("altered" in reply for reply in talk(tmp_path, look()))


def ours(root: Path) -> list[str]:
    """What a sync of nothing would remove."""
    return sorted(path for reply in talk(root, look()) for path in reply.get("stale", ()))


def test_file_that_came_there_otherwise_is_never_ours_though_it_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("same")
    both = {"data": sha("same"), "t.py": sha("1")}
    talk(tmp_path, begin(), arrive(tmp_path, {"t.py": "1"}), install({"t.py": "1"}, ledger=both))
    assert ours(tmp_path) == ["t.py"]
    talk(tmp_path, begin(), arrive(tmp_path, {"x": "1"}), install({"x": "1"}, ledger={**both, "x": sha("1")}))
    assert ours(tmp_path) == ["t.py", "x"]


def test_file_that_was_changed_there_to_what_it_is_here_is_not_ours_any_more(tmp_path: Path) -> None:
    sync(tmp_path, {"a": "old"})
    (tmp_path / "a").write_text("new")
    talk(tmp_path, begin(), arrive(tmp_path, {"x": "1"}), install({"x": "1"}, ledger={"a": sha("new"), "x": sha("1")}))
    assert ours(tmp_path) == ["x"]


def test_file_made_there_after_a_sync_that_was_cut_off_is_not_ours(tmp_path: Path) -> None:
    sync(tmp_path, {"a": "old"})
    talk(tmp_path, begin(), arrive(tmp_path, {"a": "new", "b": "new"}))
    (tmp_path / "b").write_text("new")
    assert ours(tmp_path) == ["a"]


def test_file_becomes_a_folder_and_a_folder_a_file(tmp_path: Path) -> None:
    sync(tmp_path, {"a": "file", "b/c/d": "deep"})
    done = sync(tmp_path, {"a/inner": "x", "b": "flat"}, remove=["a", "b/c/d"])
    assert done[-1] == {"done": "install", "absent": [], "changed": [], "kept": []}
    assert [(tmp_path / name).read_text() for name in ("a/inner", "b")] == ["x", "flat"]


def test_links_there_are_never_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / "data").symlink_to(elsewhere)
    done = talk(root, begin(), arrive(root, {"data/x": "1"}), install({"data/x": "1"}))
    assert f"{root}/data is no folder there, and one here" in done[-1]["fault"]
    assert list(elsewhere.iterdir()) == []


def test_folder_where_a_file_has_to_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/foreign").write_text("")
    done = sync(tmp_path, {"x": "1"}, links=[["a", "x"]])
    assert f"{tmp_path}/a is a folder there, and none here" in done[-1]["fault"]


@pytest.mark.parametrize(
    "ledger",
    [
        "",
        "[]",
        '{"mark": "m", "files": []}',
        '{"mark": "m", "files": {"../out": ["HASH"], "/abs": ["HASH"], "a/../../out": ["HASH"]}}',
        '{"mark": "m", "files": {".fdl-sync/lock": ["HASH"], "./a": ["HASH"], "a": "HASH"}}',
        "[" * 100_000,
    ],
)
def test_ledger_that_is_none_or_leads_out_of_the_folder_makes_nothing_ours(tmp_path: Path, ledger: str) -> None:
    root = tmp_path / "root"
    sync(root, {"a": "1"})
    (tmp_path / "out").write_text("precious")
    (root / ".fdl-sync/ledger.json").write_text(ledger.replace("HASH", sha("precious")))
    replies = talk(root, look(), begin(), install({}, remove=["../out", "a/../../out"]))
    assert not any("stale" in reply for reply in replies)
    assert (tmp_path / "out").exists()
    assert (root / "a").exists()


def test_nothing_is_removed_unless_the_way_can_be_made(tmp_path: Path) -> None:
    sync(tmp_path, {"lib/x.py": "1", "a": "1"})
    (tmp_path / "lib/foreign").write_text("")
    done = sync(tmp_path, {"lib": "flat", "b": "2"}, remove=["a", "lib/x.py"])
    assert f"{tmp_path}/lib is a folder there, and none here" in done[-1]["fault"]
    assert (tmp_path / "lib/x.py").exists()
    assert (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_what_interpreters_write_anew_is_in_nobodys_way(tmp_path: Path) -> None:
    sync(tmp_path, {"lib/in/x.py": "1"})
    for cache in ("lib/__pycache__", "lib/in/__pycache__", "old/__pycache__/deep"):
        (tmp_path / cache).mkdir(parents=True)
        (tmp_path / cache / "x.pyc").write_text("")
    assert found(tmp_path, "old", "lib") == [["", False], ["/", False]]
    done = sync(tmp_path, {"lib": "flat", "old": "flat"}, remove=["lib/in/x.py"])
    assert done[-1] == {"done": "install", "absent": [], "changed": [], "kept": []}
    assert [(tmp_path / name).read_text() for name in ("lib", "old")] == ["flat", "flat"]


def test_mode_of_a_file_with_another_name_elsewhere_stays_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "foreign").write_text("x")
    (tmp_path / "foreign").chmod(0o644)
    os.link(tmp_path / "foreign", root / "run")
    assert talk(root, begin(), install({}, modes=[["run", True]]))[-1]["done"] == "install"
    assert (tmp_path / "foreign").stat().st_mode & 0o777 == 0o644
    assert (root / "run").stat().st_mode & 0o777 == 0o755
    assert (root / "run").read_text() == "x"


@pytest.mark.parametrize("note", ["new", "lock", "ledger.tmp", "ledger.json"])
def test_what_is_in_the_way_of_the_notes_is_named_with_the_remedy(tmp_path: Path, note: str) -> None:
    path = tmp_path / ".fdl-sync" / note
    path.parent.mkdir()
    path.write_text("") if note == "new" else path.mkdir()
    done = talk(tmp_path, begin(), install({}))
    faults = [reply["fault"] for reply in done if "fault" in reply]
    assert faults[0].startswith(f"{path}: ")
    assert faults[0].endswith(": it is in a sync's way, remove it there")


def test_project_that_is_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "l").symlink_to("/scratch/none")
    replies = io.BytesIO()
    Agent(Talk({"do": "open", "root": str(tmp_path / "l")}), replies).serve()
    fault = json.loads(replies.getvalue().splitlines()[-1])["fault"]
    assert fault.startswith(f"{tmp_path}/l is a link to /scratch/none, which is not there")


def test_notes_that_are_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root/.fdl-sync").symlink_to("../elsewhere")
    (done,) = talk(tmp_path / "root", begin())
    assert "no folder of this user" in done["fault"]


def test_project_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    replies = io.BytesIO()
    Agent(Talk({"do": "open", "root": str(tmp_path / "f")}), replies).serve()
    assert json.loads(replies.getvalue().splitlines()[-1]) == {"fault": f"{tmp_path}/f is no folder"}


def test_home_is_the_hosts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    replies = io.BytesIO()
    Agent(Talk({"do": "open", "root": "~/p"}), replies).serve()
    assert json.loads(replies.getvalue().splitlines()[-1])["root"] == f"{tmp_path}/p"


def test_second_launch_is_kept_out_and_told_by_whom(tmp_path: Path) -> None:
    sync(tmp_path, {"a": "1"})
    with (tmp_path / ".fdl-sync/lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("you@there (pid 7)")
        lock.flush()
        os.truncate(lock.fileno(), len("you@there (pid 7)"))
        replies = talk(tmp_path, {"do": "begin", "who": "me", "wait_s": 0.1})
    assert {"waits_for": "you@there (pid 7)"} in replies
    assert replies[-1]["fault"].startswith(
        f"you@there (pid 7) copies to {tmp_path} since 0.1 s or more: end that launch"
    )


def test_lock_is_free_again_once_its_holder_is_gone(tmp_path: Path) -> None:
    sync(tmp_path, {"a": "1"})
    assert sync(tmp_path, {"a": "2"})[-1]["done"] == "install"


def test_mark_tells_whether_somebody_was_here_in_between(tmp_path: Path) -> None:
    sync(tmp_path, {"a": "1"})
    seen, begun = talk(tmp_path, look("a"), begin())[-2:]
    assert seen["mark"] == begun["mark"]
    sync(tmp_path, {"a": "2"})
    assert talk(tmp_path, begin())[-1]["mark"] != seen["mark"]


def test_disk_trouble_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    (done,) = talk(tmp_path / "f" / "below", begin())
    assert done == {"fault": f"{tmp_path}/f/below: Not a directory"}


def test_names_of_any_bytes_are_carried(tmp_path: Path) -> None:
    name = b"new\nline \xff'\"".decode("utf-8", "surrogateescape")
    (tmp_path / os.fsdecode(b"new\nline \xff'\"")).write_text("x")
    assert found(tmp_path, name) == [[sha("x"), False]]


def test_beats_tell_that_a_long_look_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "BEAT_S", 0.0)
    (tmp_path / "f").write_text("x")
    replies = io.BytesIO()
    Agent(Talk({"do": "open", "root": str(tmp_path)}, look("f")), replies).serve()
    assert b'{"beat": true}' in replies.getvalue()


def lines_until_end(root: Path, new: dict[str, str], stop_at: int) -> int:
    """Run a sync in a child that ends, as if killed, at its line ``stop_at``; how many lines it took, or -1."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != agent.__file__ or frame.f_code.co_name not in CHANGING:
            return None
        if event == "line":
            count += 1
            if count == stop_at:
                os._exit(9)
        return trace

    sys.settrace(trace)
    sync(root, new, remove=["gone"], links=[["l", "a"]])
    os._exit(0)


def test_killed_at_any_line_each_file_is_whole_and_the_next_sync_ends_it(tmp_path: Path) -> None:
    old, new = {"a": "old", "d/b": "old b", "gone": "x"}, {"a": "new, and longer", "d/b": "new b", "c": "new c"}
    ends, at = [], 1
    while not ends or ends[-1] == 9:
        root = tmp_path / str(at)
        sync(root, old, links=[["l", "d/b"]])
        ends.append(lines_until_end(root, new, at))
        made = [name for name in ("c", "gone") if not (root / name).exists()]
        for name in made:
            (root / name).write_text(new.get(name, "mine"))
        assert set(ours(root)).isdisjoint(made), at
        for name in made:
            (root / name).unlink()
        for name, text in new.items():
            held = (root / name).read_text() if (root / name).exists() else None
            assert held in (old.get(name), text), at
        assert os.readlink(root / "l") in ("a", "d/b")
        sync(root, new, remove=["gone"], links=[["l", "a"]])
        assert {name: (root / name).read_text() for name in new} == new, at
        assert not (root / "gone").exists(), at
        assert sorted(path.name for path in (root / ".fdl-sync").iterdir()) == ["ledger.json", "lock"], at
        at += 1
    assert ends[-1] == 0
    assert len(ends) > 50


def test_agent_whose_other_side_is_gone_ends_and_frees_the_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from flodl.launch.sync.agent import Agent; Agent(sys.stdin.buffer, sys.stdout.buffer, 1).serve()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        for request in ({"do": "open", "root": str(tmp_path)}, begin()):
            process.stdin.write(json.dumps(request).encode() + b"\n\n")
        process.stdin.flush()
        assert process.wait(30) == -signal.SIGALRM
    assert sync(tmp_path, {"a": "1"})[-1]["done"] == "install"
