"""The controller's side of torch.distributed's rendezvous: a bounded key-value table with waiting readers.

A request either is answered at once or waits for its keys until its own deadline. Nothing here outlives its group:
every group's keys share a prefix, and clearing it answers everyone who still waits under it, so that an abandoned
formation ends instead of hanging. Pure: time is an argument, and it imports no torch.

Operations (``messages.StoreRequest``; keys and values pairwise): set, add (``number``: amount), get and wait
(``number``: how long in ms), check, append, compare_set (values: expected, desired), delete. A reply with ``found``
False means: refused, not there, or not there in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flodl.ids import Incarnation, RankId
from flodl.messages import StoreReply, StoreRequest

MAX_KEYS = 65_536
"""A group of n ranks needs n keys (Gloo) or a handful (NCCL); room for 1,000 ranks and many attempts."""

MAX_KEY_BYTES = 1_024
MAX_VALUE_BYTES = 1 << 20
"""One rank's addresses take 200 bytes plus 100 per pair; a NCCL id 128."""

MAX_KEYS_PER_REQUEST = 4_096
MAX_WAITERS = 16_384
MAX_WAIT_MS = 600_000
"""No formation is worth longer; a request without a sensible limit waits this long."""

Replies = list[tuple[RankId, StoreReply]]


def group_prefix(incarnation: Incarnation, attempt: int) -> str:
    """The prefix under which the group of this attempt meets; no two attempts share one."""
    return f"group/{incarnation}.{attempt}/"


@dataclass(frozen=True, slots=True)
class _Waiter:
    rank: RankId
    request: StoreRequest
    deadline_s: float


class StoreTable:
    """Answers the ranks' store requests; at most one request of a rank per request number."""

    def __init__(self) -> None:
        self._table: dict[str, bytes] = {}
        self._waiters: list[_Waiter] = []

    def handle(self, rank: RankId, request: StoreRequest, now_s: float) -> Replies:
        """The replies that ``request`` causes: its own, or later, and those of the requests that waited for it."""
        if not _is_well_formed(request):
            return [(rank, _refusal(rank, request))]
        match request.op:
            case "set" | "append" | "add" | "compare_set":
                return self._write(rank, request)
            case "get" | "wait":
                return self._read(rank, request, now_s)
            case "check":
                return [(rank, StoreReply(rank, request.request, self._has(request.keys), (), 0))]
            case "delete":
                deleted = sum(self._table.pop(key, None) is not None for key in request.keys)
                return [(rank, StoreReply(rank, request.request, deleted > 0, (), deleted))]
            case _:
                return [(rank, _refusal(rank, request))]

    def drop_rank(self, rank: RankId) -> None:
        """Forget the requests of a rank that is gone."""
        self._waiters = [waiter for waiter in self._waiters if waiter.rank != rank]

    def clear_prefix(self, prefix: str) -> Replies:
        """Delete all keys that start with ``prefix`` and refuse everyone who waits for one of them."""
        for key in [key for key in self._table if key.startswith(prefix)]:
            del self._table[key]
        ended = [w for w in self._waiters if any(key.startswith(prefix) for key in w.request.keys)]
        return self._refuse(ended)

    def expire(self, now_s: float) -> Replies:
        """Refuse every request whose deadline has passed."""
        return self._refuse([waiter for waiter in self._waiters if waiter.deadline_s <= now_s])

    def next_deadline_s(self) -> float | None:
        """When ``expire`` has something to do; None while nobody waits."""
        return min((waiter.deadline_s for waiter in self._waiters), default=None)

    def _write(self, rank: RankId, request: StoreRequest) -> Replies:
        number = 0
        written = dict(zip(request.keys, request.values, strict=False))
        match request.op:
            case "append":
                written = {key: self._table.get(key, b"") + value for key, value in written.items()}
            case "add":
                key = request.keys[0]
                try:
                    number = int(self._table.get(key, b"0")) + request.number
                except ValueError:
                    return [(rank, _refusal(rank, request))]
                written = {key: str(number).encode()}
            case "compare_set":
                return self._compare_set(rank, request)
            case _:
                pass
        return self._store(rank, request, written, (), number)

    def _compare_set(self, rank: RankId, request: StoreRequest) -> Replies:
        # As torch's TCPStore: an absent key is set when nothing was expected; the answer is what stands there then.
        key, (expected, desired) = request.keys[0], request.values
        current = self._table.get(key)
        if current is None and expected:
            return [(rank, StoreReply(rank, request.request, True, (expected,), 0))]
        if current is not None and current != expected:
            return [(rank, StoreReply(rank, request.request, True, (current,), 0))]
        return self._store(rank, request, {key: desired}, (desired,), 0)

    def _store(
        self, rank: RankId, request: StoreRequest, written: dict[str, bytes], values: tuple[bytes, ...], number: int
    ) -> Replies:
        added = sum(key not in self._table for key in written)
        too_long = any(len(value) > MAX_VALUE_BYTES for value in written.values())
        if too_long or len(self._table) + added > MAX_KEYS:
            return [(rank, _refusal(rank, request))]
        self._table.update(written)
        return [(rank, StoreReply(rank, request.request, True, values, number)), *self._answer_waiters(written)]

    def _read(self, rank: RankId, request: StoreRequest, now_s: float) -> Replies:
        if self._has(request.keys):
            return [(rank, self._found(rank, request))]
        if request.number <= 0 or len(self._waiters) >= MAX_WAITERS:
            return [(rank, _refusal(rank, request))]
        self._waiters.append(_Waiter(rank, request, now_s + min(request.number, MAX_WAIT_MS) / 1000))
        return []

    def _answer_waiters(self, written: dict[str, bytes]) -> Replies:
        ready = [
            waiter
            for waiter in self._waiters
            if any(key in written for key in waiter.request.keys) and self._has(waiter.request.keys)
        ]
        self._remove(ready)
        return [(waiter.rank, self._found(waiter.rank, waiter.request)) for waiter in ready]

    def _found(self, rank: RankId, request: StoreRequest) -> StoreReply:
        values = tuple(self._table[key] for key in request.keys) if request.op == "get" else ()
        return StoreReply(rank, request.request, True, values, 0)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._table for key in keys)

    def _refuse(self, waiters: Sequence[_Waiter]) -> Replies:
        self._remove(waiters)
        return [(waiter.rank, _refusal(waiter.rank, waiter.request)) for waiter in waiters]

    def _remove(self, waiters: Sequence[_Waiter]) -> None:
        gone = {id(waiter) for waiter in waiters}
        self._waiters = [waiter for waiter in self._waiters if id(waiter) not in gone]


def _refusal(rank: RankId, request: StoreRequest) -> StoreReply:
    return StoreReply(rank, request.request, False, (), 0)


_VALUES_PER_REQUEST = {"add": 0, "get": 0, "wait": 0, "check": 0, "delete": 0, "compare_set": 2}


def _is_well_formed(request: StoreRequest) -> bool:
    keys, values = request.keys, request.values
    single = request.op in ("add", "compare_set")
    return (
        1 <= len(keys) <= (1 if single else MAX_KEYS_PER_REQUEST)
        and len(values) == _VALUES_PER_REQUEST.get(request.op, len(keys))
        and all(len(key) <= MAX_KEY_BYTES for key in keys)
        and all(len(value) <= MAX_VALUE_BYTES for value in values)
    )
