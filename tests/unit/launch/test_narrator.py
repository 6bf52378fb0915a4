"""What a terminal shows of a run, and on which stream."""

import io

import pytest

from flodl.launch.last_words import HOLD_S, MAX_HELD_LINES, MAX_TOLD, error_of
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


def line(text: str, rank: int = 0, stream: str = "stderr") -> dict[str, object]:
    return {"rank": rank, "host": "a" if rank >= 0 else "", "stream": stream, "text": text}


MISUSE = ("flodl.errors.ConfigError: batch_size 0", "  in your script, most recent call last:", '  File "t.py", line 2')


def misuse(shown: Shown, rank: int, now_s: float) -> None:
    for text in MISUSE:
        shown.narrator.log(line(text, rank), now_s)


def test_lines_of_the_script_keep_their_stream(shown: Shown) -> None:
    shown.narrator.log(line("accuracy 0.9\n", 1, "stdout"), 1.0)
    shown.narrator.log(line("a warning\n", 1), 1.0)
    shown.narrator.log(line(f"{MARK}for a closer look\n", -1), 1.0)
    assert shown.taken() == (["a:1: accuracy 0.9"], ["a:1: a warning"])


def test_what_preflight_warns_of_is_said_and_is_no_result(shown: Shown) -> None:
    shown.narrator.event({"event": "preflight", "severity": "warning", "detail": "host a: clock: late"}, 1.0)
    assert shown.taken() == ([], ["fdl: warning: host a: clock: late"])


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"event": "epoch", "severity": "info", "fields": {"epoch": 1, "num_epochs": 3}}, "fdl: epoch 2/3"),
        ({"event": "eval", "severity": "info", "detail": "epoch 2: 0.75"}, "fdl: epoch 2: 0.75"),
        ({"event": "rank_lost", "severity": "critical", "detail": "rank 1"}, "fdl: rank_lost: rank 1"),
        ({"event": "peer_suspect", "severity": "warning", "detail": "\x1b[2J"}, r"fdl: peer_suspect: \x1b[2J"),
    ],
)
def test_results_and_alerts_are_data(shown: Shown, event: dict[str, object], told: str) -> None:
    shown.narrator.event(event, 1.0)
    assert shown.taken() == ([told], [])


def test_everything_else_that_flodl_says_is_chatter(shown: Shown) -> None:
    shown.narrator.event({"event": "host_joined", "severity": "info", "detail": "a joined"}, 1.0)
    shown.narrator.event({"event": "rank_joined", "severity": "info"}, 1.0)
    shown.narrator.event({"event": "commit", "severity": "info", "detail": "version 1"}, 1.0)
    assert shown.taken() == ([], ["fdl: a joined", "fdl: rank_joined"])


def test_what_comes_with_every_round_is_shown_now_and_then_and_before_each_epoch(shown: Shown) -> None:
    def cadence(version: int, now_s: float) -> None:
        detail = f"version {version}: anchor 10"
        shown.narrator.event({"event": "cadence", "severity": "info", "detail": detail}, now_s)

    epoch = {"event": "epoch", "severity": "info", "fields": {"epoch": 0}}
    for version in range(100):
        cadence(version, 1.0 + version * 0.1)
    assert shown.taken()[1] == [f"fdl: version {version}: anchor 10" for version in (0, 50)]
    shown.narrator.event(epoch, 11.0)
    assert shown.taken() == (["fdl: epoch 1"], ["fdl: version 99: anchor 10"])
    shown.narrator.event(epoch, 11.0)
    cadence(100, 15.9)
    assert shown.taken() == (["fdl: epoch 1"], [])
    cadence(101, 16.0)
    assert shown.taken()[1] == ["fdl: version 101: anchor 10"]


# ----------------------------------------------------------------------------------------------------------- last words
FAILURE = {"kind": "exit", "host": "a", "rank": 1, "error": "exited with code 2"}


def test_words_that_the_headline_shows_are_not_shown_before_it(shown: Shown) -> None:
    for rank in (-1, 0, 1):
        misuse(shown, rank, 1.0)
    shown.narrator.log(line("goes on", 2), 1.0)
    shown.narrator.tick(1.0)
    shown.narrator.end(FAILURE)
    assert shown.taken() == ([], ["a:2: goes on"])


