"""Two hosts with their own sshd for a whole test session, and the command line that knows them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import Fdl, fdl
from tests.system.lab import Lab

__all__ = ["fdl", "hosts", "lab"]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two hosts; the test is skipped, with the reason, where there can be none."""
    if obstacle := Lab.obstacle():
        pytest.skip(obstacle)
    with Lab(tmp_path_factory.mktemp("lab"), 2) as running:
        yield running


@pytest.fixture(scope="session")
def larger_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts, as ``lab``."""
    if obstacle := Lab.obstacle():
        pytest.skip(obstacle)
    with Lab(tmp_path_factory.mktemp("lab"), 3, number=1) as running:
        yield running


@pytest.fixture
def hosts(lab: Lab, fdl: Fdl) -> Lab:
    """The lab, its host keys known to ``fdl``, whose search for leftovers includes the hosts."""
    return known(lab, fdl)


@pytest.fixture
def three(larger_lab: Lab, fdl: Fdl) -> Lab:
    """Three hosts, as ``hosts``."""
    return known(larger_lab, fdl)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where tests/scripts/job.py leaves its evidence."""
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def known(lab: Lab, fdl: Fdl) -> Lab:
    ssh = fdl.home / ".ssh"
    ssh.mkdir(mode=0o700)
    (ssh / "known_hosts").write_text(lab.known_hosts())
    fdl.env["FDL_TEST_NAMESPACES"] = " ".join(host.namespace for host in lab.hosts)
    return lab
