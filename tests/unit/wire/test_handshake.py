"""The handshake: who gets in, who is refused and with which words."""

import hashlib
import hmac
from dataclasses import replace

import pytest

from flodl.errors import LocalProtocolError, RemoteProtocolError
from flodl.messages import Answer, Challenge, Hello, RankAlive, Refused, Welcome
from flodl.wire.codec import encode
from flodl.wire.frames import PRE_AUTH_FRAME_BYTES
from flodl.wire.handshake import (
    MAX_NAME_LENGTH,
    MAX_REASON_LENGTH,
    NONCE_BYTES,
    PROOF_BYTES,
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Channel,
    ClientHandshake,
    HandshakeState,
    Peer,
    Role,
    ServerHandshake,
    derive_host_secret,
    derive_join_secret,
    derive_read_token,
)

TOKEN = bytes(range(32))
OTHER_TOKEN = bytes(range(1, 33))
CLIENT_NONCE = b"c" * 32
SERVER_NONCE = b"s" * 32
JOIN_TOKEN = bytes(range(2, 34))
ALICE = Peer(Role.DAEMON, Channel.CONTROL, "alice", "0.2.0")
WRONG_PROOF = "the proof is wrong: the token is not this run's, or the connection was tampered with"
WRONG_SERVER = (
    "the controller's proof is wrong: it holds another token (ours is another run's: copy it again), "
    "or someone sits in between"
)
WRONG_SERVER_OF_A_WALK_IN = (
    "the controller's proof is wrong: it holds another token (ours is of another join token or for another host name, "
    "or this is another user's run), or someone sits in between"
)

WALK_IN = Peer(Role.WALK_IN, Channel.CONTROL, "alice", "0.2.0")
NO_WALK_INS = "the controller takes no walk-ins: it has no join token (`controller.join.token_file`)"


def make_server(token=TOKEN, run_id="run-1", nonce=SERVER_NONCE, binding=b"", join_token=JOIN_TOKEN):
    return ServerHandshake(token, run_id, nonce, "0.1.0", channel_binding=binding, join_token=join_token)


def make_client(token=TOKEN, run_id="run-1", nonce=CLIENT_NONCE, peer=ALICE, binding=b""):
    """With the secret of the peer's role."""
    secrets = {
        Role.DAEMON: derive_host_secret(token, peer.host),
        Role.WALK_IN: derive_join_secret(JOIN_TOKEN, peer.host),
    }
    return ClientHandshake(secrets.get(peer.role, token), run_id, nonce, peer, channel_binding=binding)


def answer_of(client, server):
    """Both sides up to the client's answer."""
    (hello,) = client.start()
    (challenge,) = server.receive(hello)
    (answer,) = client.receive(challenge)
    return answer


def test_constants_are_what_every_peer_knows():
    assert PROTOCOL_VERSION == 2
    assert (TOKEN_BYTES, NONCE_BYTES, PROOF_BYTES) == (32, 32, 32)
    assert (MAX_NAME_LENGTH, MAX_REASON_LENGTH) == (253, 1000)
    assert list(Role) == ["daemon", "head", "client", "walk-in"]
    assert list(Channel) == ["control", "bulk"]


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("channel", list(Channel))
def test_peers_with_the_same_token_open_the_connection(role, channel):
    peer = Peer(role, channel, "alice", "0.2.0")
    server, client = make_server(), make_client(peer=peer)
    assert client.start() == [Hello(2, "run-1", role, channel, "alice", CLIENT_NONCE, "0.2.0")]

    answer = answer_of(client, server)
    assert (server.done, client.done) == (False, False)
    (welcome,) = server.receive(answer)
    assert welcome == Welcome("0.1.0")
    assert (server.done, client.done) == (True, False)
    assert client.receive(welcome) == []

    assert client.done
    assert server.peer == client.peer == peer
    assert type(server.peer.role) is Role
    assert type(server.peer.channel) is Channel
    assert client.controller_version == "0.1.0"
    assert (server.state, client.state) == (HandshakeState.OPEN, HandshakeState.OPEN)
    assert (server.refusal, client.refusal) == (None, None)


def test_both_ends_start_waiting_for_a_word():
    server, client = make_server(), make_client()

    assert (server.state, server.done, server.peer, server.refusal) == (HandshakeState.WAITING, False, None, None)
    assert (client.state, client.done, client.controller_version, client.refusal) == (
        HandshakeState.WAITING,
        False,
        None,
        None,
    )


