"""Machines that no roster knows: they come by address, or through an ssh login and nothing else."""

import contextlib
import re
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import START_S, Fdl, Launched
from tests.system.lab import Lab, hang_up
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@pytest.fixture
def kit(fdl: Fdl) -> Path:
    """Where ``fdl join-config walker`` leaves what it makes."""
    return Path(fdl.env["FDL_STATE_HOME"]) / "walk-ins" / "walker"


@contextlib.contextmanager
def gate(fdl: Fdl, hosts: Lab, kit: Path) -> Iterator[tuple[str, int]]:
    """An sshd on the controller's machine that knows the line of ``kit`` and nobody else; yields what follows --ssh,
    and the port.
    """
    with hosts.one_more_sshd(None, authorized=kit / "authorized_keys.line") as (port, known):
        with (fdl.home / ".ssh" / "known_hosts").open("a") as file:
            file.write(known)
        yield f"root@{hosts.address}:{port}", port


def launch(fdl: Fdl, hosts: Lab, cluster: Path, log: Path) -> Launched:
    run = fdl.job(options=("-c", cluster), mode="cpu_cadence", step_ms=40, size=1603, batch_size=8, epochs=5, log=log)
    run.wait_for_training(version=2)
    return run


def elastic_cluster(fdl: Fdl, hosts: Lab, folder: Path) -> Path:
    """One worker; a kit for ``walker`` has been made."""
    cluster = hosts.cluster(folder / "one.yml", [hosts.worker(hosts.hosts[0], 1)], is_elastic=True)
    made = fdl.call("join-config", "walker", "-c", str(cluster))
    assert made.returncode == 0, made.stderr
    return cluster


def token_of(run: Launched, folder: Path) -> Path:
    path = folder / "run.token"
    path.touch(0o600)
    path.write_bytes((run.folder / "token").read_bytes())
    return path


@pytest.mark.long
def test_machine_behind_a_firewall_joins_through_a_guarded_ssh_key(
    fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path, kit: Path
) -> None:
    second = hosts.hosts[1]
    run = launch(fdl, hosts, elastic_cluster(fdl, hosts, tmp_path), log)
    address, port = run.address
    with hosts.fence(second, port), gate(fdl, hosts, kit) as (login, _):
        assert not hosts.reaches(second, port)
        guest = fdl.join(
            run,
            f"{address}:{port}",
            *("--ssh", login, "-i", kit / "id_ed25519", "--token-file", token_of(run, tmp_path)),
            *("--devices", "cpu", "--host", "walker"),
            under=("ip", "netns", "exec", second.name),
        )
        guest.wait_for_text("rank 1 takes part")
        state = run.read("state.json")
        assert state is not None
        assert [host["host"] for host in state["hosts"] if host["tunnelled"]] == ["walker"]
        assert run.wait() == 0, run.story()
        assert guest.wait() == 0, guest.story()
    seen = witness_run(run.folder, log, size=1603, epochs=5)
    assert (seen.faults, seen.ranks) == ([], [0, 1])
    run.wait_until_clean()


@pytest.mark.long
def test_walk_in_comes_back_when_its_ssh_session_breaks(
    fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path, kit: Path
) -> None:
    second = hosts.hosts[1]
    run = launch(fdl, hosts, elastic_cluster(fdl, hosts, tmp_path), log)
    address, port = run.address
    with hosts.fence(second, port), gate(fdl, hosts, kit) as (login, ssh_port):
        guest = fdl.join(
            run,
            f"{address}:{port}",
            *("--persist", "--ssh", login, "-i", kit / "id_ed25519", "--token-file", kit / "daemon.token"),
            *("--devices", "cpu", "--host", "walker"),
            under=("ip", "netns", "exec", second.name),
        )
        fdl.wait_until(lambda: len(run.events("newcomer_ready")) == 1, START_S, guest.story)
        hang_up(hosts.pid_of_sshd[ssh_port])
        fdl.wait_until(lambda: len(run.events("newcomer_ready")) == 2, START_S, guest.story)
        assert run.wait() == 0, run.story()
        guest.process.terminate()
        assert guest.wait() == 0, guest.story()
    assert f"the session with {hosts.address} was lost; it is opened anew" in guest.stdout + guest.stderr
    assert witness_run(run.folder, log, size=1603, epochs=5, lost=[1]).faults == []
    run.wait_until_clean()


def test_guarded_key_opens_the_way_to_the_controller_and_nothing_else(
    fdl: Fdl, hosts: Lab, tmp_path: Path, kit: Path
) -> None:
    cluster = elastic_cluster(fdl, hosts, tmp_path)
    port = int(re.findall(r"port: (\d+)", cluster.read_text())[0])
    with gate(fdl, hosts, kit) as (_, ssh_port), echo(hosts.address, port), echo(hosts.address) as other:
        options = ("-o", f"UserKnownHostsFile={fdl.home}/.ssh/known_hosts", "-o", "BatchMode=yes")
        ssh = ("ssh", *options, "-i", kit / "id_ed25519", "-p", ssh_port, f"root@{hosts.address}")

        def tried(*words: object) -> tuple[int, str]:
            command = [str(word) for word in (*ssh[:1], *words[:-1], *ssh[1:], words[-1]) if word is not None]
            done = subprocess.run(command, input="ping", capture_output=True, text=True, timeout=30, check=False)
            return done.returncode, done.stdout

        assert tried("-W", f"{hosts.address}:{port}", None) == (0, "ping")
        assert tried("-W", f"{hosts.address}:{other}", None)[1] == ""
        assert tried("-W", f"127.0.0.1:{ssh_port}", None)[1] == ""
        assert tried("echo in") == (1, "")
        assert tried("-o", "ExitOnForwardFailure=yes", "-R", "0:127.0.0.1:1", "true")[0] == 255
        refused = fdl.call(
            *("join", f"127.0.0.1:{other}", "--ssh", f"root@{hosts.address}:{ssh_port}", "-i", str(kit / "id_ed25519")),
            *("--token-file", str(kit / "daemon.token"), "--devices", "cpu"),
        )
    assert refused.returncode == 4
    assert f'permitopen="127.0.0.1:{other}"' in refused.stderr


@contextlib.contextmanager
def echo(address: str, port: int = 0) -> Iterator[int]:
    """A server that sends back what comes; yields its port."""

    class Echo(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(self.rfile.read(4))

    with socketserver.TCPServer((address, port), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(10)
