"""A tree's hash, what differs between two folders, and what is too much to copy."""

import dataclasses

import pytest

from flodl.launch import document
from flodl.launch.tree import Entry, Found, Tree, differences, first_few, over_limit, path_bytes, path_text, tree_of

FILE = Entry("src/a.py", 0o644, 3, "ab" * 32)
PROGRAM = Entry("run", 0o755, 9, "cd" * 32)
LINK = Entry("latest", 0, 0, "->src/a.py")
TREE = tree_of([PROGRAM, FILE, LINK])


def test_entries_stand_in_the_order_of_their_bytes() -> None:
    paths = ["b", "a/z", "a", "a-b", "\udcff", "é"]
    assert [path_bytes(each.path) for each in tree_of(Entry(path, 0, 0) for path in paths).entries] == sorted(
        map(path_bytes, paths)
    )


def test_any_bytes_are_a_path_and_back_and_survive_a_document() -> None:
    raw = b"new\nline \xff'\"\xc3\xa9"
    tree = tree_of([Entry(path_text(raw), 0o600, 1, "00" * 32)])
    assert path_bytes(tree.entries[0].path) == raw
    assert document.load(Tree, document.dump(tree)) == tree


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(FILE, content="ef" * 32),
        dataclasses.replace(FILE, path="src/b.py"),
        dataclasses.replace(FILE, mode=0o744),
        dataclasses.replace(FILE, content="->x"),
    ],
)
def test_hash_changes_with_content_name_x_bit_and_kind(other: Entry) -> None:
    assert tree_of([other, PROGRAM, LINK]).hash != TREE.hash


def test_hash_is_that_of_the_files_whatever_their_other_permissions() -> None:
    private = dataclasses.replace(FILE, mode=0o600)
    assert tree_of([LINK, private, PROGRAM]).hash == TREE.hash


def test_name_and_content_cannot_be_mistaken_for_each_other() -> None:
    assert tree_of([Entry("b", 0, 0, "->a")]).hash != tree_of([Entry("a", 0, 0, "->b")]).hash


def test_equal_folder_has_no_differences() -> None:
    found = [Found(entry.content, entry.is_executable) for entry in TREE.entries]
    assert differences(TREE, found) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Found(""), "run is missing"),
        (Found("/"), "run is a folder there"),
        (Found("?"), "run is there, and cannot be read as a file"),
        (Found("!up\x1b"), "run cannot be there: up\\x1b is no folder"),
        (Found("cd" * 32, False), "run is not executable there"),
        (Found("00" * 32, True), "run differs"),
        (Found("->x"), "run differs"),
    ],
)
def test_difference_is_said_in_words(found: Found, words: str) -> None:
    assert differences(tree_of([PROGRAM]), [found]) == [words]


def test_file_that_is_executable_only_elsewhere_is_told() -> None:
    assert differences(tree_of([FILE]), [Found(FILE.content, True)]) == ["src/a.py is executable there"]


def test_many_differences_are_counted() -> None:
    assert first_few([str(each) for each in range(1007)]) == "0, 1, 2, 3, 4 and 1,002 more"


def test_what_fits_the_limit_is_no_trouble() -> None:
    assert over_limit(tree_of([Entry("a", 0, 10**9)]), 1.0) == ""


def test_too_many_bytes_name_the_folders_that_hold_most() -> None:
    entries = [Entry(f"data/images/{each}", 0, 10**8) for each in range(12)]
    words = over_limit(tree_of([*entries, Entry("data/x", 0, 7), Entry("src/a", 0, 9), Entry("top", 0, 5)]), 1.0)
    assert words == (
        "15 files, 1.2 GB, more than the 1 GB or 20,000 files of sync.limit_gb; most is in data/images (12 files, "
        "1.2 GB); src (1 file, 9 bytes); the project's own folder (1 file, 5 bytes)"
    )


def test_too_many_files_name_the_folders_with_most_of_them() -> None:
    entries = [Entry(f"tiny/{each}", 0, 1) for each in range(20)]
    words = over_limit(tree_of([*entries, Entry("big/one", 0, 10**5)]), 0.001)
    assert "0.001 GB or 20 files" in words
    assert words.index("tiny (20 files") < words.index("big (1 file")