def test_the_proofs_are_an_hmac_over_the_length_prefixed_transcript():
    """Written out a second time, so that another implementation can be built from this test."""

    def expected(label: bytes) -> bytes:
        parts = [label, b"2", b"run-1", b"daemon", b"control", b"alice", b"0.2.0", CLIENT_NONCE, SERVER_NONCE, b"cert"]
        transcript = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(derive_host_secret(TOKEN, "alice"), transcript, hashlib.sha256).digest()

    server, client = make_server(binding=b"cert"), make_client(binding=b"cert")

    (challenge,) = server.receive(client.start()[0])
    (answer,) = client.receive(challenge)

    assert challenge == Challenge(SERVER_NONCE, expected(b"flodl handshake server"))
    assert answer == Answer(expected(b"flodl handshake client"))
    assert len(answer.proof) == PROOF_BYTES


def test_without_tls_the_channel_binding_is_empty():
    server, client = ServerHandshake(TOKEN, "run-1", SERVER_NONCE, "0.1.0"), make_client(binding=b"")
    secret = derive_host_secret(TOKEN, "alice")
    bound_server, plain_client = make_server(binding=b""), ClientHandshake(secret, "run-1", CLIENT_NONCE, ALICE)

    assert isinstance(answer_of(client, server), Answer)
    assert isinstance(answer_of(plain_client, bound_server), Answer)


def test_client_with_a_wrong_token_finds_the_server_wrong_and_says_so():
    server, client = make_server(), make_client(token=OTHER_TOKEN)

    (challenge,) = server.receive(client.start()[0])
    (refused,) = client.receive(challenge)

    assert refused == Refused(WRONG_SERVER)
    assert (client.state, client.done, client.refusal) == (HandshakeState.REFUSED, False, WRONG_SERVER)
    assert client.is_wrong_secret
    assert server.receive(refused) == []
    assert (server.state, server.done) == (HandshakeState.REFUSED, False)
    assert server.refusal == f"the peer refused: {WRONG_SERVER}"
    assert server.peer == ALICE


@pytest.mark.parametrize("proof", [b"", b"\x00" * 32, b"x" * 33])
def test_peer_with_a_wrong_proof_is_refused(proof):
    server = make_server()
    server.receive(make_client().start()[0])

    assert server.receive(Answer(proof)) == [Refused(WRONG_PROOF)]
    assert (server.state, server.done, server.refusal) == (HandshakeState.REFUSED, False, WRONG_PROOF)


def test_the_servers_proof_sent_back_is_no_answer():
    server = make_server()
    (challenge,) = server.receive(make_client().start()[0])

    assert server.receive(Answer(challenge.proof)) == [Refused(WRONG_PROOF)]


def test_a_recorded_join_is_refused_at_a_second_connection():
    recorded = answer_of(client := make_client(), make_server())
    again = make_server(nonce=b"t" * 32)

    again.receive(client.start()[0])

    assert again.receive(recorded) == [Refused(WRONG_PROOF)]


def test_a_recorded_join_is_refused_by_another_runs_controller_with_the_same_token():
    (hello,) = make_client().start()
    reason = "run run-1 is not served here: another run's controller listens at this address"

    assert make_server(run_id="run-2").receive(hello) == [Refused(reason)]


@pytest.mark.parametrize("role", [Role.CLIENT, Role.WALK_IN])
def test_client_and_walk_in_need_not_know_the_runs_name(role):
    client = make_client(run_id="", peer=replace(ALICE, role=role))
    server = make_server()

    server.receive(answer_of(client, server))

    assert server.done


def test_client_without_a_name_still_proves_the_token():
    client = make_client(run_id="", peer=replace(ALICE, role=Role.CLIENT), token=OTHER_TOKEN)
    (hello,) = client.start()
    (challenge,) = make_server().receive(hello)

    assert client.receive(challenge) == [Refused(WRONG_SERVER)]


@pytest.mark.parametrize("role", [Role.DAEMON, Role.HEAD])
def test_member_says_which_run_it_belongs_to(role):
    (hello,) = make_client(run_id="", peer=replace(ALICE, role=role)).start()

    assert make_server().receive(hello) == [
        Refused("run  is not served here: another run's controller listens at this address")
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "run-2"},
        {"role": "head"},
        {"channel": "bulk"},
        {"host": "bob"},
        {"flodl_version": "0.2.1"},
        {"nonce": b"d" * 32},
    ],
)
def test_an_answer_does_not_fit_a_hello_with_one_field_changed(change):
    answer = answer_of(client := make_client(), make_server())
    hello = replace(client.start()[0], **change)
    server = make_server(run_id=hello.run_id)
    server.receive(hello)

    assert server.receive(answer) == [Refused(WRONG_PROOF)]


