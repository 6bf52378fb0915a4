"""`make verify`: a stage's verdict and figures."""

import json
import sys
from collections import deque
from pathlib import Path

import pytest

from benchmarks.verify import SKIPPED, Result, Stage, figures_in, run, write_report


def python(code: str, limit_s: float = 30) -> Stage:
    return Stage("probe", "nothing", (sys.executable, "-c", code), limit_s)


def test_passing_stage_gives_the_figures_of_its_last_line() -> None:
    result = run(python("print('chatter'); print('{\"ratio\": 0.9}')"))

    assert (result.verdict, result.exit_code, result.figures) == ("passed", 0, {"ratio": 0.9})
    assert result.is_good


def test_failing_stage_is_not_good_and_keeps_its_last_lines() -> None:
    result = run(python("print('what went wrong'); raise SystemExit(3)"))

    assert (result.verdict, result.exit_code) == ("failed", 3)
    assert not result.is_good
    assert result.as_json()["tail"] == ["what went wrong"]


@pytest.mark.parametrize(("last", "is_good"), [('{"skipped": "no root here"}', True), ("{}", False), ("", False)])
def test_skipped_stage_is_good_only_with_a_reason(last: str, is_good: bool) -> None:
    result = run(python(f"print({last!r}); raise SystemExit({SKIPPED})"))

    assert (result.verdict, result.is_good) == ("skipped", is_good)


def test_stage_past_its_limit_is_ended_and_says_so() -> None:
    result = run(python("import threading; threading.Event().wait(60)", limit_s=0.5))

    assert result.verdict == "timed out"
    assert not result.is_good
    assert result.seconds < 20


@pytest.mark.parametrize("last", ["3 passed in 1 s", "{broken", "[1]"])
def test_other_last_lines_are_kept_as_text(last: str) -> None:
    assert figures_in(deque(["before", last, " "])) == {"last_line": last}


def test_report_of_some_stages_is_not_complete(tmp_path: Path) -> None:
    stage = python("")
    result = Result(stage, "passed", 0, 1.0, {}, ())
    path = tmp_path / "report.json"

    write_report(path, {"commit": "abc"}, [stage], [result])

    report = json.loads(path.read_text())
    assert (report["commit"], report["passed"], report["complete"]) == ("abc", True, False)
