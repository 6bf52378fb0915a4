"""What belongs to fdl and what to the script; usage errors; the group's laziness."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from flodl.errors import ConfigError
from flodl.launch import units
from flodl.launch.keeper import KeeperRequest
from flodl.launch.rundir import write_token_file
from flodl_cli.commands import cmd_daemon
from flodl_cli.commands.cmd_launch import command as launch_command
from flodl_cli.commands.cmd_launch import split_script
from flodl_cli.main import COMMANDS, cli, main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDL_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("FDL_CLUSTER", raising=False)
    monkeypatch.chdir(tmp_path)


def fdl(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


@pytest.mark.parametrize(
    ("args", "own", "script"),
    [
        (["train.py", "--log", "x", "--po", "3", "--help", "--version", "--", "-y"], [], None),
        (["--local", "3", "train.py", "--local", "4"], ["--local", "3"], ["train.py", "--local", "4"]),
        (["--local=3", "t.py"], ["--local=3"], ["t.py"]),
        (["-n", "a", "-d", "t.py"], ["-n", "a", "-d"], ["t.py"]),
        (["-na", "t.py", "-d"], ["-na"], ["t.py", "-d"]),
        (["-dn", "a", "t.py"], ["-dn", "a"], ["t.py"]),
        (["-d", "--", "-odd.py", "x"], ["-d"], ["-odd.py", "x"]),
        (["--dry-run", "-m", "pkg.mod", "-c", "x"], ["--dry-run"], ["-m", "pkg.mod", "-c", "x"]),
        (["--bogus", "t.py"], ["--bogus"], ["t.py"]),
        (["--stop-timeout", "5", "-"], ["--stop-timeout", "5"], ["-"]),
        (["-d"], ["-d"], []),
        (
            ["--plain", "--max-restarts", "3", "t.py", "--plain"],
            ["--plain", "--max-restarts", "3"],
            ["t.py", "--plain"],
        ),
    ],
)
def test_command_line_is_cut_at_the_script(args: list[str], own: list[str], script: list[str] | None) -> None:
    assert split_script(launch_command, args) == (own, tuple(args if script is None else script))


def test_script_gets_its_arguments_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "t r.py").write_text("")
    words = ["--log", "a b", "--help", "--", "-y", "", "$HOME", "é漢", "--local", "9"]
    result = fdl("launch", "--dry-run", "--local", "1", "t r.py", *words)
    assert result.exit_code == 0, result.output
    import shlex

    ranks = next(line for line in result.output.splitlines() if line.startswith("  ranks"))
    assert shlex.split(ranks)[2:] == ["t r.py", *words]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            "echo Driver/library version mismatch; exit 18",
            "nvidia-smi exited with 18: Driver/library version mismatch; ",
        ),
        ("kill -9 $$", "nvidia-smi exited with -9: it printed nothing; "),
        ("echo 0, GPU-x", "nvidia-smi lists no GPU: 0, GPU-x; "),
    ],
)
@pytest.mark.parametrize("args", [["launch", "--dry-run"], ["probe"]])
def test_gpu_that_is_not_offered_is_no_silent_cpu_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], answer: str, words: str
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = fdl(*args, "train.py")
    assert result.exit_code == 0
    assert f"fdl: warning: no GPU here, so one CPU rank: {words}" in result.stderr


def test_machine_without_any_sign_of_a_gpu_is_not_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    for name in ("DRIVER_FILE", "AMD_FILE"):
        monkeypatch.setattr(f"flodl.config.gpus.{name}", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "warning" not in fdl("launch", "--dry-run", "train.py").output


@pytest.mark.parametrize("args", [["launch", "--dry-run", "--local", "1"], ["probe", "--local", "1"]])
def test_script_whose_name_is_no_text_is_refused_and_a_folder_or_an_argument_is_not(
    tmp_path: Path, args: list[str]
) -> None:
    odd = os.fsdecode(b"qu\xffick")
    (tmp_path / odd).mkdir()
    for path in (tmp_path / f"{odd}.py", tmp_path / odd / "train.py"):
        path.write_text("")
    refused = fdl(*args, f"{odd}.py")
    assert isinstance(refused.exception, ConfigError)
    assert str(refused.exception).endswith(f"/{odd}.py: its name is no UTF-8 text; rename it")
    code = "from flodl_cli.main import main; main()"
    words = [sys.executable, "-c", code, *args, f"{odd}/train.py", *([odd] if args[0] == "launch" else [])]
    done = subprocess.run(words, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_module_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    odd = os.fsdecode(b"qu\xffick")
    (tmp_path / f"{odd}.py").write_text("")
    with pytest.raises(ConfigError, match="its name is no UTF-8 text; rename it"):
        launch_command.main(["--dry-run", "--local", "1", "-m", odd], standalone_mode=False)


def test_plain_run_is_described_without_a_head(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    result = fdl("launch", "--dry-run", "--local", "2", "--plain", "--max-restarts", "3", "train.py")
    assert result.exit_code == 0, result.output
    assert "plain       no head, no engine; max_restarts: 3" in result.output
    assert "\nhead " not in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["launch", "--bogus", "train.py"], "--bogus"),
        (["launch", "--loc", "3", "train.py"], "--loc"),
        (["launch"], "script"),
        (["launch", "-m"], "module"),
        (["launch", "--local", "0", "train.py"], "--local"),
        (["launch", "--local", "1", "-c", "x.yml", "train.py"], "exclude"),
        (["launch", "--max-restarts", "3", "train.py"], "--max-restarts needs --plain"),
        (["launch", "--plain", "--max-restarts", "-1", "train.py"], "--max-restarts"),
        (["launch", "--plain", "--resume"], "--resume takes a run"),
        (["lunch"], "Did you mean launch?"),
        (["probe", "--local", "1", "-c", "x.yml"], "exclude"),
        (["wibble"], "There are: attach, checkpoint, config, daemon, debug, drain, join, join-config, launch"),
        (["ps", "-a", "-n", "1"], "exclude each other"),
        (["debug", "bundle", "-n", "-1"], "-n"),
        (["status", "--bogus"], "--bogus"),
        (["tail", "--stream", "x"], "stream"),
        (["join", "--devices", "cpu,,cpu"], "separated by commas"),
        (["join", "--devices", ""], "expected all"),
        (["join", "--host", "a/b"], "without blanks and slashes"),
        (["join", "--token-file", "token"], "HOST:PORT"),
        (["join", "--persist", "boss:1337"], "--token-file"),
        (["join", "--persist", "--token-file", "token"], "HOST:PORT"),
        (["daemon", "install"], "--system or --user"),
        (["daemon", "run", "--tls", "maybe"], "--tls"),
        (["join", "boss:1", "--ssh", "-o", "--token-file", "t"], "expected [USER@]HOST"),
        (["join", "--ssh", "boss"], "--ssh needs --token-file"),
        (["join", "-i", "/dev/null"], "-i needs --ssh"),
        (["join-config", "a b"], "expected a host name"),
        (["join-config", "../x"], "expected a host name"),
    ],
)
def test_usage_errors_end_with_2_and_name_the_word(args: list[str], words: str) -> None:
    result = fdl(*args)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["launch", "--local", "1", "trian.py"], 2, "did you mean train.py?"),
        (["launch", "--local", "1", "gone/t.py"], 2, "no folder"),
        (["launch", "--local", "1", "-m", "no.such.module"], 2, "module no.such.module not found"),
        (["launch", "--local", "1", "folder"], 2, "__main__.py"),
        (["launch", "-c", "nothing.yml", "train.py"], 2, "nothing.yml"),
        (["launch", "-c", "bad.yml", "train.py"], 2, "bad.yml:2"),
        (["launch", "-c", "taken.yml", "train.py"], 3, "taken"),
        (["launch", "-c", "nohost.yml", "train.py"], 4, "nohost.invalid"),
        (["probe", "-c", "nothing.yml"], 2, "nothing.yml"),
        (["status"], 2, "fdl launch"),
        (["status", "nix"], 2, "no run 'nix'"),
        (["stop"], 2, "no run is live"),
        (["tail", "nix"], 2, "no run"),
        (["drain", "here"], 2, "no run is live"),
        (["start"], 2, "no run is live"),
        (["attach", "nix"], 2, "no run 'nix'"),
        (["debug", "bundle"], 2, "fdl launch"),
        (["join"], 2, "no run is live"),
        (["join", "10.0.0.1:1337"], 2, "a controller elsewhere needs --token-file"),
        (["join", "10.0.0.1:1337", "--token-file", "nothing"], 2, "the token cannot be read"),
        (["join", "10.0.0.1:1337", "--token-file", "train.py"], 2, "readable by others"),
        (["config", "validate"], 2, "no fdl.cluster.yml"),
        (["launch", "-c", "managed.yml", "train.py"], 2, "fdl join-config node-c"),
        (["daemon", "run"], 2, "FDL_CONTROLLER"),
        (["daemon", "run", "boss:1337"], 2, "FDL_TOKEN_FILE"),
        (["daemon", "run", "boss:1337", "--token-file", "nothing"], 2, "the token cannot be read"),
        (["daemon", "run", "boss:1337", "--token-file", "train.py"], 2, "readable by others"),
        (["join", "boss:1337", "--persist", "--token-file", "train.py"], 2, "readable by others"),
    ],
)
def test_bad_input_ends_with_one_message_and_its_exit_code(
    args: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.yml").write_text("cluster:\n  controler: {}\n")
    (tmp_path / "managed.yml").write_text(
        "cluster:\n  controller: {host: 127.0.0.1}\n  workers: [{host: node-c, daemon: managed}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "taken.yml").write_text(
            f"cluster:\n  controller: {{host: 127.0.0.1, port: {port}}}\n"
            "  workers:\n    - {host: localhost, local_devices: [cpu]}\n"
        )
        (tmp_path / "nohost.yml").write_text(
            "cluster:\n  controller: {host: 127.0.0.1}\n  workers:\n    - {host: nohost.invalid, path: /x}\n"
        )
        with pytest.raises(SystemExit) as caught:
            main(args)
    captured = capsys.readouterr()
    assert caught.value.code == code, captured.err
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not list((tmp_path / "state").glob("runs/*"))


def test_every_command_is_there_and_described(tmp_path: Path) -> None:
    context = click.Context(cli)
    for name in COMMANDS:
        assert cli.get_command(context, name) is not None
        assert fdl(name, "--help").exit_code == 0


@pytest.mark.parametrize("scope", ["system", "user"])
def test_unit_is_printed_and_nothing_is_written(scope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = fdl("daemon", "install", f"--{scope}", "--print")
    assert result.exit_code == 0
    assert f"\nExecStart={sys.executable} -P -m flodl_cli daemon run\n" in result.output
    assert list(tmp_path.rglob("*.service")) == []


def test_users_unit_is_installed_with_the_words_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    result = fdl("daemon", "install", "--user")
    assert result.exit_code == 0, result.output
    assert (tmp_path / ".config/systemd/user/fdl-daemon.service").read_text().startswith("# flodl's managed daemon of")
    assert "FDL_CONTROLLER=\n" in (tmp_path / ".config/fdl/daemon.env").read_text()
    assert result.output.splitlines()[-1] == "  systemctl --user enable --now fdl-daemon"


def test_unit_of_the_machine_is_roots_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as caught:
        main(["daemon", "install", "--system"])
    assert caught.value.code == 2
    assert "type: sudo /" in capsys.readouterr().err


def test_version_is_shown() -> None:
    import flodl

    assert fdl("--version").output == f"fdl {flodl.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom flodl_cli.main import cli\ncli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'asyncssh', 'pydantic', 'rich', 'yaml', 'msgpack', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=os.environ
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["checkpoint", "daemon", "drain", "join", "launch", "probe", "status", "tail", "stop"])
def test_no_command_imports_torch_or_asyncssh(name: str) -> None:
    code = (
        f"import sys\nimport flodl_cli.commands.cmd_{name}\n"
        "heavy = {'torch', 'asyncssh', 'pydantic'} & set(sys.modules)\nsys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_traceback_is_shown_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDL_TRACEBACK", "1")
    from flodl.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["status", "nix"])


def test_config_commands_read_the_file(tmp_path: Path) -> None:
    (tmp_path / "fdl.cluster.yml").write_text(
        "cluster:\n  controller: {host: 127.0.0.1}\n  workers:\n    - {host: localhost, local_devices: [cpu]}\n"
    )
    assert "valid, 1 worker" in fdl("config", "validate").output
    shown = fdl("config", "show").output
    assert "controller.host" in shown
    assert "fdl.cluster.yml:2" in shown
    assert '"origin"' in fdl("config", "show", "--json").output
    assert '"$schema"' in fdl("config", "schema").output


@pytest.mark.parametrize(
    ("given", "loaded", "key"),
    [("/my/key", b"a key", "/my/key"), ("", b"a key", "CREDENTIAL"), ("", b"\n", None), ("", None, None)],
)
def test_managed_daemon_comes_through_ssh_with_the_key_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, loaded: bytes | None, key: str | None
) -> None:
    asked: list[KeeperRequest] = []
    monkeypatch.setattr(cmd_daemon, "keep", lambda request, service: asked.append(request) or 0)
    write_token_file(tmp_path / units.CREDENTIAL, b"\x5e" * 32)
    if loaded is not None:
        (tmp_path / units.KEY_CREDENTIAL).write_bytes(loaded)
    for name, value in {
        "CREDENTIALS_DIRECTORY": str(tmp_path),
        units.CONTROLLER: "127.0.0.1:1437",
        units.SSH: "me@boss:2222",
        units.SSH_KEY: given,
    }.items():
        monkeypatch.setenv(name, value)

    assert fdl("daemon", "run", "--host", "box").exit_code == 0

    (request,) = asked
    assert request.ssh is not None
    assert (request.ssh.user, request.ssh.target, request.ssh.port) == ("me", "boss", 2222)
    assert request.ssh.identity_file == (str(tmp_path / units.KEY_CREDENTIAL) if key == "CREDENTIAL" else key)
    assert request.ssh.reopens
    assert units.SSH not in os.environ
    assert units.SSH_KEY not in os.environ


def test_managed_daemon_without_a_login_dials_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KeeperRequest] = []
    monkeypatch.setattr(cmd_daemon, "keep", lambda request, service: asked.append(request) or 0)
    monkeypatch.setenv(units.SSH_KEY, "/no/such/key")  # as a user's unit says, whether there is one or not
    write_token_file(tmp_path / "token", b"\x5e" * 32)
    assert fdl("daemon", "run", "boss:1337", "--token-file", "token").exit_code == 0
    assert asked[0].ssh is None