@pytest.mark.parametrize("failure", [None, {"kind": "refused", "host": "", "rank": -1}, {"kind": "exit", "rank": 7}])
def test_words_that_no_headline_shows_are_shown_at_the_end_once(
    shown: Shown, failure: dict[str, object] | None
) -> None:
    for rank in (-1, 0, 1):
        misuse(shown, rank, 1.0)
    shown.narrator.end(failure)
    assert shown.taken() == ([], [*MISUSE, "fdl: the same came from rank 0 on a, rank 1 on a"])


def test_head_that_fails_has_a_headline_too(shown: Shown) -> None:
    misuse(shown, -1, 1.0)
    shown.narrator.end({"kind": "head", "host": "", "rank": -1})
    assert shown.taken() == ([], [])


@pytest.mark.parametrize(
    "first",
    [
        "Traceback (most recent call last):",
        "  + Exception Group Traceback (most recent call last):",
        '  File "/x/train.py", line 3',
        "flodl.errors.UsageError: no",
    ],
)
def test_words_of_a_run_that_goes_on_are_shown_after_a_moment(shown: Shown, first: str) -> None:
    shown.narrator.log(line(first), 1.0)
    shown.narrator.log(line("more"), 2.0)
    shown.narrator.log(line("on the other stream", stream="stdout"), 2.0)
    shown.narrator.tick(HOLD_S + 0.9)
    assert shown.taken() == (["a:0: on the other stream"], [])
    shown.narrator.tick(HOLD_S + 1.0)
    shown.narrator.log(line("and on"), HOLD_S + 1.0)
    assert shown.taken() == ([], [f"a:0: {first}", "a:0: more", "a:0: and on"])


def test_words_that_were_shown_are_not_repeated(shown: Shown) -> None:
    misuse(shown, 0, 1.0)
    shown.narrator.tick(10.0)
    assert len(shown.taken()[1]) == len(MISUSE)
    for rank in range(1, 11):
        misuse(shown, rank, 20.0)
    shown.narrator.tick(30.0)
    named = ", ".join(f"rank {rank} on a" for rank in range(1, 9))
    assert shown.taken() == ([], [f"fdl: the same came from {named} and 2 more"])


def test_what_is_remembered_is_bounded(shown: Shown) -> None:
    for number in range(MAX_TOLD + 1):
        shown.narrator.log(line(f"flodl.errors.ConfigError: {number}"), 1.0)
        shown.narrator.tick(10.0)
    shown.taken()
    for number in (0, MAX_TOLD):
        shown.narrator.log(line(f"flodl.errors.ConfigError: {number}"), 1.0)
        shown.narrator.tick(10.0)
    again = ["a:0: flodl.errors.ConfigError: 0", "fdl: the same came from rank 0 on a"]
    assert shown.taken() == ([], again)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "warning\nTraceback (most recent call last):\n  File ..\nValueError: boom\n[W] an exit handler",
            "ValueError: boom",
        ),
        ('  File "t.py", line 3\n    x = \n        ^\nSyntaxError: invalid syntax', "SyntaxError: invalid syntax"),
        ("flodl.errors.ConfigError: batch_size 0\n  in your script", "flodl.errors.ConfigError: batch_size 0"),
        ("Traceback (most recent call last):\nA: 1\n\nTraceback (most recent call last):\nB: 2", "B: 2"),
        ("a warning\nand more", ""),
        ("Traceback (most recent call last):\n  File", ""),
    ],
)
def test_error_is_found_in_last_words(text: str, error: str) -> None:
    assert error_of(text.split("\n")) == error


def test_endless_words_are_shown_at_once(shown: Shown) -> None:
    shown.narrator.log(line("Traceback (most recent call last):"), 1.0)
    for number in range(MAX_HELD_LINES - 1):
        shown.narrator.log(line(str(number)), 1.0)
    shown.narrator.tick(1.0)
    assert len(shown.taken()[1]) == MAX_HELD_LINES
