"""Events: strict JSON lines that are whole, a ring for followers, and disks that take nothing."""

import asyncio
import json
import math
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flodl.core.actions import Record, Severity
from flodl.monitor.event_log import EventLog, strict


def record(event: str = "note", **fields: object) -> Record:
    return Record(event, Severity.INFO, "a detail", fields)  # type: ignore[arg-type]


def lines(path: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_line_is_strict_json_in_a_private_file(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.add(record(loss=math.nan, rate=math.inf, spans=((0, 1), (2.5, -math.inf)), name="é\ud800\n"))
    log.end()
    (line,) = lines(tmp_path / "events.jsonl")
    assert line["fields"] == {"loss": None, "rate": None, "spans": [[0, 1], [2.5, None]], "name": "é\ud800\n"}
    assert (line["seq"], line["event"], line["severity"], line["detail"]) == (1, "note", "info", "a detail")
    assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == 0o600


def test_strict_reaches_into_everything() -> None:
    assert strict({1: [math.nan, (math.inf, {"x": 1.5})], "s": "NaN"}) == {"1": [None, [None, {"x": 1.5}]], "s": "NaN"}


def test_a_follower_gets_what_is_behind_its_cursor_in_pieces(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert log.after(0, 10) == []
    for number in range(5):
        log.add(record(number=number))
    log.end()
    assert [line["seq"] for line in log.after(0, 3)] == [1, 2, 3]
    assert [line["seq"] for line in log.after(3, 3)] == [4, 5]
    assert log.after(5, 3) == log.after(99, 3) == []


def test_a_slow_follower_sees_the_gap_in_the_numbers(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", ring_events=3)
    for _ in range(10):
        log.add(record())
    log.end()
    assert [line["seq"] for line in log.after(2, 10)] == [8, 9, 10]
    assert len(lines(tmp_path / "events.jsonl")) == 10


def test_one_event_wakes_every_follower(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    async def follow() -> list[int]:
        seen: list[int] = []
        while True:
            seen += [line["seq"] for line in log.after(seen[-1] if seen else 0, 1)]
            if not await log.wait(seen[-1] if seen else 0, 20.0):
                return seen

    async def scenario() -> list[list[int]]:
        followers = [asyncio.create_task(follow()) for _ in range(20)]
        for _ in range(10):
            log.add(record())
            await asyncio.sleep(0)
        log.end()
        return await asyncio.wait_for(asyncio.gather(*followers), 10.0)

    assert asyncio.run(scenario()) == [list(range(1, 11))] * 20


def test_waiting_ends_after_its_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert asyncio.run(log.wait(0, 0.01)) is True


def test_the_file_stops_growing_with_a_last_word(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", max_file_bytes=1000)
    for _ in range(100):
        log.add(record())
    log.end()
    written = lines(tmp_path / "events.jsonl")
    assert written[-1]["event"] == "events_end"
    assert [line["seq"] for line in written] == list(range(1, len(written) + 1))
    assert (tmp_path / "events.jsonl").stat().st_size < 1400
    assert log.last_seq == 100


def test_a_stray_link_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "victim")
    log = EventLog(tmp_path / "events.jsonl")
    log.add(record())
    log.add(record())
    assert (tmp_path / "victim").read_text() == "precious"
    assert len(log.after(0, 10)) == 2
    assert caplog.text.count("not written any more") == 1


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from flodl.core.actions import Record, Severity
from flodl.monitor.event_log import EventLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
log = EventLog(Path(sys.argv[1]))
for number in range(50):
    log.add(Record("note", Severity.INFO, "x" * 40, {"number": number}))
log.end()
print(len(log.after(0, 100)))
"""


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    argv = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "50"
    assert 0 < len(lines(path)) < 10
    assert path.read_bytes().endswith(b"\n")
