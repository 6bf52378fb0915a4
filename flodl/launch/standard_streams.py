"""Standard input, output and error, in whatever state a process was given them.

A closed one is opened to nothing: a socket that got its number would be taken for it by every child. What cannot be
written to standard output ends the command; what cannot be written to standard error is not said, and the work goes on.
"""

import errno
import io
import os
import sys
from typing import ClassVar, Final, TextIO

from flodl.errors import FlodlError

STDOUT: Final = 1
STDERR: Final = 2


class OutputLost(FlodlError):
    """Standard output takes no more: the disk is full, or the terminal gone."""


class ReaderGone(OutputLost):
    """Whoever read our standard output has closed it, as ``head`` does when it has seen enough."""

    exit_code: ClassVar[int] = 141


def open_closed() -> None:
    """Open those of the three that are closed to ``/dev/null``. To be called before anything else is opened."""
    for number in (0, STDOUT, STDERR):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w", closefd=False)


def guard() -> None:
    """Let a write that fails be ``OutputLost`` on standard output, and nothing on standard error.

    It is told where the write is made: an OSError alone does not say whose it was. Streams that somebody has put in the
    place of the process's own are left alone.
    """
    if (output := sys.__stdout__) is not None and sys.stdout is output:
        sys.stdout = _over(_Output(STDOUT, "w", closefd=False), output)
    if (words := sys.__stderr__) is not None and sys.stderr is words:
        sys.stderr = _over(_Words(STDERR, "w", closefd=False), words)


def give_up_output() -> None:
    """Nothing is written to standard output any more; the interpreter flushes what it still holds at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, STDOUT)
    os.close(nothing)


class _Output(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]  # whatever has a buffer
        except OSError as error:
            kind = ReaderGone if error.errno == errno.EPIPE else OutputLost
            raise kind(f"stdout: {error.strerror}") from None


class _Words(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]  # whatever has a buffer
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def _over(raw: io.FileIO, like: TextIO) -> TextIO:
    by_line, through = (bool(getattr(like, each, False)) for each in ("line_buffering", "write_through"))
    buffer = raw if through else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, like.encoding, like.errors, line_buffering=by_line, write_through=through)
