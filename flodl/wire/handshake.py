"""Mutual proof of the run's token, sans-IO: Hello → Challenge → Answer → Welcome, or Refused from either side.

Each side proves its secret by an HMAC-SHA256 over everything that was said: protocol version, run, role, channel, host,
flodl's version, both nonces, and the channel binding (the TLS certificate's hash as each side sees it; empty without
TLS). A changed field, a replay (the server's nonce is fresh), another run or role, a relay through another TLS
connection all change the transcript. The two proofs carry different labels, so neither can be sent back.

The secret is the run's token, and for a daemon its host's secret, which is derived from the token and opens nothing
under another name or in another role: who serves a run on one host cannot pose as another one. A walk-in is a host's
daemon, too, but was given nothing by the run: it proves its host's join secret, derived in the same way from the join
token, which outlives runs.

Invariants: the secrets and the proofs appear in no message text, error or ``repr``; a handshake object serves one
connection and never opens after a refusal; what a stranger chose is quoted only shortened and without control
characters. Nonces are arguments: the caller draws them from ``secrets`` and uses each once.

A client or a walk-in may leave the run's id empty: whoever was given a token and an address need not know the run's
name, and proves the token all the same. Daemons and heads name the run that they belong to.

The fields of ``Hello`` are the same in every protocol version, so that two versions can tell each other apart.
"""

import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from flodl.errors import LocalProtocolError, RemoteProtocolError
from flodl.ids import HostName
from flodl.messages import Answer, Challenge, Handshake, Hello, Refused, Welcome

PROTOCOL_VERSION: Final = 2
"""The version of everything that crosses a wire; both sides must have the same."""

TOKEN_BYTES: Final = 32
"""Length of a run's token, of a join token, and of what is derived from them for a host."""

NONCE_BYTES: Final = 32
"""Length of each side's nonce."""

PROOF_BYTES: Final = 32
"""Length of a proof."""

MAX_NAME_LENGTH: Final = 253
"""Longest host name, as in the DNS."""

MAX_REASON_LENGTH: Final = 1000
"""Most characters that are kept of a peer's reason."""


NO_WALK_INS: Final = "the controller takes no walk-ins: it has no join token (`controller.join.token_file`)"

_OTHER_TOKEN: Final = "ours is another run's: copy it again"
_OTHER_JOIN_TOKEN: Final = "ours is of another join token or for another host name, or this is another user's run"


class Role(StrEnum):
    """What a connecting peer is."""

    DAEMON = "daemon"
    HEAD = "head"
    CLIENT = "client"
    WALK_IN = "walk-in"


class Channel(StrEnum):
    """What a connection carries: control messages, or chunks."""

    CONTROL = "control"
    BULK = "bulk"


class HandshakeState(StrEnum):
    """WAITING for the peer's next word, OPEN once both proofs held, REFUSED by either side."""

    WAITING = "waiting"
    OPEN = "open"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who the server talks to; proven only once the handshake is open."""

    role: Role
    channel: Channel
    host: HostName
    flodl_version: str


FromConnecting: TypeAlias = Hello | Answer | Refused
FromAccepting: TypeAlias = Challenge | Welcome | Refused


def derive_read_token(token: bytes) -> str:
    """The token that lets HTTP read the run's state: 64 hex digits from which the run's token cannot be found."""
    return _mac(token, b"http-read").hex()


def derive_host_secret(token: bytes, host: HostName) -> bytes:
    """What the daemon of ``host`` proves instead of the run's token, which cannot be found from it."""
    return _mac(token, b"host", host.encode())


def derive_join_secret(join_token: bytes, host: HostName) -> bytes:
    """What ``host`` proves when it walks in, and all that its token file holds: the join token cannot be found from it,
    and it opens nothing under another name.
    """
    return _mac(join_token, b"join", host.encode())


