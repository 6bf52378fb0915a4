"""The documents and the code say the same, where a machine can tell."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import flodl
import flodl.errors
from flodl.launch.probe.finding import CHECKS

ROOT = Path(__file__).resolve().parents[3]
PUT_TOGETHER = {  # at run time, from parts too small to look for
    "FILE:LINE:COL: KEY",
    "is taken by pid",
    "' is not an address of this machine",
    "Trainer.run: this process imported the script again",
    "the daemon was not ready within 30 s",
    "peer_suspect",
    "peer_alive",
    "is dead (silent for",
    "ended by signal 9",
    "first failure: rank",
}


def texts_of_the_code() -> list[str]:
    """Every string of the code, with NUL where a value goes."""
    texts = []
    for path in (path for room in ("flodl", "flodl_cli", "daemon") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
    return texts


def quoted_symptoms() -> set[str]:
    """What the first column of troubleshooting quotes, cut at its gaps, without a stage or an event's name."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quotes = [
        quote for cell in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for quote in re.findall(r"`([^`]+)`", cell)
    ]
    parts = [part.strip(" :,;()") for quote in quotes for part in quote.split("…")]
    named = r"^(host key|[a-z]+(_[a-z]+)*): "
    return {found for part in parts if len(found := re.sub(named, "", part)) >= 8}


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


def test_every_word_of_the_glossary_is_defined_once() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")

    words = re.findall(r"\*\*([^*]+)\*\*", text)
    twice = {word for word in words if words.count(word) > 1}

    assert len(words) > 100
    assert twice == set()


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


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    texts = [" ".join(text.split()) for text in texts_of_the_code()]

    symptoms = quoted_symptoms()
    unknown = {symptom for symptom in symptoms if not any(symptom in text for text in texts)}

    assert len(symptoms) > 50
    assert unknown <= PUT_TOGETHER


def test_every_check_of_preflight_is_explained() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    section = text.split("\n## Preflight\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)

    assert [check for row in rows for check in re.findall(r"`([^`]+)`", row)] == list(CHECKS)


def test_every_error_is_importable_from_flodl_and_in_the_reference_with_its_code() -> None:
    classes = {name: each for name, each in vars(flodl.errors).items() if inspect.isclass(each)}
    errors = {name: each for name, each in classes.items() if issubclass(each, flodl.FlodlError)}

    assert {name for name, each in errors.items() if getattr(flodl, name, None) is not each} == set()
    assert dict(re.findall(r"`(\w+)` \| (\d) \|", reference_text())) == {
        name: str(each.exit_code) for name, each in errors.items()
    }


def test_every_field_of_results_is_in_the_reference() -> None:
    parts = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", reference_text(), re.MULTILINE | re.DOTALL))

    for result in (flodl.EpochMetrics, flodl.TrainedState):
        named = {field.name for field in dataclasses.fields(result) if not field.name.startswith("_")}
        assert named == set(re.findall(r"^\| `(\w+)` \|", parts[result.__name__], re.MULTILINE))


def test_every_public_name_is_there() -> None:
    assert [name for name in dir(flodl) if not hasattr(flodl, name)] == []
    assert flodl.Precision("bf16") is flodl.Precision.BF16


def reference_text() -> str:
    return (ROOT / "docs/api.md").read_text(encoding="utf-8")
