"""TLS 1.3 for one connection, sans-IO: bytes from the network become plain bytes, and the other way round.

It works in memory, because a connection changes hands: the port's mux looks at its first bytes, inside TLS too, and
then a stream of the event loop or a blocking socket of a thread goes on. asyncio's own TLS cannot be taken over by a
thread, and what has been read from a socket cannot be given back to either.

There is no authority, so nobody's certificate is checked here. The handshake inside proves the run's token together
with the certificate's hash (``flodl.wire.handshake``): whoever sits in between has another certificate, and fails.
"""

import contextlib
import functools
import hashlib
import ssl
import threading
from typing import Final

from flodl.errors import JoinRefused, RemoteProtocolError

TLS_HELLO: Final = b"\x16"
"""First byte of a connection that starts with TLS."""

TURNED_AWAY: Final = b"\x15\x03\x03\x00\x02\x02\x31"
"""The answer to a TLS hello where there is no TLS: the fatal alert ``access_denied``."""

NO_TLS: Final = "it takes no TLS: `security.tls` is `off` there, or it listens on loopback only"

RECORD_BYTES: Final = 16 * 1024
"""Most plain bytes in one TLS record: what one call of the library gives or takes at most."""

SEALED_RECORD_BYTES: Final = RECORD_BYTES + 261
"""The longest record on the wire: its header, its type, and the most padding and tag that RFC 8446 allows."""

SILENT_BYTES: Final = 64 * 1024
"""Most sealed bytes in a row that may bring no plain ones: a torn record has a quarter of that, and key updates and
session tickets, which cost us work and say nothing, are not wanted in any number."""

_TURNED_AWAY_REASON: Final = "ACCESS_DENIED"


@functools.cache
def client_context() -> ssl.SSLContext:
    """For connecting; safe for every thread."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def hash_of(peer: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """SHA-256 of the certificate that a client saw."""
    certificate = peer.getpeercert(binary_form=True)
    assert certificate is not None, "a server always has one"
    return hashlib.sha256(certificate).digest()


def is_turned_away(error: ssl.SSLError) -> bool:
    """Whether this is the other side's word that it takes no TLS."""
    return _TURNED_AWAY_REASON in (error.reason or "")


class TlsLayer:
    """One connection's TLS. Any thread may call it: the library's own object bears one call at a time."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        """``context``: ``client_context()``, or that of the run's certificate."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()
        self._silent_bytes = 0
        self.is_open = False
        self.has_ended = False  # the peer has said that nothing follows

    def shake_hands(self, data: bytes = b"") -> None:
        """Take the peer's ``data`` and go on until ``is_open``; send what ``outgoing`` gives, also after an error.

        Raises:
            JoinRefused: the peer takes no TLS.
            RemoteProtocolError: it does not speak TLS 1.3.
        """
        with self._lock:
            self._incoming.write(data)
            try:
                self._object.do_handshake()
                self.is_open = True
            except ssl.SSLWantReadError:
                return
            except ssl.SSLError as error:
                if is_turned_away(error) and not self._object.server_side:
                    raise JoinRefused(NO_TLS) from None
                raise _fault(error) from None

    def outgoing(self) -> bytes:
        """What has to be sent now."""
        with self._lock:
            return self._outgoing.read()

    def certificate_hash(self) -> bytes:
        """SHA-256 of the server's certificate, as a client saw it."""
        return hash_of(self._object)

    def encrypt(self, *buffers: bytes | bytearray | memoryview) -> bytes:
        """What to send for these plain bytes; in this order, and in the order of the calls.

        Raises:
            RemoteProtocolError: the peer has broken the protocol before.
        """
        with self._lock:
            try:
                for buffer in buffers:
                    view = memoryview(buffer)
                    while view:
                        view = view[self._object.write(view) :]
            except ssl.SSLError as error:
                raise _fault(error) from None
            return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """The plain bytes that ``data`` completes; empty while a record is torn, and at the end.

        Raises:
            RemoteProtocolError: something on the way has changed, left out or added bytes, or the peer has sent more
                than ``SILENT_BYTES`` that say nothing.
        """
        pieces: list[bytes] = []
        with self._lock:
            self._incoming.write(data)
            try:
                while piece := self._object.read(RECORD_BYTES):
                    pieces.append(piece)
                self.has_ended = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise _fault(error) from None
            self._count(len(data), brought_some=bool(pieces))
        return b"".join(pieces)

    def decrypt_into(self, view: memoryview, data: bytes | memoryview = b"") -> int:
        """Take ``data`` and fill ``view`` from its front as far as there are plain bytes; returns their number.

        Raises:
            RemoteProtocolError: as ``decrypt``.
        """
        filled = 0
        with self._lock:
            self._incoming.write(data)
            try:
                while filled < len(view) and not self.has_ended:
                    count = int(self._object.read(len(view) - filled, view[filled:]))  # a number, with a buffer
                    self.has_ended = not count
                    filled += count
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise _fault(error) from None
            self._count(len(data), brought_some=filled > 0)
        return filled

    def farewell(self) -> bytes:
        """What to send to say that nothing follows; the last call."""
        with self._lock:
            with contextlib.suppress(ssl.SSLError):  # the peer's own farewell has not come, and is not waited for
                self._object.unwrap()
            return self._outgoing.read()

    def _count(self, sealed_bytes: int, *, brought_some: bool) -> None:
        self._silent_bytes = 0 if brought_some else self._silent_bytes + sealed_bytes
        if self._silent_bytes > SILENT_BYTES:
            raise RemoteProtocolError(f"TLS: more than {SILENT_BYTES} bytes that say nothing")


def _fault(error: ssl.SSLError) -> RemoteProtocolError:
    return RemoteProtocolError(f"TLS: {error.reason or error}")
