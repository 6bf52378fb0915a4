"""Two hosts with their own sshd for a whole test session, and the command line that knows them."""

from collections.abc import Iterator

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


@pytest.fixture
def hosts(lab: Lab, fdl: Fdl) -> Lab:
    """The lab, its host keys known to ``fdl``, whose search for leftovers includes the hosts."""
    ssh = fdl.home / ".ssh"
    ssh.mkdir(mode=0o700)
    (ssh / "known_hosts").write_text(lab.known_hosts())
    fdl.env["FDL_TEST_NAMESPACES"] = " ".join(host.namespace for host in lab.hosts)
    return lab
