"""Launches over real sshd: arguments, the headline from afar, and hosts that cannot start."""

from pathlib import Path

import pytest

from tests.runs import Fdl
from tests.system.lab import Lab

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

LAUNCH_S = 150

SCRIPT = """
import os, sys, torch
import flodl
from torch.utils.data import TensorDataset

torch.set_num_threads(1)

def build_model(device):
    return torch.nn.Linear(4, 1).to(device)

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

def train_step(model, batch):
    if os.environ.get("FAIL_ON") == str(flodl.rank()):
        raise ValueError("planted")
    return (model(batch[0]) - batch[1]).pow(2).mean()

if __name__ == "__main__":
    print("argv", sys.argv[1:], "host", os.uname().nodename, "cwd", os.getcwd(), flush=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    config = flodl.ElCheConfig(mode="cpu_cadence")
    builder = flodl.Trainer.builder(build_model, make_optimizer, train_step)
    builder.dataset(data).batch_size(4).num_epochs(2).elche(config).run().join()
    print("joined once")
"""


@pytest.fixture
def project(fdl: Fdl) -> Path:
    (fdl.folder / "my code").mkdir()
    (fdl.folder / "my code" / "train it.py").write_text(SCRIPT)
    return fdl.folder


def test_arguments_and_folder_arrive_byte_for_byte(hosts: Lab, fdl: Fdl, project: Path) -> None:
    words = ["a b", '--x="q"', "$HOME", ";reboot", "*", "-n", "", "new\nline", "é漢", "--", "-y"]
    workers = [hosts.worker(host, ranks, path=str(project)) for host, ranks in zip(hosts.hosts, (1, 2), strict=True)]
    cluster = hosts.cluster(project / "c.yml", workers)
    run = fdl.launch("-c", cluster, "my code/train it.py", *words)
    assert run.wait(LAUNCH_S) == 0, run.story()
    assert run.stdout.count("joined once") == 1
    for rank, host in enumerate((hosts.hosts[0], hosts.hosts[1], hosts.hosts[1])):
        assert f"{host.name}:{rank}: argv {words!r} host {host.name} cwd {project}" in run.stdout
    run.wait_until_clean()


def test_failure_on_a_remote_rank_is_the_headline(hosts: Lab, fdl: Fdl, project: Path) -> None:
    workers = [hosts.worker(host, 1, path=str(project)) for host in hosts.hosts]
    cluster = hosts.cluster(project / "c.yml", workers, env={"FAIL_ON": "1"})
    run = fdl.launch("-c", cluster, "--stop-timeout", 3, "my code/train it.py")
    assert run.wait(LAUNCH_S) == 1, run.story()
    assert f"first failure: rank 1 on {hosts.hosts[1].name} (cpu:0): ValueError: planted" in run.stderr
    assert "ValueError: planted" in run.stderr.split("last lines", 1)[1]
    run.wait_until_clean()


@pytest.mark.parametrize(
    ("change", "words", "flags", "code"),
    [
        ({"python": "/opt/no/python"}, "preflight: interpreter /opt/no/python not found", (), 3),
        ({"path": "/no/such/folder"}, "preflight: project: folder /no/such/folder not found", (), 3),
        ({"python": "/opt/no/python"}, "start: interpreter /opt/no/python not found", ("--no-preflight",), 4),
        ({"path": "/no/such/folder"}, "start: folder /no/such/folder not found", ("--no-preflight",), 4),
        ({"options": ["UserKnownHostsFile=/dev/null"]}, "host key", (), 4),
        ({"user": "nobody"}, "auth", (), 4),
    ],
)
def test_host_that_cannot_start_is_named_and_the_other_is_cleaned(
    hosts: Lab, fdl: Fdl, project: Path, change: dict[str, object], words: str, flags: tuple[str, ...], code: int
) -> None:
    first, second = (hosts.worker(host, 1, path=str(project)) for host in hosts.hosts)
    ssh = {key: value for key, value in change.items() if key in ("options", "user")}
    second = {**second, **{key: value for key, value in change.items() if key not in ssh}}
    second["ssh"] = {**second["ssh"], **ssh}  # type: ignore[dict-item]
    cluster = hosts.cluster(project / "c.yml", [first, second])
    run = fdl.launch("-c", cluster, *flags, "my code/train it.py")
    assert run.wait(LAUNCH_S) == code, run.story()
    assert hosts.hosts[1].name in run.stderr
    assert words in run.stdout + run.stderr
    run.wait_until_clean()
