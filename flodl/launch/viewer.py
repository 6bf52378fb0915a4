"""Watches a run for the terminal that launched it, or that attached itself: progress, logs, and how it ended.

The run does not live here: whatever happens to the viewer, the controller goes on. The first Ctrl-C asks it for an
orderly stop, the second to end at once; SIGTERM and SIGUSR1 stop in order, SIGHUP and the key ``d`` leave the run
alone.
"""

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flodl.core.ending import EXIT_INTERRUPTED, process_exit_code
from flodl.errors import FlodlError
from flodl.launch import interruption
from flodl.launch.control import ControllerClient
from flodl.launch.headline import describe_outcome
from flodl.launch.keyboard import Keyboard
from flodl.launch.narrator import Narrator
from flodl.launch.progress import Progress
from flodl.launch.rundir import ControllerInfo, RunDir, outcome_exit_code, process_started
from flodl.launch.standard_streams import OutputLost
from flodl.launch.terminal import Terminal
from flodl.launch.waiting import Waiting

POLL_S: Final = 0.2
STATE_EVERY_S: Final = 1.0
DRAIN_S: Final = 3.0
"""After the end, how long the rest of the logs may take."""

ABORT_GRACE_S: Final = 4.0
"""A controller that has not ended this long after the second Ctrl-C is ended by us: its daemons notice at once."""

VANISHED_S: Final = 2.0
QUEUE_LINES: Final = 10_000
"""A full queue makes the followers wait, and with them the controller's stream: it drops slow readers."""

STDIN: Final = 0
DETACH: Final = b"d"
CAUGHT: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
RED: Final = "red"


@dataclass(frozen=True, slots=True)
class Detached:
    """The viewer has left; the run goes on. ``exit_code``: 128 + N where signal N made it leave."""

    exit_code: int = 0


