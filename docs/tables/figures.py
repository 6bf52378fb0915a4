"""Figures that benchmarks have kept."""

import json
import math
import statistics

from tables.markdown import DOCS, table


def quality() -> str:
    """The figures that benchmarks/quality.py has kept."""
    if not (DOCS / "quality.json").exists():
        return "(not measured: `python benchmarks/quality.py --write` makes this table)"
    kept = json.loads((DOCS / "quality.json").read_text())
    rows = []
    for row in kept["rows"]:
        worse = "" if row["worse_by"] is None else f"{row['worse_by']:+.4f}"
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        held_out = f"{row['mean']:.4f} ± {row['deviation']:.4f}"
        verdict = "" if row["worse_by"] is None else "yes" if row["is_good"] else "**no**"
        rows.append((row["task"], f"`{row['mode']}`", f"{row['rounds']:.0f}", held_out, worse, error, verdict))
    header = ("example", "mode", "rounds", "held out, mean ± deviation", "worse by", "standard error", "within two")
    return f"{kept['seeds']} seeds; {kept['measure']}.\n\n{table(header, rows)}"


def reliability() -> str:
    """The figures that benchmarks/reliability.py has kept."""
    if not (DOCS / "reliability.json").exists():
        return "(not measured: `python benchmarks/reliability.py --write` makes this table)"
    kept = json.loads((DOCS / "reliability.json").read_text())
    rows = []
    for what, row in kept.items():
        came = [each for each in row["next_s"] if each is not None]
        pauses = [each for each in row["pause_s"] if each is not None]
        mode, _, moment = what.partition(" ")
        rows.append(
            (
                f"`{mode}`",
                moment or "step",
                f"{len(came)} of {len(row['next_s'])}",
                f"{row['median_s']:.3f}",
                f"{max(came, default=math.inf):.3f}",
                f"{statistics.median(pauses):.3f}",
                f"{max(row['steps_redone'], default=0)}",
            )
        )
    header = (
        "who",
        "killed in",
        "went on",
        "next step, median s",
        "most s",
        "longest pause, median s",
        "steps done again",
    )
    return table(header, rows)
