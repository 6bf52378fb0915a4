"""Clocks, interfaces, MTUs, and who reaches whom."""

import pytest

from flodl.launch.plan import HostPlan
from flodl.launch.probe.facts import Facts, Interface, Reach
from flodl.launch.probe.finding import Finding, Level
from flodl.launch.probe.judge_network import (
    MAX_PEERS,
    addresses_of,
    is_named,
    judge_network,
    peers_of,
    source_of,
)
from tests.unit.launch.probe.describing import facts, host, of, reach, wrong

WARN, ERROR = Level.WARN, Level.ERROR
TWO = (Interface("eth0", 1500, ("10.0.0.11",)), Interface("ib0", 4092, ("10.9.0.11", "fd00::9")))


def on(interface: str) -> HostPlan:
    return host(env={"NCCL_SOCKET_IFNAME": interface})


def judged(
    hosts: dict[str, tuple[HostPlan, Facts]], reaches: dict[str, Reach], skews_s: dict[str, float] | None = None
) -> list[Finding]:
    return judge_network(hosts, reaches, skews_s or {})


def test_two_hosts_that_reach_everybody_are_green() -> None:
    hosts = {"a": (host("a"), facts()), "b": (host("b"), facts())}
    reaches = {"a": reach(peers={"b": ""}), "b": reach(peers={"a": ""})}
    found = judged(hosts, reaches, {"a": 0.01, "b": -0.3})
    assert wrong(found) == {}
    assert [each.read for each in found if each.host == "b"] == ["-0.30 s", "eth0", "10.0.0.1", "1 reached", "1500"]


@pytest.mark.parametrize(
    ("skew_s", "read"),
    [(600.04, "its clock is 600.0 s ahead of this machine's"), (-5.1, "its clock is 5.1 s behind this machine's")],
)
def test_clock_that_is_off_is_a_warning_with_the_figure(skew_s: float, read: str) -> None:
    finding = of(judged({"a": (host("a"), facts())}, {}, {"a": skew_s}), "clock")
    assert (finding.level, finding.read, finding.expected) == (WARN, read, "within 5 s")


def test_clock_within_five_seconds_is_fine() -> None:
    assert wrong(judged({"a": (host("a"), facts())}, {}, {"a": 4.9})) == {}
    assert of(judged({"a": (host("a"), facts())}, {}, {"a": -0.004}), "clock").read == "+0.00 s"


def test_controller_that_cannot_be_dialled_is_an_error() -> None:
    finding = of(judged({"a": (host("a"), facts())}, {"a": reach(error="10.0.0.1: timed out")}), "controller")
    assert finding.level is ERROR
    assert finding.read == "it cannot dial the controller: 10.0.0.1: timed out"
    assert "controller.port" in finding.remedy


def test_peers_that_cannot_be_dialled_are_a_warning_that_names_them() -> None:
    peers = {"b": "10.0.0.12: timed out", "c": "", **{f"x{index}": "no" for index in range(5)}}
    finding = of(judged({"a": (host("a"), facts())}, {"a": reach(peers=peers)}), "peers")
    assert finding.level is WARN
    assert finding.read.startswith("b cannot be dialled (10.0.0.12: timed out); x0")
    assert finding.read.endswith(" and 2 more")
    assert "cpu_* mode" in finding.remedy


# ----------------------------------------------------------------------------------------------------------- interfaces
@pytest.mark.parametrize(
    ("variable", "interface", "expected"),
    [
        ("ib0", "ib0", True),
        ("ib", "ib0", True),
        ("=ib", "ib0", False),
        ("=ib0", "ib0", True),
        ("eth,ib", "ib0", True),
        ("eth", "ib0", False),
        ("^docker", "docker0", False),
        ("", "ib0", False),
    ],
)
def test_interface_is_named_as_nccl_reads_it(variable: str, interface: str, expected: bool) -> None:
    assert is_named(on(variable), interface) == expected


def test_peers_dial_the_named_interface_and_from_it() -> None:
    there = facts(interfaces=TWO)
    assert addresses_of(on("ib0"), there) == ["10.9.0.11", "fd00::9"]
    assert addresses_of(host(), there) == ["10.0.0.11", "10.9.0.11", "fd00::9"]
    assert (source_of(on("ib0"), there), source_of(host(), there), source_of(on("no"), there)) == ("10.9.0.11", "", "")


def test_named_interface_that_is_not_there_is_an_error_with_those_that_are() -> None:
    finding = of(judged({"a": (on("enp1s0"), facts(interfaces=TWO))}, {}), "interface")
    assert (finding.level, finding.expected) == (ERROR, "one of: eth0, ib0")
    assert "enp1s0" in finding.read
    assert "nccl_socket_ifname" in finding.remedy


def test_named_interface_without_an_address_is_an_error() -> None:
    bare = facts(interfaces=(Interface("ib0", 4092, ()),))
    assert of(judged({"a": (on("ib0"), bare)}, {}), "interface").expected == "one of: none with an address"


def test_interface_that_is_only_excluded_needs_none_of_its_name() -> None:
    assert wrong(judged({"a": (on("^docker"), facts())}, {})) == {}


def test_host_with_a_tunnel_needs_no_network_but_ssh() -> None:
    hosts = {"a": (host("a", tunnel=True), facts(interfaces=())), "b": (host("b"), facts())}
    found = judged(hosts, {"a": reach(error="no address to dial"), "b": reach()}, {"a": 0.0, "b": 0.0})
    assert wrong(found) == {}
    assert [(each.check, each.read) for each in found if each.host == "a"] == [
        ("clock", "+0.00 s"),
        ("controller", "through ssh"),
    ]


def test_mtus_that_differ_are_a_warning_on_those_with_the_larger_one() -> None:
    hosts = {"a": (on("ib0"), facts(interfaces=TWO)), "b": (host("b"), facts())}
    found = judged(hosts, {"b": reach()})
    mtu = [each for each in found if each.check == "mtu"]
    assert [(each.host, each.level) for each in mtu] == [("a", WARN), ("b", Level.OK)]
    assert mtu[0].read == "ib0 has MTU 4092"
    assert mtu[0].remedy.endswith("mtu 1500")


# ---------------------------------------------------------------------------------------------------------------- peers
def test_everybody_dials_everybody_else() -> None:
    assert peers_of(["a", "b", "c"], "b") == ["c", "a"]
    assert peers_of(["a"], "a") == []


def test_in_a_large_cluster_everybody_is_dialled_by_as_many() -> None:
    names = [f"n{index}" for index in range(100)]
    dialled = [peer for name in names for peer in peers_of(names, name)]
    assert {dialled.count(name) for name in names} == {MAX_PEERS}
