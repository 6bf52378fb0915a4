"""The generated parts of the documents are those of the code beside them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_generated_tables_are_up_to_date(deadline_factor: float) -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate_tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 * deadline_factor,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nrun: python docs/generate_tables.py"
