"""The independent witness: were all samples of all epochs merged exactly once, and did all ranks end alike?

    python tests/witness.py RUN_DIR LOG_DIR --size N --epochs N [--seed N]

It joins what no part of flodl brings together: the round log (``commit`` records in RUN_DIR/events.jsonl, with the
positions that each rank's merged window covered), and what the script itself wrote down in LOG_DIR
(tests/scripts/job.py): every index that each process read, the digest of each rank's weights at its end, and of what
``join()`` returned. Prints its findings as JSON; the exit code is 1 when something is wrong.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flodl.core.position import Position
from flodl.data.permutation import EpochOrder
from flodl.ids import Span


@dataclass(slots=True)
class Testimony:
    """What was seen. ``faults`` is empty when all is well."""

    epochs: int = 0
    samples: int = 0
    rounds: int = 0
    ranks: list[int] = field(default_factory=list)
    sha256: str = ""
    faults: list[str] = field(default_factory=list)


def witness_run(
    run: Path,
    log: Path,
    size: int,
    epochs: int,
    seed: int = 0,
    lost: Sequence[int] = (),
    before: Sequence[tuple[Path, Path]] = (),
) -> Testimony:
    """Look at a run of ``epochs`` complete epochs over ``size`` samples; ranks in ``lost`` have no end to tell of.

    ``before``: the folders (run, log) of the runs whose work it has gone on with, each from the last version of the one
    before.
    """
    seen = Testimony(epochs)
    merged: dict[int, Counter[int]] = defaultdict(Counter)
    newest = None
    for folder, notes in (*before, (run, log)):
        merged_by: dict[int, Counter[int]] = defaultdict(Counter)
        versions = []
        for fields in commits(folder):
            versions.append(fields["version"])
            for rank, pass_index, start, count in fields["spans"]:
                indices = EpochOrder(size, seed, pass_index).indices([Span(start, count)]).tolist()
                merged[pass_index].update(indices)
                merged_by[rank].update(indices)
        if versions != list(range(versions[0], versions[0] + len(versions))):
            seen.faults.append(f"versions are not consecutive: {versions}")
        if newest not in (None, versions[0]):
            seen.faults.append(f"the run went on from version {versions[0]}, expected {newest}")
        newest, seen.rounds, seen.ranks = versions[-1], seen.rounds + len(versions), sorted(merged_by)
        seen.faults += _reading_faults(merged_by, notes)
    seen.samples = sum(counter.total() for counter in merged.values())
    seen.faults += _coverage_faults(merged, size, epochs)
    seen.faults += _ending_faults(seen, log, lost)
    return seen


def witness_solo(log: Path, size: int, epochs: int) -> Testimony:
    """Look at a run in one process, where a read that is not merged does not exist: each epoch reads all once."""
    reads = _reads(log, "solo")
    seen = Testimony(epochs, reads.total())
    seen.faults += [f"index {i} was read {reads[i]} times" for i in range(size) if reads[i] != epochs]
    seen.faults += _ending_faults(seen, log)
    return seen


def checkpoint_faults(position: Position, size: int, *runs: Path) -> list[str]:
    """What a checkpoint says against the round logs up to its version. Each of ``runs`` but the first has gone on from
    one of the run before it; epochs are whole passes over ``size`` samples.
    """
    logs = [list(commits(run)) for run in runs]
    ends = [*(log[0]["version"] for log in logs[1:]), position.version]
    counted = [fields for log, end in zip(logs, ends, strict=True) for fields in log if fields["version"] <= end]
    merged: Counter[tuple[int, int]] = Counter()
    for fields in counted:
        for _, pass_index, start, count in fields["spans"]:
            merged.update((pass_index, place) for place in range(start, start + count))
    steps = sum(count for fields in counted for _, count in fields["counts"])
    said = {(epoch, place) for epoch in range(position.epoch) for place in range(size)}
    for part in position.covered:
        said |= {(part.epoch, place) for span in part.spans for place in range(span.start, span.stop)}
    faults = [f"merged {count} times: {sample}" for sample, count in merged.items() if count > 1]
    if said != set(merged):
        faults.append(f"said and not merged: {sorted(said - set(merged))[:9]}")
        faults.append(f"merged and not said: {sorted(set(merged) - said)[:9]}")
    if steps != position.global_step:
        faults.append(f"{steps} steps are in version {position.version}, the checkpoint says {position.global_step}")
    return faults


def commits(run: Path) -> Iterator[dict[str, Any]]:
    """The round log: the fields of every commit, in order, with its wall time ``ts`` in milliseconds."""
    with (run / "events.jsonl").open() as file:
        for line in file:
            record = json.loads(line)
            if record["event"] == "commit":
                yield {**record["fields"], "ts": record["ts"]}


def _coverage_faults(merged: dict[int, Counter[int]], size: int, epochs: int) -> list[str]:
    faults = []
    if sorted(merged) != list(range(epochs)):
        faults.append(f"expected epochs 0 to {epochs - 1}, commits are of {sorted(merged)}")
    for epoch, counts in sorted(merged.items()):
        never = [index for index in range(size) if not counts[index]]
        often = [index for index, count in counts.items() if count > 1]
        if never or often:
            faults.append(f"epoch {epoch}: never merged {never[:10]}, more than once {often[:10]}")
    return faults


def _reading_faults(merged_by: dict[int, Counter[int]], log: Path) -> list[str]:
    faults = []
    for rank, counts in sorted(merged_by.items()):
        unread = counts - _reads(log, str(rank))
        if unread:
            faults.append(f"rank {rank}: merged, but it read them less often: {sorted(unread)[:10]}")
    return faults


def _ending_faults(seen: Testimony, log: Path, lost: Sequence[int] = ()) -> list[str]:
    """All ranks alike, and join() returned those weights, once, in the head (or the only process)."""
    paths = {path.stem.removeprefix("final-"): path for path in log.glob("final-*")}
    finals = {
        rank: json.loads(path.read_text())["sha256"] for rank, path in paths.items() if rank not in map(str, lost)
    }
    joined = [json.loads(path.read_text()) for path in log.glob("joined-*")]
    faults = []
    if len(set(finals.values())) != 1:
        faults.append(f"the ranks ended with other weights: {finals}")
    missing = {str(rank) for rank in seen.ranks if rank not in lost} - set(finals)
    if missing:
        faults.append(f"no final weights of rank {sorted(missing)}")
    if [each["role"] for each in joined] not in (["head"], ["solo"]):
        faults.append(f"join() returned in {[each['role'] for each in joined]}, expected once, in the head")
    elif finals and joined[0]["sha256"] not in finals.values():
        faults.append("join() returned other weights than the ranks ended with")
    seen.sha256 = next(iter(finals.values()), "")
    return faults


def _reads(log: Path, rank: str) -> Counter[int]:
    path = log / f"reads-{rank}.log"
    return Counter(map(int, path.read_text().split())) if path.exists() else Counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("log", type=Path, help="the folder given to the script as --log")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seen = witness_run(options.run, options.log, options.size, options.epochs, options.seed)
    print(json.dumps(asdict(seen)))
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
