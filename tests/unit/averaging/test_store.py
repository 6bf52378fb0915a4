"""ControlStore as torch uses it, over a table in the same process."""

import threading
import time
from datetime import timedelta
from itertools import count

import pytest
import torch.distributed

from flodl.averaging.store import ControlStore
from flodl.averaging.store_table import StoreTable
from flodl.errors import DeadlineExceeded, ProtocolError
from flodl.messages import StoreReply, StoreRequest

Answer = tuple[bool, tuple[bytes, ...], int]


class Desk:
    """Serves a table to the threads of this process."""

    def __init__(self) -> None:
        self.table = StoreTable()
        self.changed = threading.Condition()
        self.replies: dict[int, StoreReply] = {}
        self.numbers = count(1)

    def call(self, op: str, keys: tuple[str, ...], values: tuple[bytes, ...], number: int, timeout_s: float) -> Answer:
        with self.changed:
            request = StoreRequest(0, next(self.numbers), op, keys, values, number)
            self._deliver(self.table.handle(0, request, time.monotonic()))
            while request.request not in self.replies:
                deadline_s = self.table.next_deadline_s()
                self.changed.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
                self._deliver(self.table.expire(time.monotonic()))
            reply = self.replies.pop(request.request)
        return reply.found, reply.values, reply.number

    def _deliver(self, replies: list[tuple[int, StoreReply]]) -> None:
        self.replies.update({reply.request: reply for _, reply in replies})
        self.changed.notify_all()


@pytest.fixture
def store() -> ControlStore:
    return ControlStore(Desk().call, timeout_s=5.0)


@pytest.fixture
def prefixed(store: ControlStore) -> torch.distributed.Store:
    """Through torch's C++ code, as a process group calls it."""
    return torch.distributed.PrefixStore("p", store)


def test_torch_reaches_every_call(store: ControlStore, prefixed: torch.distributed.Store) -> None:
    prefixed.set("a", "1")
    prefixed.multi_set(["b", "c"], ["2", "3"])
    prefixed.append("c", "4")

    assert prefixed.get("a") == store.get("p/a") == b"1"
    assert prefixed.multi_get(["b", "c"]) == [b"2", b"34"]
    assert prefixed.add("n", 3) == 3
    assert prefixed.add("n", -1) == 2
    assert prefixed.check(["a", "b"])
    assert not prefixed.check(["a", "z"])
    assert prefixed.compare_set("a", "1", "5") == b"5"
    assert prefixed.compare_set("a", "1", "6") == b"5"
    assert prefixed.delete_key("a")
    assert not prefixed.delete_key("a")
    assert prefixed.has_extended_api()
    prefixed.wait(["b"])
    assert store.clone() is store


def test_values_with_any_bytes_survive(store: ControlStore) -> None:
    store.set("a", bytes(range(256)))

    assert store.get("a") == bytes(range(256))


def test_get_returns_once_another_thread_has_set_the_key(store: ControlStore) -> None:
    thread = threading.Thread(target=store.set, args=("late", b"x"))
    thread.start()

    assert store.get("late") == b"x"
    thread.join(5)


def test_a_key_that_never_comes_ends_in_a_deadline(store: ControlStore, prefixed: torch.distributed.Store) -> None:
    with pytest.raises(DeadlineExceeded, match="p/never did not appear within"):
        prefixed.wait(["never"], timedelta(milliseconds=20))
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DeadlineExceeded):
        store.get("never")
    with pytest.raises(DeadlineExceeded):
        store.wait(["never"])


def test_a_refused_write_is_an_error(store: ControlStore) -> None:
    with pytest.raises(ProtocolError, match="refused set of k"):
        store.set("k" * 2000, b"")


def test_a_group_forms_over_threads_of_one_process(store: ControlStore) -> None:
    from flodl.averaging.collective import CollectivePlane
    from flodl.messages import Layout

    layout = Layout(100, 3, 5)
    planes = [CollectivePlane(store._call, torch.device("cpu"), "127.0.0.1") for _ in range(2)]
    results: list[str] = []
    ended = threading.Semaphore(0)

    def done(error: str) -> None:
        results.append(error)
        ended.release()

    for rank, plane in enumerate(planes):
        plane.form(1, 0, [0, 1], rank, 10.0, done)
    assert all(ended.acquire(timeout=10) for _ in planes)
    for rank, plane in enumerate(planes):
        image = plane.side_buffer(layout)
        image[:400].view(torch.float32).fill_(rank + 0.5)
        plane.all_reduce(layout, include_raw=False, on_done=done)
    assert all(ended.acquire(timeout=10) for _ in planes)

    assert results == [""] * 4
    assert [plane.side_buffer(layout)[:400].view(torch.float32).unique().tolist() for plane in planes] == [[2.0]] * 2
    assert not any(plane.must_hard_exit for plane in planes)
