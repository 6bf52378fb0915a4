"""The units and settings of the managed daemon: what is shipped, and what is filled in."""

import shlex

import pytest

from flodl.errors import ConfigError
from flodl.launch import units
from flodl.launch.units import Scope, config, unit


@pytest.mark.parametrize("scope", list(Scope))
def test_unit_starts_the_interpreter_that_it_is_given(scope: Scope) -> None:
    text = unit(scope, "/opt/venv/bin/python", "alice")

    assert "\nExecStart=/opt/venv/bin/python -P -m flodl_cli daemon run\n" in text
    assert ("\nUser=alice\n" in text) is (scope is Scope.SYSTEM)


@pytest.mark.parametrize("scope", list(Scope))
def test_unit_keeps_its_promises(scope: Scope) -> None:
    lines = unit(scope, "/usr/bin/python3", "fdl").splitlines()

    assert {"Type=notify", "KillMode=mixed", "Restart=on-failure", "OOMPolicy=continue", "LimitCORE=0"} <= set(lines)
    assert any(line.startswith("WatchdogSec=") for line in lines)
    assert any(line.startswith("RestartPreventExitStatus=2") for line in lines)
    hides_gpus = ("PrivateDevices=", "DevicePolicy=", "DeviceAllow=", "ProtectClock=", "MemoryDenyWriteExecute=")
    assert [line for line in lines if line.startswith((*hides_gpus, "ProtectHome="))] == []


@pytest.mark.parametrize(
    ("python", "word"),
    [
        ("/opt/my venv/bin/python", '"/opt/my venv/bin/python"'),
        ("/opt/100%/$x/python", '"/opt/100%%/$$x/python"'),
        ('/opt/a"b/python', '"/opt/a\\"b/python"'),
    ],
)
def test_paths_reach_the_command_line_whole(python: str, word: str) -> None:
    assert f"\nExecStart={word} -P -m flodl_cli daemon run\n" in unit(Scope.USER, python)


@pytest.mark.parametrize("python", ["python3", "", "/opt/a\nUser=root/python"])
def test_path_that_no_unit_can_hold_is_refused(python: str) -> None:
    with pytest.raises(ConfigError, match="cannot stand in a unit"):
        unit(Scope.USER, python)


@pytest.mark.parametrize("user", ["", "a b", "a\nb", "%u"])
def test_user_that_no_unit_can_hold_is_refused(user: str) -> None:
    with pytest.raises(ConfigError, match="as the name of a user"):
        unit(Scope.SYSTEM, "/usr/bin/python3", user)


def test_settings_are_filled_in_where_the_example_explains_them() -> None:
    given = {units.CONTROLLER: "boss:1337", units.HOST: "node-c", units.PATH: '/srv/my "pro$ject"'}

    lines = [line for line in config(given).splitlines() if line and not line.startswith("#")]

    assert {name: shlex.split(value)[0] for name, _, value in (line.partition("=") for line in lines)} == given


def test_every_setting_can_be_given() -> None:
    text = config(dict.fromkeys(units.SETTINGS, "word"))

    assert [line.partition("=")[0] for line in text.splitlines() if line.endswith("=word")] == list(units.SETTINGS)


def test_value_with_a_line_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot stand in daemon\.env"):
        config({units.HOST: "a\nFDL_TLS=off"})


def test_ssh_key_beside_the_token_is_handed_over_where_it_is_there() -> None:
    system, user = unit(Scope.SYSTEM, "/usr/bin/python3", "fdl").splitlines(), unit(Scope.USER, "/usr/bin/python3")

    assert f"LoadCredential={units.KEY_CREDENTIAL}:/etc/fdl/id_ed25519" in system
    assert f"SetCredential={units.KEY_CREDENTIAL}:\\n" in system  # else a unit without the file would not start
    assert '"FDL_SSH_KEY=%E/fdl/id_ed25519"' in user
