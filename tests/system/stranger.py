"""Somebody who wants in without the right: prints what the controller answers.

    python stranger.py ADDRESS PORT TLS claim RUN ROLE HOST SECRET    says it is HOST, and answers with SECRET (hex)
    python stranger.py ADDRESS PORT TLS replay FILE                   says again what another one has said

TLS is ``tls`` or ``plain``. It does not mind that the controller's own proof is wrong, as an honest peer would.
"""

import socket
import sys
from pathlib import Path

from flodl.messages import Answer, Challenge, Refused, Welcome
from flodl.runtime.tls import client_context, hash_of
from flodl.wire.codec import decode, encode
from flodl.wire.frames import PRE_AUTH_FRAME_BYTES, PREAMBLE, FrameDecoder, frame
from flodl.wire.handshake import Channel, ClientHandshake, FromAccepting, Peer, Role

LIMIT_S = 10.0


def main() -> str:
    address, port, tls, act, *words = sys.argv[1:]
    sock = socket.create_connection((address, int(port)), LIMIT_S)
    certificate = b""
    if tls == "tls":
        secured = client_context().wrap_socket(sock)
        sock, certificate = secured, hash_of(secured)
    with sock:
        return replay(sock, Path(words[0])) if act == "replay" else claim(sock, certificate, *words)


def claim(sock: socket.socket, certificate: bytes, run_id: str, role: str, host: str, secret: str) -> str:
    peer = Peer(Role(role), Channel.CONTROL, host, "0")
    handshake = ClientHandshake(bytes.fromhex(secret), run_id, bytes(32), peer, certificate)
    sock.sendall(PREAMBLE + b"".join(frame(encode(word)) for word in handshake.start()))
    answers = hear(sock, 1)
    match answers:
        case [Challenge(nonce)]:
            sock.sendall(frame(encode(Answer(handshake._proof(b"client", nonce)))))
            return told(hear(sock, 1))
        case _:
            return told(answers)


def replay(sock: socket.socket, file: Path) -> str:
    sock.sendall(file.read_bytes())
    return told(hear(sock, 2))


def hear(sock: socket.socket, count: int) -> list[object]:
    decoder, heard = FrameDecoder(PRE_AUTH_FRAME_BYTES, expect_preamble=False), []
    while len(heard) < count and (data := sock.recv(4096)):
        heard += [decode(payload, FromAccepting) for payload in decoder.feed(data)]
    return heard


def told(answers: list[object]) -> str:
    match answers[-1:]:
        case [Refused(reason)]:
            return f"refused: {reason}"
        case [Welcome()]:
            return "welcome"
        case _:
            return "hung up"


print(main())
