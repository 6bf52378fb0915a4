"""What of a folder is listed and read: ignore rules as git itself understands them, links, odd names and kinds."""

import hashlib
import os
import shutil
import socket
import subprocess
import warnings
from pathlib import Path

import pytest

from flodl.errors import ConfigError
from flodl.launch import tree_scan
from flodl.launch.tree import path_bytes, path_text
from flodl.launch.tree_scan import read, scan

FILES = [
    "a.py",
    "a.pt",
    "keep.pt",
    "build/x",
    "build/keep/y",
    "src/build/z",
    "src/a.pt",
    "src/keep.pt",
    "src/.gitignore.x",
    "top",
    "src/top",
    "docs/top/a",
    "a/b/c/d.txt",
    "a/x.log",
    "log",
    "logs/a",
    "logs/keep/b",
    "# hash",
    "!bang",
    "sp ace",
    "trail ",
    "é.pt",
    "new\nline.pt",
    "[x].py",
    "x.py",
    "deep/a/b/deep.txt",
    "node_modules/p/i.js",
    "t/node_modules/q",
]

RULES = (
    {"": "*.pt\n!keep.pt\nbuild/\n"},
    {"": "build\n!build/keep\n"},
    {"": "/top\n"},
    {"": "docs/top\n", "src": "top\n"},
    {"": "*.pt", "src": "!*.pt\n/keep.pt\n"},
    {"": "a/**/d.txt\n**/build\n"},
    {"": "/*\n!/src\n/src/*\n!/src/a.pt\n"},
    {"": "logs/*\n!logs/keep/\n"},
    {"": "\\# hash\n\\!bang\nsp ace\ntrail\\ \n"},
    {"": "# a comment\n\n   \n[[]x].py\n[!a].py\n"},
    {"": "node_modules/\n", "t": "!node_modules/\n"},
    {"": "*\n!*/\n!*.py\n"},
    {"": "!\n/\n\\\n*.log\n"},
    {"": "\ufeffa.py\r\nx.py\r\n"},
    {"a": "*", "deep": "/a/b/\n"},
    {"": "src/\n", "src": "!a.pt\n"},
    {"": "[x-z].p?\n*.tx[!a]\n"},
    {"": "a/*/\n"},
)


def write(folder: Path, *names: str, text: str = "x") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def listed(folder: Path, *exclude: str) -> set[str]:
    return {entry.path for entry in scan(str(folder), exclude).tree.entries}


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git, which is not installed")
@pytest.mark.parametrize("rules", RULES)
def test_gitignore_files_mean_what_git_takes_them_for(tmp_path: Path, rules: dict[str, str]) -> None:
    write(tmp_path, *FILES)
    for folder, text in rules.items():
        (tmp_path / folder / ".gitignore").write_bytes(text.encode())
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run(["git", "init", "-q", tmp_path], env=env, check=True, timeout=30)
    command = ["git", "ls-files", "-z", "-o", "--exclude-per-directory=.gitignore"]
    said = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=30).stdout

    assert sorted(map(path_bytes, listed(tmp_path))) == sorted(said.split(b"\0")[:-1])


def test_gitignore_above_the_project_counts_up_to_the_repository(tmp_path: Path) -> None:
    write(tmp_path, "repo/p/q/a.py", "repo/p/q/a.pt", "repo/p/q/b.log", "repo/p/q/c.tmp", "repo/p/q/d")
    write(tmp_path, ".gitignore", text="*.py")
    write(tmp_path, "repo/.gitignore", text="*.pt\n/p/q/d")
    write(tmp_path, "repo/p/.gitignore", text="*.log\n!a.pt")
    (tmp_path / "repo/.git").mkdir()
    assert listed(tmp_path / "repo/p/q") == {"a.py", "a.pt", "c.tmp"}


def test_gitignore_above_a_project_without_repository_is_not_ours(tmp_path: Path) -> None:
    write(tmp_path, "p/a.py")
    write(tmp_path, ".gitignore", text="*.py")
    assert listed(tmp_path / "p") == {"a.py"}


def test_fdlignore_is_stronger_than_gitignore_and_exclude_than_both(tmp_path: Path) -> None:
    write(tmp_path, "w.pt", "v.pt", "src/big.bin", "src/a.py", "src/b.py")
    write(tmp_path, ".gitignore", "src/.gitignore", text="*.pt\n!big.bin")
    write(tmp_path, ".fdlignore", text="!w.pt\n*.bin\n")
    assert listed(tmp_path, "b.py", ".*ignore") == {"w.pt", "src/a.py"}
    assert "src/big.bin" in listed(tmp_path, "!big.bin")


