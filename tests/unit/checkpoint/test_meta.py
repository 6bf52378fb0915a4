"""The meta file: what is in it comes back exactly, what another version wrote is read, what nobody wrote is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flodl.checkpoint import point
from flodl.checkpoint.bundle import BundleMeta, Part
from flodl.core.elche import ElCheState, Phase
from flodl.core.position import CadenceState, Covered, Position, ResumePoint, SaveReason
from flodl.errors import CheckpointError
from flodl.ids import Span
from flodl.messages import (
    CadenceSettings,
    CheckpointSettings,
    GuardKind,
    GuardSettings,
    Mode,
    Precision,
    Settings,
)

FORMAT_1 = Path(__file__).with_name("format_1.meta.json")
META = BundleMeta(
    save_id="0123456789ab",
    reason=SaveReason.MAX_FAILURE_EXCEEDED,
    saved_at_s=1796013569.25,
    parts=(Part(".fdl", 4096, "ab" * 32), Part(".config.json", 2, "cd" * 32)),
    point=ResumePoint(
        Position(
            version=41,
            epoch=2,
            covered=(Covered(2, (Span(0, 64), Span(96, 32))), Covered(3, (Span(128, 8),))),
            global_step=1234,
            world_size=3,
        ),
        CadenceState(
            ElCheState(
                phase=Phase.STABLE,
                calibration_count=7,
                anchor=12,
                ranks=(0, 2, 11),
                slow_rank=2,
                ms_per_batch={0: 0.1, 2: 1 / 3},
                batch_counts={0: 40, 2: 12, 11: 12},
                partition_ratios={0: 0.625, 2: 0.1875, 11: 0.1875},
            ),
            trend_history=(0.1, 5e-324, 1.7976931348623157e308),
        ),
        Settings(
            dataset_size=1000,
            batch_size=8,
            num_epochs=2,
            seed=5,
            cadence=CadenceSettings(
                mode=Mode.CPU_SYNC,
                anchor=3,
                max_batch_diff=0,
                guard=GuardSettings(GuardKind.MSF, nudge_factor=0.25),
                partition_ratios=(0.5, 0.25, 0.25),
            ),
            max_grad_norm=1.5,
            callback_rank=0,
            epoch_splits=2,
            precision=Precision.BF16,
            checkpoint=CheckpointSettings("ckpts/é", 2, (1, 3), "ckpts/old", reshape=True),
        ),
    ),
    versions={"flodl": "0.1.0", "torch": "2.13.0"},
)


def changed(path: str, value: Any) -> str:
    """The text of ``META`` with one value replaced; a last step of ``-`` deletes it."""
    data: Any = json.loads(META.to_json())
    *steps, last = path.split(".")
    inner = data
    for step in steps:
        inner = inner[int(step) if step.isdigit() and isinstance(inner, list) else step]
    inner[int(last) if last.isdigit() and isinstance(inner, list) else last] = value
    return json.dumps(data)


def without(*path: str) -> str:
    data: Any = json.loads(META.to_json())
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return json.dumps(data)


def missing(old: Any, new: Any, where: str = "") -> list[str]:
    """The values of ``old`` that ``new`` says otherwise or not at all; ``new`` may say more."""
    if not isinstance(old, dict):
        return [] if old == new else [where]
    return [each for name in old for each in missing(old[name], new.get(name), f"{where}.{name}")]


# ---------------------------------------------------------------------------------------------------- there and back
def test_everything_comes_back_exactly() -> None:
    assert BundleMeta.from_json(META.to_json(), "it") == META


def test_defaults_and_no_cadence_come_back_too() -> None:
    bare = replace(
        META, point=ResumePoint(Position(), None, Settings(1, 1, 1, 0, CadenceSettings())), parts=META.parts[:1]
    )
    assert BundleMeta.from_json(bare.to_json(), "it") == bare


def test_first_format_is_read_for_ever() -> None:
    assert BundleMeta.from_json(FORMAT_1.read_text(), "it") == META


def test_what_is_written_has_all_that_the_first_format_has() -> None:
    assert missing(json.loads(FORMAT_1.read_text()), json.loads(META.to_json())) == []


@pytest.mark.parametrize(
    "path",
    ["later", "position.later", "cadence.elche.later", "settings.later", "settings.checkpoint.later", "parts.0.later"],
)
def test_fields_of_a_later_version_are_passed_over(path: str) -> None:
    assert BundleMeta.from_json(changed(path, {"more": [1]}), "it") == META


def test_fields_that_an_earlier_version_did_not_have_take_their_defaults() -> None:
    found = BundleMeta.from_json(without("settings", "checkpoint"), "it").point.settings
    assert found == replace(META.point.settings, checkpoint=CheckpointSettings())
    assert BundleMeta.from_json(without("cadence"), "it").point.cadence is None
    assert BundleMeta.from_json(without("versions"), "it").versions == {}
    assert BundleMeta.from_json(without("position", "covered"), "it").point.position.covered == ()


# ---------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "it has format 2, this flodl reads up to 1; upgrade"),
        ("format", True, "it has format True"),
        ("save_id", "../../../etc", "save_id is '../../../etc', expected"),
        ("reason", "Whim", "reason is 'Whim', this flodl knows Checkpoint, GracefulShutdown"),
        ("saved_at_s", "now", "saved_at_s is 'now', expected a finite number"),
        ("saved_at_s", 1e300, "saved_at_s is 1e+300"),
        ("parts", 7, "parts is 7, expected an array"),
        ("parts", [], "expected .fdl and at most 15 others"),
        ("parts.1.suffix", ".fdl", "expected .fdl and at most 15 others"),
        ("parts.1.suffix", ".meta.json", "expected .fdl and at most 15 others"),
        ("parts.0.suffix", "/../../x", "parts[0].suffix is '/../../x'"),
        ("parts.0.suffix", ".a\n", "parts[0].suffix is"),
        ("parts.0.size_bytes", -1, "parts[0].size_bytes is -1"),
        ("parts.0.size_bytes", 1.0, "parts[0].size_bytes is 1.0, expected a whole number"),
        ("parts.0.sha256", "ab", "parts[0].sha256 is 'ab'"),
        ("versions", [], "versions is list, expected an object"),
        ("versions", {"torch": 2}, "versions['torch'] is 2, expected a text"),
        ("versions", dict.fromkeys(map(str, range(65)), ""), "versions has 65 entries"),
        ("versions", {"a": "x" * 5000}, "expected a text of at most 4096"),
        ("position", None, "position is None, expected an object"),
        ("position.version", "x", "position.version is 'x'"),
        ("position.version", 2**63, "position.version is 9223372036854775808"),
        ("position.epoch", 5, "position.epoch does not fit, expected at most 4"),
        ("position.world_size", 0, "position.world_size is 0, expected a whole number of at least 1"),
        ("position.covered.0.epoch", 1, "position.covered does not fit, expected open epochs"),
        ("position.covered.0.epoch", 3, "position.covered does not fit, expected open epochs"),
        ("position.covered.1.epoch", 4, "position.covered does not fit, expected open epochs"),
        ("position.covered.0.spans.0.count", 0, "position.covered[0].spans[0].count is 0"),
        ("position.covered.0.spans.1.start", 63, "position.covered[0].spans does not fit"),
        ("position.covered.1.spans.0.count", 873, "position.covered[1].spans does not fit"),
        ("cadence", 1, "cadence is 1, expected an object"),
        ("cadence.trend_history", [-1.0], "cadence.trend_history[0] is -1.0"),
        ("cadence.trend_history", [0.0] * 1025, "expected at most 1024 values"),
        ("cadence.trend_history.0", math.nan, "cadence.trend_history[0] is nan"),
        ("cadence.trend_history.0", math.inf, "cadence.trend_history[0] is inf"),
        ("cadence.trend_history.0", 10**400, "cadence.trend_history[0] is 1000000"),
        ("cadence.elche.phase", "Tired", "cadence.elche.phase is 'Tired', this flodl knows probe, warmup"),
        ("cadence.elche.anchor", 0, "cadence.elche.anchor is 0"),
        ("cadence.elche.ranks", [0, 0, 2, 11], "cadence.elche.ranks does not fit"),
        ("cadence.elche.ranks", list(range(20000)), "expected up to 16384"),
        ("cadence.elche.slow_rank", 11, "cadence.elche.slow_rank does not fit"),
        ("cadence.elche.ms_per_batch", {}, "cadence.elche.slow_rank does not fit"),
        ("cadence.elche.ms_per_batch.2", 0, "cadence.elche.ms_per_batch does not fit, expected times above 0"),
        ("cadence.elche.ms_per_batch.7", 1, "cadence.elche.ms_per_batch does not fit, expected ranks"),
        ("cadence.elche.ms_per_batch.+2", 1, "cadence.elche.ms_per_batch has '+2', expected whole numbers"),
        ("cadence.elche.batch_counts.0", 0, "cadence.elche.batch_counts['0'] is 0"),
        ("settings", {}, "settings.dataset_size is missing"),
        ("settings.seed", True, "settings.seed is True"),
        ("settings.batch_size", 0, "settings.batch_size is 0"),
        ("settings.precision", "fp8", "settings.precision is 'fp8', this flodl knows fp32"),
        ("settings.cadence.mode", ["cpu_sync"], "settings.cadence.mode is list"),
        ("settings.cadence.relax_up", 1, "settings.cadence.relax_up is 1, expected true or false"),
        ("settings.checkpoint.at_epochs", [0], "settings.checkpoint.at_epochs[0] is 0"),
        ("settings.checkpoint.save_path", None, "settings.checkpoint.save_path is None"),
    ],
)
def test_field_that_cannot_be_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        BundleMeta.from_json(changed(path, value), "it")
    assert str(caught.value).startswith("it ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["save_id", "reason", "saved_at_s", "parts", "position", "settings"])
def test_field_that_every_meta_file_has_is_missed_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"it is damaged: {name} is "):
        BundleMeta.from_json(without(name), "it")


def test_spans_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point, "MAX_SPANS", 2)
    with pytest.raises(CheckpointError, match=r"position\.covered does not fit, expected at most 2 spans"):
        BundleMeta.from_json(META.to_json(), "it")


@pytest.mark.parametrize("text", ["", "[1]", "{}", "no json", "[" * 100_000, b"\xff\xfe"])
def test_other_files_are_refused(text: str | bytes) -> None:
    with pytest.raises(CheckpointError, match="it was not written by this flodl: it is not the meta file"):
        BundleMeta.from_json(text, "it")


def test_what_no_reader_would_take_is_not_written() -> None:
    broken = replace(META, point=replace(META.point, position=replace(META.point.position, global_step=-1)))
    with pytest.raises(CheckpointError, match=r"position\.global_step is -1"):
        broken.to_json()
