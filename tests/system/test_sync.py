"""The project is copied to real hosts before a rank starts: by rsync and by sftp, whole or not at all, and once."""

import os
import re
import stat
import sys
from pathlib import Path

import pytest

from tests.runs import Fdl
from tests.system.lab import Lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

LAUNCH_S = 150

SCRIPT = """
import os, torch
import flodl
from torch.utils.data import TensorDataset
from lib.words import WORD

torch.set_num_threads(1)

def build_model(device):
    return torch.nn.Linear(4, 1).to(device)

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

def train_step(model, batch):
    return (model(batch[0]) - batch[1]).pow(2).mean()

if __name__ == "__main__":
    print(WORD, "in", os.getcwd(), flush=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    config = flodl.ElCheConfig(mode="cpu_cadence")
    builder = flodl.Trainer.builder(build_model, make_optimizer, train_step)
    builder.dataset(data).batch_size(4).num_epochs(1).elche(config).run().join()
"""

ODD = {b"new\nline": b"1", b"\xff\xfe": b"2", b"q'u\"o`te $HOME": b"3", b"-n": b"4", b"#x": b"5", "é漢".encode(): b""}


@pytest.fixture
def project(fdl: Fdl) -> Path:
    folder = fdl.folder / "my project"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "lib" / "words.py").write_text('WORD = "first"\n')
    for name, content in ODD.items():
        (folder / os.fsdecode(name)).write_bytes(content)
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "link").symlink_to("lib/words.py")
    (folder / ".gitignore").write_text("*.pt\nruns/\n")
    (folder / "weights.pt").write_bytes(b"heavy")
    return folder


def names(folder: Path) -> set[bytes]:
    """Every file and link below, but for what interpreters and syncs write."""
    found = set()
    for where, folders, files in os.walk(os.fsencode(folder)):
        folders[:] = [each for each in folders if each not in (b"__pycache__", b".fdl-sync")]
        links = [each for each in folders if os.path.islink(os.path.join(where, each))]
        found |= {os.path.relpath(os.path.join(where, each), os.fsencode(folder)) for each in (*files, *links)}
    return found


def without_rsync(folder: Path) -> str:
    """An interpreter that finds no program."""
    path = folder / "python without rsync"
    path.write_text(f'#!/bin/sh\nPATH=/nowhere exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def copied(text: str, host: str) -> list[str]:
    """What the launch said of files for ``host``."""
    return re.findall(rf"^fdl: sync: {host}: (.*) to copy", text, re.MULTILINE)


@pytest.mark.parametrize("mode", ["rsync", "sftp"])
def test_project_is_copied_once_and_then_only_what_has_changed(
    hosts: Lab, fdl: Fdl, project: Path, tmp_path: Path, mode: str
) -> None:
    there = [tmp_path / "host a's copy", tmp_path / "b" / "$HOME é;*"]
    workers = [hosts.worker(host, 1, path=str(path)) for host, path in zip(hosts.hosts, there, strict=True)]
    cluster = hosts.cluster(fdl.folder / "c.yml", workers, sync={"mode": mode, "exclude": ["/link2"]})
    (project / "link2").symlink_to("tool")

    first = fdl.launch("-c", cluster, "train.py", folder=project)
    assert first.wait(LAUNCH_S) == 0, first.story()
    for host, path in zip(hosts.hosts, there, strict=True):
        assert f"{host.name}:" in first.stdout
        assert f"first in {path}" in first.stdout
        assert copied(first.stderr, host.name) == [f"10 files, {sum_of(path)} bytes"]
        assert names(path) == names(project) - {b"weights.pt", b"link2"}
        assert {name: (path / os.fsdecode(name)).read_bytes() for name in ODD} == ODD
        assert os.readlink(path / "link") == "lib/words.py"
        assert stat.S_IMODE((path / "tool").stat().st_mode) == 0o755
        (path / "results.txt").write_text("not ours")
        (path / "weights.pt").write_bytes(b"its own")

    second = fdl.launch("-c", cluster, "train.py", folder=project)
    assert second.wait(LAUNCH_S) == 0, second.story()
    assert [copied(second.stderr, host.name) for host in hosts.hosts] == [[], []]
    assert second.stderr.count("up to date") == 2

    (project / "lib" / "words.py").write_text('WORD = "second"\n')
    (project / "-n").unlink()
    (project / "tool").chmod(0o644)
    third = fdl.launch("-c", cluster, "train.py", folder=project)
    assert third.wait(LAUNCH_S) == 0, third.story()
    assert third.stdout.count("second in") == 3
    for host, path in zip(hosts.hosts, there, strict=True):
        assert f"{host.name}: 1 file, 16 bytes to copy, 1 x bit(s) to set, 1 to remove" in third.stderr
        assert not (path / "-n").exists()
        assert (path / "results.txt").read_text() == "not ours"
        assert (path / "weights.pt").read_bytes() == b"its own"
    for run in (first, second, third):
        run.wait_until_clean()


def sum_of(folder: Path) -> int:
    return sum(len((folder / os.fsdecode(name)).read_bytes()) for name in names(folder) - {b"link"})
