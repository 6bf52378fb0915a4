"""Two ends of one open TLS connection, in memory, and the certificate that all tests share."""

import functools

from flodl.runtime.certificate import Certificate, make_certificate
from flodl.runtime.tls import TlsLayer, client_context


@functools.cache
def certificate() -> Certificate:
    return make_certificate()


def open_pair() -> tuple[TlsLayer, TlsLayer]:
    """Client and server."""
    return pair_and_tickets(certificate())[:2]


def silent_bytes(count: int) -> tuple[TlsLayer, TlsLayer, bytes]:
    """Client and server, and ``count`` sealed messages of the server that bring the client no plain byte: session
    tickets, the one such message that the library makes at will. What the server encrypts follows them.
    """
    server = make_certificate()
    server.context.num_tickets = count
    return pair_and_tickets(server)


def pair_and_tickets(certificate: Certificate) -> tuple[TlsLayer, TlsLayer, bytes]:
    """Client, server, and what the server sends at the end of the handshake."""
    client = TlsLayer(client_context(), is_server=False)
    server = TlsLayer(certificate.context, is_server=True)
    client.shake_hands()
    server.shake_hands(client.outgoing())
    client.shake_hands(server.outgoing())
    server.shake_hands(client.outgoing())
    return client, server, server.outgoing()
