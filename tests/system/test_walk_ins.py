"""Machines that no roster knows: they come by address, or through an ssh login and nothing else."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import Fdl, Launched
from tests.system.lab import Lab
from tests.witness import witness_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "walker"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@contextlib.contextmanager
def gate(fdl: Fdl, hosts: Lab, key: Path, permitted: str) -> Iterator[str]:
    """An sshd on the controller's machine that lets ``key`` forward to one address and do nothing else; yields what
    follows --ssh.
    """
    authorized = key.with_suffix(".authorized")
    authorized.write_text(f'restrict,port-forwarding,permitopen="{permitted}" {key.with_suffix(".pub").read_text()}')
    with hosts.one_more_sshd(None, authorized=authorized) as (port, known):
        with (fdl.home / ".ssh" / "known_hosts").open("a") as file:
            file.write(known)
        yield f"root@{hosts.address}:{port}"


def running(fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path) -> Launched:
    first = hosts.hosts[0]
    cluster = hosts.cluster(tmp_path / "one.yml", [hosts.worker(first, 1)], is_elastic=True)
    run = fdl.job(options=("-c", cluster), mode="cpu_cadence", step_ms=40, size=1603, batch_size=8, epochs=5, log=log)
    run.wait_for_training(version=2)
    return run


def token_of(run: Launched, folder: Path) -> Path:
    path = folder / "run.token"
    path.touch(0o600)
    path.write_bytes((run.folder / "token").read_bytes())
    return path


def test_machine_behind_a_firewall_joins_through_a_guarded_ssh_key(
    fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path, key: Path
) -> None:
    second = hosts.hosts[1]
    run = running(fdl, hosts, tmp_path, log)
    address, port = run.address
    there = ("ip", "netns", "exec", second.name)
    with hosts.fence(second, port), gate(fdl, hosts, key, f"{address}:{port}") as login:
        guest = fdl.join(
            run,
            f"{address}:{port}",
            *("--ssh", login, "-i", key, "--token-file", token_of(run, tmp_path)),
            *("--devices", "cpu", "--host", "walker"),
            under=there,
        )
        guest.wait_for_text("rank 1 takes part")
        state = run.read("state.json")
        assert state is not None
        assert [(host["host"], host["address"]) for host in state["hosts"] if host["tunnelled"]] == [
            ("walker", "127.0.0.1")
        ]
        assert run.wait() == 0, run.story()
        assert guest.wait() == 0, guest.story()
    seen = witness_run(run.folder, log, size=1603, epochs=5)
    assert (seen.faults, seen.ranks) == ([], [0, 1])
    run.wait_until_clean()
