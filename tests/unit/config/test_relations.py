"""Rules across workers: rank numbers, and one machine listed twice."""

import threading
import time

import pytest

from flodl.config.relations import (
    Machine,
    machine_findings,
    rank_findings,
    resolve_all,
    resolve_host,
    resolve_nothing,
)


def machines(*hosts: str) -> list[Machine]:
    return [Machine(index, host, host, 22, "") for index, host in enumerate(hosts)]


def table(**addresses: str) -> dict[str, frozenset[str]]:
    return {name: frozenset({address}) for name, address in addresses.items()}


def resolve_a_and_b(name: str) -> frozenset[str]:
    known = table(a="10.0.0.1", b="10.0.0.1", c="10.0.0.2", me="127.0.1.1", six="::ffff:10.0.0.2")
    return known.get(name, frozenset())


@pytest.mark.parametrize(
    "hosts",
    [
        ("x", "X"),
        ("x", "x."),
        ("a", "b"),
        ("a", "10.0.0.1"),
        ("10.0.0.1", "a"),
        ("me", "127.0.0.1"),
        ("localhost", "me"),
        ("::1", "LOCALHOST"),
        ("::1", "0:0:0:0:0:0:0:1"),
        ("c", "six"),
    ],
)
def test_same_machine_twice_is_found(hosts: tuple[str, str]) -> None:
    (finding,) = machine_findings(machines(*hosts), resolve_a_and_b)

    assert finding.path == ("workers", 1, "host")
    assert f"`{hosts[0]}`" in finding.expected


@pytest.mark.parametrize("hosts", [("a", "c"), ("x", "y"), ("10.0.0.1", "10.0.0.2"), ("::1", "::2"), ()])
def test_different_machines_pass(hosts: tuple[str, ...]) -> None:
    assert machine_findings(machines(*hosts), resolve_a_and_b) == []


def test_names_alone_are_compared_without_a_resolver() -> None:
    assert machine_findings(machines("a", "b", "localhost"), resolve_nothing) == []
    assert len(machine_findings(machines("a", "A", "localhost", "127.0.0.1"), resolve_nothing)) == 2


def test_one_address_with_two_ssh_ports_is_two_machines() -> None:
    behind_nat = [Machine(0, "n1", "gate", 2201, ""), Machine(1, "n2", "gate", 2202, "")]

    assert machine_findings(behind_nat, resolve_a_and_b) == []


def test_one_ssh_target_under_two_names_is_one_machine() -> None:
    twice = [Machine(0, "n1", "gate", 22, ""), Machine(1, "n2", "GATE", 22, "")]

    assert len(machine_findings(twice, resolve_a_and_b)) == 1


def test_addresses_behind_jump_hosts_are_not_resolved_here() -> None:
    behind = [Machine(0, "a", "a", 22, "j1"), Machine(1, "b", "b", 22, "j1"), Machine(2, "n", "a", 22, "j2")]

    assert machine_findings(behind, resolve_a_and_b) == []


@pytest.mark.parametrize("ranks", [[], [None, None], [(0, 1), (2,)], [(2,), (0, 1)]])
def test_ranks_that_cover_everything_once_pass(ranks: list[tuple[int, ...] | None]) -> None:
    assert rank_findings(ranks) == []


@pytest.mark.parametrize(
    ("ranks", "path", "words"),
    [
        ([(0,), (0,)], ("workers", 1, "ranks", 0), "workers[0] has 0 already"),
        ([(0, 0)], ("workers", 0, "ranks", 1), "workers[0] has 0 already"),
        ([(0,), (2,)], ("workers", 1, "ranks", 0), "exactly 0 to 1, each once; nobody has 1"),
        ([(1, 2)], ("workers", 0, "ranks", 1), "nobody has 0"),
        ([(0,), None], ("workers", 1, "ranks"), "on every worker, or on none"),
        ([(5,), None], ("workers", 1, "ranks"), "on every worker, or on none"),
    ],
)
def test_ranks_with_holes_or_repeats_are_found(
    ranks: list[tuple[int, ...] | None], path: tuple[str | int, ...], words: str
) -> None:
    (finding,) = rank_findings(ranks)

    assert finding.path == path
    assert words in finding.expected


def test_slow_resolver_does_not_hold_up_the_others() -> None:
    release = threading.Event()

    def resolve(name: str) -> frozenset[str]:
        if name == "slow":
            release.wait(30)
        return frozenset({"10.0.0.9"})

    started_s = time.monotonic()
    resolved = resolve_all(["slow", "fast", "10.0.0.1", "fast"], resolve, timeout_s=0.3)
    release.set()

    assert resolved == {
        "slow": frozenset(),
        "fast": frozenset({"10.0.0.9"}),
        "10.0.0.1": frozenset({"10.0.0.1"}),
    }
    assert time.monotonic() - started_s < 10


def test_system_resolver_answers_or_stays_silent() -> None:
    assert resolve_host("127.0.0.1") == {"127.0.0.1"}
    assert resolve_host("a" * 300) == frozenset()
    assert resolve_host("no-such-host.invalid") == frozenset()
