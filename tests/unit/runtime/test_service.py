"""What a service takes from systemd, and tells it."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flodl.runtime.service import OWN_VARIABLES, Service

GIVEN = {
    "NOTIFY_SOCKET": "/run/notify",
    "WATCHDOG_USEC": "30000000",
    "WATCHDOG_PID": "7",
    "LISTEN_FDS": "1",
    "LISTEN_PID": "7",
    "LISTEN_FDNAMES": "x",
    "CREDENTIALS_DIRECTORY": "/run/credentials/fdl-daemon.service",
    "PATH": "/bin",
}


@pytest.fixture(params=["path", "abstract"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A notification socket and its name, of both kinds that systemd uses."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@flodl-test-{tmp_path}"[:100]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name[1:] if name.startswith("@") else name)
        sock.settimeout(5.0)
        yield sock, name


def test_what_is_meant_for_the_service_is_taken_out_of_the_environment() -> None:
    environ = dict(GIVEN)
    service = Service.taken_from(environ, 7)
    assert environ == {"PATH": "/bin"}
    assert set(OWN_VARIABLES) == set(GIVEN) - {"PATH"}
    assert service == Service("/run/notify", 30.0, Path("/run/credentials/fdl-daemon.service"))


def test_outside_of_systemd_there_is_nobody_to_talk_to() -> None:
    service = Service.taken_from({}, 7)
    assert service == Service()
    service.tell(READY=1)


@pytest.mark.parametrize(
    "changes", [{"WATCHDOG_PID": "8"}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "-1"}]
)
def test_watchdog_that_is_meant_for_another_or_is_none_is_left_alone(changes: dict[str, str]) -> None:
    assert Service.taken_from({**GIVEN, **changes}, 7).watchdog_s is None


def test_watchdog_without_a_pid_is_meant_for_everybody() -> None:
    assert Service.taken_from({"WATCHDOG_USEC": "1500000"}, 7).watchdog_s == 1.5


def test_words_arrive_as_one_datagram_of_one_line_each(listening: tuple[socket.socket, str]) -> None:
    sock, name = listening
    Service(name).tell(READY=1, STATUS="first\nsecond \udcff")
    assert sock.recv(4096) == b"READY=1\nSTATUS=first second \\udcff"


@pytest.mark.parametrize("address", ["/nowhere/notify", "vsock:2:1", "relative"])
def test_service_manager_that_does_not_listen_changes_nothing(address: str) -> None:
    Service(address).tell(WATCHDOG=1)
