"""The user's hold on a running job: results come in from the role's shell, go out to the user's thread.

Producers (the role's shell): ``publish_metrics``, ``publish_eval``, then once ``finish`` or ``fail``; none blocks.
Consumers (the user): ``join``, ``next_metrics``, ``poll_metrics``. The user's callbacks run on one thread, in order.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from flodl.errors import DeadlineExceeded
from flodl.spec import context
from flodl.spec.metrics import EpochMetrics
from flodl.spec.state import TrainedState

log = logging.getLogger(__name__)

MAX_PENDING = 1024
"""Epochs kept for a consumer that does not come; the oldest go first."""

CALLBACK_DRAIN_S = 60.0
"""How long ``join`` waits for callbacks that are still running after the end of training."""


class TrainHandle:
    """What ``Trainer.run`` returns."""

    def __init__(
        self,
        metrics_fn: Callable[[EpochMetrics], None] | None = None,
        eval_result_fn: Callable[[int, float], None] | None = None,
    ) -> None:
        self._metrics_fn, self._eval_result_fn = metrics_fn, eval_result_fn
        self._changed = threading.Condition()
        self._metrics: deque[EpochMetrics] = deque(maxlen=MAX_PENDING)
        self._calls: deque[Callable[[], None]] = deque(maxlen=MAX_PENDING)
        self._callback_thread: threading.Thread | None = None
        self._state: TrainedState | None = None
        self._error: BaseException | None = None
        self._exit_code = 0

    # ------------------------------------------------------------------------------------------------- the user
    def join(self, timeout_s: float | None = None) -> TrainedState:
        """Wait for the end of training and for the callbacks it caused.

        Args:
            timeout_s: None waits as long as the training takes.

        Returns:
            The trained state. Every call returns the same object.

        Raises:
            DeadlineExceeded: ``timeout_s`` is over; the training goes on and ``join`` may be called again.
            FlodlError: the run failed; other exceptions are the script's own.
            SystemExit: this process was sent SIGTERM or SIGUSR1 and the run has stopped for it: what is to be saved is
                saved, and the process ends with 128 + the signal's number.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_over, timeout_s):
                raise DeadlineExceeded(f"the training did not end within {timeout_s} s; it goes on")
        self._drain_callbacks()
        if self._error is not None:
            raise self._error
        if self._exit_code:
            raise SystemExit(self._exit_code)
        assert self._state is not None
        return self._state

    def next_metrics(self, timeout_s: float | None = None) -> EpochMetrics | None:
        """The next epoch's metrics, or None once the run is over and all have been taken.

        Raises:
            DeadlineExceeded: no epoch closed within ``timeout_s`` (None waits without a limit).
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._metrics or self._is_over(), timeout_s):
                raise DeadlineExceeded(f"no epoch closed within {timeout_s} s; the training goes on")
            return self._metrics.popleft() if self._metrics else None

    def poll_metrics(self) -> list[EpochMetrics]:
        """The metrics of every epoch that closed since the last call, without waiting."""
        with self._changed:
            taken = list(self._metrics)
            self._metrics.clear()
        return taken

    # ------------------------------------------------------------------------------------------------- the shells
    def publish_metrics(self, metrics: EpochMetrics) -> None:
        """An epoch closed."""
        with self._changed:
            self._metrics.append(metrics)
            self._changed.notify_all()
        if (callback := self._metrics_fn) is not None:
            self._call(lambda: callback(metrics))

    def publish_eval(self, epoch: int, value: float) -> None:
        """The evaluation after ``epoch`` is there."""
        if (callback := self._eval_result_fn) is not None:
            self._call(lambda: callback(epoch, value))

    def finish(self, state: TrainedState) -> None:
        """Training ended well. A second end is ignored."""
        self._end(state, None)

    def fail(self, error: BaseException) -> None:
        """Training ended with ``error``, which ``join`` raises. A second end is ignored."""
        self._end(None, error)

    def end_with(self, exit_code: int) -> None:
        """Let ``join`` end the process with this code, once the training has ended, unless it fails."""
        self._exit_code = exit_code

    def is_over(self) -> bool:
        """True after ``finish`` or ``fail``."""
        with self._changed:
            return self._is_over()

    # ---------------------------------------------------------------------------------------------------- private
    def _is_over(self) -> bool:
        return self._state is not None or self._error is not None

    def _end(self, state: TrainedState | None, error: BaseException | None) -> None:
        with self._changed:
            if not self._is_over():
                self._state, self._error = state, error
                context.leave()
            self._changed.notify_all()

    def _call(self, call: Callable[[], None]) -> None:
        with self._changed:
            if len(self._calls) == MAX_PENDING:
                log.warning("callback dropped pending=%d (the callbacks are slower than the epochs)", MAX_PENDING)
            self._calls.append(call)
            if self._callback_thread is None:
                self._callback_thread = threading.Thread(
                    target=self._run_callbacks, name="flodl-callbacks", daemon=True
                )
                self._callback_thread.start()
            self._changed.notify_all()

    def _run_callbacks(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._is_over())
                if not self._calls:
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:
                log.exception("callback failed; the training goes on")

    def _drain_callbacks(self) -> None:
        thread = self._callback_thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(CALLBACK_DRAIN_S)
        if thread.is_alive():
            log.warning("callback still running waited_s=%.0f; nothing waits for it any more", CALLBACK_DRAIN_S)
