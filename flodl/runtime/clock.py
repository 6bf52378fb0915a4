"""The shells' only source of time: monotonic seconds, so that no wall-clock step ever moves a deadline."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell reads the time; tests and simulations bring their own."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return time.monotonic()
