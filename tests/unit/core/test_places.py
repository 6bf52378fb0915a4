"""Ranks, hosts and devices of a plain run, and where its ranks meet."""

import pytest

from flodl.core.actions import SendHost
from flodl.core.places import Places, meeting_point, mixture
from flodl.messages import Device, HostHello, PlainGroup, RankSpec, SpawnRanks

CPU = (Device("cpu", 0), Device("cpu", 1))
GPUS = (Device("cuda", 0, "GPU-a"), Device("cuda", 1, "GPU-b"))


def hello(host: str, address: str = "10.0.0.1", devices: tuple[Device, ...] = CPU) -> HostHello:
    return HostHello(host, 7, host, address, devices, 4, "3.11", "2.13", "0.1")


def test_each_host_is_told_its_ranks_and_its_place_in_the_group() -> None:
    places = Places([("b", CPU[0]), ("a", GPUS[1]), ("a", GPUS[0])])

    assert places.orders("10.0.0.2", 29400, 1, 3) == [
        SendHost("b", SpawnRanks(3, (RankSpec(0, 0, CPU[0]),), PlainGroup("10.0.0.2", 29400, 0, 2, 1, 3, ()))),
        SendHost(
            "a",
            SpawnRanks(
                3,
                (RankSpec(1, 0, GPUS[1]), RankSpec(2, 1, GPUS[0])),
                PlainGroup("10.0.0.2", 29400, 1, 2, 1, 3, ("GPU-b", "GPU-a")),
            ),
        ),
    ]


def test_every_start_has_the_same_ranks_and_all_of_them_are_live() -> None:
    places = Places([("a", CPU[0]), ("b", CPU[0]), ("a", CPU[1])])

    first, second = places.new_membership(), places.new_membership()

    assert [(each.rank, each.host, each.device) for each in first.all()] == [
        (0, "a", CPU[0]),
        (1, "b", CPU[0]),
        (2, "a", CPU[1]),
    ]
    assert first.all() == second.all()
    assert second.live == (0, 1, 2)


def test_host_takes_its_place_again_with_the_devices_that_it_had() -> None:
    places = Places([("a", CPU[0]), ("a", CPU[1]), ("b", CPU[0])])
    assert places.misfit(hello("a")) == ""
    assert "offers other devices than before" in places.misfit(hello("b"))


def test_devices_of_a_host_are_of_one_kind() -> None:
    assert mixture(hello("a")) == ""
    assert mixture(hello("a", devices=GPUS)) == ""
    assert "offers cpu and cuda devices" in mixture(hello("a", devices=(GPUS[0], CPU[0])))


@pytest.mark.parametrize(
    ("addresses", "meets"),
    [
        (["10.0.0.1"], ("127.0.0.1", "")),
        (["10.0.0.1", "10.0.0.2"], ("10.0.0.1", "")),
        (["10.0.0.1", "127.0.0.1"], ("10.0.0.1", "")),
        (["127.0.0.1", "127.0.0.1", "10.0.0.2"], ("", "10.0.0.2")),
        (["::1", "fd00::2"], ("", "fd00::2")),
        (["127.0.0.1", "127.0.0.1"], ("127.0.0.1", "")),
    ],
)
def test_ranks_meet_at_an_address_that_reaches_rank_0(addresses: list[str], meets: tuple[str, str]) -> None:
    hosts = tuple("abc"[: len(addresses)])
    hellos = {host: hello(host, address) for host, address in zip(hosts, addresses, strict=True)}
    assert meeting_point(hosts, hellos) == meets
