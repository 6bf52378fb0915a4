"""SIGTERM and SIGUSR1: how schedulers and spot machines say that a process must go soon. It saves, then it stops.

A signal may come to every process of a run at once, twice, and one kind after the other. So the first one counts;
another SIGTERM that comes later than ``REPEAT_S`` is somebody who will not wait.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

PREEMPTIONS: Final = (signal.SIGTERM, signal.SIGUSR1)
REPEAT_S: Final = 2.0
"""A signal that comes again within this time is the same one, passed on by somebody else."""

_ours: dict[int, Callable[[int, FrameType | None], None]] = {}


def on_preemption(heard: Callable[[signal.Signals], None]) -> None:
    """Let ``heard`` be called for each of these signals, but for one that the script handles or ignores itself.

    It runs in a signal handler of the main thread, so it may only post. Processes that are forked from this one have
    the signals as they were. In another thread than the main one nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if not _ours:
        os.register_at_fork(after_in_child=_give_back)

    def handle(number: int, _frame: FrameType | None) -> None:
        heard(signal.Signals(number))

    for number in PREEMPTIONS:
        if signal.getsignal(number) in (signal.SIG_DFL, _ours.get(number)):
            signal.signal(number, handle)
            _ours[number] = handle


def stop_when_preempted(stop: Callable[[signal.Signals], None], is_over: Callable[[], bool]) -> None:
    """Let the first of these signals call ``stop``. SIGTERM again, and each once the training is over, ends the process
    as ever. Main thread only, and a handler of the script's own stays.

    Args:
        stop: asks the training to stop; may only post.
        is_over: whether the training has ended.
    """
    heard_s: list[float] = []

    def hear(number: signal.Signals) -> None:
        now_s = time.monotonic()
        is_again = number is signal.SIGTERM and bool(heard_s) and now_s - heard_s[0] > REPEAT_S
        if is_over() or is_again:
            die_of(number)
        elif not heard_s:
            sys.stderr.write(f"\nflodl: {number.name}: stopping in order\n")
            stop(number)
        heard_s.append(now_s)

    on_preemption(hear)


def exit_code_of(number: int) -> int:
    """As a shell would say it."""
    return 128 + number


def die_of(number: signal.Signals) -> None:
    """End this process by the signal, as if nobody had handled it. Main thread only."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _give_back() -> None:
    for number, handler in _ours.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.SIG_DFL)
    _ours.clear()
