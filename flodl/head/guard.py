"""The user's convergence guard, on a thread of its own: neither the connection nor a slow callback waits for the other.

Rounds are judged one at a time, in order. The controller waits for no verdict, so rounds that pile up behind a slow
guard are of no use to anybody: beyond a few they are dropped.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from flodl.core.guards import ConvergenceAction, ConvergenceGuard
from flodl.messages import GuardVerdict, RoundFigures, RoundJudged

MAX_WAITING: Final = 16
"""Rounds kept for a guard that is busy; each is overdue before the next one comes."""

log = logging.getLogger(__name__)


class GuardDesk:
    """Takes figures from the connection's thread, gives verdicts to ``answer`` from its own."""

    def __init__(self, guard: ConvergenceGuard, answer: Callable[[RoundJudged], None]) -> None:
        self._guard, self._answer = guard, answer
        self._waiting: queue.Queue[RoundFigures | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None

    def ask(self, figures: RoundFigures) -> None:
        """Have this round judged; never blocks."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flodl-guard", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(figures)
        except queue.Full:
            log.debug("round not judged version=%d (the guard is slower than the rounds)", figures.version)

    def close(self) -> None:
        """No more rounds: the thread ends behind the one under way, unless the guard hangs."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    def _run(self) -> None:
        while (figures := self._waiting.get()) is not None:
            self._answer(self._judged(figures))

    def _judged(self, figures: RoundFigures) -> RoundJudged:
        try:
            action: object = self._guard.judge(figures)
            if not isinstance(action, ConvergenceAction):
                raise TypeError(f"judge returned a {type(action).__name__}; return a flodl.ConvergenceAction")
            factor = float(action.factor)
        except Exception as error:
            log.exception("the convergence guard failed; the round counts as stable")
            return RoundJudged(figures.version, GuardVerdict.STABLE, 1.0, f"{type(error).__name__}: {error}")
        return RoundJudged(figures.version, action.verdict, factor, "")
