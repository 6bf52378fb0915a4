"""The head: the user's script beside the controller. It trains nothing, it hears what came of it.

A thread holds the connection; results go to the handle, whose own thread runs the callbacks. The connection stays open
until the process ends, so that the controller knows how long the script goes on behind ``join()``.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, assert_never

import torch

from flodl.config.address import split_address
from flodl.config.tls import TlsMode
from flodl.core.ending import EXIT_INTERRUPTED
from flodl.core.guards import ConvergenceGuard
from flodl.errors import ConfigError, FlodlError, PeerLost, UsageError, run_failed
from flodl.head.guard import GuardDesk
from flodl.messages import (
    EpochReport,
    EvalReport,
    HeadError,
    HeadReady,
    JudgeRound,
    RoundJudged,
    RunEnded,
    StopRequest,
    ToHead,
)
from flodl.runtime.dial import Controller, Identity, connect_control
from flodl.runtime.streams import ConnectionLost, FramedStream
from flodl.spec.context import ROLE_VARIABLE
from flodl.spec.fingerprint import config_fingerprint
from flodl.spec.handle import TrainHandle
from flodl.spec.interrupt import stop_on_interrupt
from flodl.spec.job import TrainingJob
from flodl.spec.metrics import EpochMetrics
from flodl.spec.preemption import exit_code_of, stop_when_preempted
from flodl.spec.state import load_state
from flodl.spec.uncaught import MARK
from flodl.spec.words import printable
from flodl.wire.handshake import Role

log = logging.getLogger(__name__)

DEFAULT_PORT: Final = 1337


def run_head(ticket: Mapping[str, Any], job: TrainingJob, handle: TrainHandle) -> None:
    """Connect to the controller and report to ``handle``; returns at once.

    Args:
        ticket: ``run_id``, the controller's ``address`` (``host:port``), the ``token_file``, ``tls`` (a ``TlsMode``).
        job: the script's; only its settings and the datasets' lengths are looked at.
        handle: ends with the trained state, or with the error that ``join()`` raises.

    Raises:
        UsageError: the script has used CUDA before ``Trainer.run``.
        ConfigError: the token cannot be read.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            "the script used CUDA before Trainer.run; the head trains nothing and must leave the GPUs to the ranks: "
            "use flodl.detect_gpus() to look at them, and build tensors inside build_model and train_step"
        )
    host, port = split_address(str(ticket["address"]), DEFAULT_PORT)
    identity = Identity(str(ticket["run_id"]), _token(Path(ticket["token_file"])), Role.HEAD, socket.gethostname())
    ready = HeadReady(job.config.settings(), config_fingerprint(job.config))
    controller = Controller(host, port, TlsMode(ticket.get("tls", TlsMode.AUTO)))
    head = _Head(controller, identity, ready, handle, job.config.elche.user_guard)
    stop_on_interrupt(lambda: head.ask_stop("Ctrl-C", EXIT_INTERRUPTED), handle.is_over)
    stop_when_preempted(head.ask_stop_for, handle.is_over)
    threading.Thread(target=head.run, name="flodl-head", daemon=True).start()


class _Head:
    """The conversation with the controller, on an event loop of its own."""

    def __init__(
        self,
        controller: Controller,
        identity: Identity,
        ready: HeadReady,
        handle: TrainHandle,
        guard: ConvergenceGuard | None,
    ) -> None:
        self._controller, self._identity, self._ready, self._handle = controller, identity, ready, handle
        self._desk = None if guard is None else GuardDesk(guard, self._answer)
        self._loop = asyncio.new_event_loop()
        self._stream: FramedStream | None = None
        self._wanted: StopRequest | None = None

    def run(self) -> None:
        """The thread: whatever happens ends up in the handle."""
        try:
            self._loop.run_until_complete(self._converse())
        except FlodlError as error:
            self._fail(error)
        except Exception as error:  # a bug on our side: the user must not wait for ever
            log.exception("the head's connection failed")
            self._report(error)
            self._fail(error)
        finally:
            if self._desk is not None:
                self._desk.close()
            self._loop.close()

    def ask_stop(self, source: str, exit_code: int) -> None:
        """Ask for an orderly stop; from any thread."""
        request = StopRequest(f"{source} in the script", abort=False, exit_code=exit_code)
        with contextlib.suppress(RuntimeError):  # the conversation is over
            self._loop.call_soon_threadsafe(self._stop, request)

    def ask_stop_for(self, number: signal.Signals) -> None:
        """The same, for a signal by which the script shall end once the run has stopped."""
        self._handle.end_with(exit_code_of(number))
        self.ask_stop(number.name, exit_code_of(number))

    async def _converse(self) -> None:
        self._stream, _ = await connect_control(self._controller, self._identity, ToHead)
        self._stream.send(self._ready)
        if self._wanted is not None:
            self._stop(self._wanted)
        try:
            while True:
                self._hear(await self._stream.receive())  # type: ignore[arg-type]  # the stream lets nothing else through
        except ConnectionLost as error:
            if not self._handle.is_over():
                raise PeerLost(f"the controller is gone ({error}); the run ends without a result") from error

    def _hear(self, message: ToHead) -> None:
        match message:
            case EpochReport():
                self._handle.publish_metrics(EpochMetrics.from_report(message))
            case EvalReport(epoch, value):
                self._handle.publish_eval(epoch, value)
            case RunEnded():
                self._end(message)
            case JudgeRound(figures):
                if self._desk is not None:
                    self._desk.ask(figures)
            case _:
                assert_never(message)

    def _end(self, ended: RunEnded) -> None:
        if ended.outcome == "failed" or not ended.state_path:
            message = ended.message or f"the run {ended.outcome} without a trained state"
            self._fail(run_failed(ended.exit_code, message), is_headline=ROLE_VARIABLE in os.environ)
            return
        state = load_state(ended.state_path, ended.outcome)
        self._handle.finish(dataclasses.replace(state, epochs=ended.epochs))

    def _stop(self, request: StopRequest) -> None:
        self._wanted = request
        if self._stream is not None:
            self._stream.send(request)

    def _answer(self, judged: RoundJudged) -> None:
        """From the guard's thread."""
        with contextlib.suppress(RuntimeError):  # the conversation is over
            self._loop.call_soon_threadsafe(self._send, judged)

    def _send(self, judged: RoundJudged) -> None:
        if self._stream is not None:
            self._stream.send(judged)

    def _report(self, error: Exception) -> None:
        if self._stream is not None:
            text = "".join(traceback.format_exception(error))
            self._stream.send(HeadError(f"{type(error).__name__}: {error}", text))

    def _fail(self, error: Exception, is_headline: bool = False) -> None:
        """``join()`` raises it; uncaught, it is one line: the script did nothing wrong here. ``is_headline``: what
        ``fdl launch`` ends with says it too, and here the log alone repeats it.
        """
        if isinstance(error, FlodlError):
            _print_without_traceback(error, MARK if is_headline else "")
        self._handle.fail(error)


def _print_without_traceback(quiet: FlodlError, mark: str) -> None:
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not quiet:
            show(kind, error, trace)
            return
        words = f"flodl: {printable(str(error))}"
        sys.stderr.write("".join(f"{mark}{line}\n" for line in words.splitlines()))
        raise SystemExit(quiet.exit_code)  # from a hook the interpreter takes it, and atexit handlers run

    sys.excepthook = hook


def _token(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.read_text(encoding="ascii"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the run's token cannot be read") from None
    except ValueError:
        raise ConfigError(f"{path}: not a token, expected hex digits") from None
