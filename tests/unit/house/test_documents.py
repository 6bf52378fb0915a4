"""The documents and the code say the same, where a machine can tell."""

import re
import subprocess
import sys
import tomllib
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


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chosen = {re.split(r"[<>=~! ]", one, maxsplit=1)[0] for one in project["dependencies"]}
    section = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Dependencies")[1]

    explained = set(re.findall(r"^\| ([a-z0-9_-]+) \| \S", section, re.MULTILINE)) - {"package"}

    assert explained == chosen


def test_names_in_the_journeys_are_those_of_the_code() -> None:
    text = (ROOT / "docs/journeys.md").read_text(encoding="utf-8")
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for room in ("flodl", "flodl_cli", "daemon")
        for path in (ROOT / room).rglob("*.py")
    )

    named = {(owner, name) for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", text)}
    unknown = [
        f"{owner}.{name}"
        for owner, name in sorted(named)
        if f"class {owner}" not in code or not re.search(rf"\bdef {name}\b", code)
    ]

    assert len(named) > 20
    assert unknown == []


def test_files_in_the_documents_exist() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))

    named = set(re.findall(r"`(?:flodl/)?([a-z_]+/[a-z_]+\.py)`", texts))
    missing = [
        path for path in sorted(named) if not any((ROOT / top / path).exists() for top in ("", "flodl", "daemon"))
    ]

    assert len(named) > 10
    assert missing == []
