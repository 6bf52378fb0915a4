"""A whole run under TLS on loopback: head, daemons, both kinds of connections, a guest, and every command."""

import json
import socket
from pathlib import Path

import pytest

from tests.runs import END_S, START_S, Fdl, Launched

pytestmark = pytest.mark.timeout(240)

CLUSTER = """\
cluster:
  controller: {{host: 127.0.0.1, port: {port}}}
  workers:
    - {{host: localhost, local_devices: [cpu]}}
  security: {{tls: {tls}}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def launch(fdl: Fdl, tls: str) -> Launched:
    path = fdl.folder / f"{tls}.yml"
    path.write_text(CLUSTER.format(port=free_port(), tls=tls))
    run = fdl.job(options=("-c", path), mode="cpu_cadence", step_ms=20, size=803, batch_size=4, epochs=10_000)
    run.wait_for_training()
    return run


def answer_in_plain(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, START_S) as sock:
        sock.sendall(b"GET /state.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return sock.recv(4096)


def test_run_under_tls_is_watched_joined_and_stopped(fdl: Fdl, tmp_path: Path) -> None:
    run = launch(fdl, "on")
    token = tmp_path / "run.token"
    token.touch(0o600)
    token.write_bytes((run.folder / "token").read_bytes())
    where = "{}:{}".format(*run.address)

    guest = fdl.join(run, where, "--token-file", token, "--tls", "on", "--devices", "cpu", "--host", "far")
    guest.wait_for_text("rank 1 takes part")
    before = len(run.commits())
    fdl.wait_until(lambda: len(run.commits()) > before + 2, START_S, guest.story)

    for asked in ((), ("--addr", where)):
        state = json.loads(fdl.call("status", "--json", *asked).stdout)
        assert {host["host"] for host in state["hosts"]} == {"localhost", "far"}
    assert fdl.call("tail", "-n", "3").returncode == 0
    refused = fdl.call("join", where, "--token-file", str(token), "--devices", "cpu", "--host", "plain")
    assert refused.returncode == 4
    assert "under TLS only" in refused.stderr
    assert answer_in_plain(run.address).startswith(b"HTTP/1.1 308")
    assert len((run.read("controller.json") or {})["certificate"]) == 64

    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    assert guest.wait() == 0, guest.story()
    assert [path for path in run.folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()] == []
    run.wait_until_clean()


def test_run_without_tls_tells_a_guest_that_wants_it(fdl: Fdl, tmp_path: Path) -> None:
    run = launch(fdl, "off")
    where = "{}:{}".format(*run.address)

    refused = fdl.call(
        "join", where, "--token-file", str(run.folder / "token"), "--tls", "on", "--devices", "cpu", "--host", "far"
    )

    assert refused.returncode == 4
    assert "it takes no TLS" in refused.stderr
    assert run.events("tls_off") == []  # nobody but this machine can listen
    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    run.wait_until_clean()
