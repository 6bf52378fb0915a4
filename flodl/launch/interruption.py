"""Signals to a command of fdl.

Before a run listens, a signal ends what would have become of it; from then on it is the run's to hear of.

Who starts a command with SIGHUP ignored, as ``nohup`` does, wants it ignored. SIGINT is caught all the same: a shell
ignores it for its background jobs, and a run is stopped by it there, too.
"""

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Final

from flodl.core.ending import process_exit_code

ENDING: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Python itself makes an exception of SIGINT, and asyncio cares for that."""

REPEAT_S: Final = 2.0
"""A signal that comes again within this time is the same one, passed on by somebody else: schedulers send theirs to
everyone, twice, and one after the other. Behind it somebody will not wait.
"""


class Interrupted(KeyboardInterrupt):
    """A signal came before there was a run to pass it on to; like Ctrl-C it is no error that anybody handles."""

    def __init__(self, number: int, what: str) -> None:
        """``what`` has ended by it."""
        super().__init__(f"{what}: ended by {signal.Signals(number).name} before its controller listened")
        self.exit_code = process_exit_code(0, number)


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


@contextlib.contextmanager
def raised(what: str, is_there: Callable[[], bool]) -> Iterator[deque[int]]:
    """Make an exception of a signal while the block brings ``what`` about; collect those that come once it is there.
    A scheduler sends its signals twice: what follows the first one within ``REPEAT_S`` says nothing new.

    Where somebody has a way of their own to end what runs at SIGINT, as asyncio has, these go the same way.

    Raises:
        Interrupted: in the block, or behind it.
    """
    collected: deque[int] = deque(maxlen=16)
    told: list[tuple[int, float]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if is_there():
            collected.append(number)
        elif not told or now_s - told[-1][1] > REPEAT_S:
            told.append((number, now_s))
            at_sigint = signal.getsignal(signal.SIGINT)
            if at_sigint is signal.default_int_handler or not callable(at_sigint):
                raise Interrupted(number, what)
            at_sigint(signal.SIGINT, frame)

    try:
        with caught(ENDING, handle):
            yield collected
    except KeyboardInterrupt as error:
        if told and not isinstance(error, Interrupted):
            raise Interrupted(told[0][0], what) from None
        raise


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let signals wait until the block has ended, so that none comes between a deed and the knowledge of it.

    Off the main thread, to which signals come, it does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    held_back = [each for each in (signal.SIGINT, *ENDING) if is_main and _is_handled(each)]
    came: list[int] = []
    try:
        with caught(held_back, lambda number, _: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


def _is_handled(number: signal.Signals) -> bool:
    """Whether it does something, and Python can put back what that is."""
    return signal.getsignal(number) not in (signal.SIG_IGN, None)
