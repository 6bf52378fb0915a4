"""``fdl probe`` on this machine: the table, what stands below it, the document, and the exit codes."""

import io
import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flodl.errors import ConfigError
from flodl.launch.probe.finding import CHECKS, Finding, Level, ok
from flodl.launch.probe.survey import Survey
from flodl_cli.main import cli
from flodl_cli.probe_table import report_text


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("FDL_CLUSTER", raising=False)
    monkeypatch.chdir(tmp_path)


def fdl(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args), standalone_mode=False)


def errors(result: Result) -> dict[str, str]:
    return {each["check"]: each["read"] for each in json.loads(result.output)["findings"] if each["level"] == "error"}


def test_this_machine_is_ready(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json\n")
    result = fdl("probe", "--local", "2", "train.py")
    lines = result.output.splitlines()
    assert result.return_value == 0, result.output
    assert lines[0].split() == ["CHECK", "(here)", "localhost"]
    assert [line.split("  ")[0] for line in lines if line.split("  ")[0] in CHECKS][:3] == ["clock", "python", "flodl"]
    assert "1 host asked in" in lines[-1]


def test_document_has_every_finding_and_the_exit_code(tmp_path: Path) -> None:
    result = fdl("probe", "--local", "1", "--json")
    document = json.loads(result.output)
    assert (result.return_value, document["exit_code"], document["hosts"]) == (0, 0, ["(here)", "localhost"])
    assert set(document["findings"][0]) == {"check", "host", "level", "read", "expected", "remedy"}


def test_a_script_that_is_not_here_is_told_as_launch_tells_it(tmp_path: Path) -> None:
    told = []
    for command in ("probe", "launch"):
        refused = fdl(command, "--local", "1", "gone.py").exception
        assert isinstance(refused, ConfigError)
        told.append((str(refused), refused.exit_code))
    assert told == [(f"script {tmp_path}/gone.py not found", 2)] * 2


def test_module_of_a_package_is_no_file_to_look_for() -> None:
    assert errors(fdl("probe", "--local", "1", "--json")) == {}


def test_port_that_is_taken_is_an_error_with_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "c.yml").write_text(
            f"cluster:\n  controller: {{host: 127.0.0.1, port: {port}}}\n"
            "  workers:\n    - {host: localhost, local_devices: [cpu]}\n"
        )
        result = fdl("probe", "-c", "c.yml", "--json")
    assert result.return_value == 3
    assert f"port {port} is taken by pid" in errors(result)["port"]


def test_interpreter_and_folder_that_are_not_there_are_found_on_this_machine_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for change, check in (("python: /no/python", "python"), ("path: /no/folder", "project")):
        (tmp_path / "c.yml").write_text(
            f"cluster:\n  controller: {{host: 127.0.0.1, port: {port}}}\n"
            f"  workers:\n    - {{host: localhost, local_devices: [cpu], {change}}}\n"
        )
        assert set(errors(fdl("probe", "-c", "c.yml", "--json"))) - {"port"} == {check}


def survey(*findings: Finding) -> Survey:
    return Survey(findings, {}, 1.25, asked_count=1)


def test_what_is_wrong_stands_whole_below_the_table_errors_first() -> None:
    found = survey(
        ok("python", "a", "3.11"),
        Finding("clock", "b", Level.WARN, "late", "on time", "set it"),
        Finding("disk", "a", Level.ERROR, "/tmp: \x1b[2Jfull", "", "free space"),
    )
    text = report_text(found, ["(here)", "a", "b"], io.StringIO())
    assert text.splitlines()[:4] == [
        "CHECK   (here)  a      b",
        "clock   –       –      warning",
        "python  –       3.11   –",
        "disk    –       ERROR  –",
    ]
    assert text.splitlines()[5:] == [
        r"ERROR a: disk: /tmp: \x1b[2Jfull",
        "  free space",
        "warning b: clock: late (expected on time)",
        "  set it",
        "1 error, 1 warning; 1 host asked in 1.2 s",
    ]


def test_of_two_findings_of_a_check_the_table_shows_the_one_that_is_wrong() -> None:
    found = survey(Finding("torch", "a", Level.ERROR, "cpu build"), ok("torch", "a", "2.13"))
    assert "ERROR" in report_text(found, ["a"], io.StringIO()).splitlines()[1]


def test_long_values_are_cut_at_their_end() -> None:
    text = report_text(survey(ok("stale runs", "a", "none, and long words about it")), ["(here)", "a"], io.StringIO())
    assert text.splitlines()[1].endswith("  none, and long words ab…")


def test_long_paths_are_cut_at_their_beginning() -> None:
    text = report_text(survey(ok("project", "a", "/x" * 40 + "/end")), ["(here)", "a"], io.StringIO())
    cell = text.splitlines()[1].split()[-1]
    assert (len(cell), cell[0], cell[-4:]) == (24, "…", "/end")
    assert text.splitlines()[-1].startswith("ready; 1 host")
