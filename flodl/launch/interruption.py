"""Signals to a command of fdl.

Who starts a command with SIGHUP ignored, as ``nohup`` does, wants it ignored. SIGINT is caught all the same: a shell
ignores it for its background jobs, and a run is stopped by it there, too.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any


def wanted(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those of ``numbers`` that are to be caught: all but a SIGHUP that was ignored when we came."""
    return [each for each in numbers if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]


@contextlib.contextmanager
def caught(numbers: Iterable[signal.Signals], handle: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """``handle`` those of ``numbers`` that are wanted, while the block runs. Main thread only."""
    before = {number: signal.signal(number, handle) for number in wanted(numbers)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
