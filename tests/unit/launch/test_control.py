"""The client of a controller, against the real port mux with a small HTTP answerer behind it."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flodl.config.builder import local_cluster
from flodl.config.tls import TlsMode
from flodl.errors import ConfigError, JoinRefused, PeerLost, RemoteProtocolError
from flodl.launch.control import ControllerClient
from flodl.launch.document import dump
from flodl.launch.plan import LaunchRequest, guest_bootstrap, plan
from flodl.launch.rundir import ControllerInfo, RunDir
from flodl.messages import (
    AskBootstrap,
    BootstrapGiven,
    Declined,
    DrainAccepted,
    DrainRequest,
    Message,
    StartAccepted,
    StartRequest,
    StopAccepted,
    StopRequest,
)
from flodl.runtime.certificate import Security
from flodl.runtime.clock import MonotonicClock
from flodl.runtime.line import Line
from flodl.runtime.mux import Handlers, PortMux, Run
from flodl.runtime.ports import listen, port_of
from flodl.runtime.streams import FramedStream
from flodl.wire.handshake import Peer, derive_read_token
from tests.unit.runtime.tls_pair import certificate

TOKEN = b"\x5e" * 32
RUN_ID = "20261129-213045-ab12"


@dataclass
class Site:
    port: int
    heard: list[Message] = field(default_factory=list)
    reply: Message = StopAccepted("training")  # noqa: RUF009  # it is frozen
    requests: list[bytes] = field(default_factory=list)
    body: bytes = b'{"phase": "training"}'
    status: bytes = b"200 OK"

    def client(self, token: bytes = TOKEN, run_id: str = RUN_ID, **changes: Any) -> ControllerClient:
        return ControllerClient(run_id, token, "127.0.0.1", self.port, **changes)

    def secure_client(self, certificate: bytes = b"", token: bytes = TOKEN) -> ControllerClient:
        return self.client(token, tls=TlsMode.ON, certificate=certificate)

    async def on_control(self, peer: Peer, stream: FramedStream) -> None:
        async with stream:
            self.heard.append(await stream.receive())
            stream.send(self.reply)

    async def on_bulk(self, peer: Peer, line: Line) -> None:
        line.sock.close()

    async def on_http(self, line: Line) -> None:
        self.requests.append(await line.receive())
        answer = b"HTTP/1.1 %s\r\nTransfer-Encoding: chunked\r\n\r\n" % self.status
        for piece in (self.body[:7], self.body[7:]):
            answer += b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b""
        await line.send(answer + b"0\r\n\r\n")
        line.sock.close()

    async def on_plain_http(self, line: Line) -> None:
        raise AssertionError("no test asks for it")


@contextlib.contextmanager
def serving(security: Security) -> Iterator[Site]:
    sockets = listen("127.0.0.1", 0)
    made = Site(port_of(sockets))
    loop = asyncio.new_event_loop()
    handlers = Handlers(made.on_control, made.on_bulk, made.on_http, made.on_plain_http)
    mux = PortMux(sockets, Run(RUN_ID, TOKEN), handlers, MonotonicClock(), security)
    task = loop.create_task(mux.serve())

    def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        loop.close()
        for sock in sockets:
            sock.close()


@pytest.fixture
def site(wait_until: Callable[..., object]) -> Iterator[Site]:
    with serving(Security()) as made:
        yield made


@pytest.fixture
def tls_site() -> Iterator[Site]:
    with serving(Security(TlsMode.ON, certificate())) as made:
        yield made


@pytest.mark.parametrize("abort", [False, True])
def test_stop_is_said_over_the_control_protocol(site: Site, abort: bool) -> None:
    assert site.client().stop("fdl stop", abort=abort, exit_code=143) == "training"
    assert site.heard == [StopRequest("fdl stop", abort, 143)]


def test_start_is_said_over_the_control_protocol(site: Site) -> None:
    site.reply = StartAccepted(3, ("a", "b"))
    assert site.client().start("fdl start") == (3, ("a", "b"))
    assert site.heard == [StartRequest("fdl start")]


def test_start_that_cannot_be_says_why(site: Site) -> None:
    site.reply = Declined("too few ranks", is_early=True)
    with pytest.raises(ConfigError, match=rf"^run {RUN_ID} cannot be started: too few ranks$"):
        site.client().start("fdl start")


def test_drain_is_said_over_the_control_protocol(site: Site) -> None:
    site.reply = DrainAccepted((1, 2))
    assert site.client().drain("b", "fdl drain") == (1, 2)
    assert site.heard == [DrainRequest("b", "fdl drain")]


def test_drain_that_cannot_be_says_why(site: Site) -> None:
    site.reply = Declined("it is the last one", is_early=False)
    with pytest.raises(ConfigError, match=r"^host b cannot be drained: it is the last one$"):
        site.client().drain("b", "fdl drain")


GUEST = plan(local_cluster(1), LaunchRequest(RUN_ID, 0.0, ("t.py",), "/p", "python", frozenset({"localhost"})))


def test_bootstrap_comes_whole_however_long_it_is_and_without_the_runs_name(site: Site) -> None:
    given = replace(guest_bootstrap(GUEST, "c"), env={"LONG": "x" * 300_000})
    site.reply = BootstrapGiven(dump(given))
    assert site.client(run_id="").ask_bootstrap("c") == given
    assert site.heard == [AskBootstrap("c")]


def test_run_that_takes_the_host_in_later_says_so(site: Site) -> None:
    site.reply = Declined("it is staging", is_early=True)
    assert site.client().ask_bootstrap("c") == site.reply


def test_run_that_does_not_take_the_host_in_says_why(site: Site) -> None:
    site.reply = Declined("it is over", is_early=False)
    with pytest.raises(JoinRefused, match=r"does not take host c in: it is over$") as caught:
        site.client().ask_bootstrap("c")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("run_id", ["../../etc/x", "", "a\nb"])
def test_bootstrap_with_a_run_id_that_names_no_file_is_refused(site: Site, run_id: str) -> None:
    site.reply = BootstrapGiven(dump(replace(guest_bootstrap(GUEST, "c"), run_id=run_id)))
    with pytest.raises(RemoteProtocolError, match="run id"):
        site.client().ask_bootstrap("c")


def test_bootstrap_that_is_none_is_refused(site: Site) -> None:
    site.reply = BootstrapGiven("{}")
    with pytest.raises(RemoteProtocolError, match="bootstrap: "):
        site.client().ask_bootstrap("c")


def test_answer_to_another_question_is_a_broken_protocol(site: Site) -> None:
    with pytest.raises(RemoteProtocolError, match="StopAccepted"):
        site.client().drain("b", "fdl drain")


@pytest.mark.parametrize("change", [{"token": b"\x00" * 32}, {"run_id": "another"}])
def test_another_runs_client_is_refused_and_told_why(site: Site, change: dict[str, object]) -> None:
    with pytest.raises(JoinRefused) as caught:
        site.client(**change).stop("x", abort=False, exit_code=143)  # type: ignore[arg-type]
    assert TOKEN.hex() not in str(caught.value)
    assert caught.value.is_wrong_token is ("token" in change)
    assert caught.value.exit_code == 4
    assert site.heard == []


def test_state_is_read_with_the_read_token_and_never_the_runs(site: Site) -> None:
    assert site.client().state() == {"phase": "training"}
    (request,) = site.requests
    assert f"Bearer {derive_read_token(TOKEN)}".encode() in request
    assert TOKEN.hex().encode() not in request


def test_streams_come_line_by_line_and_skip_what_is_no_object(site: Site) -> None:
    site.body = b'{"seq": 1}\n\n[]\n' + json.dumps({"seq": 2, "text": "é" * 5000}).encode() + b"\n"
    lines = list(site.client().follow("/events", {"cursor": 0, "follow": 1}))
    assert [line["seq"] for line in lines] == [1, 2]
    assert b"GET /events?cursor=0&follow=1 " in site.requests[0]


@pytest.mark.parametrize(("status", "body"), [(b"401 Unauthorized", b"token"), (b"200 OK", b"{broken\n")])
def test_answer_that_is_none_is_a_lost_peer(site: Site, status: bytes, body: bytes) -> None:
    site.status, site.body = status, body
    with pytest.raises(PeerLost, match=rf"127.0.0.1:{site.port}"):
        list(site.client().follow("/logs", {}))
    with pytest.raises(PeerLost):
        site.client().state()


def test_controller_that_is_gone_is_a_lost_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    client = ControllerClient(RUN_ID, TOKEN, "127.0.0.1", port)
    words = rf"^controller 127\.0\.0\.1:{port}: Connection refused$"
    with pytest.raises(PeerLost, match=words):
        client.stop("x", abort=False, exit_code=143)
    with pytest.raises(PeerLost, match=words):
        client.state()


@pytest.mark.parametrize("ask", ["state", "stop", "follow"])
def test_controller_that_does_not_answer_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    monkeypatch.setattr("flodl.launch.control.TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        port = frozen.getsockname()[1]
        client = ControllerClient(RUN_ID, TOKEN, "127.0.0.1", port, 4711)
        questions: dict[str, Callable[[], object]] = {
            "state": client.state,
            "stop": lambda: client.stop("test", abort=False, exit_code=143),
            "follow": lambda: list(client.follow("/logs", {})),
        }
        with pytest.raises(PeerLost) as caught:
            questions[ask]()
    said = str(caught.value)
    assert said.startswith(f"controller 127.0.0.1:{port} (pid 4711) of run {RUN_ID} does not answer: timed out\n")
    assert said.endswith(f"on its machine: kill -KILL 4711, then fdl launch --resume {RUN_ID}")


@pytest.mark.parametrize("run_id", ["", RUN_ID])
def test_remedy_has_placeholders_for_what_is_not_known(monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    monkeypatch.setattr("flodl.launch.control.TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as frozen, pytest.raises(PeerLost) as caught:
        ControllerClient(run_id, TOKEN, "127.0.0.1", frozen.getsockname()[1]).state()
    assert str(caught.value).endswith(f"kill -KILL PID, then fdl launch --resume {run_id or 'RUN'}")


# --------------------------------------------------------------------------------------------------------- under TLS
def test_everything_is_asked_under_tls(tls_site: Site) -> None:
    client = tls_site.secure_client()
    assert client.stop("fdl stop", abort=False, exit_code=143) == "training"
    assert client.state() == {"phase": "training"}
    assert list(client.follow("/events", {})) == [{"phase": "training"}]
    assert tls_site.heard == [StopRequest("fdl stop", False, 143)]


@pytest.mark.parametrize("known", [b"", certificate().sha256], ids=["unknown", "known"])
def test_read_token_is_said_to_the_holder_of_the_runs_certificate(tls_site: Site, known: bytes) -> None:
    assert tls_site.secure_client(known).state() == {"phase": "training"}
    (request,) = tls_site.requests
    assert derive_read_token(TOKEN).encode() in request


def test_read_token_is_not_said_to_another_certificates_holder(tls_site: Site) -> None:
    with pytest.raises(JoinRefused, match=r"^controller 127\.0\.0\.1:\d+: its certificate is not the run's"):
        tls_site.secure_client(b"\x00" * 32).state()
    assert tls_site.requests == []


def test_read_token_is_not_said_to_whoever_does_not_hold_the_runs_token(tls_site: Site) -> None:
    with pytest.raises(JoinRefused, match="it holds another token"):
        tls_site.secure_client(token=bytes(32)).state()
    assert tls_site.requests == []


def test_plain_client_is_refused_in_words_where_tls_is_required(tls_site: Site) -> None:
    with pytest.raises(JoinRefused, match=r"under TLS only"):
        tls_site.client(tls=TlsMode.OFF).stop("x", abort=False, exit_code=143)


@pytest.mark.parametrize("ask", ["stop", "state"])
def test_tls_client_is_refused_in_words_where_there_is_none(site: Site, ask: str) -> None:
    client = site.secure_client()
    with pytest.raises(JoinRefused, match=r"^controller 127\.0\.0\.1:\d+: it takes no TLS") as caught:
        client.state() if ask == "state" else client.stop("x", abort=False, exit_code=143)
    assert caught.value.exit_code == 4


def test_whoever_does_not_speak_tls_is_a_lost_peer() -> None:
    def answer(server: socket.socket) -> None:
        accepted, _ = server.accept()
        with accepted:
            accepted.recv(100)
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        client = ControllerClient(RUN_ID, TOKEN, "127.0.0.1", server.getsockname()[1], tls=TlsMode.ON)
        with pytest.raises(PeerLost, match=r"^controller 127\.0\.0\.1:\d+: /state.json: "):
            client.state()
        thread.join()


@pytest.mark.parametrize("said", [b"SSH-2.0-x\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64), b"\0\0\0\1\xc1"])
def test_what_is_no_controller_is_a_lost_peer_with_a_place_and_a_remedy(said: bytes) -> None:
    def answer(server: socket.socket) -> None:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(said)
            accepted.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(PeerLost, match=rf"^controller 127\.0\.0\.1:{port} speaks another protocol: check the port"):
            ControllerClient("", TOKEN, "127.0.0.1", port).ask_bootstrap("c")
        thread.join()


def test_announced_controller_is_asked_as_it_announces(tls_site: Site, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write("token", TOKEN.hex())
    info = ControllerInfo(1, 1, "127.0.0.1", tls_site.port, TlsMode.ON, certificate().sha256.hex())
    assert ControllerClient.of(run, info).state() == {"phase": "training"}
