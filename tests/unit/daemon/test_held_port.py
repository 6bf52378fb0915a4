"""A port that is kept for rank 0: who may have it, and how it is seen that somebody else has."""

import socket
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from flodl_daemon import held_port
from flodl_daemon.held_port import HeldPort


@pytest.fixture
def held() -> Iterator[HeldPort]:
    with closing(HeldPort()) as port:
        yield port


def listening(port: int, reuse: bool = True) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        sock.bind(("127.0.0.1", port))
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


@pytest.mark.parametrize("use_libuv", [True, False])
def test_store_of_rank_0_listens_on_the_port_that_is_held(held: HeldPort, use_libuv: bool) -> None:
    port = held.renew(1, "").port
    store = TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=20), wait_for_workers=False, use_libuv=use_libuv)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_port_is_given_to_nobody_who_does_not_ask_for_it_by_number(held: HeldPort) -> None:
    port = held.renew(1, "").port
    with pytest.raises(OSError, match="in use"):
        listening(port, reuse=False)
    with closing(socket.create_server(("", 0))) as other:
        assert other.getsockname()[1] != port


def test_next_port_is_another_one_and_the_last_is_free_again(held: HeldPort) -> None:
    first, second = held.renew(1, ""), held.renew(2, "")
    assert (first.start, first.was_taken, first.error, first.address) == (1, False, "", "")
    assert (second.start, second.was_taken) == (2, False)
    with closing(listening(first.port, reuse=False)):
        assert second.port != first.port


def test_stranger_who_listens_on_the_port_is_seen(held: HeldPort) -> None:
    port = held.renew(1, "").port
    with closing(listening(port)):
        again = held.renew(2, "")
    assert again.was_taken
    assert again.port not in (0, port)
    assert not held.renew(3, "").was_taken


def test_address_that_reaches_a_peer_is_told_on_demand(held: HeldPort) -> None:
    assert held.renew(1, "127.0.0.5").address == "127.0.0.1"


def test_no_way_to_a_peer_is_an_error_and_no_port(held: HeldPort) -> None:
    answer = held.renew(1, "not an address")
    assert answer.port == 0
    assert answer.error


def test_without_ipv6_the_port_is_held_for_ipv4(held: HeldPort, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = held_port._bind

    def without_ipv6(family: socket.AddressFamily, address: str) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return bind(family, address)

    monkeypatch.setattr(held_port, "_bind", without_ipv6)
    port = held.renew(1, "").port
    with pytest.raises(OSError, match="in use"):
        listening(port, reuse=False)
