"""Which addresses are under TLS."""

import pytest

from flodl.config.tls import TlsMode

LOOPBACK = ["127.0.0.1", "127.0.1.1", "::1"]
BEYOND = ["192.168.122.1", "10.0.0.2", "0.0.0.0", "::", "fe80::1%eth0", "203.0.113.9"]


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_is_plain_unless_tls_is_on(address: str) -> None:
    assert [mode.covers(address) for mode in (TlsMode.AUTO, TlsMode.ON, TlsMode.OFF)] == [False, True, False]


@pytest.mark.parametrize("address", BEYOND)
def test_what_others_can_reach_is_under_tls_unless_it_is_off(address: str) -> None:
    assert [mode.covers(address) for mode in (TlsMode.AUTO, TlsMode.ON, TlsMode.OFF)] == [True, True, False]


@pytest.mark.parametrize(
    ("mode", "address", "near"),
    [
        (TlsMode.AUTO, "10.0.0.1", TlsMode.ON),
        (TlsMode.AUTO, "127.0.0.1", TlsMode.OFF),
        (TlsMode.AUTO, "localhost", TlsMode.OFF),
        (TlsMode.ON, "127.0.0.1", TlsMode.ON),
        (TlsMode.OFF, "10.0.0.1", TlsMode.OFF),
    ],
)
def test_forwarded_port_wants_what_the_far_end_dials(mode: TlsMode, address: str, near: TlsMode) -> None:
    assert mode.through(address) is near
