"""TLS in memory: what passes, what does not, and whose certificate it is."""

import os
import ssl
import threading
from pathlib import Path

import pytest

from flodl.config.tls import TlsMode
from flodl.errors import JoinRefused, RemoteProtocolError
from flodl.runtime import certificate as certificate_module
from flodl.runtime.certificate import Security, make_certificate, security_of, security_warning
from flodl.runtime.tls import RECORD_BYTES, SILENT_BYTES, TURNED_AWAY, TlsLayer, client_context
from tests.unit.runtime.tls_pair import certificate, open_pair, silent_bytes

TEXT = bytes(range(256)) * 1000


def fresh_client() -> TlsLayer:
    """A client that has said its hello."""
    client = TlsLayer(client_context(), is_server=False)
    client.shake_hands()
    assert client.outgoing()
    return client


def test_both_ends_speak_the_newest_version_and_the_client_knows_the_certificate() -> None:
    client, server = open_pair()

    assert client.is_open
    assert server.is_open
    assert client._object.version() == "TLSv1.3"
    assert client.certificate_hash() == certificate().sha256
    assert len(certificate().sha256) == 32


def test_bytes_arrive_in_order_both_ways_and_not_in_plain() -> None:
    client, server = open_pair()

    sealed = client.encrypt(b"head", memoryview(TEXT), bytearray(b"tail"))

    assert TEXT[:64] not in sealed
    assert server.decrypt(sealed) == b"head" + TEXT + b"tail"
    assert client.decrypt(server.encrypt(TEXT)) == TEXT
    assert client.encrypt() == b""


def test_bytes_arrive_however_they_are_cut() -> None:
    client, server = open_pair()
    sealed = client.encrypt(TEXT[:5000])

    pieces = [server.decrypt(sealed[at : at + 1]) for at in range(len(sealed))]

    assert b"".join(pieces) == TEXT[:5000]
    assert pieces[:-1] == [b""] * (len(sealed) - 1)


def test_a_buffer_is_filled_from_what_is_there() -> None:
    client, server = open_pair()
    buffer, more = memoryview(bytearray(20_000)), memoryview(bytearray(40_000))
    sealed = client.encrypt(TEXT[:50_000])

    assert server.decrypt_into(buffer) == 0
    assert server.decrypt_into(buffer, sealed[:100]) == 0
    assert server.decrypt_into(buffer, sealed[100:]) == 20_000
    assert server.decrypt_into(more) == 30_000
    assert bytes(buffer) + bytes(more[:30_000]) == TEXT[:50_000]
    assert not server.has_ended


def test_the_end_is_told_apart_from_nothing() -> None:
    client, server = open_pair()

    assert server.decrypt(client.encrypt(b"last") + client.farewell()) == b"last"
    assert server.has_ended
    assert server.decrypt(b"") == b""
    assert server.decrypt_into(memoryview(bytearray(8))) == 0


def test_a_buffer_is_filled_up_to_the_end() -> None:
    client, server = open_pair()
    buffer = memoryview(bytearray(8))

    assert server.decrypt_into(buffer, client.encrypt(b"last") + client.farewell()) == 4
    assert server.has_ended


@pytest.mark.parametrize("into", [False, True])
def test_a_changed_byte_ends_the_connection(into: bool) -> None:
    client, server = open_pair()
    sealed = bytearray(client.encrypt(b"x" * 100))
    sealed[60] ^= 1

    with pytest.raises(RemoteProtocolError, match=r"^TLS: DECRYPTION_FAILED_OR_BAD_RECORD_MAC$"):
        server.decrypt_into(memoryview(bytearray(100)), bytes(sealed)) if into else server.decrypt(bytes(sealed))
    with pytest.raises(RemoteProtocolError, match=r"^TLS: "):
        server.encrypt(b"more")


def test_a_record_left_out_is_noticed() -> None:
    client, server = open_pair()
    client.encrypt(b"lost")

    with pytest.raises(RemoteProtocolError):
        server.decrypt(client.encrypt(b"next"))


def test_a_client_that_is_turned_away_hears_why() -> None:
    with pytest.raises(JoinRefused, match=r"^it takes no TLS: "):
        fresh_client().shake_hands(TURNED_AWAY)


def test_a_client_cannot_turn_a_server_away() -> None:
    with pytest.raises(RemoteProtocolError):
        TlsLayer(certificate().context, is_server=True).shake_hands(TURNED_AWAY)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(40)])
