"""The rendezvous table: answers at once, later, or with a refusal; never grows without limit."""

from itertools import count

import pytest

from flodl.averaging import store_table
from flodl.averaging.store_table import StoreTable, group_prefix
from flodl.messages import StoreReply, StoreRequest

_numbers = count(1)


def request(rank: int, op: str, *keys: str, values: tuple[bytes, ...] = (), number: int = 0) -> StoreRequest:
    return StoreRequest(rank, next(_numbers), op, keys, values, number)


def ask(
    table: StoreTable, rank: int, op: str, *keys: str, values: tuple[bytes, ...] = (), number: int = 0
) -> StoreReply:
    """The one reply to a request that is answered at once."""
    asked = request(rank, op, *keys, values=values, number=number)
    ((to, reply),) = table.handle(rank, asked, 0.0)
    assert (to, reply.rank, reply.request) == (rank, rank, asked.request)
    return reply


def test_what_one_rank_sets_another_gets() -> None:
    table = StoreTable()
    ask(table, 0, "set", "a", "b", values=(b"1", b"2"))

    assert ask(table, 1, "get", "b", "a").values == (b"2", b"1")
    assert ask(table, 1, "check", "a", "b").found
    assert not ask(table, 1, "check", "a", "c").found


def test_get_waits_until_every_key_is_there() -> None:
    table = StoreTable()
    waiting = request(1, "get", "a", "b", number=5000)

    assert table.handle(1, waiting, 10.0) == []
    assert len(table.handle(0, request(0, "set", "a", values=(b"1",)), 11.0)) == 1
    replies = table.handle(0, request(0, "set", "b", values=(b"2",)), 12.0)

    assert replies[1] == (1, StoreReply(1, waiting.request, True, (b"1", b"2"), 0))
    assert table.next_deadline_s() is None


def test_wait_answers_without_values() -> None:
    table = StoreTable()
    ask(table, 0, "set", "a", values=(b"1",))

    reply = ask(table, 1, "wait", "a", number=1000)

    assert (reply.found, reply.values) == (True, ())


def test_a_waiter_is_refused_at_its_deadline_and_not_before() -> None:
    table = StoreTable()
    waiting = request(1, "wait", "a", number=2000)
    table.handle(1, waiting, 10.0)

    assert table.next_deadline_s() == 12.0
    assert table.expire(11.9) == []
    assert table.expire(12.0) == [(1, StoreReply(1, waiting.request, False, (), 0))]
    assert table.expire(99.0) == []


def test_no_wait_is_longer_than_the_limit() -> None:
    table = StoreTable()
    table.handle(1, request(1, "wait", "a", number=10**12), 0.0)

    assert table.next_deadline_s() == store_table.MAX_WAIT_MS / 1000


def test_add_counts_and_can_be_read() -> None:
    table = StoreTable()

    assert ask(table, 0, "add", "n", number=2).number == 2
    assert ask(table, 1, "add", "n", number=-5).number == -3
    assert ask(table, 1, "get", "n").values == (b"-3",)


def test_add_to_what_is_no_number_is_refused() -> None:
    table = StoreTable()
    ask(table, 0, "set", "n", values=(b"x",))

    assert not ask(table, 0, "add", "n", number=1).found


def test_append_makes_and_lengthens_a_value() -> None:
    table = StoreTable()
    ask(table, 0, "append", "a", values=(b"po",))
    ask(table, 0, "append", "a", values=(b"tato",))

    assert ask(table, 1, "get", "a").values == (b"potato",)


def test_compare_set_writes_only_over_what_was_expected() -> None:
    table = StoreTable()

    assert ask(table, 0, "compare_set", "a", values=(b"x", b"1")).values == (b"x",)
    assert not ask(table, 0, "check", "a").found
    assert ask(table, 0, "compare_set", "a", values=(b"", b"1")).values == (b"1",)
    assert ask(table, 1, "compare_set", "a", values=(b"9", b"2")).values == (b"1",)
    assert ask(table, 1, "compare_set", "a", values=(b"1", b"2")).values == (b"2",)


def test_delete_says_whether_the_key_was_there() -> None:
    table = StoreTable()
    ask(table, 0, "set", "a", values=(b"1",))

    assert ask(table, 0, "delete", "a").found
    assert not ask(table, 0, "delete", "a").found


def test_clearing_a_prefix_forgets_its_keys_and_ends_its_waits_only() -> None:
    table = StoreTable()
    old, new = group_prefix(1, 0), group_prefix(1, 1)
    ask(table, 0, "set", old + "0", new + "0", values=(b"1", b"2"))
    ended = request(1, "get", old + "1", number=1000)
    table.handle(1, ended, 0.0)
    table.handle(2, request(2, "get", new + "1", number=1000), 0.0)

    assert table.clear_prefix(old) == [(1, StoreReply(1, ended.request, False, (), 0))]
    assert not ask(table, 0, "check", old + "0").found
    assert ask(table, 0, "check", new + "0").found
    assert table.next_deadline_s() is not None


def test_prefixes_of_different_attempts_never_contain_each_other() -> None:
    prefixes = [group_prefix(incarnation, attempt) for incarnation in (1, 11, 111) for attempt in (1, 11, 111)]

    assert not [(a, b) for a in prefixes for b in prefixes if a != b and b.startswith(a)]


def test_a_rank_that_is_gone_gets_no_replies() -> None:
    table = StoreTable()
    table.handle(1, request(1, "get", "a", number=1000), 0.0)
    table.drop_rank(1)

    assert len(table.handle(0, request(0, "set", "a", values=(b"1",)), 0.0)) == 1


@pytest.mark.parametrize(
    ("op", "keys", "values"),
    [
        ("explode", ("a",), (b"",)),
        ("set", (), ()),
        ("set", ("a", "b"), (b"1",)),
        ("add", ("a", "b"), ()),
        ("get", ("a",), (b"1",)),
        ("compare_set", ("a",), (b"1",)),
        ("set", ("k" * 1025,), (b"1",)),
        ("set", ("a",), (bytes((1 << 20) + 1),)),
        ("get", tuple(map(str, range(4097))), ()),
    ],
)
def test_a_malformed_request_is_refused(op: str, keys: tuple[str, ...], values: tuple[bytes, ...]) -> None:
    table = StoreTable()

    assert not ask(table, 0, op, *keys, values=values, number=1).found
    assert not ask(table, 0, "check", "a").found


def test_values_cannot_grow_by_appending_beyond_the_limit() -> None:
    table = StoreTable()
    ask(table, 0, "append", "a", values=(bytes(1 << 20),))

    assert not ask(table, 0, "append", "a", values=(b"x",)).found


def test_the_table_and_its_waiters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "MAX_KEYS", 2)
    monkeypatch.setattr(store_table, "MAX_WAITERS", 1)
    table = StoreTable()
    ask(table, 0, "set", "a", "b", values=(b"1", b"2"))

    assert not ask(table, 0, "set", "c", values=(b"3",)).found
    assert ask(table, 0, "set", "a", values=(b"4",)).found
    assert table.handle(1, request(1, "get", "c", number=1000), 0.0) == []
    assert not ask(table, 1, "get", "d", number=1000).found