class ServerHandshake:
    """The accepting side. Feed it the decoded messages of one connection (``FromConnecting``)."""

    def __init__(
        self,
        token: bytes,
        run_id: str,
        nonce: bytes,
        flodl_version: str,
        channel_binding: bytes = b"",
        join_token: bytes | None = None,
    ) -> None:
        """``nonce``: ``NONCE_BYTES`` fresh random bytes. ``channel_binding``: hash of our TLS certificate, or empty.
        ``join_token`` None takes no walk-ins.

        Raises:
            LocalProtocolError: a token or nonce of another length.
        """
        _check_secrets(token, nonce)
        if join_token is not None:
            _check_secrets(join_token, nonce)
        self._token = token
        self._join_token = join_token
        self._run_id = run_id
        self._nonce = nonce
        self._flodl_version = flodl_version
        self._channel_binding = channel_binding
        self._hello: Hello | None = None
        self.state = HandshakeState.WAITING
        self.peer: Peer | None = None
        self.refusal: str | None = None

    @property
    def done(self) -> bool:
        """The peer holds the token and has been told Welcome; ``peer`` is who it says it is."""
        return self.state is HandshakeState.OPEN

    def receive(self, message: Handshake) -> list[Handshake]:
        """Take the peer's word and return what to send. After a Refused, close the connection.

        Raises:
            RemoteProtocolError: a word out of turn; close without an answer.
        """
        _check_waiting(self.state)
        match message:
            case Hello() if self._hello is None:
                return self._on_hello(message)
            case Answer(proof) if self._hello is not None:
                return self._on_answer(proof, self._hello)
            case Refused(reason):
                self._refuse(f"the peer refused: {_plain(reason, MAX_REASON_LENGTH)}")
                return []
            case _:
                raise RemoteProtocolError(f"handshake: {type(message).__name__} out of turn")

    def _on_hello(self, hello: Hello) -> list[Handshake]:
        fault = self._fault(hello)
        if fault is not None:
            return self._refuse(fault)
        self._hello = hello
        self.peer = Peer(Role(hello.role), Channel(hello.channel), hello.host, hello.flodl_version)
        return [Challenge(self._nonce, self._proof(b"server", hello))]

    def _on_answer(self, proof: bytes, hello: Hello) -> list[Handshake]:
        if not hmac.compare_digest(proof, self._proof(b"client", hello)):
            return self._refuse("the proof is wrong: the token is not this run's, or the connection was tampered with")
        self.state = HandshakeState.OPEN
        return [Welcome(self._flodl_version)]

    def _fault(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"protocol version {hello.protocol} (flodl {_plain(hello.flodl_version)}), the controller has "
                f"{PROTOCOL_VERSION} (flodl {self._flodl_version}): install flodl {self._flodl_version} on both sides"
            )
        is_by_token = hello.role in (Role.CLIENT, Role.WALK_IN) and not hello.run_id
        if hello.run_id != self._run_id and not is_by_token:
            return f"run {_plain(hello.run_id)} is not served here: another run's controller listens at this address"
        if hello.role not in set(Role):
            return f"unknown role {_plain(hello.role)}, expected one of {', '.join(Role)}"
        if hello.role == Role.WALK_IN and self._join_token is None:
            return NO_WALK_INS
        if hello.channel not in set(Channel):
            return f"unknown channel {_plain(hello.channel)}, expected one of {', '.join(Channel)}"
        if not is_host_name(hello.host):
            return f"host name {_plain(hello.host)} cannot be used: 1 to {MAX_NAME_LENGTH} printable characters, no /"
        if len(hello.nonce) != NONCE_BYTES:
            return f"nonce of {len(hello.nonce)} bytes, expected {NONCE_BYTES}"
        return None

    def _proof(self, label: bytes, hello: Hello) -> bytes:
        return _proof(self._secret_of(hello), label, hello, self._nonce, self._channel_binding)

    def _secret_of(self, hello: Hello) -> bytes:
        """What a peer of this role and host has to prove."""
        if hello.role == Role.WALK_IN and self._join_token is not None:
            return derive_join_secret(self._join_token, hello.host)
        return derive_host_secret(self._token, hello.host) if hello.role == Role.DAEMON else self._token

    def _refuse(self, reason: str) -> list[Handshake]:
        self.state, self.refusal = HandshakeState.REFUSED, reason
        return [Refused(reason)]


