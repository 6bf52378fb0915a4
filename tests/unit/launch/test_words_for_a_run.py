"""The live line, log lines, the headline at the end, and a terminal on which they do not mix."""

import io
import os
import pty
import re
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from flodl.launch import terminal
from flodl.launch.headline import describe_outcome, last_lines
from flodl.launch.progress import Progress, duration, epoch_line, is_shown, log_line, phase_words
from flodl.launch.rundir import RunDir
from flodl.launch.terminal import Terminal
from flodl.launch.viewer import RED
from flodl.spec.uncaught import MARK

FAILURE = {
    "kind": "exception",
    "host": "node-b",
    "rank": 2,
    "error": "ValueError: boom",
    "traceback": "Traceback\nValueError: boom",
    "exit_code": 1,
    "signal": 0,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "logs").mkdir()
    return RunDir(tmp_path)


# ------------------------------------------------------------------------------------------------------------ progress
def test_live_line_has_epoch_loss_rate_and_time_left() -> None:
    progress = Progress()
    state = {"phase": "training", "epoch": 0, "num_epochs": 2, "samples_merged": 0, "epoch_samples": 100, "ranks": []}
    progress.line(state, 10.0)
    ranks = [{"loss": 1.0, "share": 0.75}, {"loss": 2.0, "share": 0.25}, {"loss": None}]
    line = progress.line({**state, "epoch": 1, "samples_merged": 50, "ranks": ranks}, 20.0)
    assert "epoch 2/2" in line
    assert "50%" in line
    assert "loss 1.25" in line
    assert "15 samples/s" in line
    assert "left 3.3s" in line
    stopping = {**state, "epoch": 1, "samples_merged": 50}
    for change in ({"phase": "ending"}, {"message": "stopped by fdl stop"}):
        assert "left" not in progress.line({**stopping, **change}, 21.0)


def test_live_line_before_training_is_the_phase() -> None:
    assert Progress().line({"phase": "waiting", "num_epochs": None}, 0.0) == "waiting"


def window(**changes: object) -> dict[str, object]:
    join = {"start": "auto", "is_held": False, "has_least": False, "ranks": 1, "least": 2, "target": None}
    return {"phase": "waiting", "join": {**join, "closes_in_s": 45.0, "fails_in_s": 345.0, **changes}}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (window(), "waiting: 1 of 2 ranks are there, it fails in 5m45s with fewer than 2"),
        (window(target=4, has_least=True, ranks=2), "waiting: 2 of 4 ranks are there, it starts in 45s"),
        (window(least=None), "waiting: 1 rank is there, it fails in 5m45s"),
        (
            window(is_held=True, has_least=True, closes_in_s=None),
            "waiting: 1 of 2 ranks are there, fdl start starts the run",
        ),
        ({"phase": "waiting", "join": None}, "waiting"),
        ({"phase": "staging", "ranks": []}, "staging"),
        (
            {"phase": "staging", "ranks": [{"state": "ready"}, {"state": "spawned"}, 7]},
            "staging: model built by 1 of 3 ranks",
        ),
        ({"phase": "forming"}, "forming"),
        ({}, "unknown"),
    ],
)
def test_phase_of_a_run_that_starts_says_how_far_it_has_come(state: dict[str, object], words: str) -> None:
    assert phase_words(state) == words


def test_live_line_of_a_plain_run_counts_its_ranks() -> None:
    state = {
        "phase": "running",
        "plain": {"restarts": 0, "max_restarts": 0, "uptime_s": 61.0},
        "ranks": [{"state": "live"}, {"state": "finished"}],
    }
    assert Progress().line(state, 0.0) == "running  1 of 2 ranks alive  up 1m01s"
    frozen = {**state, "ranks": [{"state": "live"}, {"state": "frozen"}]}
    assert Progress().line(frozen, 0.0) == "running  2 of 2 ranks alive, 1 frozen  up 1m01s"
    assert Progress().line({**state, "ranks": []}, 0.0) == "running"


def test_rate_forgets_what_is_long_past() -> None:
    progress = Progress()
    state = {"phase": "training", "epoch": 0, "num_epochs": 1, "epoch_samples": 1000}
    for second in range(100):
        line = progress.line({**state, "samples_merged": min(second, 50) * 10}, float(second))
    assert "samples/s" not in line


