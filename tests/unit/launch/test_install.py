"""Where the managed daemon's files come to lie, what is kept, and what systemd's words say."""

from pathlib import Path

import pytest

from flodl.errors import PreflightError
from flodl.launch.install import Places, install, is_active, next_steps, parse_properties, places, status_line
from flodl.launch.units import Scope


@pytest.fixture
def where(tmp_path: Path) -> Places:
    return Places(
        tmp_path / "units" / "fdl-daemon.service", tmp_path / "fdl" / "daemon.env", tmp_path / "fdl" / "token"
    )


@pytest.mark.parametrize(
    ("scope", "environ", "unit", "config"),
    [
        (Scope.SYSTEM, {}, "/etc/systemd/system/fdl-daemon.service", "/etc/fdl/daemon.env"),
        (Scope.USER, {}, "/home/me/.config/systemd/user/fdl-daemon.service", "/home/me/.config/fdl/daemon.env"),
        (Scope.USER, {"XDG_CONFIG_HOME": "/c"}, "/c/systemd/user/fdl-daemon.service", "/c/fdl/daemon.env"),
        (Scope.USER, {"XDG_CONFIG_HOME": "c"}, "/home/me/.config/systemd/user/fdl-daemon.service",
         "/home/me/.config/fdl/daemon.env"),
    ],
)  # fmt: skip
def test_files_lie_where_systemd_looks(scope: Scope, environ: dict[str, str], unit: str, config: str) -> None:
    found = places(scope, environ, Path("/home/me"))
    assert (str(found.unit), str(found.config)) == (unit, config)
    assert found.token == found.config.with_name("daemon.token")


def test_again_changes_nothing(where: Places) -> None:
    first = install(where, "unit", "settings")
    assert [line.split()[0] for line in first] == ["written", "written", "missing"]
    where.config.write_text("edited")
    where.token.touch(0o600)
    stamp = where.unit.stat().st_mtime_ns
    assert [line.split()[0] for line in install(where, "unit", "settings")] == ["kept", "kept", "kept"]
    assert (where.config.read_text(), where.unit.stat().st_mtime_ns) == ("edited", stamp)


def test_unit_of_an_older_flodl_is_replaced_and_settings_are_not(where: Places) -> None:
    install(where, "unit", "settings")
    assert install(where, "newer unit", "newer settings")[0] == f"written  {where.unit}"
    assert (where.unit.read_text(), where.config.read_text()) == ("newer unit", "settings")
    assert [path.name for path in where.unit.parent.iterdir()] == ["fdl-daemon.service"]


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    places = Places(tmp_path / "file" / "fdl-daemon.service", tmp_path / "daemon.env", tmp_path / "token")
    with pytest.raises(PreflightError, match=r"the unit is not installed"):
        install(places, "unit", "settings")


@pytest.mark.parametrize(
    ("scope", "line"),
    [(Scope.SYSTEM, "  systemctl enable --now fdl-daemon"), (Scope.USER, "  systemctl --user enable --now fdl-daemon")],
)
def test_next_steps_can_be_typed(scope: Scope, line: str, where: Places) -> None:
    steps = next_steps(scope, where, "me")
    assert steps[-1] == line
    assert any("enable-linger me" in step for step in steps) is (scope is Scope.USER)


ACTIVE = """\
LoadState=loaded
ActiveState=active
SubState=running
StatusText=serving run a=b: 2 ranks
MainPID=41
NRestarts=0
"""
FAILED = """\
LoadState=loaded
ActiveState=failed
SubState=failed
StatusText=
Result=exit-code
ExecMainStatus=2
NRestarts=3
"""


@pytest.mark.parametrize(
    ("text", "active", "line"),
    [
        (ACTIVE, True, "system  active (running)  pid 41  serving run a=b: 2 ranks"),
        (FAILED, False, "system  failed (failed)  exit-code, exit code 2  restarted 3 times"),
        ("LoadState=not-found\nActiveState=inactive\n", False, "system  not installed; fdl daemon install --system"),
        ("LoadState=loaded\nActiveState=inactive\nSubState=dead\nResult=success\n", False, "system  inactive (dead)"),
        ("", False, "system  not installed; fdl daemon install --system"),
    ],
)
def test_what_systemd_says_becomes_one_line(text: str, active: bool, line: str) -> None:
    found = parse_properties(text)
    assert (is_active(found), status_line(Scope.SYSTEM, found)) == (active, line)
