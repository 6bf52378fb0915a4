"""Two ends of one open TLS connection, in memory, and the certificate that all tests share."""

import functools

from flodl.runtime.certificate import Certificate, make_certificate
from flodl.runtime.tls import TlsLayer, client_context


@functools.cache
def certificate() -> Certificate:
    return make_certificate()


def open_pair() -> tuple[TlsLayer, TlsLayer]:
    """Client and server."""
    client = TlsLayer(client_context(), is_server=False)
    server = TlsLayer(certificate().context, is_server=True)
    client.shake_hands()
    server.shake_hands(client.outgoing())
    client.shake_hands(server.outgoing())
    server.shake_hands(client.outgoing())
    return client, server
