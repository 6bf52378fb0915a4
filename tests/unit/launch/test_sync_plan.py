"""What a sync does on a host, from what is here and what is there."""

import pytest

from flodl.launch.sync.plan import SyncPlan, There, altered_words, ledger_of, plan_sync
from flodl.launch.tree import Entry, Found, Tree, tree_of

FILE = Entry("a/f", 0o644, 1000, "aa" * 32)
TOOL = Entry("tool", 0o755, 5, "bb" * 32)
LINK = Entry("link", 0, 0, "->tool")
TREE = tree_of([FILE, TOOL, LINK])


def there(changes: dict[str, Found], tree: Tree = TREE, **others: tuple[str, ...]) -> There:
    same = {entry.path: Found(entry.content, entry.is_executable) for entry in tree.entries}
    return There(tuple({**same, **changes}.values()), **others)  # type: ignore[arg-type]


def test_equal_folder_needs_nothing() -> None:
    assert plan_sync(TREE, there({}), ()).is_empty


@pytest.mark.parametrize("content", ["", "cc" * 32, "7 bytes", "?", "->x"])
def test_file_that_is_missing_or_other_travels(content: str) -> None:
    plan = plan_sync(TREE, there({"a/f": Found(content)}), ())
    assert (plan.send, plan.links, plan.modes) == ((FILE,), (), ())
    assert str(plan) == "1 file, 1.0 kB to copy"


def test_link_is_set_and_never_sent() -> None:
    plan = plan_sync(TREE, there({"link": Found("bb" * 32)}), ())
    assert (plan.send, plan.links) == ((), (LINK,))
    assert str(plan) == "0 files, 0 bytes to copy, 1 link to set"


def test_x_bit_alone_costs_no_copy() -> None:
    plan = plan_sync(TREE, there({"tool": Found("bb" * 32, False)}), ())
    assert (plan.send, plan.modes) == ((), (TOOL,))


def test_file_of_an_earlier_sync_goes_when_it_is_gone_here() -> None:
    plan = plan_sync(TREE, there({}, stale=("old", "kept/x")), {"kept/x"})
    assert (plan.remove, plan.retain) == (("old",), ("kept/x",))
    assert str(plan) == "0 files, 0 bytes to copy, 1 file to remove"


def test_altered_file_is_never_removed_and_is_told_once_it_is_gone_here() -> None:
    plan = plan_sync(TREE, there({}, altered=("notes", "kept")), {"kept"})
    assert (plan.remove, plan.altered, plan.retain) == ((), ("notes",), ("kept",))
    assert plan.is_empty
    assert altered_words(plan.altered) == "left there, changed since it was copied and gone here: notes"
    assert altered_words(()) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a/f": Found("!a")}, ("a is no folder there",)),
        ({"tool": Found("/")}, ("tool is a folder there",)),
        ({"a/f": Found("!a"), "link": Found("/")}, ("a is no folder there", "link is a folder there")),
    ],
)
def test_what_is_in_the_way_and_not_ours_stops_the_sync(changes: dict[str, Found], words: tuple[str, ...]) -> None:
    assert plan_sync(TREE, there(changes), ()).obstacles == words


def test_what_earlier_syncs_put_in_the_way_is_no_obstacle() -> None:
    was_file = plan_sync(TREE, there({"a/f": Found("!a")}, stale=("a",)), ())
    was_folder = plan_sync(TREE, there({"tool": Found("/")}, stale=("tool/inner/x",)), ())
    assert (was_file.obstacles, was_folder.obstacles) == ((), ())
    assert (was_file.remove, was_folder.remove) == (("a",), ("tool/inner/x",))


def test_ledger_names_every_entry_with_its_content() -> None:
    assert ledger_of(TREE) == {"a/f": "aa" * 32, "tool": "bb" * 32, "link": "->tool"}


def test_empty_plan_sends_nothing() -> None:
    assert (SyncPlan().is_empty, SyncPlan().send_bytes) == (True, 0)
