"""Host names, IP literals and ``host:port`` texts.

A host is kept as written, except that an IPv6 literal loses its brackets: sockets want ``::1``, files and URLs want
``[::1]``. Nothing here resolves a name.
"""

import ipaddress
import re

from flodl.errors import ConfigError

MAX_NAME_CHARS = 253
"""RFC 1035's limit for a whole name."""

_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NAME_WORDS = "a host name (letters, digits, `-`, `_` and `.`) or an IP address"


def parse_host(text: str) -> str:
    """Return the host that ``text`` names: a host name or an IP literal, IPv6 with or without brackets.

    Returns:
        The text itself, an IPv6 literal without its brackets.

    Raises:
        ConfigError: it is neither; the message says what was expected.
    """
    if text.startswith("[") and text.endswith("]"):
        if not _is_ip(text[1:-1], version=6):
            raise ConfigError("an IPv6 address between the brackets")
        return text[1:-1]
    if _is_ip(text):
        return text
    if ":" in text:
        raise ConfigError(f"{_NAME_WORDS}; a port has a key of its own, and an IPv6 address is written in full")
    labels = text.removesuffix(".").split(".")
    if len(text) > MAX_NAME_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError(_NAME_WORDS)
    if labels[-1].isdigit():
        raise ConfigError(f"{_NAME_WORDS} in full; a host name cannot end in a part of digits only")
    return text


def split_address(text: str, default_port: int) -> tuple[str, int]:
    """Split ``host``, ``host:port``, ``::1``, ``[::1]`` or ``[::1]:port``.

    Args:
        text: as typed by a person.
        default_port: taken when ``text`` names no port.

    Raises:
        ConfigError: the host is no host, or the port not a whole number from 1 to 65535.
    """
    host, colon, port = text.rpartition(":")
    if not colon or _is_ip(text, version=6) or text.endswith("]"):
        host, port = text, str(default_port)
    try:
        parsed = parse_host(host)
    except ConfigError as wrong:
        raise ConfigError(f"address {text!r}: expected {wrong}") from None
    if not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise ConfigError(f"address {text!r}: expected a port from 1 to 65535, got {port!r}")
    return parsed, int(port)


def format_address(host: str, port: int) -> str:
    """Write ``host:port``, an IPv6 literal in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback IP literal or the name ``localhost``."""
    if _is_ip(host):
        return ipaddress.ip_address(host).is_loopback
    return host.casefold().removesuffix(".") == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether ``host`` is ``0.0.0.0`` or ``::``: every address to bind, none to dial."""
    return _is_ip(host) and ipaddress.ip_address(host).is_unspecified


def _is_ip(text: str, version: int | None = None) -> bool:
    try:
        return ipaddress.ip_address(text).version == (version or ipaddress.ip_address(text).version)
    except ValueError:
        return False
