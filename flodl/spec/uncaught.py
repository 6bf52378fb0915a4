"""An uncaught error of flodl ends the script with the code that docs/operations.md gives to its class."""

import sys
from types import TracebackType

from flodl.errors import FlodlError

_is_installed = False


def exit_with_own_code() -> None:
    """Let an uncaught ``FlodlError`` end this process with its ``exit_code``, after the traceback as ever.

    A second call changes nothing. Other exceptions are left to the hook that was there.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if isinstance(error, FlodlError):
            raise SystemExit(error.exit_code)  # from a hook the interpreter takes it, and atexit handlers run

    sys.excepthook = hook
