"""What the README shows really runs: its script, and its commands in their order."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
EXECUTABLES = {"python": sys.executable, "fdl": str(BIN / "fdl")}
COMMAND_LIMIT_S = 100.0


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]


@pytest.mark.timeout(900)
def test_script_and_commands_of_the_readme_run_as_shown(tmp_path: Path, deadline_factor: float) -> None:
    (script,) = blocks("python")
    (tmp_path / "circle.py").write_text(script, encoding="utf-8")
    (block,) = [block for block in blocks("sh") if "circle.py" in block]
    env = {**os.environ, "FDL_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}

    said = []
    for command, *arguments in commands(block):
        done = subprocess.run(
            [EXECUTABLES[command], *arguments],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S * deadline_factor,
            check=False,
        )
        assert done.returncode == 0, f"{command} {arguments}: {done.stderr}"
        said.append(done.stdout)

    alone, launched, status, logs = said
    assert "trained 5 epochs, 129 parameters" in alone
    assert launched.count("trained 5 epochs, 129 parameters") == 1
    assert "completed, exit code 0" in status
    assert "trained 5 epochs, 129 parameters" in logs


def test_make_targets_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([a-z]+)|`make ([a-z]+)`", README, re.MULTILINE))

    targets = {first or second for first, second in named}

    assert targets >= {"demo", "test"}
    assert all(f"\n{target}:" in makefile for target in targets)


def test_every_link_of_the_documents_leads_to_a_file() -> None:
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

    broken = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]

    assert broken == []
