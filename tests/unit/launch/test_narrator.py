"""What a terminal shows of a run, and on which stream."""

import io

import pytest

from flodl.launch.narrator import Narrator
from flodl.launch.terminal import Terminal
from flodl.spec.uncaught import MARK


class Shown:
    """A narrator, and what it has written."""

    def __init__(self) -> None:
        self._out, self._err = io.StringIO(), io.StringIO()
        self.narrator = Narrator(Terminal(self._out, self._err))

    def taken(self) -> tuple[list[str], list[str]]:
        """The lines of stdout and of stderr since the last call."""
        taken = self._out.getvalue().splitlines(), self._err.getvalue().splitlines()
        for stream in (self._out, self._err):
            stream.seek(0)
            stream.truncate()
        return taken


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_lines_of_the_script_keep_their_stream(shown: Shown) -> None:
    shown.narrator.log({"rank": 1, "host": "a", "stream": "stdout", "text": "accuracy 0.9\n"})
    shown.narrator.log({"rank": 1, "host": "a", "stream": "stderr", "text": "a warning\n"})
    shown.narrator.log({"rank": -1, "stream": "stderr", "text": f"{MARK}for a closer look\n"})
    assert shown.taken() == (["a:1: accuracy 0.9"], ["a:1: a warning"])


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"event": "epoch", "severity": "info", "fields": {"epoch": 1, "num_epochs": 3}}, "fdl: epoch 2/3"),
        ({"event": "eval", "severity": "info", "detail": "epoch 2: 0.75"}, "fdl: epoch 2: 0.75"),
        ({"event": "rank_lost", "severity": "critical", "detail": "rank 1"}, "fdl: rank_lost: rank 1"),
        ({"event": "peer_suspect", "severity": "warning", "detail": "\x1b[2J"}, r"fdl: peer_suspect: \x1b[2J"),
    ],
)
def test_results_and_alerts_are_data(shown: Shown, event: dict[str, object], line: str) -> None:
    shown.narrator.event(event)
    assert shown.taken() == ([line], [])


def test_everything_else_that_flodl_says_is_chatter(shown: Shown) -> None:
    shown.narrator.event({"event": "host_joined", "severity": "info", "detail": "a joined"})
    shown.narrator.event({"event": "rank_joined", "severity": "info"})
    shown.narrator.event({"event": "commit", "severity": "info", "detail": "version 1"})
    assert shown.taken() == ([], ["fdl: a joined", "fdl: rank_joined"])
