"""What ``fdl probe`` shows: one table, check × host, and below it what is wrong and what to do."""

from collections.abc import Sequence
from typing import Final, TextIO

from rich.table import Table
from rich.text import Text

from flodl.core.counted import counted
from flodl.launch.probe.finding import CHECKS, Finding, Level
from flodl.launch.probe.survey import Survey
from flodl.spec.words import printable
from flodl_cli.render import DASH, screen

MAX_CELL_CHARS: Final = 24
"""What is wrong stands whole below the table."""

STYLES: Final = {Level.OK: "", Level.WARN: "yellow", Level.ERROR: "red"}
WORDS: Final = {Level.WARN: "warning", Level.ERROR: "ERROR"}


def report_text(found: Survey, hosts: Sequence[str], stream: TextIO) -> str:
    """The whole report, without a line end, as ``stream`` shows it best."""
    console = screen(stream)
    wrong = [finding for level in (Level.ERROR, Level.WARN) for finding in found.findings if finding.level is level]
    with console.capture() as capture:
        console.print(_table(found, hosts))
        console.print()
        for finding in wrong:
            console.print(_lines(finding), soft_wrap=True)
        console.print(_verdict(wrong, found), soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))


def _table(found: Survey, hosts: Sequence[str]) -> Table:
    ranked = sorted(found.findings, key=lambda finding: list(Level).index(finding.level))
    worst = {(finding.check, finding.host): finding for finding in ranked}
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("CHECK", *hosts):
        made.add_column(head, overflow="fold")
    for check in CHECKS:
        cells = [worst.get((check, host)) for host in hosts]
        if any(cells):
            made.add_row(Text(check), *map(_cell, cells))
    return made


def _cell(finding: Finding | None) -> Text:
    if finding is None:
        return Text(DASH, "dim")
    if finding.level is not Level.OK:
        return Text(WORDS[finding.level], STYLES[finding.level])
    text = printable(finding.read).replace("\n", " ")
    if len(text) > MAX_CELL_CHARS:  # of a path the end tells most
        is_path = text.startswith("/")
        text = f"…{text[-MAX_CELL_CHARS + 1 :]}" if is_path else f"{text[: MAX_CELL_CHARS - 1]}…"
    return Text(text)


def _lines(finding: Finding) -> Text:
    expected = f" (expected {printable(finding.expected)})" if finding.expected else ""
    read = printable(finding.read).replace("\n", "\n    ")
    text = Text(f"{WORDS[finding.level]} ", STYLES[finding.level])
    text.append(f"{printable(finding.host)}: {finding.check}: {read}{expected}", "")
    if finding.remedy:
        text.append(f"\n  {printable(finding.remedy)}", "")
    return text


def _verdict(wrong: Sequence[Finding], found: Survey) -> Text:
    errors = sum(finding.level is Level.ERROR for finding in wrong)
    said = f"{counted(errors, 'error')}, {counted(len(wrong) - errors, 'warning')}" if wrong else "ready"
    return Text(f"{said}; {counted(found.asked_count, 'host')} asked in {found.duration_s:.1f} s")