def test_git_caches_of_interpreters_and_our_own_notes_are_never_copied(tmp_path: Path) -> None:
    write(tmp_path, ".git/config", "sub/.git", "__pycache__/a.pyc", "s/__pycache__/b", ".fdl-sync/ledger.json", "a.py")
    assert listed(tmp_path, "!.git", "!__pycache__", "!.fdl-sync") == {"a.py"}


def test_private_folders_are_left_out_whatever_the_patterns_say(tmp_path: Path) -> None:
    write(tmp_path, "state/runs/1/token", "a.py")
    found = scan(str(tmp_path), ["!state"], [f"{tmp_path}/state/"])
    assert [entry.path for entry in found.tree.entries] == ["a.py"]


@pytest.mark.parametrize("line", ["!", "a\\", "[z-a]"])
def test_pattern_of_ours_that_is_none_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    write(tmp_path, "sub/.fdlignore", text=f"# mine\n{line}\n")
    with pytest.raises(ConfigError, match=r"^sub/\.fdlignore: pattern 2, "):
        scan(str(tmp_path))
    with pytest.raises(ConfigError, match=r"^sync\.exclude: pattern 1, "):
        scan(str(tmp_path), [line])


def test_gitignore_line_that_is_no_pattern_is_passed_over_without_a_warning(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.pt")
    write(tmp_path, ".gitignore", text="[z-a]\n[[:alpha:]]x\n*.pt\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert listed(tmp_path) == {".gitignore", "a.py"}


def test_names_of_any_bytes_are_listed_and_read(tmp_path: Path) -> None:
    names = [b"new\nline", b"\xff\xfe", "é漢".encode(), b"q'\"`$x", b"-n", b" "]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(name)
    tree = read(str(tmp_path), scan(str(tmp_path)).tree)
    assert {path_bytes(each.path): each.content for each in tree.entries} == {
        name: hashlib.sha256(name).hexdigest() for name in names
    }
    assert path_text(b"\xff\xfe") in {each.path for each in tree.entries}


def test_x_bit_and_size_are_noted(tmp_path: Path) -> None:
    write(tmp_path, "run", "data", text="12345")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "data").chmod(0o640)
    tree = read(str(tmp_path), scan(str(tmp_path)).tree)
    assert [(each.path, each.mode, each.size) for each in tree.entries] == [("data", 0o640, 5), ("run", 0o755, 5)]


def test_links_inside_are_kept_and_those_that_lead_out_are_told(tmp_path: Path) -> None:
    write(tmp_path, "src/a.py")
    for name, target in {
        "in": "src/a.py",
        "src/up": "../in",
        "dangling": "nothing",
        "folder": "src",
        "out": "../elsewhere",
        "src/far": "../../x",
        "abs": str(tmp_path / "src"),
    }.items():
        (tmp_path / name).symlink_to(target)
    found = scan(str(tmp_path))
    assert {each.path: each.content for each in found.tree.entries if each.is_link and each.path != "abs"} == {
        "in": "->src/a.py",
        "src/up": "->../in",
        "dangling": "->nothing",
        "folder": "->src",
        "out": "->../elsewhere",
        "src/far": "->../../x",
    }
    assert found.strays == (f"abs -> {tmp_path}/src", "out -> ../elsewhere", "src/far -> ../../x")


def test_what_is_private_is_left_out_under_whatever_name(tmp_path: Path) -> None:
    project, link = tmp_path / "project", tmp_path / "link"
    link.symlink_to(project)
    write(project, "a.py", "state/runs/x/token", "key", "deep/er/token")
    os.link(project / "key", project / "same")
    for here, there in ((project, link), (link, project)):
        private = [str(there / "state"), str(there / "key"), str(there / "deep" / ".." / "deep" / "er"), "", "a\0b"]
        assert [each.path for each in scan(str(here), private=private).tree.entries] == ["a.py"]


def test_pipes_and_sockets_are_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("sock")
    write(tmp_path, "a.py")
    found = scan(str(tmp_path))
    assert found.skipped == ("pipe", "sock")
    assert [each.path for each in found.tree.entries] == ["a.py"]


def test_a_million_files_and_more_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_scan, "MAX_LISTED", 3)
    write(tmp_path, "a", "b", "c")
    assert len(listed(tmp_path)) == 3
    write(tmp_path, "d")
    with pytest.raises(ConfigError, match="holds more than 3 files"):
        scan(str(tmp_path))


def test_file_that_is_gone_or_replaced_before_it_is_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    found = scan(str(tmp_path)).tree
    (tmp_path / "b").unlink()
    with pytest.raises(ConfigError, match=r"/b: No such file"):
        read(str(tmp_path), found)
    os.mkfifo(tmp_path / "b")
    with pytest.raises(ConfigError, match="changes while it is read"):
        read(str(tmp_path), found)
