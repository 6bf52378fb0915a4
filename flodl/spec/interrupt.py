"""Ctrl-C in a process whose training goes on beside the main thread: the first one stops it in order."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

NOTE = "\nflodl: stopping in order, join() returns what is trained so far; Ctrl-C again ends at once\n"


def stop_on_interrupt(stop: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Let the first SIGINT call ``stop``; the next one, and every one once the training is over, raises
    KeyboardInterrupt as ever. Leaves a handler of the script's own alone. In another thread than the main one nothing
    is done: signals are not handled there, and Ctrl-C stays what it was.

    Args:
        stop: asks the training to stop; runs in a signal handler, so it may only post.
        is_over: whether the training has ended.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_over():
            signal.default_int_handler(number, frame)
        sys.stderr.write(NOTE)
        stop()

    signal.signal(signal.SIGINT, handle)
