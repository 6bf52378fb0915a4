"""Single keys of the terminal, while it is ours: no line end needed, nothing echoed, Ctrl-C and the like as ever.

The terminal has its own modes back on every way out, by SIGTSTP and SIGQUIT as well; only SIGKILL gives us no chance.
In the background nothing is read or set, for that would stop us.
"""

import contextlib
import os
import select
import signal
import termios
import tty
from types import FrameType, TracebackType
from typing import Any, Final, Self

MAX_KEYS: Final = 64
LEAVING: Final = (signal.SIGQUIT, signal.SIGTSTP)


class Keyboard:
    """A context manager for the main thread."""

    def __init__(self, fd: int | None) -> None:
        """``fd``: where keys come from, standard input as a rule; None, or what is no terminal, has no keys."""
        self._fd = fd
        self._modes: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take keys from now on."""
        if self._fd is not None and os.isatty(self._fd):
            chosen = [number for number in LEAVING if signal.getsignal(number) is signal.SIG_DFL]
            self._handlers = {number: signal.signal(number, self._leave) for number in chosen}
            self._attend(self._fd)
        else:
            self._fd = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal its modes back."""
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    @property
    def is_attentive(self) -> bool:
        """Whether keys are read."""
        return self._modes is not None

    def pressed(self, key: bytes) -> bool:
        """Whether ``key``, and no other, was pressed since the last call; never waits."""
        if self._fd is None:
            return False
        self._attend(self._fd)
        with contextlib.suppress(OSError):  # the terminal is gone
            if self._modes is not None and select.select([self._fd], [], [], 0)[0]:
                keys = os.read(self._fd, MAX_KEYS)
                return bool(keys) and not keys.strip(key)
        return False

    def _attend(self, fd: int) -> None:
        if self._modes is None and _is_ours(fd):
            with contextlib.suppress(termios.error):
                self._modes = termios.tcgetattr(fd)
                tty.setcbreak(fd, termios.TCSANOW)

    def _restore(self) -> None:
        modes, self._modes = self._modes, None
        if modes is not None and self._fd is not None and _is_ours(self._fd):
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSANOW, modes)

    def _leave(self, number: int, _frame: FrameType | None) -> None:
        """Do what the signal always does, with the terminal's modes as they were."""
        self._restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._leave)  # continued; the next look at the keys finds out whether they are ours


def _is_ours(fd: int) -> bool:
    """Whether ``fd`` is the terminal that we are in the foreground of."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
