"""What an uncaught error of flodl leaves: the exit code that docs/operations.md gives to its class, and its words.

A ``ConfigError``, which is the script's to mend, is told by its message and the script's own places; so are the errors
with which ``join()`` ends a training, ``CheckpointError`` and ``RankFailed``, where nothing else caused them. Under
``fdl`` the whole traceback follows in the log, each line marked: the launching terminal leaves these lines out. Without
``fdl`` there is no log, and ``FDL_TRACEBACK=1`` shows the whole instead.
"""

import os
import sys
import traceback
from types import FrameType, TracebackType

from flodl.errors import CheckpointError, ConfigError, FlodlError, RankFailed
from flodl.spec.context import ROLE_VARIABLE

MARK = "flodl traceback | "
"""Begins every line of a log that is for a closer look only."""

TRACEBACK_VARIABLE = "FDL_TRACEBACK"

_NOT_THE_SCRIPT = frozenset({"flodl", "runpy", "torch"})
_HINT = f"{TRACEBACK_VARIABLE}=1 shows the whole traceback\n"
_is_installed = False


def exit_with_own_code() -> None:
    """Let an uncaught ``FlodlError`` end this process with its ``exit_code``, after it has been shown.

    A second call changes nothing. Other exceptions are left to the hook that was there, and so are all words where the
    script has a hook of its own.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_ours = _is_told(error) and show is sys.__excepthook__ and sys.stderr is not None
        is_logged = ROLE_VARIABLE in os.environ
        if is_ours and (is_logged or not os.environ.get(TRACEBACK_VARIABLE)):
            sys.stderr.write(_words(error, trace) + (_whole(error) if is_logged else _HINT))
        else:
            show(kind, error, trace)
        if isinstance(error, FlodlError):
            raise SystemExit(error.exit_code)  # from a hook the interpreter takes it, and atexit handlers run

    sys.excepthook = hook


def _is_told(error: BaseException) -> bool:
    """Whether its message tells what flodl's own frames could."""
    is_of_join = isinstance(error, CheckpointError | RankFailed) and error.__cause__ is None
    return is_of_join or isinstance(error, ConfigError)


def _words(error: BaseException, trace: TracebackType | None) -> str:
    places = traceback.StackSummary.extract(place for place in _stack(trace) if _is_of_script(place[0]))
    header = ["  in your script, most recent call last:\n"] if places else []
    return "".join([*traceback.format_exception_only(error), *header, *places.format()])


def _whole(error: BaseException) -> str:
    return "".join(f"{MARK}{line}\n" for line in "".join(traceback.format_exception(error)).splitlines())


def _stack(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Every frame down to the error, with its line: the callers of the one that caught it, too."""
    if trace is None:
        return []
    caller = trace.tb_frame.f_back
    above = [] if caller is None else list(traceback.walk_stack(caller))
    return [*reversed(above), *traceback.walk_tb(trace)]


def _is_of_script(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_SCRIPT