def test_epoch_line_counts_from_one() -> None:
    fields = {"epoch": 0, "num_epochs": 3, "loss": 0.5, "samples": 100, "epoch_ms": 2000.0}
    assert epoch_line(fields) == "fdl: epoch 1/3  loss 0.5  50 samples/s  2.0s"
    assert epoch_line({"epoch": 0, "loss": None}) == "fdl: epoch 1"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ({"rank": 2, "host": "b", "text": "hi\n"}, "b:2: hi"),
        ({"rank": -1, "host": "", "text": "from the head"}, "from the head"),
        ({"rank": 0, "host": "a", "text": " 10%\r 20%\r"}, "a:0:  20%"),
        ({"rank": 0, "host": "a", "text": ""}, "a:0: "),
    ],
)
def test_log_lines_carry_host_and_rank(line: dict[str, object], shown: str) -> None:
    assert log_line(line) == shown


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0s"), (42.4, "42s"), (185, "3m05s"), (7620, "2h07m")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ------------------------------------------------------------------------------------------------------------ headline
def test_headline_is_the_first_failure_with_its_last_lines_and_log(run: RunDir) -> None:
    log = run.logs / "rank2.stderr.log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(100)) + b"ValueError: \xff boom\n")
    outcome = {"status": "failed", "message": "rank 2 failed", "failure": FAILURE, "collateral": 2, "losses": [FAILURE]}
    state = {"ranks": [{"rank": 2, "device": "cuda:0"}]}
    lines = describe_outcome(run, outcome, state)
    assert lines[0].endswith("failed: rank 2 failed")
    assert lines[1] == "first failure: rank 2 on node-b (cuda:0): ValueError: boom"
    assert lines[3:5] == ["  | line 61", "  | line 62"]
    assert lines[42] == "  | ValueError: \\xff boom"
    assert f"full log: {log}" in lines
    assert "2 more failures only followed from it" in lines
    assert lines[-1] == "1 loss came before it: rank 2 on node-b"


def test_losses_of_a_run_that_went_on_were_tolerated(run: RunDir) -> None:
    lines = describe_outcome(run, {"status": "completed", "losses": [FAILURE]}, {})
    assert lines[1:] == ["1 loss was tolerated: rank 2 on node-b"]


def test_losses_that_ended_a_run_came_before_its_end(run: RunDir) -> None:
    message = "2 ranks lost, and max_failure is 2; the last one: ended by signal 9"
    lines = describe_outcome(run, {"status": "stopped", "exit_code": 5, "message": message, "losses": [FAILURE]}, {})
    assert lines[0].endswith(f"stopped: {message}")
    assert lines[1:] == ["1 loss came before it: rank 2 on node-b"]


def test_escapes_of_an_error_are_not_obeyed(run: RunDir) -> None:
    failure = {**FAILURE, "error": "ValueError: \x1b[2Jboom"}
    lines = describe_outcome(run, {"status": "failed", "message": "rank 2: \x1b]0;x\x07", "failure": failure}, {})
    assert lines[0].endswith(r"failed: rank 2: \x1b]0;x\x07")
    assert lines[1] == r"first failure: rank 2 on node-b: ValueError: \x1b[2Jboom"


def test_a_rank_lost_with_its_host_is_explained_by_the_daemon(run: RunDir) -> None:
    (run.logs / "rank2.stderr.log").write_text("nothing to say\n")
    log = run.logs / "daemon-node-b.log"
    log.write_text("leaving: the daemon was stopped by the end of its warden\n")
    failure = {**FAILURE, "kind": "host lost", "error": "stopped by its daemon, which leaves the run"}
    lines = describe_outcome(run, {"status": "failed", "failure": failure}, {})
    assert lines[2:] == [
        "last lines of the daemon's log:",
        "  | leaving: the daemon was stopped by the end of its warden",
        f"full log: {log}",
    ]


def test_failure_is_not_said_twice(run: RunDir) -> None:
    outcome = {"status": "failed", "message": "rank 2 failed: ValueError: boom", "failure": FAILURE}
    assert describe_outcome(run, outcome, {})[0].endswith("failed")


def test_line_above_a_list_of_failures_is_said(run: RunDir) -> None:
    failure = {"kind": "host lost", "host": "b", "rank": -1, "error": "host b: auth: no\n  add it\nhost c: join: late"}
    message = f"the run cannot start: 1 of 3 hosts are there\n{failure['error']}"
    lines = describe_outcome(run, {"status": "failed", "message": message, "failure": failure}, {})
    assert lines[0] == f"run {run.run_id} failed: the run cannot start: 1 of 3 hosts are there"
    assert lines[1:] == ["2 hosts are missing:", "host b: auth: no\n  add it", "host c: join: late"]


def test_headline_leaves_out_what_is_for_a_closer_look(run: RunDir) -> None:
    told = ["ConfigError: no", "  in your script", *(f"{MARK}frame {number}" for number in range(50))]
    (run.logs / "head.stderr.log").write_text("\n".join(told) + "\n")
    failure = {"kind": "head", "rank": -1, "error": "the head ended with code 2"}
    lines = describe_outcome(run, {"status": "failed", "failure": failure}, {})
    assert lines[1].endswith(": ConfigError: no")
    assert lines[3:5] == ["  | ConfigError: no", "  |   in your script"]
    assert not any(MARK in line for line in lines)


