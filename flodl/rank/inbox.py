"""What waits for the training thread: events, and orders that only this thread may carry out.

An order is a function that the thread calls between two steps; what it returns, if anything, is the event. A plane's
callback uses one to have a landed sum digested here instead of on torch's thread.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from flodl.core.events import RankEvent

Order: TypeAlias = Callable[[], RankEvent | None]
Item: TypeAlias = RankEvent | Order

MAX_WAITING: Final = 4096
"""Messages that wait before the socket is left alone: a flood stays with its sender. A round has under ten."""


class Inbox:
    """A queue with one consumer. ``is_empty`` costs nothing, for it is asked before every step."""

    def __init__(self, when_idle: Callable[[], None] = lambda: None) -> None:
        """``when_idle`` is called by the consumer whenever it has waited for nothing."""
        self._when_idle = when_idle
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._items

    def post(self, item: Item) -> None:
        """Add what comes of an action, or a signal's order: never waits, and there are never more than a few."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def put(self, event: RankEvent) -> None:
        """Add a peer's message, after waiting for room: what the socket's reader uses."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < MAX_WAITING)
            self._items.append(event)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> RankEvent | None:
        """The next event; carries out orders on the way. None when nothing came within ``timeout_s``."""
        item: Item | None = None
        with self._changed:
            if self._changed.wait_for(lambda: self._items, timeout_s):
                item = self._items.popleft()
                self._changed.notify_all()
        if item is None:
            self._when_idle()
        return item() if callable(item) else item
