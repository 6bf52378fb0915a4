"""Which OpenSSH options ``ssh.options`` may hold, checked before anything starts and without importing asyncssh.

An option that cannot be honoured is refused by name: one that is dropped in silence is a host that behaves otherwise
than its owner wrote.
"""

from collections.abc import Iterable
from typing import Final

from flodl.errors import ConfigError

HONOURED: Final = (
    "AddressFamily",
    "BindAddress",
    "CASignatureAlgorithms",
    "CertificateFile",
    "Ciphers",
    "Compression",
    "ConnectTimeout",
    "GlobalKnownHostsFile",
    "HashKnownHosts",
    "HostKeyAlgorithms",
    "HostKeyAlias",
    "Hostname",
    "IdentitiesOnly",
    "IdentityAgent",
    "IdentityFile",
    "KexAlgorithms",
    "MACs",
    "Port",
    "PreferredAuthentications",
    "ProxyCommand",
    "ProxyJump",
    "PubkeyAuthentication",
    "RekeyLimit",
    "ServerAliveCountMax",
    "ServerAliveInterval",
    "StrictHostKeyChecking",
    "TCPKeepAlive",
    "User",
    "UserKnownHostsFile",
)

_NAMES: Final = {name.lower(): name for name in HONOURED}
_INTEGERS: Final = {"ConnectTimeout", "Port", "ServerAliveCountMax", "ServerAliveInterval"}
_STRICT: Final = ("yes", "no", "off", "accept-new", "ask")


def parse_options(options: Iterable[str], host: str) -> dict[str, str]:
    """The ``Key=value`` pairs as canonical names and values; the first of a repeated key wins, as with OpenSSH.

    Raises:
        ConfigError: not ``Key=value``, an option that cannot be honoured, or a value of the wrong kind.
    """
    parsed: dict[str, str] = {}
    for option in options:
        key, separator, value = option.partition("=")
        value = value.strip()
        name = _NAMES.get(key.strip().lower())
        if not separator or not value or any(ord(char) < 32 for char in option):
            raise ConfigError(f"host {host}: ssh.options: {option!r}: expected one line like Key=value")
        if name is None:
            raise ConfigError(
                f"host {host}: ssh.options: {key.strip()} cannot be honoured; accepted are: {', '.join(HONOURED)}"
            )
        if name in _INTEGERS and not value.isdigit():
            raise ConfigError(f"host {host}: ssh.options: {name}={value}: expected a whole number")
        if name == "StrictHostKeyChecking" and value.lower() not in _STRICT:
            raise ConfigError(f"host {host}: ssh.options: {name}={value}: expected one of {', '.join(_STRICT)}")
        parsed.setdefault(name, value)
    return parsed
