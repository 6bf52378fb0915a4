"""Hosts and addresses as people write them."""

import pytest

from flodl.config.address import format_address, is_loopback, is_unspecified, parse_host, split_address
from flodl.errors import ConfigError


@pytest.mark.parametrize("text", ["node-a", "my_host", "a.b.lab", "node-a.", "10.0.0.1", "::1", "fe80::1%eth0", "1e3"])
def test_host_is_kept_as_written(text: str) -> None:
    assert parse_host(text) == text


def test_bracketed_ipv6_loses_its_brackets() -> None:
    assert parse_host("[::1]") == "::1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0",
        "1337",
        "999.1.1.1",
        "-a",
        "a-",
        "a..b",
        "a b",
        "node-a:1337",
        "[10.0.0.1]",
        "[::1",
        "é",
        "a" * 64,
        ("a." * 127),
    ],
)
def test_text_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_host(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node-a", ("node-a", 1337)),
        ("node-a:80", ("node-a", 80)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("::1", ("::1", 1337)),
        ("[::1]", ("::1", 1337)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_address_is_split_into_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text, 1337) == expected


@pytest.mark.parametrize(
    "text", ["node-a:", "node-a:0", "node-a:70000", "node-a:x", "node-a:٣", "a b:80", ":80", "h:9999999"]
)
def test_bad_address_is_refused_with_the_text_in_the_message(text: str) -> None:
    with pytest.raises(ConfigError, match=r"address "):
        split_address(text, 1337)


def test_ipv6_is_written_in_brackets_before_a_port() -> None:
    assert format_address("::1", 80) == "[::1]:80"
    assert format_address("node-a", 80) == "node-a:80"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.1.1", True), ("::1", True), ("LocalHost.", True), ("10.0.0.1", False), ("node", False)],
)
def test_loopback_is_told_apart(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", True), ("::", True), ("::1", False), ("node", False)])
def test_unspecified_address_is_told_apart(host: str, expected: bool) -> None:
    assert is_unspecified(host) is expected
