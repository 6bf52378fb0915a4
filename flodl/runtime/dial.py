"""The connecting side: try every address of the controller, prove the token, hand over the open connection."""

import asyncio
import errno
import secrets
import socket
from dataclasses import dataclass, field
from typing import Final

import flodl
from flodl.config.address import format_address
from flodl.config.tls import TlsMode
from flodl.errors import HostUnreachable, JoinRefused, RemoteProtocolError
from flodl.runtime.greeting import converse
from flodl.runtime.line import Line
from flodl.runtime.reason import reason_of
from flodl.runtime.streams import ConnectionLost, FramedStream, configure_tcp
from flodl.runtime.tls import TlsLayer, client_context
from flodl.wire.codec import Vocabulary, encode
from flodl.wire.frames import FRAME_BYTES, PRE_AUTH_FRAME_BYTES, PREAMBLE, FrameDecoder, frame
from flodl.wire.handshake import NONCE_BYTES, Channel, ClientHandshake, FromAccepting, Peer, Role

RESOLVE_S: Final = 10.0
"""Longest look-up of a name: two tries of the usual resolver."""

CONNECT_S: Final = 5.0
"""Longest try at one address: two lost SYNs; a host that needs longer cannot train with us."""

HANDSHAKE_S: Final = 10.0
"""Longest handshake; the accepting side gives up after as long."""

_CHECK_REMEDY: Final = "check that the controller runs there and that no firewall drops its port"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who dials, and what it proves: the run's token; as a daemon its host's secret, as a walk-in its join secret.
    ``host`` is the dialing host's name in the roster.
    """

    run_id: str
    secret: bytes = field(repr=False)
    role: Role
    host: str


@dataclass(frozen=True, slots=True)
class Controller:
    """Where the controller listens, as configured; ``tls`` says at which addresses we want TLS. ``shown`` names it for
    people where the address means nothing to them; empty: the address does.
    """

    host: str
    port: int
    tls: TlsMode = TlsMode.AUTO
    shown: str = ""

    def __str__(self) -> str:
        return self.shown or format_address(self.host, self.port)


async def connect_control(controller: Controller, identity: Identity, allowed: Vocabulary) -> tuple[FramedStream, str]:
    """Open a control connection.

    Returns:
        The stream, on which ``allowed`` messages may come, and the local address that reached the controller.

    Raises:
        HostUnreachable: stage resolve, connect or join, with every address that was tried.
        JoinRefused: the controller refused us, takes no TLS, or could not prove that it holds our token.
    """
    line, decoder, payloads = await _open(controller, identity, Channel.CONTROL)
    local: str = line.sock.getsockname()[0]
    peer = f"controller {controller}"
    stream = await FramedStream.over(line.sock, peer, allowed, decoder=decoder, payloads=payloads, tls=line.tls)
    return stream, local


async def connect_bulk(controller: Controller, identity: Identity) -> tuple[Line, str]:
    """Open a bulk connection.

    Returns:
        A line with a blocking socket, for a thread's ``BlockingFrames``, and the local address that reached the
        controller.

    Raises:
        HostUnreachable: as ``connect_control``.
        JoinRefused: as ``connect_control``.
    """
    line, decoder, payloads = await _open(controller, identity, Channel.BULK)
    if payloads or decoder.buffered_bytes:
        line.sock.close()
        raise HostUnreachable(str(controller), "join", "it sent more than the handshake on a bulk connection")
    local: str = line.sock.getsockname()[0]
    line.sock.setblocking(True)
    return line, local


async def _open(controller: Controller, identity: Identity, channel: Channel) -> tuple[Line, FrameDecoder, list[bytes]]:
    sock = await _dial(controller)
    try:
        line, decoder = Line(sock), FrameDecoder(PRE_AUTH_FRAME_BYTES, expect_preamble=False)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                handshake = await _prepare(controller, identity, channel, line)
                hello = b"".join(frame(encode(word)) for word in handshake.start())
                await line.send(PREAMBLE + hello)
                payloads = await converse(line, decoder, handshake, FromAccepting)
        except JoinRefused as refused:
            raise JoinRefused(f"controller {controller}: {refused}") from None
        except TimeoutError:
            reason = f"no answer to the handshake within {HANDSHAKE_S:g} s"
            raise HostUnreachable(str(controller), "join", reason, _CHECK_REMEDY) from None
        except ConnectionLost as lost:
            raise HostUnreachable(str(controller), "join", f"it hung up {lost.detail}", _CHECK_REMEDY) from lost
        except (RemoteProtocolError, OSError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise HostUnreachable(str(controller), "join", reason, _CHECK_REMEDY) from error
        if not handshake.done:
            reason = f"controller {controller}: {handshake.refusal}"
            raise JoinRefused(reason, is_wrong_token=handshake.is_wrong_secret)
        return line, decoder, payloads + decoder.raise_limit(FRAME_BYTES)
    except BaseException:
        sock.close()
        raise


async def _prepare(controller: Controller, identity: Identity, channel: Channel, line: Line) -> ClientHandshake:
    """TLS where it is wanted, and a handshake that proves the certificate which we saw in it."""
    binding = b""
    if controller.tls.covers(str(line.sock.getpeername()[0])):
        layer = TlsLayer(client_context(), is_server=False)
        await line.secure(layer)
        binding = layer.certificate_hash()
    peer = Peer(identity.role, channel, identity.host, flodl.__version__)
    return ClientHandshake(identity.secret, identity.run_id, secrets.token_bytes(NONCE_BYTES), peer, binding)


async def _dial(controller: Controller) -> socket.socket:
    """Connect to the first address that answers, in the resolver's order."""
    failures = []
    for family, sockaddr in await _resolve(controller):
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, sockaddr)
            if sock.getsockname() == sock.getpeername():  # TCP met itself: nobody listens there
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            configure_tcp(sock)
            return sock
        except TimeoutError:
            failures.append(f"{sockaddr[0]!s}: no answer within {CONNECT_S:g} s")
        except OSError as error:
            failures.append(f"{sockaddr[0]!s}: {reason_of(error)}")
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise HostUnreachable(str(controller), "connect", "; ".join(failures), _CHECK_REMEDY)


async def _resolve(controller: Controller) -> list[tuple[int, tuple[str | int | bytes, ...]]]:
    loop = asyncio.get_running_loop()
    remedy = "use a name that this host resolves, or an IP address (`controller.advertise`)"
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(controller.host, controller.port, type=socket.SOCK_STREAM)
    except TimeoutError:
        reason = f"no answer from the resolver within {RESOLVE_S:g} s"
        raise HostUnreachable(str(controller), "resolve", reason, remedy) from None
    except (OSError, UnicodeError) as error:
        raise HostUnreachable(str(controller), "resolve", reason_of(error), remedy) from error
    return list(dict.fromkeys((int(family), sockaddr) for family, _, _, _, sockaddr in found))
