"""The last words of processes that fail: held back for a moment, so that the same ones are shown once. Pure.

A failure that ends a run is shown as its headline, with the lines that the process left; a misuse of flodl comes from
the head and from every rank alike. So what a process says on its stderr from a traceback or a misuse on waits for the
run's end. It does not wait long: where the run goes on, it is told after all, the same words of several processes once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flodl.core.ending import KIND_HEAD
from flodl.monitor.log_store import HEAD

HOLD_S: Final = 5.0
"""From a process's failure to the run's end it takes a round and the farewell, mostly less than this."""

MAX_HELD_LINES: Final = 400
MAX_TOLD: Final = 64
"""So many different last words are remembered; a run whose ranks fail in more ways repeats some."""

_TRACEBACK: Final = r".*Traceback \(most recent call last\):"
_MARK: Final = re.compile(r"^\[rank\d+\]: ?")
"""Before each line of a traceback, from a rank in a group of torch.distributed."""

_BEGINS: Final = re.compile(rf'flodl\.errors\.\w+: |  File ".+", line \d+$|{_TRACEBACK}')
"""A misuse of flodl, a script that cannot be parsed, anything else that was not caught."""


@dataclass(slots=True)
class LastWords:
    """What one process has said, as lines of the log stream. ``speakers`` have said the same; ``is_known``: as others
    whose words have been shown.
    """

    since_s: float
    lines: list[Mapping[str, Any]] = field(default_factory=list)
    speakers: list[str] = field(default_factory=list)
    is_known: bool = False

    @property
    def text(self) -> tuple[str, ...]:
        """The words without their speaker."""
        return tuple(_unmarked(str(line.get("text", "")).rstrip()) for line in self.lines)


class Held:
    """See the module docstring."""

    def __init__(self) -> None:
        self._held: dict[int, LastWords] = {}
        self._told: dict[tuple[str, ...], None] = {}

    def take(self, line: Mapping[str, Any], now_s: float) -> bool:
        """Whether ``line`` belongs to last words, and is kept here."""
        rank = _rank(line)
        if line.get("stream") != "stderr":
            return False
        if rank not in self._held:
            if not _begins(str(line.get("text", ""))):
                return False
            self._held[rank] = LastWords(now_s)
        self._held[rank].lines.append(line)
        return True

    def due(self, now_s: float) -> list[LastWords]:
        """What has been held for too long, or is too much."""
        ranks = [
            rank
            for rank, words in self._held.items()
            if now_s - words.since_s >= HOLD_S or len(words.lines) >= MAX_HELD_LINES
        ]
        return self._release(ranks)

    def rest(self, failure: Mapping[str, Any] | None) -> list[LastWords]:
        """What is to be shown at the run's end: nothing where the headline, which is of ``failure``, shows it."""
        if failure is not None and _speaker(failure) in self._held:
            self._held.clear()
        return self._release(list(self._held))

    def _release(self, ranks: list[int]) -> list[LastWords]:
        released: list[LastWords] = []
        for rank in ranks:
            if rank not in self._held:
                continue  # somebody said the same, and they went together
            words = self._held[rank]
            alike = [other for other, each in self._held.items() if each.text == words.text]
            words.speakers = [_who(self._held.pop(other).lines[0]) for other in alike]
            words.is_known = words.text in self._told
            self._told[words.text] = None
            if len(self._told) > MAX_TOLD:
                del self._told[next(iter(self._told))]
            released.append(words)
        return released


def error_of(lines: Sequence[str]) -> str:
    """The line that names the error in the last words which end ``lines``; empty where there are none."""
    begun = [number for number, line in enumerate(lines) if _begins(line)]
    said = [_unmarked(line) for line in lines[begun[-1] :]] if begun else []
    return next((line for line in said if line[:1].strip() and not re.match(_TRACEBACK, line)), "")


def _unmarked(text: str) -> str:
    return _MARK.sub("", text)


def _begins(text: str) -> bool:
    return _BEGINS.match(text.rstrip("\n")) is not None


def _speaker(failure: Mapping[str, Any]) -> int | None:
    """The process whose log the headline shows."""
    rank = _rank(failure)
    return rank if rank != HEAD or failure.get("kind") == KIND_HEAD else None


def _rank(line: Mapping[str, Any]) -> int:
    rank = line.get("rank", HEAD)
    return rank if isinstance(rank, int) else HEAD


def _who(line: Mapping[str, Any]) -> str:
    rank = _rank(line)
    return "the head" if rank == HEAD else f"rank {rank} on {line.get('host', '')}"
