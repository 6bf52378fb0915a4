"""The run's certificate: self-signed, fresh for each run, its private key never on a disk."""

import datetime as dt
import hashlib
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from flodl.config.tls import TlsMode

VALID_DAYS: Final = 3650
"""Of no meaning to us, who know a certificate by its hash; browsers want to see something."""

SKEW_DAYS: Final = 1


@dataclass(frozen=True, slots=True)
class Certificate:
    """``context`` accepts connections with it; ``sha256`` is its hash, by which it is known."""

    context: ssl.SSLContext
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Security:
    """How a port is served: at addresses that ``mode`` covers under TLS only, at the others under TLS too where there
    is a ``certificate``.
    """

    mode: TlsMode = TlsMode.OFF
    certificate: Certificate | None = None


def security_of(mode: TlsMode, addresses: Iterable[str]) -> Security:
    """How to serve listening sockets at these ``addresses``; makes a certificate where one is needed."""
    return Security(mode, make_certificate() if any(map(mode.covers, addresses)) else None)


def security_warning(mode: TlsMode, addresses: Iterable[str]) -> str:
    """What people must be told of sockets that listen at these ``addresses``; empty when all is well."""
    if mode is not TlsMode.OFF or not any(map(TlsMode.AUTO.covers, addresses)):
        return ""
    return (
        "`security.tls` is `off`: whoever sits on the way between the hosts can read and change the parameters, the "
        "logs, the script's arguments and its environment"
    )


def make_certificate() -> Certificate:
    """A new key and its certificate, ready to accept TLS 1.3 and nothing older."""
    from cryptography import x509  # 30 ms, and a run on loopback needs none
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "flodl")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=SKEW_DAYS))
        .not_valid_after(now + dt.timedelta(days=VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = _server_context(secret + certificate.public_bytes(Encoding.PEM))
    return Certificate(context, hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest())


def _server_context(pem: bytes) -> ssl.SSLContext:
    """The library takes keys from files only: this one has no name and lives in memory for this call."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session
    fd = os.memfd_create("flodl-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context
