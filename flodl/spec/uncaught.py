"""What an uncaught error of flodl leaves: the exit code that docs/operations.md gives to its class, and its words.

Under ``fdl`` a ``ConfigError``, which is the script's to mend, is told by its message and the script's own places. The
whole traceback follows in the log, each line marked: the launching terminal leaves these lines out.
"""

import os
import sys
import traceback
from types import FrameType, TracebackType

from flodl.errors import ConfigError, FlodlError
from flodl.spec.context import ROLE_VARIABLE

MARK = "flodl traceback | "
"""Begins every line of a log that is for a closer look only."""

_NOT_THE_SCRIPT = frozenset({"flodl", "runpy"})
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
        is_logged = ROLE_VARIABLE in os.environ and show is sys.__excepthook__
        if is_logged and isinstance(error, ConfigError) and sys.stderr is not None:
            sys.stderr.write(_words(error, trace))
        else:
            show(kind, error, trace)
        if isinstance(error, FlodlError):
            raise SystemExit(error.exit_code)  # from a hook the interpreter takes it, and atexit handlers run

    sys.excepthook = hook


def _words(error: BaseException, trace: TracebackType | None) -> str:
    places = traceback.StackSummary.extract(place for place in _stack(trace) if _is_of_script(place[0]))
    header = ["  in your script, most recent call last:\n"] if places else []
    whole = "".join(traceback.format_exception(error)).splitlines()
    return "".join(
        [
            *traceback.format_exception_only(error),
            *header,
            *places.format(),
            *(f"{MARK}{line}\n" for line in whole),
        ]
    )


def _stack(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Every frame down to the error, with its line: the callers of the one that caught it, too."""
    if trace is None:
        return []
    caller = trace.tb_frame.f_back
    above = [] if caller is None else list(traceback.walk_stack(caller))
    return [*reversed(above), *traceback.walk_tb(trace)]


def _is_of_script(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_SCRIPT