def test_headline_says_from_how_many_the_same_came(run: RunDir) -> None:
    told = "flodl.errors.ConfigError: no\n  in your script\n"
    for name in ("rank0", "rank2", "head"):
        (run.logs / f"{name}.stderr.log").write_text(f"{told}{MARK}frame of {name}\n")
    (run.logs / "rank1.stderr.log").write_text("flodl.errors.ConfigError: another\n")
    failure = {**FAILURE, "kind": "exit", "error": "exited with code 2"}
    lines = describe_outcome(run, {"status": "failed", "failure": failure}, {})
    assert lines[-2:] == [
        "the same came from 1 more rank and the head",
        f"full log: {run.logs / 'rank2.stderr.log'}",
    ]
    lost = {**FAILURE, "kind": "host lost"}
    (run.logs / "daemon-node-b.log").write_text("flodl.errors.ConfigError: no\n")
    assert not any("the same" in line for line in describe_outcome(run, {"status": "failed", "failure": lost}, {}))


def test_ranks_that_share_a_warning_have_not_failed_alike(run: RunDir) -> None:
    for rank in (1, 2):
        (run.logs / f"rank{rank}.stderr.log").write_text("UserWarning: no GPU\n")
    lines = describe_outcome(run, {"status": "failed", "failure": {**FAILURE, "kind": "signal", "signal": 9}}, {})
    assert lines[-2:] == ["  | UserWarning: no GPU", f"full log: {run.logs / 'rank2.stderr.log'}"]


@pytest.mark.parametrize(("wish", "is_there"), [("", False), ("1", True)])
def test_own_frames_are_shown_on_request(monkeypatch: pytest.MonkeyPatch, wish: str, is_there: bool) -> None:
    monkeypatch.setenv("FDL_TRACEBACK", wish)
    assert is_shown(f"{MARK}Traceback (most recent call last):") is is_there
    assert is_shown("Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("[rank2]: Traceback (most recent call last):\n[rank2]:   A\n[rank2]: KeyError: 7\nbye\n", ": KeyError: 7"),
        ("Traceback (most recent call last):\n  A\nE: 1\nTraceback (most recent call last):\n  B\nE: 2\n", ": E: 2"),
        ("no traceback\n", ""),
        ("Traceback (most recent call last):\n  cut", ""),
    ],
)
def test_headline_of_a_rank_that_exited_names_what_it_raised(run: RunDir, said: str, raised: str) -> None:
    (run.logs / "rank2.stderr.log").write_text(said)
    failure = {**FAILURE, "kind": "exit", "error": "exited with code 1"}
    lines = describe_outcome(run, {"status": "failed", "message": "", "failure": failure}, {})
    assert lines[1] == f"first failure: rank 2 on node-b: exited with code 1{raised}"


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("head", "the script ended in the head without flodl.Trainer.run(...).join()", "a warning\n"),
        (
            "exception",
            "ValueError: using env:// rendezvous: environment variable RANK expected, but not set",
            "",
        ),
    ],
)
def test_headline_of_a_script_that_trains_by_itself_names_the_way(
    run: RunDir, kind: str, error: str, said: str
) -> None:
    name = "head" if kind == "head" else "rank0"
    (run.logs / f"{name}.stderr.log").write_text(said)
    failure = {"kind": kind, "rank": -1 if kind == "head" else 0, "host": "", "error": error}
    told = describe_outcome(run, {"status": "failed", "failure": failure}, {})
    assert told[1].endswith(error)
    assert told[2] == "  a script that trains by itself, as under torchrun: fdl launch --plain"
    assert any(each.startswith("full log: ") for each in told) == bool(said)
    run.write("run.json", '{"plain": {"max_restarts": 0}}')
    assert not any("--plain" in each for each in describe_outcome(run, {"failure": failure}, {}))


def test_headline_without_a_log_shows_the_traceback(run: RunDir) -> None:
    lines = describe_outcome(run, {"status": "failed", "failure": FAILURE}, {})
    assert "  | ValueError: boom" in lines


@pytest.mark.parametrize(
    ("change", "who"),
    [({"rank": -1, "kind": "host lost"}, "host node-b"), ({"rank": -1, "kind": "head"}, "the head")],
)
def test_headline_names_hosts_and_the_head(run: RunDir, change: dict[str, object], who: str) -> None:
    lines = describe_outcome(run, {"status": "failed", "failure": {**FAILURE, **change}}, {})
    assert who in lines[1]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rank": -1, "host": "", "error": "2 samples for 3 ranks"}, "first failure: 2 samples for 3 ranks"),
        ({"rank": -1, "error": "host node-b: auth: no"}, "first failure: host node-b: auth: no"),
    ],
)
def test_headline_names_nobody_twice_and_no_empty_host(run: RunDir, change: dict[str, object], line: str) -> None:
    assert describe_outcome(run, {"status": "failed", "failure": {**FAILURE, **change}}, {})[1] == line