def test_client_notices_that_its_hello_was_changed_on_the_way():
    server, client = make_server(), make_client()
    (challenge,) = server.receive(replace(client.start()[0], host="bob"))

    assert client.receive(challenge) == [Refused(WRONG_SERVER)]


def test_text_moved_from_one_field_to_the_next_changes_the_proof():
    one, other = (
        make_client(peer=replace(ALICE, host="alice1")),
        make_client(peer=replace(ALICE, flodl_version="10.2.0")),
    )

    assert answer_of(one, make_server()) != answer_of(other, make_server())


@pytest.mark.parametrize(("of_server", "of_client"), [(b"cert", b"other"), (b"cert", b""), (b"", b"cert")])
def test_a_relay_between_two_tls_connections_is_noticed(of_server, of_client):
    server, client = make_server(binding=of_server), make_client(binding=of_client)
    (challenge,) = server.receive(client.start()[0])

    assert client.receive(challenge) == [Refused(WRONG_SERVER)]


def test_a_hosts_secret_is_a_labelled_hmac_of_the_token():
    label, host = b"flodl host", b"alice"
    transcript = b"".join(len(part).to_bytes(8, "big") + part for part in (label, host))

    assert derive_host_secret(TOKEN, "alice") == hmac.new(TOKEN, transcript, hashlib.sha256).digest()
    assert len(derive_host_secret(TOKEN, "alice")) == TOKEN_BYTES
    assert derive_host_secret(TOKEN, "alicf") != derive_host_secret(TOKEN, "alice")
    assert derive_host_secret(OTHER_TOKEN, "alice") != derive_host_secret(TOKEN, "alice")


def test_a_hosts_join_secret_is_a_labelled_hmac_of_the_join_token():
    label, host = b"flodl join", b"alice"
    transcript = b"".join(len(part).to_bytes(8, "big") + part for part in (label, host))

    assert derive_join_secret(JOIN_TOKEN, "alice") == hmac.new(JOIN_TOKEN, transcript, hashlib.sha256).digest()
    assert derive_join_secret(JOIN_TOKEN, "alice") != derive_host_secret(JOIN_TOKEN, "alice")


@pytest.mark.parametrize(
    "peer",
    [
        replace(WALK_IN, host="bob"),
        replace(WALK_IN, host="bob", channel=Channel.BULK),
        replace(WALK_IN, role=Role.DAEMON),
        replace(WALK_IN, role=Role.HEAD),
        replace(WALK_IN, role=Role.CLIENT),
    ],
)
def test_a_hosts_join_secret_opens_nothing_under_another_name_or_in_another_role(peer):
    of_alice = ClientHandshake(derive_join_secret(JOIN_TOKEN, "alice"), "run-1", CLIENT_NONCE, peer)
    liar = make_client(peer=WALK_IN)
    server = make_server()
    (challenge,) = server.receive(of_alice.start()[0])

    is_walk_in = peer.role is Role.WALK_IN
    assert of_alice.receive(challenge) == [Refused(WRONG_SERVER_OF_A_WALK_IN if is_walk_in else WRONG_SERVER)]
    assert server.receive(answer_of(liar, make_server())) == [Refused(WRONG_PROOF)]


@pytest.mark.parametrize("secret", [JOIN_TOKEN, TOKEN, derive_host_secret(TOKEN, "alice")])
def test_no_other_secret_lets_a_walk_in_in(secret):
    client = ClientHandshake(secret, "", CLIENT_NONCE, WALK_IN)
    (challenge,) = make_server().receive(client.start()[0])

    assert client.receive(challenge) == [Refused(WRONG_SERVER_OF_A_WALK_IN)]
    assert client.is_wrong_secret


def test_a_recorded_walk_in_is_refused_at_a_second_connection_and_by_the_next_run():
    recorded = answer_of(client := make_client(run_id="", peer=WALK_IN), make_server())

    for again in (make_server(nonce=b"t" * 32), make_server(nonce=b"t" * 32, run_id="run-2", token=OTHER_TOKEN)):
        again.receive(client.start()[0])
        assert again.receive(recorded) == [Refused(WRONG_PROOF)]


def test_controller_without_a_join_token_takes_no_walk_ins():
    client, server = make_client(peer=WALK_IN), make_server(join_token=None)

    assert server.receive(client.start()[0]) == [Refused(NO_WALK_INS)]
    client.receive(Refused(NO_WALK_INS))
    assert (client.refusal, client.is_wrong_secret) == (NO_WALK_INS, False)


