"""A port that somebody else has: who, in one line."""

import socket

import psutil
import pytest

from flodl.errors import PreflightError
from flodl.runtime.ports import MAX_COMMAND_CHARS, listen


def test_owner_of_a_port_is_named_in_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["python", "-c", "import socket\n  serve()\x1b[2J " + "x" * 500]
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: command)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PreflightError) as error:
        listen("127.0.0.1", taken.getsockname()[1], "stop it")
    line, remedy = str(error.value).split("\n")
    shown = line.partition("(")[2]
    assert shown.startswith("python -c import socket serve() [2J xxx")
    assert (len(shown), shown[-2:]) == (MAX_COMMAND_CHARS + 1, "…)")
    assert remedy == "  stop it"
