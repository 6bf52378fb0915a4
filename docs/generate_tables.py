"""Writes the tables of the documents that can be read off the code.

    python docs/generate_tables.py            rewrite the documents
    python docs/generate_tables.py --check    exit 1 and name the documents that are not up to date

A generated part of a document stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; ``PARTS`` maps the
names to the functions that make them. Everything else in a document is written by hand.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping

from tables.figures import quality, reliability
from tables.limits import core_limits, elche_constants, limits
from tables.machines import rank_transitions, round_transitions
from tables.markdown import DOCS, ROOT
from tables.surface import cadence_knobs, cluster_file, commands, knobs, layers
from tables.wire import message_fields, nested_types, who_says_what

MARKED = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, report what is out of date")
    is_check = parser.parse_args().check
    stale = [path for path in sorted(DOCS.glob("*.md")) if render(path.read_text()) != path.read_text()]
    for path in stale:
        if not is_check:
            path.write_text(render(path.read_text()))
        sys.stdout.write(f"{'out of date' if is_check else 'written'}: {path.relative_to(ROOT)}\n")
    return 1 if is_check and stale else 0


def render(text: str) -> str:
    """``text`` with every generated part made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


PARTS: Mapping[str, Callable[[], str]] = {
    "quality": quality,
    "reliability": reliability,
    "who-says-what": who_says_what,
    "messages": message_fields,
    "nested-types": nested_types,
    "limits": limits,
    "core-limits": core_limits,
    "elche-constants": elche_constants,
    "rank-transitions": rank_transitions,
    "round-story": round_transitions,
    "commands": commands,
    "cluster-file": cluster_file,
    "knobs": knobs,
    "cadence-knobs": cadence_knobs,
    "layers": layers,
}


if __name__ == "__main__":
    sys.exit(main())
