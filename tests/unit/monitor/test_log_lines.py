"""Lines from arrivals: whole, in order, once, wherever a reader starts, and progress bars that do not pile up."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flodl.monitor.log_lines import CUT_MARK, MAX_LINE_BYTES, LineReader, cursor_at, tail_reader
from flodl.monitor.log_store import LogStore


def anything(rank: int, stream: str) -> bool:
    return True


class Clocked(LogStore):
    """A store that is fed at chosen times."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._positions: dict[tuple[int, str], int] = {}

    def say(self, data: bytes, rank: int = 0, stream: str = "stdout") -> None:
        position = self._positions.get((rank, stream), 0)
        self._positions[rank, stream] = position + len(data)
        self.append(rank, stream, position, data)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Clocked]:
    made = Clocked(tmp_path)
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The wall clock's seconds, to be set by the test."""
    now = [1000.0]
    monkeypatch.setattr("flodl.monitor.log_store.time.time", lambda: now[0])
    return iter([now])


def drain(reader: LineReader, store: LogStore, *, with_rest: bool = True) -> list[str]:
    texts = []
    while reader.next_arrival < store.count:
        texts += [line.text for line in reader.lines()]
    return texts + [line.text for line in reader.rest()] if with_rest else texts


def read(store: LogStore, cursor: int = 0) -> list[str]:
    return drain(LineReader(store, cursor, anything), store)


def tail(store: LogStore, lines: int, *, first: int = 0, with_rest: bool = True) -> list[str]:
    reader = asyncio.run(tail_reader(store, anything, lines, first, with_rest))
    return drain(reader, store, with_rest=with_rest)


def test_lines_of_many_ranks_come_in_the_order_in_which_they_ended(store: Clocked) -> None:
    store.say(b"one\ntw", 0)
    store.say(b"uno\n", 1)
    store.say(b"o\n", 0)
    reader = LineReader(store, 0, anything)
    assert [(line.rank, line.text) for line in reader.lines()] == [(0, "one"), (1, "uno"), (0, "two")]


def test_a_reader_sees_only_what_it_wants(store: Clocked) -> None:
    for rank in range(3):
        store.say(b"out\n", rank)
        store.say(b"err\n", rank, "stderr")
    reader = LineReader(store, 0, lambda rank, stream: rank == 2 and stream == "stderr")
    assert [(line.rank, line.stream) for line in reader.lines()] == [(2, "stderr")]


def test_a_character_split_between_arrivals_comes_out_whole(store: Clocked) -> None:
    for byte in "é漢\n".encode():
        store.say(bytes([byte]))
    assert read(store) == ["é漢"]


def test_bytes_that_are_no_text_are_escaped_and_nul_is_kept(store: Clocked) -> None:
    store.say(b"\xff\xfe a\0b \xed\xa0\x80 \xe6\xbc")
    assert read(store) == ["\\xff\\xfe a\0b \\xed\\xa0\\x80 \\xe6\\xbc"]


def test_the_unfinished_line_comes_at_the_end(store: Clocked) -> None:
    store.say(b"done\nKilled here")
    assert read(store) == ["done", "Killed here"]


def test_windows_line_ends_and_empty_lines(store: Clocked) -> None:
    store.say(b"a\r\n\r\n\nb\r")
    store.say(b"\n")
    assert read(store) == ["a", "", "", "b"]


def test_a_very_long_line_is_cut_with_a_mark_and_costs_no_memory(store: Clocked, tmp_path: Path) -> None:
    for _ in range(50):
        store.say(b"x" * (1 << 20))
    store.say(b"\nnext\n")
    lines = read(store)
    assert [len(line) for line in lines] == [MAX_LINE_BYTES + len(CUT_MARK), 4]
    assert lines[0].endswith("x" + CUT_MARK)
    assert (tmp_path / "rank0.stdout.log").stat().st_size == (50 << 20) + 6


def test_a_cut_leaves_no_half_character(store: Clocked) -> None:
    store.say(b"x" + "é".encode() * MAX_LINE_BYTES + b"\n")
    text = read(store)[0]
    assert text.endswith("é" + CUT_MARK)
    assert "\\x" not in text


# ---------------------------------------------------------------------------------------------------- progress bars
def test_a_bar_becomes_at_most_one_line_a_second(store: Clocked, clock: Iterator[list[float]]) -> None:
    now = next(clock)
    for tick in range(300):  # ten a second, thirty seconds
        now[0] = 1000 + tick / 10
        store.say(f"\r {tick}/300".encode())
    store.say(b"\r 300/300\ndone\n")
    lines = read(store)
    assert lines[-2:] == [" 300/300", "done"]
    assert 29 <= len(lines[:-2]) <= 31