def test_a_join_token_of_another_length_is_our_own_bug():
    with pytest.raises(LocalProtocolError, match="token of 31 bytes, expected 32"):
        make_server(join_token=b"j" * 31)


@pytest.mark.parametrize(
    "peer",
    [
        replace(ALICE, host="bob"),
        replace(ALICE, host="bob", channel=Channel.BULK),
        replace(ALICE, role=Role.HEAD),
        replace(ALICE, role=Role.CLIENT),
    ],
)
def test_a_hosts_secret_opens_nothing_under_another_name_or_in_another_role(peer):
    of_alice = ClientHandshake(derive_host_secret(TOKEN, "alice"), "run-1", CLIENT_NONCE, peer)
    liar = ClientHandshake(derive_host_secret(TOKEN, "alice"), "run-1", CLIENT_NONCE, ALICE)
    server = make_server()
    (challenge,) = server.receive(of_alice.start()[0])
    liar.start()

    assert of_alice.receive(challenge) == [Refused(WRONG_SERVER)]
    assert server.receive(answer_of(liar, make_server())) == [Refused(WRONG_PROOF)]


def test_the_runs_token_is_no_hosts_secret():
    client = ClientHandshake(TOKEN, "run-1", CLIENT_NONCE, ALICE)
    (challenge,) = make_server().receive(client.start()[0])

    assert client.receive(challenge) == [Refused(WRONG_SERVER)]


def test_another_protocol_version_is_refused_with_both_versions_and_the_remedy():
    hello = replace(make_client().start()[0], protocol=3, flodl_version="0.9\n" + "9" * 90)
    server = make_server()

    (refused,) = server.receive(hello)

    assert refused.reason == (
        f"protocol version 3 (flodl 0.9?{'9' * 60}), the controller has 2 (flodl 0.1.0): "
        "install flodl 0.1.0 on both sides"
    )
    assert server.refusal == refused.reason
    assert server.state is HandshakeState.REFUSED


def test_version_is_judged_before_anything_else():
    hello = Hello(protocol=0, run_id="x", role="x", channel="x", host="", nonce=b"", flodl_version="")

    assert "protocol version 0" in make_server().receive(hello)[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "a\x1b[31m"}, "run a?[31m is not served here: another run's controller listens at this address"),
        ({"role": "rank"}, "unknown role rank, expected one of daemon, head, client, walk-in"),
        ({"role": "DAEMON"}, "unknown role DAEMON, expected one of daemon, head, client, walk-in"),
        ({"channel": "http"}, "unknown channel http, expected one of control, bulk"),
        ({"channel": "x" * 70}, f"unknown channel {'x' * 64}, expected one of control, bulk"),
        ({"host": "a/b"}, "host name a/b cannot be used: 1 to 253 printable characters, no /"),
        ({"nonce": b"c" * 31}, "nonce of 31 bytes, expected 32"),
        ({"nonce": b"c" * 33}, "nonce of 33 bytes, expected 32"),
    ],
)
def test_a_hello_that_cannot_be_served_is_refused_with_the_reason(change, reason):
    server = make_server()

    assert server.receive(replace(make_client().start()[0], **change)) == [Refused(reason)]
    assert (server.refusal, server.peer) == (reason, None)


@pytest.mark.parametrize("host", ["", "h" * 254, "a/b", "a\\b", "a b", ".hidden", "..", "a\nb", "a\x00b", "a\x1b[31m"])
def test_host_names_that_are_no_file_names_are_refused_on_both_sides(host):
    (refused,) = make_server().receive(replace(make_client().start()[0], host=host))
    assert refused.reason.startswith("host name ")

    with pytest.raises(LocalProtocolError, match=r"^handshake: host name .*cannot be used$"):
        make_client(peer=replace(ALICE, host=host))


@pytest.mark.parametrize("host", ["h", "H" * 253, "X1", "node-1.example.org", "::1", "rechner-ä"])
def test_usual_host_names_are_served(host):
    server = make_server()

    server.receive(make_client(peer=replace(ALICE, host=host)).start()[0])

    assert server.peer.host == host


@pytest.mark.parametrize("message", [Answer(b"x" * 32), Challenge(b"s" * 32, b""), Welcome("0.1"), RankAlive(0, 0)])
def test_server_takes_no_word_before_hello(message):
    server = make_server()

    with pytest.raises(RemoteProtocolError, match=rf"^handshake: {type(message).__name__} out of turn$"):
        server.receive(message)
    assert not server.done


def test_server_takes_hello_once():
    server = make_server()
    (hello,) = make_client().start()
    server.receive(hello)

    with pytest.raises(RemoteProtocolError, match=r"^handshake: Hello out of turn$"):
        server.receive(hello)


