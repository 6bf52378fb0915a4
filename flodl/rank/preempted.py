"""SIGTERM and SIGUSR1 to a rank: its daemon hears of them at once, whatever the training thread is doing.

Whose signal it was the daemon knows: its own ends the rank, anybody else's stops the run in order.
"""

import queue
import signal
import threading
from collections.abc import Callable

from flodl.spec.preemption import on_preemption


def tell_preemptions(tell: Callable[[int], None]) -> None:
    """Let ``tell`` be called with each signal's number, on a thread that waits for nothing else. Main thread only."""
    numbers: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()  # the one queue that a signal handler may use

    def pass_on() -> None:
        while True:
            tell(numbers.get())

    on_preemption(numbers.put)
    threading.Thread(target=pass_on, name="flodl-signals", daemon=True).start()