def test_a_bar_that_stands_still_is_shown_as_it_stands(store: Clocked, clock: Iterator[list[float]]) -> None:
    next(clock)
    store.say(b"\r 10%")
    store.say(b"\r 20%")
    reader = LineReader(store, 0, anything)
    assert [line.text for line in reader.lines()] == [" 10%"]
    assert reader.updates(1_000_500) == []
    assert [line.text for line in reader.updates(1_001_000)] == [" 20%"]
    assert reader.updates(1_005_000) == []


def test_a_bar_that_was_shown_is_not_repeated_by_its_line_feed(store: Clocked) -> None:
    store.say(b"100%\r")
    store.say(b"\nnext\n")
    assert read(store) == ["100%", "next"]


def test_plain_unfinished_lines_are_no_bars(store: Clocked, clock: Iterator[list[float]]) -> None:
    next(clock)
    store.say(b"Password: ")
    reader = LineReader(store, 0, anything)
    assert reader.lines() == []
    assert reader.updates(2_000_000_000) == []


# ---------------------------------------------------------------------------------------------------------- cursors
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 1), st.binary(max_size=6).map(lambda b: b.replace(b"\r", b"\n"))), max_size=12
    ),
    stop=st.integers(0, 40),
)
def test_a_reader_that_comes_back_misses_nothing_and_sees_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bytes]], stop: int
) -> None:
    store = Clocked(tmp_path_factory.mktemp("logs"))
    for rank, data in pieces:
        store.say(data, rank)
    everything = LineReader(store, 0, anything).lines()
    seen = everything[:stop]
    again = LineReader(store, seen[-1].cursor if seen else 0, anything)
    seen += again.lines()
    rest = sorted((line.rank, line.text) for line in again.rest())
    whole = LineReader(store, 0, anything)
    whole.lines()
    store.close()
    assert [(line.rank, line.text) for line in seen] == [(line.rank, line.text) for line in everything]
    assert set(rest) <= {(line.rank, line.text) for line in whole.rest()}


def test_coming_back_in_the_middle_of_a_cut_line_tells_no_second_piece_of_it(store: Clocked) -> None:
    store.say(b"first\n" + b"x" * (MAX_LINE_BYTES * 2))
    store.say(b"x" * MAX_LINE_BYTES)
    store.say(b"yyy\nlast\n")
    lines = LineReader(store, 0, anything).lines()
    assert [line.text[:5] for line in lines] == ["first", "xxxxx", "last"]
    assert [line.text for line in LineReader(store, lines[1].cursor, anything).lines()] == ["last"]


def test_a_cursor_beyond_the_end_waits_there(store: Clocked) -> None:
    store.say(b"a\n")
    assert LineReader(store, cursor_at(7), anything).lines() == []


# ------------------------------------------------------------------------------------------------------------- tail
def test_tail_is_exact(store: Clocked) -> None:
    store.say(b"".join(b"%d\n" % number for number in range(1000)))
    store.say(b"end")
    assert tail(store, 3) == ["998", "999", "end"]
    assert tail(store, 3, with_rest=False) == ["997", "998", "999"]
    assert tail(store, 0) == []
    assert len(tail(store, 10**9)) == 1001


def test_tail_begins_no_earlier_than_asked(store: Clocked) -> None:
    for number in range(10):
        store.say(b"%d\n" % number)
    assert tail(store, 100, first=7) == ["7", "8", "9"]
    assert tail(store, 2, first=3) == ["8", "9"]


def test_tail_looks_back_past_whatever_others_print(store: Clocked) -> None:
    store.say(b"rare 1\nrare 2\n", 1)
    for _ in range(3000):
        store.say(b"noise\n", 0)
    reader = asyncio.run(tail_reader(store, lambda rank, _: rank == 1, 1, 0, with_rest=True))
    assert drain(reader, store) == ["rare 2"]


def test_a_million_arrivals_are_searched_in_small_steps(store: Clocked) -> None:
    for _ in range(1000):
        store.say(b"x\n")
    record = next(store.arrivals(0, 1))
    with (store._folder / "index").open("r+b") as index:  # as if a thousand times more had come
        index.write(index.read() * 1000)
    store._count = 1_000_000
    gaps = []

    async def scenario() -> LineReader:
        search = asyncio.create_task(tail_reader(store, lambda rank, _: rank == 9, 20, 0, with_rest=False))
        last_s = time.monotonic()
        while not search.done():
            await asyncio.sleep(0)
            gaps.append(time.monotonic() - last_s)
            last_s = time.monotonic()
        return search.result()

    started_s = time.monotonic()
    reader = asyncio.run(scenario())
    assert (reader.next_arrival, record.rank) == (0, 0)
    assert sorted(gaps)[len(gaps) * 99 // 100] < 0.05
    assert store.first_since(record.ts_ms) == 0
    assert time.monotonic() - started_s < 60
