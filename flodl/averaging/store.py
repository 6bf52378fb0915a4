"""torch.distributed's rendezvous over the rank's control connection.

torch calls this store from Python and from C++ threads while a group forms; each call becomes one
``messages.StoreRequest`` and blocks its thread until the reply or the deadline. An error raised here travels through
torch's C++ code and ends the formation cleanly. Keep the store referenced as long as any group lives.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeAlias

from torch.distributed import Store  # type: ignore[attr-defined]

from flodl.errors import DeadlineExceeded, ProtocolError

StoreCall: TypeAlias = Callable[
    [str, tuple[str, ...], tuple[bytes, ...], int, float], tuple[bool, tuple[bytes, ...], int]
]
"""``call(op, keys, values, number, timeout_s) -> (found, values, number)``: sends one request, waits for its reply.

Must be callable from any thread and raise ``DeadlineExceeded`` when no reply came within ``timeout_s``.
"""

REPLY_GRACE_S = 5.0
"""How much longer than the table's own deadline a caller waits for the reply that says so."""


class ControlStore(Store):
    """A ``torch.distributed.Store`` whose table lives in the controller (``store_table.StoreTable``)."""

    def __init__(self, call: StoreCall, timeout_s: float) -> None:
        """``timeout_s`` limits every wait that torch gives no limit of its own."""
        super().__init__()
        self._call = call
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Write one key."""
        self._write("set", (key,), (_bytes(value),))

    def get(self, key: str) -> bytes:
        """The value of ``key``, once somebody has set it.

        Raises:
            DeadlineExceeded: Nobody set it in time, or the attempt was abandoned.
        """
        return self._wait_for("get", (key,), self._timeout_s)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        return self._write("add", (key,), (), amount)[1]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set now."""
        return self._call("check", tuple(keys), (), 0, REPLY_GRACE_S)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are set.

        Raises:
            DeadlineExceeded: They were not in time, or the attempt was abandoned.
        """
        self._wait_for("wait", tuple(keys), self._timeout_s if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Delete one key; returns whether it was there."""
        return self._call("delete", (key,), (), 0, REPLY_GRACE_S)[0]

    deleteKey = delete_key  # noqa: N815  torch's C++ code looks for this name

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write ``desired`` if ``expected`` stands there; returns what stands there afterwards."""
        return self._write("compare_set", (key,), (_bytes(expected), _bytes(desired)))[0][0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of one key."""
        self._write("append", (key,), (_bytes(value),))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, once they are set."""
        return list(self._wait_for("get", tuple(keys), self._timeout_s))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys at once."""
        self._write("set", tuple(keys), tuple(_bytes(value) for value in values))

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def clone(self) -> "ControlStore":
        """Itself: calls may come from any thread."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the limit of the waits that have none of their own."""
        self._timeout_s = timeout.total_seconds()

    def _write(
        self, op: str, keys: tuple[str, ...], values: tuple[bytes, ...], number: int = 0
    ) -> tuple[tuple[bytes, ...], int]:
        found, answer, number = self._call(op, keys, values, number, REPLY_GRACE_S)
        if not found:
            raise ProtocolError(f"rendezvous: the controller refused {op} of {', '.join(keys)}")
        return answer, number

    def _wait_for(self, op: str, keys: tuple[str, ...], timeout_s: float) -> tuple[bytes, ...]:
        found, values, _ = self._call(op, keys, (), max(1, round(timeout_s * 1000)), timeout_s + REPLY_GRACE_S)
        if not found:
            raise DeadlineExceeded(f"rendezvous: {', '.join(keys)} did not appear within {timeout_s:g} s")
        return values


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
