"""The recount finds what it is there to find."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flodl.messages import Layout
from tests.recount import recount

LAYOUT = Layout(f32_count=4, f64_count=0, raw_bytes=1)
SAMPLES = {0: 3, 1: 2, 2: 1}

Entries = dict[int, list[dict[str, Any]]]


def image(values: list[float], raw: int = 0) -> bytes:
    whole = np.zeros(LAYOUT.total_bytes, np.uint8)
    whole[: 4 * LAYOUT.f32_count].view(np.float32)[:] = values
    whole[LAYOUT.raw_offset] = raw
    return whole.tobytes()


def diaries() -> Entries:
    """Three ranks, one round; the parts are chosen so that the order of addition shows."""
    parts = {0: [1.0, 0.1, 3.0, 0.0], 1: [2.0**-24, 0.2, -3.0, 0.0], 2: [2.0**-24, 0.3, 1e-9, 0.0]}
    total = np.float32(parts[0]) + np.float32(parts[1]) + np.float32(parts[2])
    consensus = image(total.tolist(), 7).hex()
    weight = {rank: count / 6 for rank, count in SAMPLES.items()}
    return {
        rank: [
            {"did": "packed", "key": [1, 1, 1], "held": f"of {rank}", "shares": [weight[rank], 1 / 3, rank == 0],
             "image": image(parts[rank], 7 if rank == 0 else 0).hex()},
            {"did": "adopted", "key": [1, 1, 1], "holds": "all", "image": consensus},
        ]
        for rank in parts
    }  # fmt: skip


def look(folder: Path, entries: Entries, in_rank_order: bool = True, lost: tuple[int, ...] = ()) -> list[str]:
    spans, start = [], 0
    for rank, count in SAMPLES.items():
        spans.append((rank, 0, start, count))
        start += count
    fields = {"version": 1, "incarnation": 1, "attempt": 1, "spans": spans, "counts": [(r, 1) for r in SAMPLES]}
    (folder / "events.jsonl").write_text(json.dumps({"event": "commit", "ts": 0, "fields": fields}) + "\n")
    for rank, lines in entries.items():
        (folder / f"diary-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return recount(folder, folder, LAYOUT, in_rank_order, lost)


@pytest.mark.parametrize("in_rank_order", [True, False])
def test_consensus_of_the_parts_is_right(tmp_path: Path, in_rank_order: bool) -> None:
    assert look(tmp_path, diaries(), in_rank_order) == []


def other_order(entries: Entries) -> None:
    for lines in entries.values():
        lines[1]["image"] = image([1.0 + 2.0**-23, 0.6, 1e-9, 0.0], 7).hex()


def without_a_part(entries: Entries) -> None:
    total = sum(np.frombuffer(bytes.fromhex(entries[rank][0]["image"]), np.float32, 4) for rank in (0, 1))
    for lines in entries.values():
        lines[1]["image"] = image(total.tolist(), 7).hex()


def one_rank_differs(entries: Entries) -> None:
    entries[2][1]["holds"] = "something else"


def weight_of_another(entries: Entries) -> None:
    entries[1][0]["shares"] = [0.5, 1 / 3, False]


def raw_of_two(entries: Entries) -> None:
    for lines in entries.values():
        lines[1]["image"] = lines[1]["image"][:-128] + "08" + lines[1]["image"][-126:]


def changed_between_attempts(entries: Entries) -> None:
    entries[1].insert(0, {**entries[1][0], "key": [1, 1, 0], "held": "before"})


def never_adopted(entries: Entries) -> None:
    del entries[2][1]


def adopted_what_never_was(entries: Entries) -> None:
    entries[2].append({**entries[2][1], "key": [1, 2, 1]})


@pytest.mark.parametrize(
    ("spoil", "in_rank_order", "words"),
    [
        (other_order, True, "not those of the sum"),
        (without_a_part, False, "element 1 is"),
        (one_rank_differs, True, "hold other holds"),
        (weight_of_another, True, "rank 1 packed with"),
        (raw_of_two, True, "raw bytes"),
        (changed_between_attempts, True, "rank 1: its parameters changed"),
        (never_adopted, True, "rank 2 has not adopted it"),
        (adopted_what_never_was, True, "which never was"),
    ],
)
def test_spoilt_consensus_is_found(
    tmp_path: Path, spoil: Callable[[Entries], None], in_rank_order: bool, words: str
) -> None:
    entries = diaries()
    spoil(entries)

    assert words in " ".join(look(tmp_path, entries, in_rank_order))


def test_lost_rank_need_not_have_adopted(tmp_path: Path) -> None:
    entries = diaries()
    never_adopted(entries)

    assert look(tmp_path, entries, lost=(2,)) == []
