"""The run's token, what is derived from it and the user's private key are searched for, on all hosts, as they may be
written: raw, in hex, in base64. Hosts share this machine's files and process table, so one search finds them all.
"""

import os
import secrets
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flodl.launch.debug_bundle import forms_of
from flodl.launch.rundir import TOKEN_BYTES, RunDir, write_token_file
from flodl.wire.handshake import derive_host_secret, derive_join_secret, derive_read_token
from tests.runs import END_S, Fdl, Launched
from tests.system.lab import Lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

MAX_FILE_BYTES = 64 << 20
VERBOSE = {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"}


def secrets_of(run: Launched, lab: Lab) -> dict[str, tuple[bytes, ...]]:
    """By name, every form of it; of the key the lines that only it has."""
    token = RunDir(run.folder).read_token()
    found = {"token": forms_of(token), "read token": forms_of(bytes.fromhex(derive_read_token(token)))}
    found |= {
        f"secret of {name}": forms_of(derive_host_secret(token, name))
        for name in (*(host.name for host in lab.hosts), "walker")
    }
    join = bytes.fromhex((Path(run.folder).parents[1] / "join.token").read_text())
    found |= {"join token": forms_of(join), "join secret": forms_of(derive_join_secret(join, "walker"))}
    lines = lab.key.read_bytes().splitlines()[2:-1]  # the first line of the body names the kind of key
    return {**found, "private key": tuple(lines)}


def holders(known: dict[str, tuple[bytes, ...]], data: bytes, where: str) -> list[str]:
    return [f"{name} in {where}" for name, forms in known.items() if any(form in data for form in forms)]


def argv_and_environments() -> Iterator[tuple[str, bytes]]:
    """Of every process of this machine and its hosts."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        for part in ("cmdline", "environ"):
            yield f"/proc/{name}/{part}", read(Path(f"/proc/{name}/{part}"))


def open_files(pids: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    """What these processes have open, unlinked spools included, but for the parameters' memory."""
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith("/") and not target.startswith(("/memfd:", "/dev/")):
                yield f"{fd} → {target}", read(fd)


def files_below(*folders: Path, but: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    left_out = set(but)
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path not in left_out:
                yield str(path), read(path)


def members(bundle: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(bundle) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            yield f"{bundle.name}: {member.name}", b"" if file is None else file.read()


def read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError:
        return b""  # gone, or a socket


def test_no_secret_stands_in_argv_environments_logs_state_events_or_bundle_on_any_host(
    fdl: Fdl, hosts: Lab, tmp_path: Path
) -> None:
    first, second = hosts.hosts
    fdl.env["FDL_TRACEBACK"] = "1"
    home, own = Path(fdl.env["FDL_STATE_HOME"]), tmp_path / "run.token"
    home.mkdir(mode=0o700, parents=True)
    write_token_file(home / "join.token", secrets.token_bytes(TOKEN_BYTES))
    cluster = hosts.cluster(tmp_path / "c.yml", [hosts.worker(first, 1)], is_elastic=True, env=VERBOSE)
    run = fdl.job(options=("-c", cluster), step_ms=20, epochs=10_000, mode="nccl_cadence", save=tmp_path / "ckpt")
    run.wait_for_event("host_joined")
    write_token_file(own, RunDir(run.folder).read_token())
    address, port = run.address
    there = ("ip", "netns", "exec", second.name)
    guest = fdl.join(run, f"{address}:{port}", "--token-file", own, "--devices", "cpu", "--host", "walker", under=there)
    guest.wait_for_text("rank 1 takes part")
    known = secrets_of(run, hosts)

    found = [each for where, data in argv_and_environments() for each in holders(known, data, where)]
    pids = [int(line.split()[0]) for line in run.leftovers()]
    assert len(pids) > 6, pids
    found += [each for where, data in open_files(pids) for each in holders(known, data, where)]
    for name, arguments in (("status", ["--json"]), ("ps", ["--json"]), ("tail", ["-n", "1000"])):
        found += holders(known, fdl.call(name, *arguments).stdout.encode(), f"fdl {name}")
    bundle = tmp_path / "bundle.tar.gz"
    assert fdl.call("debug", "bundle", "-o", str(bundle)).returncode == 0
    assert fdl.call("stop", timeout_s=END_S).returncode == 0
    assert run.wait(END_S) == 143, run.story()
    guest.wait()
    found += [each for where, data in members(bundle) for each in holders(known, data, where)]
    kept = [run.folder / "token", home / "join.token", own, hosts.key]
    found += [
        each
        for where, data in files_below(tmp_path, hosts.key.parent, but=kept)
        for each in holders(known, data, where)
    ]

    assert found == []
    run.wait_until_clean()


def test_search_finds_what_is_planted(fdl: Fdl, hosts: Lab, tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    """The search above could be blind."""
    token = bytes(range(32))
    known = {"token": forms_of(token)}
    planted = tmp_path / "planted"
    planted.write_text(f"x{token.hex()}x")
    with (
        planted.open() as file,
        subprocess.Popen(
            ["ip", "netns", "exec", hosts.hosts[0].name, sys.executable, "-c", "input()", token.hex().upper()],
            env={"SECRET": forms_of(token)[-1].decode()},
            stdin=subprocess.PIPE,
            stdout=file,
        ) as process,
    ):
        proc = Path(f"/proc/{process.pid}")  # has neither for a moment, while ip becomes Python
        python = sys.executable.encode()
        wait_until(lambda: read(proc / "cmdline").startswith(python) and read(proc / "environ"), 10, "Python")
        seen = [where for where, data in argv_and_environments() if holders(known, data, where)]
        assert {f"/proc/{process.pid}/cmdline", f"/proc/{process.pid}/environ"} <= set(seen)
        assert any(holders(known, data, where) for where, data in open_files([process.pid]))
    assert [where for where, data in files_below(tmp_path, but=()) if holders(known, data, where)] == [str(planted)]