def test_completed_run_needs_one_line(run: RunDir) -> None:
    assert len(describe_outcome(run, {"status": "completed", "message": ""}, {})) == 1


def test_last_lines_keep_an_unfinished_one(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a\nb\nc")
    assert last_lines(tmp_path / "log", 2) == ["b", "c"]
    assert last_lines(tmp_path / "none") == []


# ------------------------------------------------------------------------------------------------------------ terminal
class Screen:
    """A terminal of 40 columns, and what stands on it."""

    def __init__(self, stream: TextIO, reader: int) -> None:
        self.stream, self._reader, self.raw = stream, reader, b""

    def rows(self) -> list[str]:
        """Every row that was written to, without styles."""
        self.stream.write("\x00")
        self.stream.flush()
        while not self.raw.endswith(b"\x00"):
            self.raw += os.read(self._reader, 4096)
        rows, row, column = [""], 0, 0
        for piece in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[^\x00]", self.raw.decode()):
            match piece:
                case "\r":
                    column = 0
                case "\n":
                    row += 1
                    rows += [""] * (row == len(rows))
                case "\x1b[2K":
                    rows[row] = ""
                case "\x1b[1A":
                    row -= 1
                case _ if piece[0] != "\x1b":
                    rows[row] = rows[row].ljust(column)[:column] + piece + rows[row][column + 1 :]
                    column += 1
        return rows


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (20, 40))
    with open(writer, "w", encoding="utf-8") as stream:
        yield Screen(stream, reader)
    os.close(reader)


@pytest.fixture
def _undamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "REFRESH_S", 0.0)


@pytest.mark.usefixtures("_undamped")
def test_live_line_stays_below_the_output(screen: Screen) -> None:
    shown = Terminal(out=screen.stream, err=screen.stream)
    shown.show("working")
    shown.result("output")
    shown.say("chatter")
    shown.say("bad", RED)
    assert screen.rows() == ["output", "chatter", "bad", "working"]


@pytest.mark.usefixtures("_undamped")
def test_live_line_is_gone_and_the_cursor_back_at_the_end(screen: Screen) -> None:
    shown = Terminal(out=screen.stream, err=screen.stream)
    shown.show("working")
    shown.close()
    shown.say("the end", RED)
    assert screen.rows() == ["the end", ""]
    assert screen.raw.rfind(b"\x1b[?25h") > screen.raw.rfind(b"\x1b[?25l")


@pytest.mark.usefixtures("_undamped")
def test_live_line_is_never_longer_than_the_terminal_is_wide(screen: Screen) -> None:
    shown = Terminal(out=screen.stream, err=screen.stream)
    shown.show("漢" * 100)
    shown.result("output")
    shown.close()
    assert screen.rows()[0] == "output"


def test_long_lines_are_left_to_the_terminal(screen: Screen) -> None:
    Terminal(out=screen.stream, err=screen.stream).say("x" * 100 + " [red] 12", RED)
    assert screen.rows()[0] == "x" * 100 + " [red] 12"


@pytest.mark.parametrize(("variable", "code"), [("", b"\x1b[31mbad\x1b[0m"), ("1", b"bad")])
def test_no_color_is_honoured(screen: Screen, monkeypatch: pytest.MonkeyPatch, variable: str, code: bytes) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    Terminal(out=screen.stream, err=screen.stream).say("bad", RED)
    screen.rows()
    assert screen.raw.strip(b"\r\n\x00") == code


def test_without_a_terminal_there_are_plain_lines_only() -> None:
    out, err = io.StringIO(), io.StringIO()
    shown = Terminal(out, err)
    shown.show("working")
    shown.result("output")
    shown.say("chatter", RED)
    shown.close()
    assert (out.getvalue(), err.getvalue()) == ("output\n", "chatter\n")


def test_text_that_the_stream_cannot_encode_is_escaped() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Terminal(out, io.StringIO()).result("é\udcff")
    out.seek(0)
    assert out.read() == "\\xe9\\udcff\n"


def test_drawing_is_bounded_in_rate(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "REFRESH_S", 1000.0)
    shown = Terminal(out=screen.stream, err=screen.stream)
    shown._drawn_at_s = -2000.0
    for number in range(100):
        shown.show(f"step {number}")
    assert screen.rows() == ["step 0"]