class ClientHandshake:
    """The connecting side. Send ``start()``, then feed it the answers (``FromAccepting``)."""

    def __init__(
        self,
        secret: bytes,
        run_id: str,
        nonce: bytes,
        peer: Peer,
        channel_binding: bytes = b"",
    ) -> None:
        """``secret`` is the run's token; the host's secret where ``peer``, who we say we are, is a daemon; its join
        secret where it is a walk-in. ``channel_binding``: hash of the TLS certificate that we saw, or empty.

        Raises:
            LocalProtocolError: secret or nonce of another length, or a host name that no server takes.
        """
        _check_secrets(secret, nonce)
        if not is_host_name(peer.host):
            raise LocalProtocolError(f"handshake: host name {_plain(peer.host)} cannot be used")
        self._secret = secret
        self._channel_binding = channel_binding
        self._hello = Hello(
            protocol=PROTOCOL_VERSION,
            run_id=run_id,
            role=peer.role,
            channel=peer.channel,
            host=peer.host,
            nonce=nonce,
            flodl_version=peer.flodl_version,
        )
        self._has_answered = False
        self.state = HandshakeState.WAITING
        self.peer = peer
        self.controller_version: str | None = None
        self.refusal: str | None = None
        self.is_wrong_secret = False

    @property
    def done(self) -> bool:
        """Both sides have proven the token and the connection is open."""
        return self.state is HandshakeState.OPEN

    def start(self) -> list[Handshake]:
        """The first message to send, behind the preamble."""
        return [self._hello]

    def receive(self, message: Handshake) -> list[Handshake]:
        """Take the server's word and return what to send. With ``refusal`` set, send it and close the connection.

        Raises:
            RemoteProtocolError: a word out of turn, or a nonce that cannot be fresh; close without an answer.
        """
        _check_waiting(self.state)
        match message:
            case Challenge(nonce, proof) if not self._has_answered:
                return self._on_challenge(nonce, proof)
            case Welcome(version) if self._has_answered:
                self.state, self.controller_version = HandshakeState.OPEN, _plain(version)
                return []
            case Refused(reason):
                self.state, self.refusal = HandshakeState.REFUSED, _plain(reason, MAX_REASON_LENGTH)
                return []
            case _:
                raise RemoteProtocolError(f"handshake: {type(message).__name__} out of turn")

    def _on_challenge(self, nonce: bytes, proof: bytes) -> list[Handshake]:
        if len(nonce) != NONCE_BYTES:
            raise RemoteProtocolError(f"handshake: nonce of {len(nonce)} bytes, expected {NONCE_BYTES}")
        if not hmac.compare_digest(proof, self._proof(b"server", nonce)):
            self.state, self.is_wrong_secret = HandshakeState.REFUSED, True
            ours = _OTHER_JOIN_TOKEN if self.peer.role is Role.WALK_IN else _OTHER_TOKEN
            self.refusal = (
                f"the controller's proof is wrong: it holds another token ({ours}), or someone sits in between"
            )
            return [Refused(self.refusal)]
        self._has_answered = True
        return [Answer(self._proof(b"client", nonce))]

    def _proof(self, label: bytes, server_nonce: bytes) -> bytes:
        return _proof(self._secret, label, self._hello, server_nonce, self._channel_binding)


def _proof(secret: bytes, label: bytes, hello: Hello, server_nonce: bytes, channel_binding: bytes) -> bytes:
    texts = (str(hello.protocol), hello.run_id, hello.role, hello.channel, hello.host, hello.flodl_version)
    return _mac(
        secret,
        b"handshake " + label,
        *(text.encode() for text in texts),
        hello.nonce,
        server_nonce,
        channel_binding,
    )


def _mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over length-prefixed parts: no two different lists of parts give the same bytes."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (b"flodl " + label, *parts):
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


def _check_secrets(secret: bytes, nonce: bytes) -> None:
    if len(secret) != TOKEN_BYTES:
        raise LocalProtocolError(f"handshake: token of {len(secret)} bytes, expected {TOKEN_BYTES}")
    if len(nonce) != NONCE_BYTES:
        raise LocalProtocolError(f"handshake: nonce of {len(nonce)} bytes, expected {NONCE_BYTES}")


def _check_waiting(state: HandshakeState) -> None:
    if state is not HandshakeState.WAITING:
        raise RemoteProtocolError(f"handshake: a word after it was {state}")


def is_host_name(host: str) -> bool:
    """Host names become file and record names, so what could leave a folder or break a line is refused."""
    return (
        1 <= len(host) <= MAX_NAME_LENGTH
        and host.isprintable()
        and not host.startswith(".")
        and not any(character in "/\\ " for character in host)
    )


def _plain(text: str, max_length: int = 64) -> str:
    """A stranger's text, shortened, on one line and without control characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:max_length])