@pytest.mark.parametrize("message", [Welcome("0.1"), Answer(b""), make_client().start()[0], RankAlive(0, 0)])
def test_client_takes_no_word_before_the_challenge(message):
    client = make_client()

    with pytest.raises(RemoteProtocolError, match=rf"^handshake: {type(message).__name__} out of turn$"):
        client.receive(message)
    assert not client.done


def test_client_takes_the_challenge_once():
    server, client = make_server(), make_client()
    (challenge,) = server.receive(client.start()[0])
    client.receive(challenge)

    with pytest.raises(RemoteProtocolError, match=r"^handshake: Challenge out of turn$"):
        client.receive(challenge)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_client_refuses_a_nonce_of_another_length(length):
    client = make_client()

    with pytest.raises(RemoteProtocolError, match=rf"^handshake: nonce of {length} bytes, expected 32$"):
        client.receive(Challenge(b"s" * length, b""))


def test_client_hears_a_refusal_at_any_time():
    early, late = make_client(), make_client()
    answer_of(late, make_server())

    assert early.receive(Refused("no")) == late.receive(Refused("no")) == []
    assert (early.state, early.refusal) == (late.state, late.refusal) == (HandshakeState.REFUSED, "no")


def test_a_reason_is_kept_short_and_free_of_control_characters():
    server, client = make_server(), make_client()

    client.receive(Refused("a\x1b\r\n" + "b" * 2000))
    server.receive(Refused("a\x1b\r\n" + "b" * 2000))

    assert client.refusal == "a???" + "b" * 996
    assert server.refusal == "the peer refused: a???" + "b" * 996


def test_the_controllers_version_is_kept_short_and_free_of_control_characters():
    server, client = make_server(), make_client()
    answer_of(client, server)

    client.receive(Welcome("1\n" + "2" * 90))

    assert client.controller_version == "1?" + "2" * 62


def test_nothing_is_taken_after_the_end():
    server, client = make_server(), make_client()
    answer = answer_of(client, server)
    (welcome,) = server.receive(answer)
    client.receive(welcome)

    with pytest.raises(RemoteProtocolError, match=r"^handshake: a word after it was open$"):
        server.receive(answer)
    with pytest.raises(RemoteProtocolError, match=r"^handshake: a word after it was open$"):
        client.receive(welcome)


def test_nothing_is_taken_after_a_refusal():
    server, client = make_server(), make_client()
    good = answer_of(client, server)
    server.receive(Answer(b"wrong"))
    client.receive(Refused("no"))

    with pytest.raises(RemoteProtocolError, match=r"^handshake: a word after it was refused$"):
        server.receive(good)
    with pytest.raises(RemoteProtocolError, match=r"^handshake: a word after it was refused$"):
        client.receive(Welcome("0.1"))
    assert not server.done
    assert not client.done


def test_secrets_of_another_length_are_a_fault_of_the_caller():
    client = Peer(Role.CLIENT, Channel.CONTROL, "client", "0.2.0")
    for make in (make_server, lambda **secrets: make_client(peer=client, **secrets)):
        with pytest.raises(LocalProtocolError, match=r"^handshake: token of 31 bytes, expected 32$"):
            make(token=b"t" * 31)
        with pytest.raises(LocalProtocolError, match=r"^handshake: token of 33 bytes, expected 32$"):
            make(token=b"t" * 33)
        with pytest.raises(LocalProtocolError, match=r"^handshake: nonce of 0 bytes, expected 32$"):
            make(nonce=b"")


def test_neither_token_nor_proof_is_in_what_is_shown():
    server, client = make_server(), make_client()
    answer = answer_of(client, server)
    (refused,) = server.receive(Answer(answer.proof[::-1]))
    shown = " ".join([repr(server), repr(client), server.refusal, refused.reason, repr(server.peer)])

    for secret in (TOKEN, answer.proof, answer.proof[::-1]):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown


def test_the_largest_handshake_message_fits_the_limit_for_strangers():
    hello = Hello(2, "r" * 1000, "daemon", "control", "h" * MAX_NAME_LENGTH, CLIENT_NONCE, "v" * 1000)

    assert len(encode(hello)) < PRE_AUTH_FRAME_BYTES


def test_the_read_token_is_a_labelled_hmac_of_the_token():
    label = b"flodl http-read"
    expected = hmac.new(TOKEN, len(label).to_bytes(8, "big") + label, hashlib.sha256).hexdigest()

    assert derive_read_token(TOKEN) == expected
    assert len(expected) == 64
    assert derive_read_token(OTHER_TOKEN) != expected
