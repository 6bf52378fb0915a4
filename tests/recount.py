"""The recount: is every consensus of a run the weighted sum of what its participants packed, and of nothing else?

It joins the round log (``commit`` records in RUN/events.jsonl) with the diaries that tests/scripts/phased.py writes:
what each rank packed for each attempt at each round, and what it adopted. Sums are made anew here, in exact or in the
documented order (docs/engine.md).
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from flodl.core.rounds import weigh
from flodl.messages import Layout
from tests.witness import commits

UNIT = Fraction(1, 2**24)


def recount(run: Path, log: Path, layout: Layout, in_rank_order: bool, lost: Sequence[int] = ()) -> list[str]:
    """What is wrong with the run's consensus; nothing when all is well.

    Args:
        run: the run's directory.
        log: the folder of the diaries.
        layout: of the model's image; float32 and raw bytes only.
        in_rank_order: the sum is made in the order of the ranks, as on the CPU plane; else in any order.
        lost: ranks that need not have adopted everything.
    """
    diaries = {int(path.stem.removeprefix("diary-")): _read(path) for path in log.glob("diary-*.jsonl")}
    packed = {rank: _by_key(lines, "packed") for rank, lines in diaries.items()}
    adopted = {rank: _by_key(lines, "adopted") for rank, lines in diaries.items()}
    faults = []
    for commit in commits(run):
        key = (commit["incarnation"], commit["version"], commit["attempt"])
        ranks = sorted(rank for rank, _ in commit["counts"])
        held = {rank: adopted[rank][key] for rank in ranks if key in adopted[rank]}
        faults += [f"{key}: rank {rank} has not adopted it" for rank in ranks if rank not in held and rank not in lost]
        faults += _disagreements(key, held)
        parts = [packed[rank][key] for rank in ranks]
        faults += _weight_faults(key, commit, dict(zip(ranks, parts, strict=True)))
        if held:
            image = bytes.fromhex(next(iter(held.values()))["image"])
            faults += _sum_faults(key, image, [bytes.fromhex(part["image"]) for part in parts], layout, in_rank_order)
    return faults + _touched(packed) + _uncommitted(adopted, run)


def _disagreements(key: Sequence[int], held: dict[int, dict[str, Any]]) -> list[str]:
    return [
        f"{key}: the ranks hold other {what}: {[(rank, each[what][:16]) for rank, each in held.items()]}"
        for what in ("image", "holds")
        if len({each[what] for each in held.values()}) > 1
    ]


def _weight_faults(key: Sequence[int], commit: dict[str, Any], parts: dict[int, dict[str, Any]]) -> list[str]:
    samples = dict.fromkeys(parts, 0)
    for rank, _, _, count in commit["spans"]:
        samples[rank] += count
    if not any(samples.values()):  # version 0
        shares = sorted(part["shares"][0] for part in parts.values())
        return [] if shares == [0.0] * (len(shares) - 1) + [1.0] else [f"{key}: one rank has all the weight: {shares}"]
    expected = weigh(samples, 1.0)
    return [
        f"{key}: rank {rank} packed with {part['shares']}, {samples[rank]} of {sum(samples.values())} samples"
        for rank, part in parts.items()
        if part["shares"][:2] != [expected[rank].weight, expected[rank].buffer_weight]
    ]


def _sum_faults(
    key: Sequence[int], image: bytes, parts: Sequence[bytes], layout: Layout, in_rank_order: bool
) -> list[str]:
    raw = np.frombuffer(image, np.uint8, layout.raw_bytes, layout.raw_offset)
    raws = [np.frombuffer(part, np.uint8, layout.raw_bytes, layout.raw_offset) for part in parts]
    faults = [] if (raw == sum(raws)).all() else [f"{key}: the raw bytes are not those of the source"]
    got = np.frombuffer(image, np.float32, layout.f32_count)
    values = [np.frombuffer(part, np.float32, layout.f32_count) for part in parts]
    if in_rank_order or len(parts) <= 2:
        total = values[0]
        for value in values[1:]:
            total = total + value
        return faults + ([] if total.tobytes() == got.tobytes() else [f"{key}: the bits are not those of the sum"])
    for place, part in enumerate(zip(*(value.tolist() for value in values), strict=True)):
        exact = [Fraction(value) for value in part]
        error = abs(Fraction(got[place].item()) - sum(exact))
        if error > (len(parts) - 1) * UNIT * sum(map(abs, exact)):
            faults.append(f"{key}: element {place} is {got[place]}, the parts are {part}")
    return faults


def _touched(packed: dict[int, dict[tuple[int, ...], dict[str, Any]]]) -> list[str]:
    """A rank that packs for a second attempt at a round packs the very parameters that it packed for the first."""
    faults = []
    for rank, entries in packed.items():
        held = defaultdict(set)
        for (_, version, _), entry in entries.items():
            held[version].add(entry["held"])
        faults += [
            f"rank {rank}: its parameters changed between attempts at version {version}"
            for version, digests in held.items()
            if len(digests) > 1
        ]
    return faults


def _uncommitted(adopted: dict[int, dict[tuple[int, ...], dict[str, Any]]], run: Path) -> list[str]:
    keys = {(commit["incarnation"], commit["version"], commit["attempt"]) for commit in commits(run)}
    return [f"rank {r}: adopted {key}, which never was" for r, own in adopted.items() for key in own if key not in keys]


def _by_key(lines: list[dict[str, Any]], did: str) -> dict[tuple[int, ...], dict[str, Any]]:
    return {tuple(line["key"]): line for line in lines if line["did"] == did}


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
