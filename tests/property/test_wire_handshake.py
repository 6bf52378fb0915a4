"""Handshakes under tampering, as a relay between two honest sides can do it."""

from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flodl.errors import RemoteProtocolError
from flodl.messages import Answer, Challenge, Handshake, Refused
from flodl.wire.codec import decode, encode
from flodl.wire.handshake import (
    Channel,
    ClientHandshake,
    FromAccepting,
    FromConnecting,
    HandshakeState,
    Peer,
    Role,
    ServerHandshake,
    derive_host_secret,
    derive_join_secret,
)

TOKEN = b"t" * 32
JOIN_TOKEN = b"j" * 32
PEERS = st.builds(
    Peer,
    st.sampled_from(Role),
    st.sampled_from(Channel),
    st.text("abcdefghijklmnopqrstuvwxyz0123456789-.:", min_size=1, max_size=12).map("h".__add__),
    st.text(max_size=8),
)
NONCES = st.binary(min_size=32, max_size=32)
RUN_IDS = st.text(max_size=8)


@dataclass
class Talk:
    """Both sides and what crossed the wire between them."""

    client: ClientHandshake
    server: ServerHandshake
    wire: list[bytes] = field(default_factory=list)

    def run(self, tampered: int = -1, tamper=lambda raw: raw) -> None:
        """Carry every message to the other side; the one with the number ``tampered`` is changed on its way."""
        words = self.client.start()
        receivers = [(self.server, FromConnecting), (self.client, FromAccepting)]
        while words:
            receiver, allowed = receivers[len(self.wire) % 2]
            raw = encode(words[0])
            raw = tamper(raw) if len(self.wire) == tampered else raw
            self.wire.append(raw)
            words = receiver.receive(decode(raw, allowed))


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    run_id, peer = draw(RUN_IDS), draw(PEERS)
    binding = draw(st.binary(max_size=4))
    derived = {
        Role.DAEMON: derive_host_secret(TOKEN, peer.host),
        Role.WALK_IN: derive_join_secret(JOIN_TOKEN, peer.host),
    }
    secret = derived.get(peer.role, TOKEN)
    return Talk(
        ClientHandshake(secret, run_id, draw(NONCES), peer, channel_binding=binding),
        ServerHandshake(TOKEN, run_id, draw(NONCES), "0.1.0", binding, JOIN_TOKEN),
    )


@settings(max_examples=50, deadline=None)
@given(talk=talks())
def test_honest_sides_always_agree(talk):
    talk.run()

    assert talk.client.done
    assert talk.server.done
    assert talk.server.peer == talk.client.peer
    assert len(talk.wire) == 4


@settings(max_examples=400, deadline=None)
@given(talk=talks(), data=st.data())
def test_a_changed_byte_never_opens_the_server_and_gives_only_protocol_errors(talk, data):
    tampered = data.draw(st.integers(0, 2))

    def tamper(raw: bytes) -> bytes:
        changed = bytearray(raw)
        changed[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        return bytes(changed)

    with suppress(RemoteProtocolError):
        talk.run(tampered, tamper)

    assert talk.server.state is not HandshakeState.OPEN
    assert not talk.client.done


@settings(max_examples=200, deadline=None)
@given(talk=talks(), at=st.integers(0, 1000), mask=st.integers(1, 255))
def test_a_changed_welcome_gives_a_clean_message_or_a_protocol_error(talk, at, mask):
    def tamper(raw: bytes) -> bytes:
        changed = bytearray(raw)
        changed[at % len(raw)] ^= mask
        return bytes(changed)

    try:
        talk.run(3, tamper)
    except RemoteProtocolError:
        assert not talk.client.done


@settings(max_examples=200, deadline=None)
@given(talk=talks(), fresh=NONCES, run_id=RUN_IDS, peer=PEERS)
def test_a_recorded_talk_opens_no_other_connection(talk, fresh, run_id, peer):
    """The attacker sends the recorded words, or a hello of its own with the recorded answer."""
    talk.run()
    (hello,) = talk.client.start()
    assume(fresh != decode(talk.wire[1], Challenge).nonce)
    answer = decode(talk.wire[2], Answer)
    other = replace(hello, role=peer.role, channel=peer.channel, host=peer.host)

    for first in (hello, other):
        for served in (hello.run_id, run_id):
            server = ServerHandshake(TOKEN, served, fresh, "0.1.0", join_token=JOIN_TOKEN)
            words: list[Handshake] = server.receive(replace(first, run_id=served))
            assert not isinstance(words[0], Refused)
            assert isinstance(server.receive(answer)[0], Refused)
            assert not server.done
