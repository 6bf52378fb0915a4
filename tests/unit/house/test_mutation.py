"""Mutation testing: how survivors are named and explained."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutation import Outcome, Survivor, read_reasons, report, survivor_of

DIFF = """--- flodl/ids.py
+++ flodl/ids.py
@@ -1,3 +1,3 @@
 def stop(self) -> int:
-    return self.start + self.count
+    return self.start - self.count
"""
SURVIVOR = Survivor("flodl/ids.py", "Span.stop", "return self.start + self.count", "return self.start - self.count")


def outcome(killed: int, *survivors: Survivor) -> Outcome:
    return Outcome("ids", Counter(killed=killed, survived=len(survivors)), survivors)


def test_survivor_is_named_by_what_changed() -> None:
    assert survivor_of("flodl/ids.py", "Span.stop", DIFF) == SURVIVOR


def test_entry_for_the_reasons_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "mutants.toml"
    path.write_text(SURVIVOR.as_toml() + '\nreason = "same set"\n')

    assert read_reasons(path) == {SURVIVOR: "same set"}


def test_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mutants.toml"
    path.write_text(SURVIVOR.as_toml() + '\nreason = " "\n')

    with pytest.raises(SystemExit, match="no reason given"):
        read_reasons(path)


@pytest.mark.parametrize(
    ("killed", "reasons", "exit_code"),
    [(9, {SURVIVOR: "same set"}, 0), (9, {}, 1), (1, {SURVIVOR: "same set"}, 1)],
)
def test_all_is_well_when_enough_die_and_the_rest_is_explained(
    killed: int, reasons: dict[Survivor, str], exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([outcome(killed, SURVIVOR)], reasons) == exit_code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["targets"]["ids"]["killed"] == killed