class Viewer:
    """One run on one terminal. ``watch`` returns the exit code, or Detached."""

    def __init__(
        self,
        run: RunDir,
        info: ControllerInfo,
        terminal: Terminal,
        reap: Callable[[], object] = lambda: None,
        lines: int | None = None,
        signals: deque[int] | None = None,
    ) -> None:
        """``reap`` collects the controller's exit status when it is our child, so that its end can be seen. ``lines``:
        of the logs, and as many events, are shown of what was before; None shows all. ``signals`` came before
        the viewer, and may still.
        """
        self._run = run
        self._info = info
        self._terminal = terminal
        self._reap = reap
        self._keys = Keyboard(STDIN if terminal.is_interactive else None)
        self._client = ControllerClient.of(run, info)
        self._history: dict[str, str | int] = {} if lines is None else {"tail": lines}
        self._lines: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(QUEUE_LINES)
        self._signals: deque[int] = deque(maxlen=16) if signals is None else signals
        self._state: dict[str, Any] = {}
        self._asking: threading.Thread | None = None
        self._narrator = Narrator(terminal)
        self._progress = Progress()
        self._waiting = Waiting()
        self._stops = 0
        self._stopped_at_s = 0.0
        self._abort_at_s: float | None = None

    def watch(self) -> int | Detached:
        """Show the run until it ends, or until ``d`` or SIGHUP."""
        followers = [
            threading.Thread(target=self._follow, args=(path,), daemon=True, name=f"fdl{path}")
            for path in ("/events", "/logs")
        ]
        heard = interruption.caught(CAUGHT, lambda number, _: self._signals.append(number))
        with heard, self._keys:
            if self._keys.is_attentive:
                self._terminal.say("fdl: Ctrl-C stops the run in order, d detaches")
            for follower in followers:
                follower.start()
            try:
                return self._loop(followers)
            except OutputLost:
                self._terminal.close()
                self._terminal.say(f"fdl: {self._left_words()}")
                raise
            finally:
                self._terminal.close()

    def _loop(self, followers: list[threading.Thread]) -> int | Detached:
        state_at_s, gone_at_s = 0.0, None
        while True:
            now_s = time.monotonic()
            while self._signals:
                number = self._signals.popleft()
                if number == signal.SIGHUP:
                    return self._detached("detached by SIGHUP", process_exit_code(0, number))
                self._on_signal(number)
            if self._keys.pressed(DETACH):
                return self._detached("detached")
            if now_s - state_at_s >= STATE_EVERY_S:
                state_at_s = now_s
                self._refresh()
            self._take_lines(POLL_S)
            self._narrator.tick(now_s)
            self._terminal.refresh()
            self._enforce_abort()
            self._reap()
            outcome = self._run.read_json("outcome.json")
            if outcome is not None:
                return self._ended(outcome, followers)
            if self._is_alive():
                gone_at_s = None
            elif gone_at_s is None:
                gone_at_s = now_s
            elif now_s - gone_at_s >= VANISHED_S:
                return self._vanished()

    # ------------------------------------------------------------------------------------------------------ signals
    def _on_signal(self, number: int) -> None:
        if self._stops and not self._is_impatient(number):
            return
        exit_code = process_exit_code(0, number)
        self._stops += 1
        if self._stops == 1:
            self._stopped_at_s = time.monotonic()
            leave = ", d to leave it to itself" if self._keys.is_attentive else ""
            self._terminal.say(f"fdl: stopping in order; press Ctrl-C again to end it at once{leave}")
            self._ask(signal.Signals(number).name, abort=False, exit_code=exit_code)
        elif self._stops == 2:
            self._terminal.say("fdl: ending at once")
            self._abort_at_s = time.monotonic() + ABORT_GRACE_S
            self._ask(signal.Signals(number).name, abort=True, exit_code=exit_code)

    def _is_impatient(self, number: int) -> bool:
        """Somebody wants the end at once. Schedulers send their signals to everyone, twice, and one after the other."""
        is_late = time.monotonic() - self._stopped_at_s > interruption.REPEAT_S
        return number == signal.SIGINT or (number == signal.SIGTERM and is_late)

    def _ask(self, source: str, *, abort: bool, exit_code: int) -> None:
        def ask() -> None:
            try:
                self._client.stop(source, abort=abort, exit_code=exit_code)
            except FlodlError as error:
                self._put("note", {"text": f"fdl: the controller did not hear it: {error}"})

        threading.Thread(target=ask, daemon=True, name="fdl-stop").start()

    def _enforce_abort(self) -> None:
        if self._abort_at_s is not None and time.monotonic() >= self._abort_at_s:
            self._abort_at_s = None
            if self._is_alive():
                self._terminal.say("fdl: the controller does not answer; ending it")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._info.pid, signal.SIGKILL)

    # ------------------------------------------------------------------------------------------------------ streams
    def _follow(self, path: str) -> None:
        cursor = 0
        while True:
            query = self._history if not cursor else {}
            try:
                for line in self._client.follow(path, {"cursor": cursor, "follow": 1, **query}):
                    cursor = int(line.get("cursor", line.get("seq", cursor)))
                    self._put(path, line)
            except (FlodlError, ValueError, TypeError):
                pass
            if not self._is_alive() or self._run.outcome_json.exists():
                return
            time.sleep(POLL_S)

    def _put(self, kind: str, line: dict[str, Any]) -> None:
        self._lines.put((kind, line))

    def _take_lines(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                kind, line = self._lines.get(timeout=left_s)
            except queue.Empty:
                return
            self._show(kind, line)

    def _show(self, kind: str, line: dict[str, Any]) -> None:
        match kind:
            case "/logs":
                self._narrator.log(line, time.monotonic())
            case "/events":
                self._narrator.event(line, time.monotonic())
            case "state":
                self._show_state(line, time.monotonic())
            case _:
                self._terminal.say(str(line.get("text", "")))

    def _refresh(self) -> None:
        """Have the run's state brought: by a thread, for a controller that hangs must not make Ctrl-C wait."""
        is_wanted = self._terminal.is_live or self._stops > 0
        if is_wanted and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._bring_state, daemon=True, name="fdl-state")
            self._asking.start()

    def _bring_state(self) -> None:
        with contextlib.suppress(FlodlError):
            self._put("state", self._client.state())

    def _show_state(self, state: dict[str, Any], now_s: float) -> None:
        self._state = state
        self._terminal.show(self._progress.line(state, now_s))
        if self._stops and (line := self._waiting.look(state, now_s)):
            self._terminal.say(f"fdl: {line}")

    # ---------------------------------------------------------------------------------------------------------- end
    def _is_alive(self) -> bool:
        return process_started(self._info.pid) == self._info.started

    def _detached(self, how: str, exit_code: int = 0) -> Detached:
        self._narrator.end(None)
        self._terminal.close()
        self._terminal.say(f"fdl: {how}; {self._left_words()}")
        return Detached(exit_code)

    def _left_words(self) -> str:
        run_id = self._run.run_id
        if self._run.outcome_json.exists():
            return f"run {run_id} has ended; fdl status {run_id}"
        goes = "stops by itself" if self._stops else "goes on"
        return f"run {run_id} {goes}; fdl attach {run_id}, fdl stop {run_id}"

    def _ended(self, outcome: Mapping[str, Any], followers: list[threading.Thread]) -> int:
        deadline_s = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline_s:
            self._take_lines(0.05)
            if not any(follower.is_alive() for follower in followers):
                break
        self._take_lines(0.05)
        failure = outcome.get("failure")
        self._narrator.end(failure if isinstance(failure, dict) else None)
        self._terminal.close()
        state = self._run.read_json("state.json") or self._state
        style = RED if outcome.get("status") == "failed" else ""
        for line in describe_outcome(self._run, outcome, state):
            self._terminal.say(f"fdl: {line}", style)
            style = ""
        return outcome_exit_code(outcome)

    def _vanished(self) -> int:
        if self._stops >= 2:
            return EXIT_INTERRUPTED
        self._narrator.end(None)
        is_plain = (self._run.read_json("run.json") or {}).get("plain") is not None
        resume = f"\nfdl: from its last checkpoint, where it saved one: fdl launch --resume {self._run.run_id}"
        self._terminal.say(
            f"fdl: the controller (pid {self._info.pid}) has vanished without a word; its hosts stop by themselves\n"
            f"fdl: its log: {self._run.logs / 'controller.log'}" + ("" if is_plain else resume),
            RED,
        )
        return 1
