import os
import sys
from pathlib import Path

import asyncssh
import pytest

from flodl.launch.bootstrap import Bootstrap, Liveness
from tests.unit.launch.ssh_site import FAKE_DAEMON, USER, SshSite, executable


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshSite:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", USER)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = SshSite(home)
    client_key = asyncssh.generate_private_key("ssh-ed25519")
    client_key.write_private_key(made.key)
    made.key.chmod(0o600)
    client_key.write_public_key(home / "authorized.pub")
    return made


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An interpreter that plays a daemon: reads its bootstrap, says ready, stores what it got, waits for the end."""
    script = tmp_path / "fake_daemon.py"
    script.write_text(FAKE_DAEMON)
    return executable(
        tmp_path / "fake python",
        f'exec "{sys.executable}" "{script}" "{tmp_path / "got.json"}"',
    )


@pytest.fixture
def bootstrap() -> Bootstrap:
    return Bootstrap(
        run_id="20261129-213045-ab12",
        secret="5e" * 32,
        controllers=(),
        host="box",
        devices=("cpu",),
        script=("a b.py", '--x="q"', "$HOME", ";reboot", "*", "", "new\nline", "é漢"),
        cwd="/",
        env={"MULTI": "a\nb", "UNI": "é漢", "QUOTE": "'\"`$x"},
        python=sys.executable,
        liveness=Liveness(),
        on_disconnect_s=120.0,
        stop_timeout_s=30.0,
        spool_dir=os.fspath(Path("/nowhere")),
    )