def test_whoever_does_not_speak_tls_is_named_so(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^TLS: WRONG_VERSION_NUMBER$"):
        fresh_client().shake_hands(answer)


def test_an_older_version_is_refused_and_told() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    client, server = TlsLayer(context, is_server=False), TlsLayer(certificate().context, is_server=True)
    client.shake_hands()

    with pytest.raises(RemoteProtocolError, match=r"^TLS: UNSUPPORTED_PROTOCOL$"):
        server.shake_hands(client.outgoing())
    with pytest.raises(RemoteProtocolError, match="PROTOCOL_VERSION"):
        client.shake_hands(server.outgoing())


def test_an_unfinished_handshake_sends_no_bytes_of_ours() -> None:
    with pytest.raises(RemoteProtocolError):
        fresh_client().encrypt(b"secret")


def test_two_threads_send_and_receive_at_once() -> None:
    client, server = open_pair()
    rounds, size = 40, 4 * RECORD_BYTES
    answers = [server.encrypt(os.urandom(size)) for _ in range(rounds)]
    sent: list[bytes] = []
    thread = threading.Thread(target=lambda: sent.extend(client.encrypt(TEXT[:size]) for _ in range(rounds)))
    thread.start()

    received = [client.decrypt(answer) for answer in answers]
    thread.join()

    assert [len(data) for data in received] == [size] * rounds
    assert [server.decrypt(data) for data in sent] == [TEXT[:size]] * rounds


# ------------------------------------------------------------------------------------------------------ certificates
def test_every_run_has_a_certificate_of_its_own() -> None:
    assert make_certificate().sha256 != certificate().sha256


def test_the_private_key_is_in_no_file_and_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    loaded: list[str] = []
    load = ssl.SSLContext.load_cert_chain

    def watch(context: ssl.SSLContext, path: str) -> None:
        loaded.append(os.readlink(path))
        load(context, path)

    monkeypatch.setattr(certificate_module.ssl.SSLContext, "load_cert_chain", watch)
    make_certificate()

    assert loaded == ["/memfd:flodl-certificate (deleted)"]
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("mode", "addresses", "needs_one"),
    [
        (TlsMode.AUTO, ["127.0.0.1", "::1"], False),
        (TlsMode.AUTO, ["127.0.0.1", "10.0.0.1"], True),
        (TlsMode.AUTO, ["0.0.0.0"], True),
        (TlsMode.ON, ["127.0.0.1"], True),
        (TlsMode.OFF, ["10.0.0.1"], False),
    ],
)
def test_a_certificate_is_made_where_one_is_needed(mode: TlsMode, addresses: list[str], needs_one: bool) -> None:
    security = security_of(mode, addresses)

    assert security.mode is mode
    assert (security.certificate is not None) is needs_one


@pytest.mark.parametrize(
    ("mode", "addresses", "is_warned"),
    [
        (TlsMode.OFF, ["127.0.0.1"], False),
        (TlsMode.OFF, ["127.0.0.1", "10.0.0.1"], True),
        (TlsMode.AUTO, ["10.0.0.1"], False),
        (TlsMode.ON, ["10.0.0.1"], False),
    ],
)
def test_tls_that_is_off_is_warned_about_where_others_can_listen(
    mode: TlsMode, addresses: list[str], is_warned: bool
) -> None:
    assert ("`security.tls` is `off`" in security_warning(mode, addresses)) is is_warned


def test_nothing_said_means_no_tls() -> None:
    assert Security() == Security(TlsMode.OFF, None)


@pytest.mark.parametrize("into", [True, False])
def test_bytes_that_say_nothing_are_borne_up_to_a_limit(into: bool) -> None:
    client, _, silence = silent_bytes(600)
    pieces = [silence[at : at + 4096] for at in range(0, len(silence), 4096)]
    borne = SILENT_BYTES // 4096

    def take(data: bytes) -> int:
        return client.decrypt_into(memoryview(bytearray(10)), data) if into else len(client.decrypt(data))

    assert [take(piece) for piece in pieces[:borne]] == [0] * borne
    with pytest.raises(RemoteProtocolError, match=rf"^TLS: more than {SILENT_BYTES} bytes that say nothing$"):
        take(pieces[borne])


@pytest.mark.parametrize("into", [True, False])
def test_a_word_is_an_end_to_silence(into: bool) -> None:
    client, server = open_pair()

    def take(data: bytes) -> int:
        return client.decrypt_into(memoryview(bytearray(RECORD_BYTES)), data) if into else len(client.decrypt(data))

    for _ in range(5):  # each record torn: all but its last byte says nothing yet
        record = server.encrypt(bytes(RECORD_BYTES))
        assert (take(record[:-1]), take(record[-1:])) == (0, RECORD_BYTES)
