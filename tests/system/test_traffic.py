"""What can be read on the wire between two hosts, and what somebody in between achieves."""

import sys
from pathlib import Path

import pytest

from flodl.launch.probe.collect import PAYLOAD_BYTES
from tests.runs import Fdl, Launched
from tests.system import capture
from tests.system.capture import ALERT, DATA, HANDSHAKE, TLS_1_3, Traffic, captured, records
from tests.system.lab import Lab, is_listening

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(240)]

SSH_PORT = 22
SIZE, EPOCHS = 101, 2
WORD_BYTES = 64
"""Most of preflight's one-time word."""
RELAY = Path(__file__).with_name("relay.py")


def run_captured(fdl: Fdl, hosts: Lab, folder: Path, log: Path, mode: str) -> tuple[Traffic, int, Launched]:
    """A whole run of two hosts, all its packets, and the controller's port."""
    if obstacle := capture.obstacle():
        pytest.skip(obstacle)
    port = hosts.free_port()
    cluster = hosts.cluster(folder / "c.yml", [hosts.worker(hosts.hosts[0], 1), hosts.worker(hosts.hosts[1], 2)], port)
    with captured(hosts.bridge, folder / "packets") as traffic:
        run = fdl.job(options=("-c", cluster), mode=mode, size=SIZE, batch_size=4, epochs=EPOCHS, log=log)
        assert run.wait() == 0, run.story()
    run.wait_until_clean()
    return traffic, port, run


def check_controllers_port(traffic: Traffic, port: int, hosts: Lab) -> None:
    """Every byte from and to it is TLS 1.3, and after the hellos everything is encrypted."""
    ways = {way: data for way, data in traffic.streams.items() if (hosts.address, port) in way}
    assert {address for way in ways for address, _ in way} == {hosts.address, *(host.address for host in hosts.hosts)}
    assert len(ways) == 2 * 2 * len(hosts.hosts)  # control and bulk of each host, both ways
    for way, data in ways.items():
        types = records(data)
        assert types[0] == HANDSHAKE, way
        assert types.count(HANDSHAKE) == 1, way
        assert DATA in types, way
        assert ALERT not in types, way
    versions = traffic.hello_versions(port)
    assert versions == [TLS_1_3] * (len(ways) // 2)


def workers_of(hosts: Lab) -> tuple[str, ...]:
    return tuple(sorted(host.address for host in hosts.hosts))


def between_workers(traffic: Traffic, port: int) -> list[bytes]:
    """What went by other ways than the controller's port and ssh."""
    return [data for way, data in traffic.streams.items() if not {at for _, at in way} & {port, SSH_PORT}]


def is_preflight(data: bytes) -> bool:
    """A one-time word, behind it nothing but zeros in one direction; or the word sent back."""
    return len(data) <= WORD_BYTES + PAYLOAD_BYTES and not any(data[WORD_BYTES:])


def beside(traffic: Traffic, *known: int) -> set[tuple[str, str]]:
    """Who talks to whom at other ports than these, as pairs of addresses."""
    rest = {way for way in traffic.streams if not {port for _, port in way} & set(known)}
    return {tuple(sorted((way[0][0], way[1][0]))) for way in rest}  # type: ignore[misc]  # pairs


def test_cpu_mode_puts_nothing_but_tls_and_ssh_on_the_wire(fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path) -> None:
    traffic, port, run = run_captured(fdl, hosts, tmp_path, log, "cpu_cadence")

    check_controllers_port(traffic, port, hosts)
    assert beside(traffic, port, SSH_PORT) <= {workers_of(hosts)}
    assert [data for data in between_workers(traffic, port) if not is_preflight(data)] == []
    assert traffic.others == set()
    everything, token = b"".join(traffic.streams.values()), (run.folder / "token").read_text()
    for words in (token.encode(), bytes.fromhex(token), b"job.py", b"takes its first step", b"HostHello"):
        assert words not in everything


def test_collective_mode_adds_only_what_workers_say_to_each_other(
    fdl: Fdl, hosts: Lab, tmp_path: Path, log: Path
) -> None:
    traffic, port, _ = run_captured(fdl, hosts, tmp_path, log, "nccl_cadence")

    check_controllers_port(traffic, port, hosts)
    assert beside(traffic, port, SSH_PORT) == {workers_of(hosts)}
    assert [data for data in between_workers(traffic, port) if not is_preflight(data)] != []
    assert traffic.others == set()


def test_relay_with_a_certificate_of_its_own_is_refused_by_both_sides(fdl: Fdl, hosts: Lab, tmp_path: Path) -> None:
    worker, between = hosts.hosts
    port = hosts.free_port()
    cluster = hosts.cluster(
        tmp_path / "c.yml", [hosts.worker(worker, 1)], port, controller={"advertise": between.address}
    )
    relay = (sys.executable, RELAY, between.address, port, hosts.address, "tls", tmp_path / "heard")
    with hosts.running(between, *relay, ready=lambda: is_listening(between.address, port)):
        run = fdl.job(options=("-c", cluster), mode="cpu_cadence")
        assert run.wait() == 5, run.story()

    assert f"host {worker.name}: join: its daemon ended with code 2 before it joined" in run.stderr
    words = "the controller's proof is wrong: it holds another token "
    assert words in run.log(f"daemon-{worker.name}.log")
    assert f"was refused: the peer refused: {words}" in run.log("controller.log")
    heard = b"".join(path.read_bytes() for path in tmp_path.glob("heard.*"))
    assert worker.name.encode() in heard  # it has read the hello, and that is all it gets
    assert (run.folder / "token").read_text().encode() not in heard
    run.wait_until_clean()
